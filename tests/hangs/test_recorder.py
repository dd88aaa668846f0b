"""Collectives that do not complete, by torch's flight recorder. The counts are those of NCCL 2.28 and gloo in real deadlocks."""

import gc
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from elastic_ext.base.diagnosis import Collective
from elastic_ext.checkpoints.ranks import DESCRIPTION
from elastic_ext.features.stragglers import decide
from elastic_ext.hangs import stacks
from elastic_ext.hangs.detector import WaitFor
from elastic_ext.hangs.process_stats import ProcessStats
from elastic_ext.hangs.stacks import Stay, without_our_thread
from elastic_ext.hangs.watch import collective_in
from elastic_ext.workers.bootstrap import recorder
from elastic_ext.workers.bootstrap.recorder import Outstanding
from elastic_ext.workers.progress import Progress

S = 10**9
WORLD, OTHERS = "nccl 0", "nccl 1"


def since(*seen: tuple[int, dict[str, tuple[int, int]]]) -> int:
    """Return what the last of these looks finds. seen: (seconds, counts)."""
    outstanding, found = Outstanding(), 0
    for at_s, counts in seen:
        found = outstanding.since_ns(counts, at_s * S)
    return found


@pytest.mark.parametrize(
    ("seen", "expected_s"),
    [
        ([(100, {})], 0),
        ([(100, {WORLD: (5, 5)}), (102, {WORLD: (5, 5)})], 0),
        ([(100, {WORLD: (5, 5)}), (102, {WORLD: (6, 5)})], 102),
        ([(100, {WORLD: (5, 5)}), (102, {WORLD: (6, 5)}), (104, {WORLD: (299, 5)})], 102),  # FSDP runs far ahead
        ([(100, {WORLD: (6, 5)}), (102, {WORLD: (7, 6)}), (104, {WORLD: (7, 6)})], 102),  # one has completed since
        ([(100, {WORLD: (6, 5)}), (102, {WORLD: (6, 6)}), (104, {WORLD: (7, 6)})], 104),
        ([(100, {WORLD: (6, 5), OTHERS: (1, 1)}), (102, {WORLD: (6, 5), OTHERS: (2, 2)})], 102),  # in another group
        ([(100, {WORLD: (6, 5)}), (102, {WORLD: (6, 5), OTHERS: (1, -1)}), (104, {WORLD: (6, 5), OTHERS: (1, -1)})], 102),
    ],
)
def test_since_when_none_completes(seen, expected_s):
    assert since(*seen) == expected_s * S


def test_all_recorders_are_read(monkeypatch):
    def dump(includeCollectives, onlyActive):
        assert not includeCollectives
        status = {"last_enqueued_collective": "6", "last_started_collective": "-1", "last_completed_collective": "5"}
        return json.dumps({"version": "2.10", "pg_config": {}, "pg_status": {"0": status}}).encode()

    module = SimpleNamespace(_dump_nccl_trace_json=dump, _dump_fr_trace_json=lambda **_: b'{"version": "2.10"}')
    monkeypatch.setitem(recorder.sys.modules, "torch._C._distributed_c10d", module)
    assert recorder.read() == {"nccl 0": (6, 5)}
    monkeypatch.delitem(recorder.sys.modules, "torch._C._distributed_c10d")
    assert recorder.read() == {}


class Hooked:
    """A group to which torch 2.15 has attached its hook. backends: by device, the name and whether it knows when one ends."""

    def __init__(self, **backends: tuple[str, bool]) -> None:
        self._device_types = list(backends)
        self._backends = {
            device: SimpleNamespace(name=lambda name=name: name, supports_completion_hooks=knows)
            for device, (name, knows) in backends.items()
        }

    def _get_backend(self, device: str) -> SimpleNamespace:
        return self._backends[device]


def hooked(monkeypatch, *groups: object) -> None:
    """As in a process of torch 2.15 with four ranks and these groups: each recorder says that one has completed of two."""

    def dump(includeCollectives, onlyActive, backend="gloo"):
        entries = [entry("all_reduce", number, number, process_group=["0", "default_pg"]) for number in (1, 2)]
        status = {"last_enqueued_collective": "2", "last_completed_collective": "1"}
        return json.dumps({"entries": entries, "pg_status": {"0": status}}).encode()

    world = SimpleNamespace(pg_names={"pg": "0"}, pg_group_ranks={"pg": {0: 0, 1: 1, 2: 2, 3: 3}})
    world.pg_flight_recorder_hooks = dict.fromkeys(groups, "its hook")
    monkeypatch.setitem(recorder.sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace_json=dump))
    monkeypatch.setitem(recorder.sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(_world=world))


