"""NCCL's flight recorder: makes torch dump the last collectives of each rank when the job hangs."""

from __future__ import annotations

import errno
import logging
import os
import select
import shlex
import tempfile
import time
from collections.abc import Iterable, Mapping

from elastic_ext.agent.feature import JobParts
from elastic_ext.features.hangs.watch import Hangs

logger = logging.getLogger(__name__)

PIPE_FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
WAIT_S = 4.0  # the monitor thread checks once a second
CHECK_S = 0.1


class FlightRecorder:
    """Makes torch dump NCCL's flight recorder: the last collectives of each rank of this node.

    Written from torch's headers (ProcessGroupNCCL.hpp, FlightRecorder.hpp of 2.13), and seen to work on a GPU with 2.11. Torch's
    monitor thread creates a named pipe TORCH_NCCL_DEBUG_INFO_PIPE_FILE<rank>.pipe and checks it about once a second. On any byte
    it writes the last TORCH_NCCL_TRACE_BUFFER_SIZE (2000) collectives to TORCH_NCCL_DEBUG_INFO_TEMP_FILE<rank>, which newer
    versions call TORCH_FR_DUMP_TEMP_FILE. That file is a pickle. This class never opens it;
    torch's command `torchfrtrace` reads it.

    In torch 2.15 `nccl` is ProcessGroupNCCL2, which has no such thread in 2.15.0, and so no pipe: `dump` asks no process. Later
    sources have one, with the same pipe and file (nccl2/HeartbeatMonitor.cpp, read only). Both write the file without being asked
    when a collective fails or exceeds torch's timeout (FlightRecorderHook::onAbort in 2.15.0).
    """

    def __init__(self, run_dir: str, environ: Mapping[str, str]) -> None:
        """Choose the paths. run_dir: the agent's private directory, for the pipes. environ: the agent's environment.

        People read the dumps after the job, so they do not go to run_dir. They go to a directory that only this user may enter,
        since torch would follow a link planted by another user.
        """
        chosen = next((environ[name] for name in DUMP_FILES if environ.get(name)), None)
        self._own = tempfile.mkdtemp(prefix="elastic_ext_flight_") if chosen is None else None
        self._dumps: str = os.path.join(self._own, "rank_") if self._own is not None else str(chosen)
        self._pipes = environ.get(PIPE_FILE) or os.path.join(run_dir, "flight_")
        wanted = {PIPE_FILE: self._pipes, **dict.fromkeys(DUMP_FILES, self._dumps)}
        # additions to the workers' environment; without those that the user has set
        self.variables = {name: value for name, value in wanted.items() if not environ.get(name)}

    def close(self) -> None:
        """Remove the directory of the dumps if it holds none; else say where it is: torch may have written some unasked."""
        if self._own is not None:
            try:
                os.rmdir(self._own)
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    logger.warning("elastic_ext: NCCL's flight records are in %s; %s", self._own, reader(self._dumps))
                elif error.errno != errno.ENOENT:
                    raise

    def dump(self, ranks: Iterable[int]) -> str:
        """Make these ranks dump their records; return a sentence that says where, "" if none did. Takes WAIT_S at most."""
        begin = time.time()
        asked = [rank for rank in ranks if _ask(f"{self._pipes}{rank}.pipe")]
        deadline = time.monotonic() + WAIT_S
        while not all(_written(f"{self._dumps}{rank}", begin) for rank in asked) and time.monotonic() < deadline:
            select.select([], [], [], CHECK_S)  # another process writes the files: no event reports it
        found = [f"{self._dumps}{rank}" for rank in asked if _written(f"{self._dumps}{rank}", begin)]
        return f"NCCL's flight records are in {', '.join(found)}; {reader(self._dumps)}" if found else ""


def reader(dumps: str) -> str:
    """Return how people read the dumps. dumps: their common path, to which torch adds the rank."""
    folder, prefix = os.path.split(dumps)
    return f"`{shlex.join(['torchfrtrace', f'--prefix={prefix}', folder or '.'])}` reads them, once those of all nodes are there"


def _ask(pipe: str) -> bool:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # that rank has no NCCL process group, or its monitor thread has ended
        return False
    try:
        return os.write(descriptor, b"1\n") > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _written(path: str, since: float) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return found.st_size > 0 and found.st_mtime >= since - 1


class HangsWithRecords(Hangs):
    recorder: FlightRecorder

    def __init__(self, parts: JobParts) -> None:
        super().__init__(parts)
        self.recorder = FlightRecorder(parts.run_dir, os.environ)

    def variables(self) -> Mapping[str, str]:
        return self.recorder.variables

    def close(self) -> None:
        self.recorder.close()
