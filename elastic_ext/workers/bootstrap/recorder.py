"""Reads torch's flight recorder in a worker: since when has a collective of this process been outstanding, and which? And when
did this rank issue its last collectives, which the agents compare with the other ranks (`features.stragglers.decide`)?

The recorder counts, per process group, the last collective that was enqueued and the last that has completed (torch 2.8 to 2.15,
NCCL and gloo). Asked for these counts alone, it answers in less than a millisecond, wherever the training thread is. But they may
be wrong: gloo's two threads may write the ends of two collectives in the wrong order, NCCL's watchdog never writes that of the
last one of a group which is destroyed right after it, and NCCL counts sends and receives, too. So a count only raises the
question which collectives are outstanding, which takes up to 0.1 s to answer. Where the recorder is off
(TORCH_FR_BUFFER_SIZE=0) it knows no groups. Loaded by path at the first step, so it uses only the standard library and what the
script has imported.

Gloo and the old NCCL (ProcessGroupNCCL) record themselves. From torch 2.15 on, `_maybe_attach_flight_recorder` attaches a hook to
each group with another backend: nccl2, which is what `nccl` builds there, nccl-lazy, ucc, one in Python. By reading (2.15.0:
distributed_c10d.py, and the headers that come with torch):

- The hook has one recorder for each name that Backend::getBackendName() returns, whatever the script called the backend: that of
  `nccl` is called nccl2. Only gloo, nccl and xccl count as recording themselves (recordsFlightRecorderNatively).
- It has no events of the device (FlightRecorderHook.hpp), and update_state() asks only those (FlightRecorderDetail.hpp). So a
  dump never asks the device, unlike the old NCCL's; and a collective is never "started" before it has completed.
- The end of a collective comes from the backend, if supportsCompletionHooks(): nccl2 and nccl-lazy alone (their headers). All
  others count as ended once they are issued, and their groups' last completed collective stays -1.
- It records no operation that is being captured into a CUDA graph, nor its replays.

Times of the recorder are those of CLOCK_REALTIME (c10::getTime of torch 2.8 to 2.15, on Linux).
"""

import json
import sys
import threading
import time
from functools import partial

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    Entry = dict[str, Any]  # a collective, as torch writes it

