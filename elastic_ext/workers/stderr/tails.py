"""The last bytes of each worker's stderr, where NCCL, CUDA or the C++ runtime report errors before a worker dies.

A relay (`relay.py`) stands between the workers and the console. Each worker's bootstrap opens a named pipe as its fd 2, so the
relay also gets what C code and child processes write. Two things can differ from a worker that writes to the console itself: its
stdout is not relayed, so if both go to one place, their order may be off by the time of one read; and a console that is gone
costs the output, not the worker.

If stderr goes to a file (--log-dir with --redirects or --tee), nothing is relayed, and the tail is the end of that file. The
tail is None, and the worker keeps its stderr, if the console is a terminal (progress bars and debuggers check for one), if no
bootstrap runs (functions, other programs), or if a pipe or the relay cannot be created.

Why the relay is a process: a thread of the agent can do the same work, and does if no process can run. Measured side by side
on two busy shared cores with two to eight writers:

    |                                                                 | process                 | thread of the agent     |
    |-----------------------------------------------------------------|-------------------------|-------------------------|
    | agent stopped for 3 s, each worker writes 200 KB/s: its pause   | 0.02 s                  | 2.7 s                   |
    | agent's main thread holds the GIL for about 2 s: the same pause | 0.08 s                  | 1.5 s                   |
    | agent gets SIGKILL, console full, 200 KB written: shown         | 200 KB                  | 55 to 60 KB             |
    | a process that the agent left running writes after its end      | shown                   | SIGPIPE kills it        |
    | a worker's death to the agent's reaction: median, 90 %          | 7 to 8 ms, 15 to 21 ms  | 4 to 7 ms, 21 to 27 ms  |
    | throughput, 8 writers of 100-byte lines                         | 78 to 194 MB/s          | 50 to 88 MB/s           |

The last two rows do not matter in practice. The others do: with a thread, training stops when the agent does (once a pipe's
64 KiB are full), the output before a kill is lost, and processes left running on purpose die. So the relay is a process.

Why not a file in the run directory that the agent reads and punches holes into, so that no worker ever waits for the console? At
100 MB/s on 2 cores that takes about as much processor time in all (1.5 s instead of 1.4 s in 5 s), but 0.87 s instead of 0.5 s in
the worker, and 0.67 s instead of none in the agent. What decides is the rest. A file has no limit: while the agent was stopped
for 3 s it took 290 MB of memory, and a write to a full /dev/shm (64 MB in a Docker container) fails in the worker. `echo >
/dev/stderr` truncates it, with what others have written. And after the agent's end nobody reads it.
"""

from __future__ import annotations

import logging
import os

from elastic_ext.workers.stderr import relay
from elastic_ext.workers.stderr.client import RelayClient
from elastic_ext.workers.stderr.source import Source, make_source

logger = logging.getLogger(__name__)

FLUSH_S = 0.05  # the longest time that a recovery waits for the console
TAIL_BYTES = relay.RING_BYTES


class StderrTails:
    """The last stderr output of this round's workers, by local rank. Has a relay from construction to close()."""

    def __init__(self, enabled: bool) -> None:
        self._relay: RelayClient | None = None
        self._sources: dict[int, Source] = {}
        self._files: dict[int, str] = {}
        self._console_is_slow = False  # it did not take everything in time: this round does not wait for it again
        self._warned = False
        if enabled and _console_can_be_relayed():
            try:
                self._relay = RelayClient()
            except (OSError, RuntimeError) as error:  # no descriptor, no thread
                self._warn("all workers", error)

    @property
    def enabled(self) -> bool:
        """Return whether there is a relay."""
        return self._relay is not None

    def begin_round(self) -> None:
        """Forget the workers of the previous round. The console still gets what any of them writes."""
        self._console_is_slow = False
        self._files.clear()
        self._sources.clear()
        if self._relay is not None:
            self._relay.forget_round()

    def connect(self, local_rank: int, destination: str, directory: str) -> str | None:
        """Return the named pipe that this worker's bootstrap must open as its stderr; None if the worker keeps its stderr.

        destination: where torch sends its stderr: a file, os.devnull, or "" for the console. directory: where to make the pipe.
        """
        if destination not in ("", os.devnull):
            self._files[local_rank] = destination
            return None
        if self._relay is None:
            return None
        try:
            source = make_source(os.path.join(directory, "stderr"), shown=destination == "")
        except OSError as error:
            self._warn(f"worker {local_rank}", error)
            return None
        if not self._relay.add(source):
            return None
        self._sources[local_rank] = source
        return source.path

    def flush(self) -> None:
        """Wait, for FLUSH_S at most, until the console has all worker output so far. The agent's own lines follow it."""
        if self._relay is not None and self._sources and not self._console_is_slow:
            self._console_is_slow = self._relay.flush(FLUSH_S) is None

    def tail(self, local_rank: int, traceback: str = "") -> str | None:
        """Return the last TAIL_BYTES that this worker has written to stderr; None if not known.

        traceback: text that the worker did not print because the agent shows it; it is appended if the tail lacks it.
        """
        if local_rank in self._files:
            tail = _file_tail(self._files[local_rank])
        else:
            self.flush()
            source = self._sources.get(local_rank)
            tail = source.ring.read() if source is not None and source.ring.connected else None
        if tail is None:
            return traceback or None
        text = tail.decode(errors="replace")
        return text if traceback.rstrip() in text else text + traceback

    def close(self) -> None:
        """Let the relay finish; it may outlive this call. A second call does nothing."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
            self._sources.clear()

    def _warn(self, whose: str, error: Exception) -> None:
        """Warn once, since the reason would be the same for every worker of every round."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        logger.log(level, "cannot keep the tail of the stderr of %s: %s", whose, error)


def _console_can_be_relayed() -> bool:
    try:
        return not os.isatty(2) and bool(os.fstat(2))
    except OSError:  # closed
        return False


def _file_tail(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return None