NCCL2, LAZY, UCC = ("nccl2", True), ("nccl-lazy", True), ("ucc", False)
BOTH = ("nccl2", "nccl-lazy")


@pytest.mark.parametrize(
    ("groups", "know_ends", "sampled"),
    [
        ([], ["gloo"], ["gloo"]),
        ([Hooked(cuda=NCCL2)], ["gloo", "nccl2"], ["gloo", "nccl2"]),
        ([Hooked(cpu=("gloo", False), cuda=NCCL2)], ["gloo", "nccl2"], ["gloo", "nccl2"]),
        ([Hooked(cuda=NCCL2), Hooked(cuda=LAZY), Hooked(cuda=NCCL2)], ["gloo", *BOTH], ["gloo", *BOTH]),
        ([Hooked(cuda=UCC)], ["gloo"], ["gloo", "ucc"]),  # what is issued counts as ended
        ([Hooked(cpu=UCC, cuda=NCCL2)], ["gloo", "nccl2"], ["gloo", "nccl2", "ucc"]),
        ([Hooked(cuda=("a/b", True))], ["a/b", "gloo"], ["a_b", "gloo"]),
    ],
)
def test_each_backend_that_torch_hooks_is_read(monkeypatch, groups, know_ends, sampled):
    hooked(monkeypatch, *groups)
    assert recorder.read() == {f"{backend} 0": (2, 1) for backend in know_ends}
    assert recorder.issued(with_nccl=False) == {f"{backend} 0 0 4": {1: 1, 2: 2} for backend in sampled}


class Changed:
    """A group of a torch that has renamed what Hooked has."""


def test_a_changed_hook_leaves_other_recorders_read(monkeypatch):
    hooked(monkeypatch, Changed())
    assert recorder.read() == {"gloo 0": (2, 1)}


def entry(operation: str, number: int, created_ns: int, **more: object) -> dict[str, object]:
    """As NCCL's recorder shows a collective of a real deadlock, without what nobody reads."""
    found = {"process_group": ["0", "default_pg"], "collective_seq_id": number, "profiling_name": f"nccl:{operation}"}
    found |= {"state": "scheduled", "retired": False, "is_p2p": False, "thread_id": str(threading.main_thread().ident)}
    return {**found, "time_created_ns": created_ns, **more}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry("all_gather", 87, 5)], "all_gather 87 of group default_pg"),
        ([entry("all_gather", 88, 6), entry("all_reduce", 87, 5)], "all_reduce 87 of group default_pg"),
        ([entry("all_reduce", 4, 1, retired=True), entry("all_reduce", 5, 9)], "all_reduce 5 of group default_pg"),
        ([entry("all_reduce", 4, 1, state="completed"), entry("all_reduce", 5, 9)], "all_reduce 5 of group default_pg"),
        ([entry("recv", 0, 1, is_p2p=True), entry("barrier", 5, 9, process_group=["3", "undefined"])], "barrier 5 of group 3"),
        ([entry("all_reduce", 5, 9, thread_id="1")], "all_reduce 5 of group default_pg"),  # of the backward pass
        ([entry("all_reduce", 5, 9, process_group=["1", "gone"])], ""),  # its end was never recorded
        ([entry("all_reduce", 4, 1, retired=True)], ""),  # as gloo shows all that have ended, whatever the counts say
        ([], ""),
    ],
)
def test_the_oldest_collective_is_named(monkeypatch, tmp_path, entries, expected):
    dumped(monkeypatch, entries)
    found, _ = recorder.oldest()
    (tmp_path / "stacks.collective").write_text(json.dumps(found))
    assert str(collective_in(str(tmp_path / "stacks"), 3) or "") == expected
    assert bool(found) == bool(expected)
    assert collective_in(str(tmp_path / "other"), 3) is None


def test_what_the_agents_compare_over_the_ranks(monkeypatch, tmp_path):
    dumped(monkeypatch, [entry("all_reduce", 87, 5, input_sizes=[[4, 2]])])
    (tmp_path / "stacks.collective").write_text(json.dumps(recorder.oldest()[0]))
    assert collective_in(str(tmp_path / "stacks"), 3) == Collective(3, "all_reduce", 87, "default_pg", 2, 3, "[[4, 2]]")
    dumped(monkeypatch, [entry("all_reduce", 87, 5, input_sizes=[[4, 2]] * 100)])
    assert recorder.oldest()[0]["shapes"] == ""  # longer than a report has room for


