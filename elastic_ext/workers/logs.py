"""A LogsSpecs around the user's own, which decides what each worker gets from the agent and where its files go.

In every version of torch, `reify` is the public hook in which a plug-in sees the environment of every worker before it starts.
torch's own LogsSpecs sets TORCHELASTIC_ERROR_FILE in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from elastic_ext.base import files
from elastic_ext.workers import progress_layout, worker_env
from elastic_ext.workers.stderr.tails import StderrTails

logger = logging.getLogger(__name__)

OF_TORCH = "torchelastic_"  # beginning of the directory that torch makes for logs if the user names none, and never removes
OWNER = "elastic_ext.lock"  # in such a directory, as long as it has no logs: its agent holds this lock


class WorkerLogs(LogsSpecs):  # type: ignore[misc, unused-ignore]  # torch is untyped
    """Adds our variables to the workers' environment and keeps their error files from torch's reader."""

    def __init__(self, inner: LogsSpecs) -> None:
        """Wrap `inner`, the user's own LogsSpecs."""
        super().__init__()
        self._inner = inner
        self._round_dir = ""
        self._on_disk: str | None = None  # this round's directory if run_dir is full
        # Set once: the agent's private directory, for the files of a job that wants no logs; the end of the workers' stderr.
        self.run_dir = ""
        self.stderr = StderrTails(enabled=False)
        # Set before each round, by local rank or for all workers of this node.
        self.variables: dict[str, str] = {}  # for their environment; TORCHELASTIC_RESTART_COUNT names the log directory
        self.own_variables: dict[int, dict[str, str]] = {}  # what differs for a worker
        self.messages: dict[int, dict[str, object]] = {}  # keys of each worker's message; see `worker_env`. `reify` adds the rest
        self.modules_file = ""  # where a worker of this round writes what it has imported
        # Read after the start: where each worker writes them, by local rank.
        self.error_files: dict[int, str] = {}
        self.stacks_files: dict[int, str] = {}
        self.failed = False  # set before the end: whether torch's message names the last round's error files, if there are any

    @property
    def root_log_dir(self) -> str:
        return str(self._inner.root_log_dir)

    @contextlib.contextmanager
    def owned_directory(self) -> Iterator[None]:
        """Own the directory that torch has made for logs, if it has. At the end leave only what somebody may look for there.

        Before that remove the directories of this user's agents that were killed. Torch itself never removes one.
        """
        owner: int | None = None
        parent, name = os.path.split(self.root_log_dir)
        try:
            if parent == tempfile.gettempdir() and name.startswith(OF_TORCH) and not os.listdir(self.root_log_dir):
                files.remove_orphans(f"{parent}/{OF_TORCH}*", OWNER, lambda folder: logger.info("removing %s", folder))
                owner = files.own(self.root_log_dir, OWNER)
        except OSError as error:
            logger.info("%s stays when this agent ends: %s", self.root_log_dir, error)
        try:
            yield
        finally:
            if owner is not None:
                if os.path.exists(os.path.join(self.root_log_dir, OWNER)):  # `reify` has left it there: nobody wants logs
                    _remove_but(self.root_log_dir, self.error_files.values() if self.failed else ())
                os.close(owner)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the workers' environments, by local rank, and return where their logs go. Torch calls this each round."""
        for local_rank, env in envs.items():
            env.update(self.variables, **self.own_variables.get(local_rank, {}))
        dest = self._inner.reify(envs)
        if {*dest.stdouts.values(), *dest.stderrs.values()} - {"", os.devnull}:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.root_log_dir, OWNER))
        self.stderr.begin_round()
        if self._round_dir:  # the previous round's: a job that restarts for weeks must not fill the memory that holds it
            shutil.rmtree(self._round_dir, ignore_errors=True)
        self.remove()
        self._round_dir = os.path.join(self.run_dir, f"attempt_{self.variables['TORCHELASTIC_RESTART_COUNT']}")
        for local_rank, env in envs.items():
            error_file = env.get("TORCHELASTIC_ERROR_FILE") or os.path.join(self._private_dir(local_rank), "error.json")
            env["TORCHELASTIC_ERROR_FILE"] = self.error_files[local_rank] = error_file
            self.stacks_files[local_rank] = os.path.join(os.path.dirname(error_file), "stacks.txt")
            env[worker_env.WORKER_ENV] = json.dumps(self._message(local_rank, dest.stderrs[local_rank]))
        # Torch reads the files named here, without checks, as soon as a worker has failed. The supervisor checks what it reads.
        return dataclasses.replace(dest, error_files=dict.fromkeys(dest.error_files, ""))

    def _message(self, local_rank: int, destination: str) -> dict[str, object]:
        """Return this worker's message. destination: where torch sends its stderr: a file, os.devnull, or "" for the console."""
        message = {
            "version": worker_env.VERSION,
            "progress_version": progress_layout.VERSION,
            **self.messages[local_rank],
            "stacks": self.stacks_files[local_rank],
            # If stderr goes to a file, the traceback belongs in that file; on the console, the agent shows it once.
            "quiet_traceback": destination in ("", os.devnull),
        }
        pipe = self.stderr.connect(local_rank, destination, self._private_dir(local_rank))
        return message if pipe is None else {**message, "stderr": pipe}

    def _private_dir(self, local_rank: int) -> str:
        path = os.path.join(self._round_dir, str(local_rank))
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            on_disk = tempfile.mkdtemp(prefix="elastic_ext_")
            logger.warning("cannot create the workers' files in %s: %s; using %s", self._round_dir, error.strerror, on_disk)
            self.remove()
            self._round_dir, self._on_disk = on_disk, on_disk
            path = os.path.join(on_disk, str(local_rank))
            os.makedirs(path)
        return path

    def remove(self) -> None:
        """Remove the files of this round that are not in run_dir."""
        on_disk, self._on_disk = self._on_disk, None
        if on_disk is not None:
            shutil.rmtree(on_disk, ignore_errors=True)


def _remove_but(folder: str, kept: Collection[str]) -> None:
    """Remove a directory, but for these files and the directories in which they are."""
    for inside, folders, names in os.walk(folder, topdown=False):
        for name in (*folders, *names):  # a link to a directory is among the first
            if (path := os.path.join(inside, name)) not in kept:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        with contextlib.suppress(OSError):  # something is left in it
            os.rmdir(inside)
