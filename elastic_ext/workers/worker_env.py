"""The message from the agent to each worker, in the environment variable ELASTIC_EXT_WORKER.

Wire protocol, version 1. The value is one JSON object. The agent writes it (`logs.WorkerLogs`); the bootstrap and
`elastic_ext.training` read it. See `WorkerMessage`: any key
may be missing, and readers ignore unknown keys.

This file is loaded by path in every worker before the user's script, so it imports only what every interpreter has loaded.
"""

import _signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypedDict

    class WorkerMessage(TypedDict, total=False):
        version: int  # VERSION. A reader ignores a message with another version and reports it
        progress_version: int  # progress_layout.VERSION
        progress: str  # path of the progress table
        slot: int  # number of this worker's row in the table
        wake_pipe: str  # path of the agent's wake pipe: one byte says that the worker has changed what the agent waits for
        # path of the file to which STACKS_SIGNAL appends the stacks of all threads; beside it: `collective_path`, `issued_path`
        stacks: str
        stderr: str  # path of a named pipe to open as the worker's stderr
        quiet_traceback: bool  # the agent shows the traceback, so the worker need not print it
        # path of the file to which the worker writes what it has imported, at its first optimizer step or at its end:
        # {"modules": [[NAME, FILE or null], ...], "changed": [names of environment variables set by the script]}
        modules: str
        store: tuple[str, int]  # host and port of the round's store
        integrity_every: int  # every how many optimizer steps to hash what is a replica; where, see `hashes_path`
        stragglers: str  # auto or all, as in the setting; absent: off
        journal: str  # beginning of the paths of the journals of saves; see bootstrap/saves.py
        saves_below: list[str]  # the directories of checkpoints, as absolute paths or URLs
        agent: str  # token of the agent, by which the reaper finds what the workers started
        interrupts_held: bool  # it starts with SIGINT blocked, and lets it in once a KeyboardInterrupt shows nothing of ours
        mark: tuple[int, int]  # the same, whatever their environment: the number of a limit, and its soft value; see reaper.mark


MEMORY_THREAD = "elastic_ext-memory-"
"""How the names of threads begin that may wait in torch's C++ code when a worker ends; see `runner.exit_handlers_are_done`."""

WORKER_ENV = "ELASTIC_EXT_WORKER"
VERSION = 1

STACKS_SIGNAL: int = _signal.SIGRTMIN + 8
"""Kills a process that has no handler for it. Check the field STACKS_ARMED of the progress table first."""
ANSWER_SIGNAL: int = _signal.SIGRTMIN + 9
"""The worker's main thread counts it in the field ANSWERS as soon as it runs Python code. So while the count stays the same, the
main thread has not left the call into C in which it was. Kills a process that has no handler for it: ANSWERS is 0 there."""


def leave_notices_to_the_agent() -> None:
    """Ignore the signals that Slurm sends before the time is up (sbatch --signal), unless something else has a use for them.

    They are for the agent, which asks for a checkpoint. Where Slurm tracks processes by their parents (proctrack/linuxproc), they
    also reach the workers and would end them first.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return
    for notice in (_signal.SIGUSR1, _signal.SIGUSR2):
        try:
            if _signal.getsignal(notice) == _signal.SIG_DFL:
                _signal.signal(notice, _signal.SIG_IGN)
        except ValueError:  # not the main thread
            return


def take_mark(message: "WorkerMessage", import_stdlib: "Callable[[str], Any]") -> None:
    """Take the mark by which the agent's reaper finds what this worker starts, before it starts anything."""
    if "mark" in message:
        limit, soft = message["mark"]
        try:
            limits = import_stdlib("resource")
            limits.setrlimit(limit, (soft, limits.getrlimit(limit)[1]))
        except (ImportError, OSError, ValueError):
            pass  # as under gVisor; see reaper.mark


def let_interrupts_in(message: "WorkerMessage") -> None:
    """Unblock SIGINT, which the agent blocked before it started this process. If one waits, it raises KeyboardInterrupt here."""
    if message.get("interrupts_held") is True:
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGINT,))


def checked(message: object) -> "WorkerMessage":
    """Return a decoded message unchanged. Raises ValueError if it is not a JSON object or has another version."""
    if not isinstance(message, dict):
        raise ValueError("expected a JSON object")
    version = message.get("version", VERSION)
    if version != VERSION:
        raise ValueError(f"expected version {VERSION}, got version {version!r}")
    return message  # type: ignore[return-value]


def loads(text: str) -> "WorkerMessage":
    """Decode the variable's value. Raises ValueError. The bootstrap cannot use this: it must not import json."""
    import json

    return checked(json.loads(text))


def collective_path(stacks: "str | None") -> "str | None":
    """Return where the worker writes which collective does not complete, as JSON. stacks: see the message."""
    return None if stacks is None else f"{stacks}.collective"


def issued_path(stacks: "str | None") -> "str | None":
    """Return where the worker writes when it issued its collectives, as a `stragglers.decide.WorkerSample`. stacks: see there."""
    return None if stacks is None else f"{stacks}.issued"


def hashes_path(progress: "str | None", slot: "int | None") -> "str | None":
    """Return where the worker writes the hashes of its replicas (features/integrity). The arguments: see the message."""
    return None if progress is None or slot is None else f"{progress}.hashes.{slot}"


def wake(path: "str | None") -> None:
    """Wake the agent through its wake pipe. path: None if there is no pipe. Never raises or waits."""
    if path is None:
        return
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, b"\0")
        finally:
            os.close(pipe)
    except (OSError, TypeError, ValueError):
        pass  # the agent is gone, or the pipe is full and will wake the agent anyway
