"""Reads torch's flight recorder in a worker: since when has a collective of this process been outstanding, and which?

The recorder counts, per process group, the last collective that was enqueued and the last that has completed (torch 2.8 to 2.15,
NCCL and gloo). Asked for these counts alone, it answers in less than a millisecond, wherever the training thread is. But they may
be wrong: gloo's two threads may write the ends of two collectives in the wrong order, NCCL's watchdog never writes that of the
last one of a group which is destroyed right after it, and NCCL counts sends and receives, too. So a count only raises the
question which collectives are outstanding, which takes up to 0.1 s to answer. Where the recorder is off
(TORCH_FR_BUFFER_SIZE=0) it knows no groups. Loaded by path at the first step, so it uses only the standard library and what the
script has imported.
"""

import json
import sys
import threading
import time

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

CHECK_S = 2.0
ASKED_NS = 4 * 10**9
"""Without a change of the counts for this time, the recorder is asked which collectives are outstanding."""
AGAIN_NS = 10 * 10**9
"""... and again after this time."""
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # private, in torch._C._distributed_c10d: NCCL's, and all others


class Outstanding:
    """Since when collectives have been outstanding by the counts, from one reading to the next."""

    def __init__(self) -> None:
        self._completed: dict[str, int] = {}  # by group
        self._since: dict[str, int] = {}  # by group, in ns
        self._progress_ns = 0  # when one was last seen to complete

    def since_ns(self, counts: "Mapping[str, tuple[int, int]]", now_ns: int) -> int:
        """Return since when a collective has been outstanding and none has completed; 0: none is outstanding.

        Args:
            counts: by group, the numbers of the last collectives that were enqueued and that have completed.
            now_ns: time.monotonic_ns(), as what is returned.
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
        return max(min(self._since.values()), self._progress_ns) if self._since else 0


def read() -> dict[str, tuple[int, int]]:
    """Return the counts of all process groups. Raises AttributeError, KeyError, TypeError, ValueError or RuntimeError.

    These mean that torch has changed: all that this module reads is private.
    """
    counts = {}
    for name, said in _dumped(collectives=False):
        for group, each in said.get("pg_status", {}).items():
            counts[f"{name} {group}"] = int(each["last_enqueued_collective"]), int(each["last_completed_collective"])
    return counts


def oldest() -> "dict[str, Any]":
    """Return the collective that has been outstanding for longest, as `base.collectives.Collective`; empty: none is.

    Not one of a group that is gone, nor one that a thread of the script's own waits for: another may do this rank's part
    meanwhile. Raises as `read` does.
    """
    groups = sys.modules.get("torch.distributed.distributed_c10d")
    found = [each for _, said in _dumped(collectives=True) for each in said.get("entries", [])]
    live = set(groups._world.pg_names.values()) if groups is not None else set()
    main, dummy = threading.main_thread(), threading._DummyThread  # torch's own, as for the backward pass
    others = {str(each.ident) for each in threading.enumerate() if each is not main and not isinstance(each, dummy)}
    found = [each for each in found if not each["retired"] and each["state"] != "completed" and not each["is_p2p"]]
    found = [each for each in found if each["process_group"][0] in live and each["thread_id"] not in others]
    if not found:
        return {}
    first = min(found, key=lambda each: int(each["time_created_ns"]))
    number, description = first["process_group"]
    group = number if description in ("", "undefined") else description
    found_in = {"operation": first["profiling_name"].rpartition(":")[2], "number": first["collective_seq_id"], "group": group}
    return {**found_in, **_compared(first)}


def _compared(entry: "Mapping[str, Any]") -> "dict[str, Any]":
    """Return what else the agents compare over the ranks: see `base.collectives.Collective`."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    ranks_of, names = getattr(world, "pg_group_ranks", {}), getattr(world, "pg_names", {})
    ranks = next((ranks_of.get(group, ()) for group, name in names.items() if name == entry["process_group"][0]), ())
    shapes = json.dumps(entry.get("input_sizes", ""))
    return {"first": min(ranks, default=-1), "size": len(ranks), "shapes": shapes if len(shapes) <= 200 else ""}


def _dumped(collectives: bool) -> "list[tuple[str, dict[str, Any]]]":
    """Return what each recorder of this torch says, with its name in _DUMPS. collectives: with the collectives themselves."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dumps = [(name, dump) for name in _DUMPS if (dump := getattr(c10d, name, None)) is not None]
    return [(name, json.loads(dump(includeCollectives=collectives, onlyActive=True))) for name, dump in dumps]


class RecorderWatch(threading.Thread):
    """Reads the counts every CHECK_S, until the script ends."""

    def __init__(
        self,
        publish: "Callable[[int, int], None]",
        describe: "Callable[[str], None]",
        warn: "Callable[[str], None]",
    ) -> None:
        """Prepare.

        Args:
            publish: gets since when a collective has been outstanding and none has completed, and when that was so; 0: none is.
            describe: gets what `oldest` returns, as JSON, whenever it is another one.
            warn: gets the reason why the recorder cannot be read.
        """
        super().__init__(name="elastic_ext flight recorder", daemon=True)
        self.over = threading.Event()
        self._publish, self._describe, self._warn = publish, describe, warn

    def run(self) -> None:
        outstanding, seen, asked_ns = Outstanding(), dict[str, tuple[int, int]](), 0
        found: dict[str, Any] = {}
        while not self.over.wait(CHECK_S):
            try:
                counts, now_ns = read(), time.monotonic_ns()
                since_ns = outstanding.since_ns(counts, now_ns)
                if since_ns and now_ns - since_ns >= ASKED_NS:
                    if counts != seen or now_ns - asked_ns >= AGAIN_NS:
                        before, found = found, oldest()
                        seen, asked_ns = counts, now_ns
                        if found and found != before:
                            self._describe(json.dumps(found))
                else:
                    seen, found = {}, {}
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
                self._warn(f"cannot read torch's flight recorder: {error!r}; a hang of spinning collectives is noticed later")
                break
            self._publish(since_ns if found else 0, now_ns)
        self._publish(0, time.monotonic_ns())