CHECK_S = 2.0
ASKED_NS = 4 * 10**9
"""Without a change of the counts for this time, the recorder is asked which collectives are outstanding."""
AGAIN_NS = 10 * 10**9
"""... and again after this time."""
SAMPLE_S = 7.0
"""From one sample of issued collectives to the next, at least, and less than twice as long; longer where COST says so."""
COST = 0.0025
"""Of the time, that samples take at most: each holds up the script, as it reads all that the recorder has."""
MOST, LEAST = 256, 32  # numbers of a group in a sample
NUMBERS = 2**16
"""Of all ranks of a group in their samples, above LEAST for each: the agent of rank 0 reads them all."""
_ENTRY = b'{"collective_seq_id":'  # a collective in a dump begins with its first key: they are sorted
_NCCL = "nccl"
_DUMPS = {_NCCL: "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}  # private, in torch._C._distributed_c10d
OWN = "elastic_ext"
"""Description of the groups of saves and copies (`checkpoints.ranks`): threads use them beside training, and their numbers count
sends, of which each rank has others."""


class Outstanding:
    """Since when collectives have been outstanding by the counts, from one reading to the next."""

    def __init__(self) -> None:
        self._completed: dict[str, int] = {}  # by group
        self._since: dict[str, int] = {}  # by group, in ns
        self._progress_ns = 0  # when one was last seen to complete

    def since_ns(self, counts: "Mapping[str, tuple[int, int]]", now_ns: int) -> int:
        """Return since when a collective has been outstanding and none has completed; 0: none is outstanding.

        counts: by group, the numbers of the last collectives that were enqueued and that have completed. now_ns:
        time.monotonic_ns(), as what is returned.
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
    for backend, said in _dumped(collectives=False):
        for group, each in said.get("pg_status", {}).items():
            counts[f"{backend} {group}"] = int(each["last_enqueued_collective"]), int(each["last_completed_collective"])
    return counts


NONE_OUTSTANDING: "tuple[Entry, bool]" = ({}, False)


def oldest() -> "tuple[Entry, bool]":
    """Return the collective that has been outstanding for longest, as `base.diagnosis.Collective`, and whether it has begun.

    NONE_OUTSTANDING: none is. Not one of a group that is gone, nor one that a thread of the script's own waits for: another may
    do this rank's part meanwhile. It has begun if it does not wait for this rank's own device: by the recorder, which knows that
    of NCCL only with TORCH_NCCL_ENABLE_TIMING, or since this process uses no device. Raises as `read` does.
    """
    found = [each for _, said in _dumped(collectives=True) for each in said.get("entries", [])]
    live, others = _ranks_of_groups(), _threads_of_the_script()
    found = [each for each in found if not each["retired"] and each["state"] != "completed" and not each["is_p2p"]]
    found = [each for each in found if each["process_group"][0] in live and each["thread_id"] not in others]
    if not found:
        return NONE_OUTSTANDING
    first = min(found, key=lambda each: int(each["time_created_ns"]))
    number, description = first["process_group"]
    group = number if description in ("", "undefined") else description
    found_in = {"operation": first["profiling_name"].rpartition(":")[2], "number": first["collective_seq_id"], "group": group}
    return {**found_in, **_compared(first)}, first["state"] == "started" or not _uses_device()


def _uses_device() -> bool:
    """Return whether this process may have work on an accelerator."""
    torch = sys.modules["torch"]
    if (device := torch.accelerator.current_accelerator()) is None:  # of this build of torch
        return False
    is_initialized = getattr(getattr(torch, device.type, None), "is_initialized", None)
    return is_initialized is None or is_initialized()


def _compared(entry: "Entry") -> "Entry":
    """Return what else the agents compare over the ranks: see `base.diagnosis.Collective`."""
    ranks = _ranks_of_groups().get(entry["process_group"][0], [])
    shapes = json.dumps(entry.get("input_sizes", ""))
    return {"first": min(ranks, default=-1), "size": len(ranks), "shapes": shapes if len(shapes) <= 200 else ""}


def _ranks_of_groups() -> "dict[str, list[int]]":
    """Return the ranks of each live process group, by its name."""
    groups = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is None:
        return {}
    names = list(groups._world.pg_names.items())  # a copy: the script may make or destroy a group meanwhile
    return {name: sorted(groups._world.pg_group_ranks.get(group, ())) for group, name in names}


def _threads_of_the_script() -> set[str]:
    main, dummy = threading.main_thread(), threading._DummyThread  # torch's own, as for the backward pass
    return {str(each.ident) for each in threading.enumerate() if each is not main and not isinstance(each, dummy)}


def issued(with_nccl: bool) -> dict[str, dict[int, int]]:
    """Return when this rank issued its last collectives, by group and number, in ns of CLOCK_REALTIME.

    with_nccl: read the old NCCL's recorder, too. It queries events of the device, which may break the capture of a CUDA graph.
    A group's name holds its backend, its own name, its first rank and its size: groups of other ranks may have the same name.
    Operations that were issued as one have one number: the first counts. Groups of OWN are left out. Raises as `read` does.
    """
    ranks = {name: each for name, each in _ranks_of_groups().items() if len(each) > 1}
    found: dict[str, dict[int, int]] = {}
    if not ranks:
        return found
    others = _threads_of_the_script()
    most = 2 * sum(window_of(len(each)) for each in ranks.values())
    for backend, dump in _recorders(that_know_ends=False):
        if backend == _NCCL and not with_nccl:
            continue
        for each in newest(dump(includeCollectives=True, onlyActive=False), most):
            name = each["process_group"][0]
            is_own = each["process_group"][1] == OWN
            if name in ranks and not is_own and not each["is_p2p"] and each["thread_id"] not in others:
                group = f"{backend} {name} {ranks[name][0]} {len(ranks[name])}".replace("/", "_")
                of = found.setdefault(group, {})
                of.setdefault(int(each["collective_seq_id"]), int(each["time_created_ns"]))
    return found


def newest(dump: "bytes | str", most: int) -> "Iterator[Entry]":
    """Yield the last collectives of a dump, in order. Only these are parsed: all 2000 would take 20 ms.

    One at a time: thousands of new objects at once would have the garbage collector look through all that the script holds.
    """
    data = dump.encode() if isinstance(dump, str) else dump
    begin = len(data)
    for _ in range(most):
        if (at := data.rfind(_ENTRY, 0, begin)) < 0:
            break
        begin = at
    if begin == len(data):  # the dump has no collectives, or a future torch writes them another way
        yield from json.loads(data).get("entries", [])[-most:]
        return
    text, at, decode = data[begin:].decode(), -1, json.JSONDecoder().raw_decode
    while at < 0 or text[at] == ",":
        entry, at = decode(text, at + 1)
        yield entry


def window_of(size: int) -> int:
    """Return how many collectives of a group of this size are in a sample: a power of two."""
    window = MOST
    while window > LEAST and window * size > NUMBERS:
        window //= 2
    return window


def window(times: "Mapping[int, int]", length: int) -> "tuple[int, list[int]] | None":
    """Return the first number and the times of the newest window without a gap that begins at a multiple of its length.

    So all ranks choose the same numbers, unless they are about to begin the next window.
    """
    last = max(times, default=-1) // length * length + length
    for first in (last - length, last - 2 * length):
        if all(number in times for number in range(first, first + length)):
            return first, [times[number] for number in range(first, first + length)]
    return None


def steps_apart(step_ns: int, cost_ns: int) -> int:
    """Return how many steps lie between two samples: a power of two, so that all ranks choose the same or one's multiple.

    step_ns: of one step. cost_ns: of one sample.
    """
    return 1 << (int(max(SAMPLE_S * 1e9, cost_ns / COST)) // step_ns).bit_length()


class Sampler:
    """Samples when this rank issued its last collectives, after the same optimizer steps as the other ranks do: a dump stops the
    script for some ms, and if the ranks stopped at different moments, each would wait for all others.
    """

    def __init__(self, steps: "Callable[[], int]", publish: "Callable[[str], None]", which: "str | None" = "auto") -> None:
        """Prepare.

        steps: returns the number of steps done. publish: gets a sample, a `stragglers.decide.WorkerSample` as JSON. which: "auto"
        or "all", as in the setting `stragglers`; None: it is off.
        """
        self.at_step = 0  # the number of steps after which the next sample is due; 0: that is not known yet
        self._steps, self._publish, self._which = steps, publish, which
        self._before = (0, 0)  # steps and monotonic ns of the last sample
        self._cost_ns = 0  # of CPU, of that sample
        self._numbers: dict[str, int] = {}  # the last collective of each group then

    def look(self, now_ns: int) -> None:
        """Take a sample if it is due. now_ns: time.monotonic_ns(). Raises as `read` does, and OSError."""
        if self._which is None:
            return
        steps, (steps_before, at_ns) = self._steps(), self._before
        if not at_ns:
            self._take(steps, now_ns, 0)
        elif steps > steps_before and not self.at_step:
            step_ns = max(1, (now_ns - at_ns) // (steps - steps_before))
            every = steps_apart(step_ns, self._cost_ns)
            self.at_step = steps // every * every + every
        elif self.at_step and steps >= self.at_step:
            at_step, self.at_step = self.at_step, 0
            self._take(steps, now_ns, at_step)

    def _take(self, steps: int, now_ns: int, at_step: int) -> None:
        ahead_ns, began_ns = time.time_ns() - time.monotonic_ns(), time.thread_time_ns()
        found = issued(with_nccl=self._which == "all")
        self._cost_ns = time.thread_time_ns() - began_ns
        (steps_before, at_ns), self._before = self._before, (steps, now_ns)
        before, self._numbers = self._numbers, {group: max(times) for group, times in found.items()}
        if not at_step:
            return
        windows = []
        for group, times in found.items():
            chosen = window(times, window_of(int(group.rpartition(" ")[2])))
            per_step = (self._numbers[group] - before.get(group, 0)) / (steps - steps_before)
            if chosen is not None and per_step > 0:
                first, at = chosen
                after_us = [(each - at[0]) // 1000 for each in at]
                windows.append(
                    {
                        "group": group,
                        "first": first,
                        "per_step": round(per_step, 3),
                        "base_us": (at[0] - ahead_ns) // 1000,
                        "after_us": after_us,
                    }
                )
        step_us = (now_ns - at_ns) // (steps - steps_before) // 1000
        self._publish(json.dumps({"schema": 1, "step": at_step, "step_us": step_us, "windows": windows}))


def _dumped(collectives: bool) -> "list[tuple[str, Entry]]":
    """Return what each recorder that knows ends says, with its backend. collectives: with the collectives themselves."""
    asked = _recorders(that_know_ends=True)
    return [(backend, json.loads(dump(includeCollectives=collectives, onlyActive=True))) for backend, dump in asked]


def _recorders(that_know_ends: bool) -> "list[tuple[str, Callable[..., bytes | str]]]":
    """Return what dumps each recorder of this torch, with the name of its backend.

    that_know_ends: only those that know when a collective has completed.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    found = [(backend, dump) for backend, name in _DUMPS.items() if (dump := getattr(c10d, name, None)) is not None]
    if hooked := _hooked(that_know_ends):
        dump = c10d._dump_fr_trace_json  # type: ignore[union-attr]
        found += [(backend, partial(dump, backend=backend)) for backend in hooked]
    return found


def _hooked(that_know_ends: bool) -> list[str]:
    """Return the backends that torch's hook records in this process; none if torch has changed, of which the agent has warned.

    that_know_ends: as in `_recorders`.
    """
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    groups = list(getattr(world, "pg_flight_recorder_hooks", ()))  # a copy, as above; torch before 2.15 has none
    try:
        backends = [group._get_backend(device) for group in groups for device in group._device_types]
        return sorted({each.name() for each in backends if each.supports_completion_hooks or not that_know_ends} - _DUMPS.keys())
    except AttributeError:  # base/torch_names.py has these names
        return []


class RecorderWatch(threading.Thread):
    """Reads the counts every CHECK_S, until the script ends, and lets the sampler look then, and when `wake` is set."""

    def __init__(
        self,
        publish: "Callable[[int, int, bool], None]",
        describe: "Callable[[str], None]",
        warn: "Callable[[str], None]",
        sampler: Sampler,
    ) -> None:
        """Prepare.

        publish: gets since when a collective has been outstanding and none has completed (0: none is), when that was so, and
        whether it has begun: see `oldest`. describe: gets the collective that `oldest` returns, as JSON, whenever it is another
        one. warn: gets the reason why the recorder cannot be read.
        """
        super().__init__(name="elastic_ext flight recorder", daemon=True)
        self.wake, self.sampler = threading.Event(), sampler
        self._over = self._cannot_sample = False
        self._publish, self._describe, self._warn = publish, describe, warn

    def end(self) -> None:
        """End soon. Returns at once."""
        self._over = True
        self.wake.set()

    def _sample(self) -> None:
        try:
            self.sampler.look(time.monotonic_ns())
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OSError, IndexError) as error:
            self._warn(f"cannot sample torch's flight recorder: {error!r}; nothing says whether this rank is late")
            self._cannot_sample, self.sampler.at_step = True, 0

    def run(self) -> None:
        outstanding, seen, asked_ns = Outstanding(), dict[str, tuple[int, int]](), 0
        found, has_begun = NONE_OUTSTANDING
        while True:
            self.wake.wait(CHECK_S)
            self.wake.clear()
            if self._over:
                break
            try:
                counts, now_ns = read(), time.monotonic_ns()
                since_ns = outstanding.since_ns(counts, now_ns)
                if since_ns and now_ns - since_ns >= ASKED_NS:
                    if counts != seen or now_ns - asked_ns >= AGAIN_NS:
                        before, (found, has_begun) = found, oldest()
                        seen, asked_ns = counts, now_ns
                        if found and found != before:
                            self._describe(json.dumps(found))
                else:
                    seen, (found, has_begun) = {}, NONE_OUTSTANDING
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
                self._warn(f"cannot read torch's flight recorder: {error!r}; a hang of spinning collectives is noticed later")
                break
            self._publish(since_ns if found else 0, now_ns, has_begun)
            if counts and not self._cannot_sample:
                self._sample()
        self._publish(0, time.monotonic_ns(), False)
