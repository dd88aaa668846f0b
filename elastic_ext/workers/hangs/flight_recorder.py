"""NCCL's flight recorder: what each rank's last collectives were, dumped by torch itself when it is asked to.

From torch's documentation and headers (ProcessGroupNCCL.hpp, FlightRecorder.hpp of 2.13), never run, for want of a GPU: its
monitor thread makes a named pipe TORCH_NCCL_DEBUG_INFO_PIPE_FILE<rank>.pipe, looks at it about once a second, and on any byte
writes the record of the last TORCH_NCCL_TRACE_BUFFER_SIZE (2000) collectives to TORCH_NCCL_DEBUG_INFO_TEMP_FILE<rank>, which
newer versions call TORCH_FR_DUMP_TEMP_FILE. The file is a pickle, which is never opened here:
`python -m torch.distributed.flight_recorder.fr_trace` reads it.
"""

from __future__ import annotations

import errno
import os
import select
import tempfile
import time
from collections.abc import Iterable, Mapping

PIPE_FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
WAIT_S = 4.0  # the monitor thread looks once a second
LOOK_S = 0.1


class FlightRecorder:
    """Of all workers of one agent.

    Attributes:
        variables: what the workers' environment needs; what the user has set stays as it is.
    """

    def __init__(self, run_dir: str, environ: Mapping[str, str]) -> None:
        """run_dir: of the agent; the pipes are in there. The dumps are not: they are to be read after the job.

        They have a directory that only this user may enter: torch would follow a link that waits for them.
        """
        told_of = next((environ[name] for name in DUMP_FILES if environ.get(name)), None)
        self._own = tempfile.mkdtemp(prefix="elastic_ext_flight_") if told_of is None else None
        self._dumps: str = os.path.join(self._own, "rank_") if self._own is not None else str(told_of)
        self._pipes = environ.get(PIPE_FILE) or os.path.join(run_dir, "flight_")
        told = {PIPE_FILE: self._pipes, **dict.fromkeys(DUMP_FILES, self._dumps)}
        self.variables = {name: value for name, value in told.items() if not environ.get(name)}

    def close(self) -> None:
        """Remove the directory, unless there is a dump to be read."""
        if self._own is not None:
            try:
                os.rmdir(self._own)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                    raise

    def dump(self, ranks: Iterable[int]) -> str:
        """Have these ranks dump their records; return in words where they are, "" if there is none. Takes WAIT_S at most."""
        begin = time.time()
        asked = [rank for rank in ranks if _ask(f"{self._pipes}{rank}.pipe")]
        deadline = time.monotonic() + WAIT_S
        while not all(_written(f"{self._dumps}{rank}", begin) for rank in asked) and time.monotonic() < deadline:
            select.select([], [], [], LOOK_S)  # a file of another process's: there is no event for it
        found = [f"{self._dumps}{rank}" for rank in asked if _written(f"{self._dumps}{rank}", begin)]
        return f"NCCL's flight records are in {', '.join(found)}" if found else ""


def _ask(pipe: str) -> bool:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no process group of NCCL in that rank, or its monitor thread is gone
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