@pytest.mark.parametrize("said", [{"operation": "x" * 300}, {"number": "many"}, {"group": None}])
def test_a_workers_words_about_collectives_are_checked(tmp_path, said):
    whole = {"operation": "all_reduce", "number": 1, "group": "0"}
    (tmp_path / "stacks.collective").write_text(json.dumps({**whole, **said}))
    assert collective_in(str(tmp_path / "stacks"), 3) is None


def test_a_script_threads_waits_do_not_count(monkeypatch):
    """Another thread may do this rank's part meanwhile: a save beside training, say."""
    over = threading.Event()
    beside = threading.Thread(target=over.wait)
    beside.start()
    dumped(monkeypatch, [entry("all_reduce", 5, 9, thread_id=str(beside.ident))])
    assert recorder.oldest() == ({}, False)
    over.set()
    beside.join()


GPU = SimpleNamespace(type="cuda")


@pytest.mark.parametrize(
    ("device", "initialized", "state", "expected"),
    [
        (None, None, "scheduled", True),
        (GPU, lambda: False, "scheduled", True),
        (GPU, lambda: True, "scheduled", False),  # perhaps behind much work of this rank's own
        (GPU, lambda: True, "started", True),
        (GPU, None, "scheduled", False),
    ],
)
def test_whether_a_collective_has_begun(monkeypatch, device, initialized, state, expected):
    dumped(monkeypatch, [entry("all_reduce", 5, 9, state=state)], device, initialized)
    assert recorder.oldest()[1] == expected


def dumped(monkeypatch, entries, device=None, initialized=None):
    accelerator = SimpleNamespace(current_accelerator=lambda: device)
    cuda = SimpleNamespace(**({"is_initialized": initialized} if initialized else {}))
    monkeypatch.setitem(recorder.sys.modules, "torch", SimpleNamespace(accelerator=accelerator, cuda=cuda))
    dump = json.dumps({"version": "2.10", "entries": entries}).encode()
    module = SimpleNamespace(_dump_nccl_trace_json=lambda includeCollectives, onlyActive: dump)
    monkeypatch.setitem(recorder.sys.modules, "torch._C._distributed_c10d", module)
    group, other = object(), object()
    world = SimpleNamespace(pg_names={group: "0", other: "3"}, pg_group_ranks={group: {2: 0, 3: 1, 4: 2}})
    monkeypatch.setitem(recorder.sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(_world=world))


ROW = Progress(1, 30, 1, 1, True, answers=2, outstanding_ns=100 * S, outstanding_at_ns=110 * S)
STATS = ProcessStats("R")
STAY = Stay(100.0, WaitFor.QUEUED, 0, True, STATS, outstanding_ns=100 * S)


def test_a_silent_recorder_proves_no_wait():
    """Its main thread holds the interpreter's lock: it computes."""
    assert stacks.is_outstanding(ROW, 110.0 + stacks.RECORDED_S)
    assert not stacks.is_outstanding(ROW, 110.1 + stacks.RECORDED_S)
    assert not stacks.is_outstanding(replace(ROW, outstanding_ns=0), 110.0)


def test_a_stay_ends_when_a_collective_completes(monkeypatch):
    monkeypatch.setattr(stacks, "RATES_S", 100.0)
    assert stacks.continues(STAY, ROW, STATS, 111.0)
    assert stacks.continues(STAY, replace(ROW, answers=3), STATS, 111.0)  # its main thread may run
    assert not stacks.continues(STAY, replace(ROW, outstanding_ns=101 * S), STATS, 111.0)
    assert not stacks.continues(STAY, replace(ROW, outstanding_begun=True), STATS, 111.0)
    assert not stacks.continues(STAY, ROW, replace(STATS, state="T"), 111.0)


STACKS = """Thread 0x1 (most recent call first):
  File "{}", line 1 in {}
  File "/usr/lib/python3.12/threading.py", line 1 in run

Current thread 0x2 (most recent call first):
  File "/train.py", line 53 in <module>
"""


@pytest.mark.parametrize(
    ("path", "function", "waits"),
    [
        ("/usr/lib/python3.12/threading.py", "wait", True),
        ("/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_reduce", True),
        ("/train.py", "compute", False),
    ],
)
def test_no_other_thread_may_compute(path, function, waits):
    assert stacks.still_waits(STAY, STACKS.format(path, function)) == waits
    assert not stacks.still_waits(STAY, "")


