"""Reads torch's flight recorder in a worker: since when has a collective of this process been outstanding?

The recorder counts, per process group, the last collective that was enqueued and the last that has completed (torch 2.8 to 2.15,
NCCL and gloo; no sends and receives). Asked for these counts alone, it answers in 10 to 200 microseconds, wherever the training
thread is. Where it is switched off (TORCH_FR_BUFFER_SIZE=0) it knows no groups. Loaded by path at the first step, so it uses only
the standard library and what the script has imported.
"""

import json
import sys
import threading
import time

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHECK_S = 2.0
TRUSTED_NS = 60 * 10**9
"""A collective that stays outstanding for longer than this while the optimizer steps is one whose end torch does not record."""
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # private, in torch._C._distributed_c10d: NCCL's, and all others


class Outstanding:
    """Since when collectives have been outstanding, from one look at the counts to the next."""

    def __init__(self) -> None:
        self._completed: dict[str, int] = {}  # by group
        self._since: dict[str, int] = {}  # by group, in ns
        self._progress_ns = 0  # when one was last seen to complete

    def since_ns(self, counts: "Mapping[str, tuple[int, int]]", sign_ns: int, now_ns: int) -> int:
        """Return since when a collective has been outstanding and none has completed; 0: none is outstanding.

        Args:
            counts: by group, the numbers of the last collectives that were enqueued and that have completed.
            sign_ns: the last sign of life of the worker. All times are time.monotonic_ns().
        """
        completed = {group: done for group, (_, done) in counts.items()}
        kept = {group for group, done in completed.items() if self._completed.get(group) == done}
        if self._completed != completed:
            self._completed, self._progress_ns = completed, now_ns
        self._since = {
            group: self._since.get(group, now_ns) if group in kept else now_ns
            for group, (enqueued, done) in counts.items()
            if done < enqueued
        }
        trusted = [since for since in self._since.values() if sign_ns - since <= TRUSTED_NS]
        return max(min(trusted), self._progress_ns) if trusted else 0


def read() -> dict[str, tuple[int, int]]:
    """Return the counts of all process groups. Raises AttributeError, KeyError, TypeError or ValueError if torch has changed."""
    c10d, counts = sys.modules.get("torch._C._distributed_c10d"), {}
    for name in _DUMPS:
        dump = getattr(c10d, name, None)
        if dump is not None:
            for group, each in json.loads(dump(includeCollectives=False, onlyActive=True)).get("pg_status", {}).items():
                counts[f"{name} {group}"] = int(each["last_enqueued_collective"]), int(each["last_completed_collective"])
    return counts


class Watch(threading.Thread):
    """Looks at the counts every CHECK_S, until the script ends."""

    def __init__(
        self, sign_ns: "Callable[[], int]", publish: "Callable[[int, int], None]", warn: "Callable[[str], None]"
    ) -> None:
        """sign_ns: returns the last sign of life. publish: gets what `since_ns` returns, and when it was so."""
        super().__init__(name="elastic_ext flight recorder", daemon=True)
        self.over = threading.Event()
        self._sign_ns, self._publish, self._warn = sign_ns, publish, warn

    def run(self) -> None:
        outstanding = Outstanding()
        while not self.over.wait(CHECK_S):
            try:
                counts = read()
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self._warn(f"cannot read torch's flight recorder: {error!r}; a hang of spinning collectives is noticed later")
                return
            now_ns = time.monotonic_ns()
            self._publish(outstanding.since_ns(counts, self._sign_ns(), now_ns), now_ns)
