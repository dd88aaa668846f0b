"""Reads torch's flight recorder in a worker: since when has a collective of this process been outstanding, and which?

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
DESCRIBED_NS = 6 * 10**9
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # private, in torch._C._distributed_c10d: NCCL's, and all others


class Outstanding:
    """Since when collectives have been outstanding, from one look at the counts to the next."""

    def __init__(self) -> None:
        self._completed: dict[str, int] = {}  # by group
        self._since: dict[str, int] = {}  # by group, in ns
        self._live: set[str] = set()  # names of the groups that torch had
        self._ended: dict[str, int] = {}  # groups that may have been destroyed, with what they had completed
        self._progress_ns = 0  # when one was last seen to complete

    def since_ns(self, counts: "Mapping[str, tuple[int, int]]", live: set[str], sign_ns: int, now_ns: int) -> int:
        """Return since when a collective has been outstanding and none has completed; 0: none is outstanding.

        NCCL's watchdog records an end up to a second late, and never that of the last collective of a group which is destroyed
        right after it. So once a group is gone, none counts that was outstanding then, until one more of that group completes.

        Args:
            counts: by group, the numbers of the last collectives that were enqueued and that have completed.
            live: names of the groups that torch has. They are not those in counts.
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
        if self._live - live or not live:
            self._ended |= {group: completed[group] for group in self._since}
        self._live = set(live)
        self._ended = {group: done for group, done in self._ended.items() if completed.get(group) == done}
        trusted = [since for group, since in self._since.items() if group not in self._ended and sign_ns - since <= TRUSTED_NS]
        return max(min(trusted), self._progress_ns) if trusted else 0


def read() -> tuple[dict[str, tuple[int, int]], set[str]]:
    """Return the arguments counts and live of `since_ns`. Raises AttributeError, KeyError, TypeError or ValueError.

    These mean that torch has changed: all that this reads is private.
    """
    c10d, groups = sys.modules.get("torch._C._distributed_c10d"), sys.modules.get("torch.distributed.distributed_c10d")
    counts: dict[str, tuple[int, int]] = {}
    if groups is None:
        return counts, set()
    for name in _DUMPS:
        dump = getattr(c10d, name, None)
        if dump is not None:
            for group, each in json.loads(dump(includeCollectives=False, onlyActive=True)).get("pg_status", {}).items():
                counts[f"{name} {group}"] = int(each["last_enqueued_collective"]), int(each["last_completed_collective"])
    return counts, set(groups._world.pg_names.values())


def oldest() -> str:
    """Return which collective has been outstanding for longest, as JSON: operation, number and group. Raises as `read` does."""
    found = []
    c10d = sys.modules.get("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump = getattr(c10d, name, None)
        if dump is not None:
            entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
            found += [each for each in entries if not each["retired"] and not each["is_p2p"]]
    if not found:
        return "{}"
    first = min(found, key=lambda each: int(each["time_created_ns"]))
    number, description = first["process_group"]
    group = number if description == "undefined" else description
    operation = first["profiling_name"].rpartition(":")[2]
    return json.dumps({"operation": operation, "number": first["collective_seq_id"], "group": group})


class Watch(threading.Thread):
    """Looks at the counts every CHECK_S, until the script ends."""

    def __init__(
        self,
        sign_ns: "Callable[[], int]",
        publish: "Callable[[int, int], None]",
        describe: "Callable[[str], None]",
        warn: "Callable[[str], None]",
    ) -> None:
        """Prepare.

        Args:
            sign_ns: returns the last sign of life.
            publish: gets what `since_ns` returns, and when it was so.
            describe: gets what `oldest` returns, once none has completed for DESCRIBED_NS.
            warn: gets the reason why the recorder cannot be read.
        """
        super().__init__(name="elastic_ext flight recorder", daemon=True)
        self.over = threading.Event()
        self._sign_ns, self._publish, self._describe, self._warn = sign_ns, publish, describe, warn

    def run(self) -> None:
        outstanding, described_ns = Outstanding(), 0
        while not self.over.wait(CHECK_S):
            try:
                counts, live = read()
                now_ns = time.monotonic_ns()
                since_ns = outstanding.since_ns(counts, live, self._sign_ns(), now_ns)
                if since_ns not in (0, described_ns) and now_ns - since_ns >= DESCRIBED_NS:
                    described_ns = since_ns
                    self._describe(oldest())
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self._warn(f"cannot read torch's flight recorder: {error!r}; a hang of spinning collectives is noticed later")
                return
            self._publish(since_ns, now_ns)