SCRIPT = 'Current thread 0x2 (most recent call first):\n  File "/train.py", line 53 in <module>\n'
ASKED = replace(ROW, outstanding_ns=100 * S, outstanding_at_ns=108 * S, outstanding_begun=True)


@pytest.mark.parametrize(
    ("row", "first_s", "moved", "since", "wait"),
    [
        (replace(ROW, outstanding_ns=0), 103.0, 0, 108.0, WaitFor.NOTHING),
        (ASKED, 103.0, 0, 103.0, WaitFor.BEGUN),
        (replace(ASKED, outstanding_begun=False), 103.0, 0, 103.0, WaitFor.QUEUED),
        (replace(ASKED, outstanding_ns=104 * S), 103.0, 0, 108.0, WaitFor.BEGUN),  # another one had completed meanwhile
        (ASKED, 103.0, 10**7, 108.0, WaitFor.BEGUN),  # it has written a file meanwhile
        (ASKED, None, 0, 108.0, WaitFor.BEGUN),
    ],
)
def test_a_stay_begins_before_the_recorder_is_asked(row, first_s, moved, since, wait):
    stats = ProcessStats("R", io_bytes=0, sockets={})
    before = None if first_s is None else stacks.stay_of(SCRIPT, replace(ROW, outstanding_ns=0), stats, first_s, None)
    stay = stacks.stay_of(SCRIPT, row, replace(stats, io_bytes=moved), 108.0, before)
    assert (stay.since, stay.wait) == (since, wait)


def test_stacks_do_not_show_our_own_thread():
    script = STACKS.format("/train.py", "compute")
    ours = STACKS.format("/elastic_ext/workers/bootstrap/recorder.py", "run")
    assert without_our_thread(script) == script
    assert without_our_thread(ours) == ours[ours.index("Current") :]
    assert without_our_thread("") == ""


# When this rank issued its collectives.


def dump_of(numbers, group=("0", "default_pg"), **changes):
    entries = [
        {
            "collective_seq_id": number,
            "is_p2p": False,
            "process_group": list(group),
            "thread_id": "1",
            "time_created_ns": number * 1_000_000,
            **changes,
        }
        for number in numbers
    ]
    return json.dumps(
        {"comm_lib_version": "", "entries": entries, "pg_status": {}}, sort_keys=True, separators=(",", ":")
    ).encode()


@pytest.mark.parametrize("most", [1, 7, 300])
def test_only_a_dumps_newest_collectives_are_parsed(most):
    found = recorder.newest(dump_of(range(300)), most)
    assert [each["collective_seq_id"] for each in found] == list(range(300 - most, 300))


def test_a_sample_sets_off_no_garbage_collection():
    """In a script that holds much, one would stop all its threads for longer than the sample itself takes."""
    dump, collections = dump_of(range(2000), input_sizes=[[1, 2], [3]], output_sizes=[[1]]), []
    gc.collect()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        last = [each["collective_seq_id"] for each in recorder.newest(dump, 1000)][-1]
    finally:
        gc.callbacks.pop()
    assert (last, collections) == (1999, [])


def test_a_dump_in_another_style_is_parsed_whole():
    text = json.dumps(json.loads(dump_of(range(30))), indent=1)
    assert [each["collective_seq_id"] for each in recorder.newest(text, 2)] == [28, 29]
    assert list(recorder.newest(b'{"version": "2.10"}', 5)) == []


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [(range(100), 64), (range(31, 100), 64), (range(65, 127), None), (range(40, 97), 64), (range(31), None), ([], None)],
)
def test_all_ranks_choose_the_same_window(numbers, expected):
    chosen = recorder.window({number: number * 10 for number in numbers}, 32)
    assert (chosen[0] if chosen else None) == expected
    if chosen:
        assert chosen[1] == [number * 10 for number in range(expected, expected + 32)]


@pytest.mark.parametrize(("size", "expected"), [(2, 256), (256, 256), (512, 128), (100_000, 32)])
def test_a_window_of_many_ranks_is_shorter(size, expected):
    assert recorder.window_of(size) == expected


@pytest.fixture
def four_ranks(monkeypatch):
    """The default group of four ranks, whose last collective is the value of this."""
    last = [10]
    module = SimpleNamespace(
        _dump_nccl_trace_json=lambda **_: b'{"version": "2.10"}', _dump_fr_trace_json=lambda **_: dump_of(range(last[0] + 1))
    )
    world = SimpleNamespace(pg_names={"pg": "0", "alone": "1"}, pg_group_ranks={"pg": {0: 0, 1: 1, 2: 2, 3: 3}, "alone": {2: 0}})
    monkeypatch.setitem(recorder.sys.modules, "torch._C._distributed_c10d", module)
    monkeypatch.setitem(recorder.sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(_world=world))
    return last


def test_ranks_sample_after_the_same_steps(four_ranks):
    steps, published = [1], []
    sampler = recorder.Sampler(lambda: steps[0], published.append)
    sampler.look(2 * S)
    steps[0] = 31
    sampler.look(5 * S)  # a step takes 0.1 s
    assert sampler.at_step == 128
    steps[0], four_ranks[0] = 127, 126 * 6
    sampler.look(14 * S)
    assert published == []
    steps[0], four_ranks[0] = 129, 128 * 6 + 10
    sampler.look(15 * S)
    (text,) = published
    sample = decide.decode_worker(text, "it")
    assert (sample.step, sample.step_us) == (128, 13 * 10**6 // 128)
    (window,) = sample.windows
    assert (window.group, window.first, window.per_step, len(window.after_us)) == ("gloo 0 0 4", 512, 6.0, 256)
    assert window.after_us[:3] == (0, 1000, 2000)


@pytest.mark.parametrize(
    ("step_s", "cost_s", "apart_s"),
    [(0.1, 0.0, 12.8), (0.1, 0.02, 12.8), (0.1, 0.06, 25.6), (0.1, 0.1, 51.2), (3.0, 0.05, 24.0), (600.0, 0.06, 600.0)],
)
def test_costly_samples_are_rarer(step_s, cost_s, apart_s):
    apart = recorder.steps_apart(int(step_s * S), int(cost_s * S))
    assert apart * step_s == pytest.approx(apart_s)
    assert cost_s <= recorder.COST * apart_s


def test_a_sample_knows_the_one_before_it(four_ranks, monkeypatch):
    taken = iter([0, S // 10, 0, 0])
    monkeypatch.setattr(recorder.time, "thread_time_ns", lambda: next(taken))
    steps = [1]
    sampler = recorder.Sampler(lambda: steps[0], lambda text: None)
    sampler.look(2 * S)
    steps[0] = 31
    sampler.look(5 * S)
    assert sampler.at_step == 512


def test_a_rank_alone_samples_nothing(monkeypatch):
    monkeypatch.setitem(
        recorder.sys.modules,
        "torch.distributed.distributed_c10d",
        SimpleNamespace(_world=SimpleNamespace(pg_names={"pg": "0"}, pg_group_ranks={"pg": {0: 0}})),
    )
    assert recorder.issued(with_nccl=True) == {}


def test_groups_of_saves_and_copies_are_not_sampled(four_ranks, monkeypatch):
    """Its threads have ended, so they are not known as such."""
    module = recorder.sys.modules["torch._C._distributed_c10d"]
    monkeypatch.setattr(module, "_dump_fr_trace_json", lambda **_: dump_of(range(300), ("0", DESCRIPTION)))
    assert recorder.issued(with_nccl=True) == {}


@pytest.mark.parametrize(("which", "read"), [("auto", ["gloo"]), ("all", ["NCCL", "gloo"]), (None, [])])
def test_nccl_is_read_only_on_request(four_ranks, monkeypatch, which, read):
    module, asked = recorder.sys.modules["torch._C._distributed_c10d"], []
    monkeypatch.setattr(module, "_dump_nccl_trace_json", lambda **_: asked.append("NCCL") or b'{"version": "2.10"}')
    monkeypatch.setattr(module, "_dump_fr_trace_json", lambda **_: asked.append("gloo") or b'{"version": "2.10"}')
    recorder.Sampler(lambda: 1, lambda text: None, which).look(2 * S)
    assert asked == read


def test_the_script_may_change_groups_during_samples(four_ranks):
    world = recorder.sys.modules["torch.distributed.distributed_c10d"]._world

    class MadeMeanwhile(dict):
        def get(self, group, default=()):
            world.pg_names[f"made {len(world.pg_names)}"] = f"{len(world.pg_names)}"
            return super().get(group, default)

    world.pg_group_ranks = MadeMeanwhile(world.pg_group_ranks)
    assert recorder.issued(with_nccl=True).keys() == {"gloo 0 0 4"}
