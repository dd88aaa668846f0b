"""Hangs: the limits, the culprits, and each kind of hang in real jobs."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_ext.agent import launch
from elastic_ext.base.settings import Settings
from elastic_ext.failures.classify import classify, root_cause
from elastic_ext.failures.evidence import Evidence
from elastic_ext.hangs import detector
from elastic_ext.hangs.detector import Stuck, WaitFor, WorkerStatus
from elastic_ext.workers import progress_layout
from tests.embedded_server import EmbeddedServer
from tests.jobs import PATIENT_AGENT as AGENT
from tests.jobs import SCRIPTS, TORCHRUN, Job, wait_gone
from tests.until import until

JOB = SCRIPTS / "hang_job.py"
GAPS = (0,) * 10 + (500,)  # 500 gaps of half a second to a second


def worker(rank: int = 0, steps: int = 10, quiet_s: float = 100.0, **more) -> WorkerStatus:
    return WorkerStatus(rank, steps, quiet_s, **{"working": False, "state": "S", **more})


# Limits.


@pytest.mark.parametrize(
    ("one", "fixed_s", "limit_s"),
    [
        (worker(), None, 60),
        (worker(gaps=GAPS), None, 60),
        (worker(gaps=(0,) * 15 + (100,)), None, 327.68),  # steps of 16 to 33 s: ten times that
        (worker(gaps=(0,) * 10 + (500,) + (0,) * 11 + (1,)), None, 60),  # one of an hour
        (worker(gaps=(0,) * 10 + (500,) + (0,) * 11 + (1,), working=True), None, 2 * 4194.304),  # it may take as long again
        (worker(gaps=(0,) * 10 + (20,) + (0,) * 9 + (1,)), None, 2 * 1048.576),  # each twentieth is of a quarter of an hour
        (worker(working=True), None, 1800),
        (worker(working=None), None, 1800),
        (worker(working=True, state="T"), None, 60),
        (worker(asleep_in_kernel=True), None, 1800),  # fsync to a file server that is away
        (worker(asleep_in_kernel=True, gaps=(0,) * 10 + (500,) + (0,) * 11 + (1,)), None, 2 * 4194.304),
        (worker(asleep_in_kernel=True, state="T"), None, 60),
        (worker(asleep_in_kernel=True, steps=0), None, 1800),  # stuck in an import, say
        (worker(asleep_in_kernel=True, steps=0, working=True), None, float("inf")),
        (worker(steps=0), None, 1800),
        (worker(steps=0, reports=1), None, 60),
        (worker(steps=0, working=True), None, float("inf")),
        (worker(phase="eval"), None, 1800),
        (worker(phase="data"), None, 60),
        (worker(gaps=(0,) * 15 + (100,)), 5, 5),
        (worker(working=True), 5, 5),
        (worker(asleep_in_kernel=True), 5, 5),
        (worker(asleep_in_kernel=True, steps=0), 5, 50),
        (worker(steps=0), 5, 50),
        (worker(steps=0, working=True), 5, 1800),
        *((worker(phase=phase), 5, 1800) for phase in ("compile", "checkpoint", "eval", "exit")),
        (worker(phase="eval", gaps=(0,) * 22 + (2,)), 5, 2 * 4194.304),
    ],
)
def test_limits(one, fixed_s, limit_s):
    assert detector.limit_s(one, detector.activity_of([one]), fixed_s) == pytest.approx(limit_s)
    if limit_s < float("inf"):
        assert not detector.assess([replace(one, quiet_s=limit_s - 0.1)], fixed_s).stalled
        assert detector.assess([replace(one, quiet_s=limit_s + 0.1)], fixed_s).stalled


def test_one_that_goes_on_is_enough():
    still = [worker(rank) for rank in range(4)]
    assert detector.assess(still).stalled
    assert not detector.assess([*still, worker(4, quiet_s=1)]).stalled
    assert not detector.assess([*still, worker(4, debugged=True)]).stalled
    assert not detector.assess([*still, worker(4, known=False)]).stalled
    assert not detector.assess([*still, worker(4, asleep_in_kernel=True)]).stalled
    assert not detector.assess([*still, worker(4, working=True)]).stalled
    assert not detector.assess([*still, worker(4, phase="checkpoint")]).stalled
    assert not detector.assess([]).stalled


def test_the_one_behind_is_named():
    verdict = detector.assess([worker(0, 11), worker(1, 10), worker(2, 11)])
    assert verdict.culprits == (1,)
    assert "the lowest step is 10, at rank 1" in verdict.reason
    assert detector.assess([worker(0, 11, reports=3), worker(1, 11, reports=2)]).culprits == (1,)


def test_the_next_look_is_at_possible_change():
    assert detector.next_check_s([worker(quiet_s=1)]) == 29  # at half of the limit
    assert detector.next_check_s([worker(quiet_s=30)]) == 15  # when a hang is imminent
    assert detector.next_check_s([worker(quiet_s=55), worker(quiet_s=45)]) == 15
    assert detector.next_check_s([worker(quiet_s=70, working=True)]) == 30
    assert detector.next_check_s([worker(quiet_s=1), worker(quiet_s=70)], 4) == 1
    assert detector.next_check_s([worker(steps=0, quiet_s=1)], 4) == 2  # the first step makes it short
    assert detector.next_check_s([]) == 30


def test_a_hang_is_imminent_after_long_idleness():
    late = worker(0, quiet_s=46, idle_s=15, working=True)  # it has worked until half of the limit
    assert detector.assess([late, replace(late, rank=1, quiet_s=50)]).imminent
    assert not detector.assess([late, replace(late, rank=1, quiet_s=44)]).imminent
    assert not detector.assess([late, replace(late, rank=1, idle_s=1.0)]).imminent
    assert not detector.assess([late, replace(late, rank=1, idle_s=0.0)]).imminent
    assert not detector.assess([replace(late, phase="eval")]).imminent
    assert not detector.assess([late, replace(late, rank=1, asleep_in_kernel=True)]).imminent  # that one has half an hour
    assert detector.assess([replace(late, quiet_s=4, asleep_in_kernel=True)], 5).imminent
    assert not detector.assess([replace(late, quiet_s=70, idle_s=40, working=False)]).imminent  # it is there


@pytest.mark.parametrize("fixed_s", [None, 5])
def test_a_worker_that_never_comes_up_stalls_too(fixed_s):
    """Before its bootstrap is in place nothing is known of it. For half an hour that proves nothing; then it counts as stuck."""
    others = [worker(rank, quiet_s=1801) for rank in range(3)]
    assert not detector.assess([*others, worker(3, 0, 1790, known=False)], fixed_s).stalled
    verdict = detector.assess([*others, worker(3, 0, 1801, known=False, asleep_in_kernel=True)], fixed_s)
    assert (verdict.stalled, verdict.culprits) == (True, (3,))
    assert not detector.assess([replace(others[0], quiet_s=1), worker(3, 0, 1801, known=False)], fixed_s).stalled
    assert not detector.assess([*others, worker(3, 0, 1799, known=False)], 1000).stalled
    assert not detector.assess([*others, worker(3, 0, 1801, known=False, working=True)]).stalled  # a long import


@pytest.mark.parametrize(
    ("entrypoint", "args", "has_one"),
    [
        (sys.executable, ("-u", str(JOB)), True),
        (sys.executable, ("-u", "-m", "json.tool"), True),
        ("/bin/true", (), False),
        (sys.executable, ("-c", "pass"), False),
        (print, (), False),
    ],
)
def test_where_none_can_come_up_none_is_watched(entrypoint, args, has_one):
    """Functions and other programs run without the bootstrap, so nothing is ever known of their progress."""
    spec = WorkerSpec("", 1, rdzv_handler=None, entrypoint=entrypoint, args=args)  # type: ignore[arg-type]
    assert launch.has_bootstrap(launch.prepare(spec, Settings())) == has_one


@pytest.mark.parametrize(
    ("cpu_share", "bytes_s", "works"),
    [
        (0.0, 0.0, False),
        (0.019, 99_000.0, False),
        (0.02, 0.0, True),
        (0.0, 100_000.0, True),
        (None, 0.0, True),
        (0.0, None, True),  # not known is not idle
    ],
)
def test_what_is_work(cpu_share, bytes_s, works):
    assert detector.works(cpu_share, bytes_s) == works


# Culprits.

WAITING = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007e (most recent call first):
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/v/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "train.py", line 31 in step
"""
LOADING = WAITING.replace(
    "/v/site-packages/torch/distributed/distributed_c10d.py", "/v/site-packages/torch/utils/data/dataloader.py"
)
BACKWARD = """Current thread 0x00007e (most recent call first):
  File "/v/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/v/site-packages/torch/autograd/__init__.py", line 354 in backward
"""


STORING = """Current thread 0x00007e (most recent call first):
  File "/v/site-packages/torch/distributed/checkpoint/filesystem.py", line 452 in _write_files_from_queue
  File "/v/site-packages/torch/distributed/checkpoint/filesystem.py", line 743 in write_data
  File "/v/site-packages/torch/distributed/checkpoint/state_dict_saver.py", line 505 in write_data
"""
PLANNING = STORING.replace("checkpoint/filesystem.py", "distributed_c10d.py")
OWN = 'Current thread 0x00007e (most recent call first):\n  File "train.py", line 64 in evaluate\n'


def stuck(rank: int, steps: int = 10, state: str = "S", stack: str = WAITING) -> Stuck:
    return Stuck(rank, steps, 70.0, state=state, condition="asleep", stack=stack)


def test_a_lock_of_a_killed_build_is_named():
    assert (
        "TORCH_EXTENSIONS_DIR" in stuck(0, stack=WAITING.replace("distributed/distributed_c10d.py", "utils/file_baton.py")).reason
    )
    assert "TORCH_EXTENSIONS_DIR" not in stuck(0).reason


@pytest.mark.parametrize(
    ("all_", "behind"),
    [
        ([stuck(0), stuck(1, stack=LOADING), stuck(2)], [1]),
        ([stuck(0, stack=BACKWARD), stuck(1, stack=LOADING)], [1]),
        ([stuck(0, 11), stuck(1, 10), stuck(2, 11, stack=LOADING)], [2]),  # nobody waits for a rank that waits
        ([stuck(0, 0), stuck(1, 20, stack=LOADING)], [1]),  # one without an optimizer
        ([stuck(0, 11, stack=LOADING), stuck(1, 10, stack=LOADING), stuck(2, 9)], [1]),  # both do their own part
        ([stuck(0, stack=PLANNING), stuck(1, stack=STORING)], [1]),
        ([stuck(0, stack=PLANNING), stuck(1, stack=STORING.replace("filesystem", "_fsspec_filesystem"))], [1]),
        ([stuck(0), stuck(1, 11, "T", "")], [1]),
        ([stuck(0), stuck(1, 10, "D", ""), stuck(2, stack=LOADING)], [1]),
        ([stuck(0), stuck(1, stack="")], [1]),
        ([stuck(0), stuck(1, stack=OWN), stuck(2)], [1]),
        ([stuck(0, 0), stuck(1, 0, stack=OWN)], [1]),  # never came to the first step
        ([stuck(0), stuck(1)], [0, 1]),  # all wait: they wait in different collectives, perhaps
        ([], []),
    ],
)
def test_culprits(all_, behind):
    assert [each.rank for each in detector.culprits(all_)] == behind


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (stuck(1), "10 steps after its start; asleep, waits for other ranks"),
        (stuck(1, 0, stack=OWN), "0 steps after its start; asleep"),
        (stuck(1, 1, stack=OWN), "1 step after its start; asleep"),
        (replace(stuck(1, stack=LOADING), phase="data"), "10 steps after its start, in phase data; asleep"),
    ],
)
def test_the_reason_says_what_is_known(one, said):
    assert one.reason == f"rank 1 made no progress for 70 s, {said}"


def test_the_lowest_blame_wins_in_any_order():
    told = [
        classify(Evidence(rank=each.rank, hang=True, hang_reason=each.reason, hang_blame=each.blame, ended_ns=order))
        for order, each in enumerate([stuck(0), stuck(3, 10, stack=LOADING), stuck(5, 11, stack=LOADING)])
    ]
    told = [replace(diagnosis, order=order) for order, diagnosis in enumerate(told)]
    for order in itertools.permutations(told):
        cause = root_cause(order)
        assert (cause.evidence.rank, cause.kind, cause.rule) == (3, "hang", "hang")
    assert "rank 3 made no progress for 70 s, 10 steps after its start" in cause.reason
    bug = classify(Evidence(rank=7, exit_code=1, stderr_tail="NameError: name 'x' is not defined", ended_ns=9))
    assert root_cause([*told, replace(bug, order=9)]).evidence.rank == 7


@pytest.mark.parametrize(
    ("state", "cpu", "waiting", "said"),
    [
        ("T", 0.0, 0.0, "stopped by a signal"),
        ("D", 0.0, 0.0, "asleep in the kernel in nfs_wait"),
        ("S", 0.0, 0.0, "asleep in nfs_wait: 0% of a processor"),
        ("R", 1.0, 0.0, "busy: 100%"),
        ("R", 0.4, 0.6, "busy: 40%"),  # shares its processor with another endless loop
        ("R", 0.02, 0.98, "starved: ready to run 98% of the time, but got 2%"),
        ("S", None, None, "state S"),
    ],
)
def test_what_it_does(state, cpu, waiting, said):
    assert detector.condition(state, "nfs_wait", cpu, waiting).startswith(said)


# Half an hour of healthy training, on a simulated clock.


class Clock:
    """Workers as the agent would see them, on a simulated clock."""

    def __init__(self, ranks: int) -> None:
        self.now = 0.0
        self.words = [[0] * (progress_layout.SAVE_WANTED + 1) for _ in range(ranks)]
        self.alarms: list[str] = []
        self.looks = 0
        self.next_check = 0.0
        self.working = [True] * ranks
        self.wait = [WaitFor.NOTHING] * ranks
        self.call_s = float("inf")  # each call that waits takes this long
        self.waits_since = 0.0

    def sign(self, rank: int, step: bool = True) -> None:
        words = self.words[rank]
        progress_layout.note_sign(words, int(self.now * 1e9))  # type: ignore[arg-type]
        words[progress_layout.STEPS] += step

    def phase(self, name: str) -> None:
        for rank, words in enumerate(self.words):
            self.sign(rank, step=False)
            words[progress_layout.PHASE] = progress_layout.PHASES.index(name)

    def workers(self) -> list[WorkerStatus]:
        found = []
        for rank, words in enumerate(self.words):
            gaps = progress_layout.GAPS + words[progress_layout.PHASE] * progress_layout.GAP_BUCKETS
            found.append(
                WorkerStatus(
                    rank,
                    words[progress_layout.STEPS],
                    self.now - words[progress_layout.SIGN_NS] / 1e9,
                    phase=progress_layout.PHASES[words[progress_layout.PHASE]],
                    gaps=tuple(words[gaps : gaps + progress_layout.GAP_BUCKETS]),
                    working=self.working[rank],
                    state="S",
                    wait=self.wait[rank],
                    stayed_s=(self.now - self.waits_since) % self.call_s if self.wait[rank] is not WaitFor.NOTHING else 0.0,
                )
            )
        return found

    def in_calls(self, wait: WaitFor, seconds: float, ranks: range, call_s: float = float("inf")) -> None:
        """These ranks spin in calls that only wait; the others work."""
        self.wait = [wait if rank in ranks else WaitFor.NOTHING for rank in range(len(self.words))]
        self.waits_since, self.call_s = self.now, call_s
        self.pass_time(seconds)
        self.wait = [WaitFor.NOTHING] * len(self.words)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.next_check <= end:
            self.now = max(self.now, self.next_check)
            verdict = detector.assess(self.workers())
            self.looks += 1
            if verdict.stalled:
                self.alarms.append(f"at {self.now:.0f} s: {verdict.reason}")
            self.next_check = self.now + min(detector.next_check_s(self.workers()), detector.next_call_check_s(self.workers()))
        self.now = end


def healthy(clock: Clock, chance: random.Random, until_s: float, step_s: float) -> None:
    """Uneven steps, stragglers, late data; evaluations, compiles and saves, some of which nobody reports."""
    clock.pass_time(chance.uniform(30, 600))  # imports, data sets, the first compile
    while clock.now < until_s:
        for _ in range(chance.randrange(20, 200)):
            clock.pass_time(step_s * chance.lognormvariate(0, 0.7))
            for rank in range(len(clock.words)):
                clock.pass_time(chance.random() * step_s / 10)
                clock.sign(rank)
        others = range(1, len(clock.words))
        what = chance.choice(["data", "eval", "quiet eval", "rank 0 saves", "checkpoint", "compile", "calls"])
        if what == "calls":
            clock.in_calls(WaitFor.RANKS, chance.uniform(10, 900), others)  # while rank 0 does its own part
            clock.in_calls(WaitFor.RANKS, chance.uniform(10, 900), range(len(clock.words)), call_s=5.0)  # an evaluation
            clock.in_calls(WaitFor.DEVICE, chance.uniform(1, 40), range(len(clock.words)))  # a long kernel
        elif what in ("eval", "checkpoint", "compile"):
            clock.phase(what)
            clock.working = [what == "compile"] * len(clock.words)  # a device works, or a disk
            clock.pass_time(chance.uniform(10, 900))
            clock.working = [True] * len(clock.words)
            clock.phase("")
        elif what == "data":  # nobody does anything
            clock.working = [False] * len(clock.words)
            clock.pass_time(chance.uniform(1, 55))
            clock.working = [True] * len(clock.words)
        else:
            clock.working = [what == "quiet eval" or rank == 0 for rank in range(len(clock.words))]
            clock.pass_time(chance.uniform(10, 900))
            clock.working = [True] * len(clock.words)


@pytest.mark.parametrize("step_s", [0.05, 0.8, 12.0])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 10))])
@pytest.mark.parametrize("spins", [True, False])
def test_no_alarm_in_health_one_after_a_hang(seed, step_s, spins):
    clock = Clock(4)
    healthy(clock, random.Random(seed), 1800, step_s)
    assert clock.alarms == []
    assert clock.looks < clock.now / 2.5  # twenty in a minute, and a few more where somebody is late
    before = stop(clock, working=spins)
    if spins:
        limit_s = max(detector.wait_limit_s(each) for each in clock.workers())
        clock.in_calls(WaitFor.RANKS, limit_s + 100, range(4))
        assert limit_s - 1 < raised(clock) - before < limit_s + 2 * detector.CALL_CHECK_S
    else:
        clock.pass_time(2100)
        assert raised(clock) - before > 59


def stop(clock: Clock, working: bool) -> float:
    """All ranks stop stepping; return when."""
    for rank in range(4):
        clock.sign(rank)
    clock.working = [working] * 4
    clock.alarms.clear()
    return clock.now


def raised(clock: Clock) -> float:
    assert clock.alarms, "the clock and its workers would never raise one"
    return float(re.findall(r"at (\d+) s", clock.alarms[0])[0])


# Real jobs.

CONF = "hang_timeout=3"
PATIENT_CONF = "hang_timeout=8"  # of what is no hang: a busy machine needs longer for a step


def verdict_of(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.seam
@pytest.mark.parametrize(
    ("fault", "kind", "reason", "logged"),
    [
        (
            "deadlock:1",
            "hang",
            r"rank 1 made no progress for (?!.*waits for other ranks).*asleep.*: \d% of a processor used",
            "rank 0 made no progress .* waits for other ranks",
        ),
        (
            "leave:1",
            "code",
            "rank 1 ended with 0 at step 5 since it started, the others wait for it, .*; then rank 0 made no progress",
            "",
        ),
    ],
)
def test_a_hang_is_caught_and_the_culprit_named(tmp_path, fault, kind, reason, logged):
    """No restart is left, so the verdict is in a file: it names the rank and its condition, and holds the stacks."""
    verdict = tmp_path / "verdict"
    command = [*AGENT, "--nproc-per-node=2", "--max-restarts=0", f"--rdzv-conf={CONF}", JOB, fault]
    with Job(command, tmp_path, STOP=str(tmp_path / "stop"), ELASTIC_EXT_VERDICT_FILE=str(verdict)) as job:
        done = job.finish()
    assert done.returncode == 1, done.err
    found = verdict_of(verdict)
    decision = found["decision"]
    assert (found["rank"], decision["kind"], decision["rule"]) == (1, kind, "budget"), done.err
    assert re.search(reason, decision["reason"]), decision["reason"]
    assert re.search(logged, done.err), done.err
    if kind == "hang":
        assert found["stacks"].index("in deadlock") < found["stacks"].index("in all_reduce")  # the culprit first


@pytest.mark.full
def test_a_hung_job_continues_in_a_new_round(tmp_path):
    stop = tmp_path / "stop"
    with Job(
        [*AGENT, "--nproc-per-node=2", "--max-restarts=1", f"--rdzv-conf={CONF}", JOB, "stop:0"], tmp_path, STOP=str(stop)
    ) as job:
        stopped = int(job.wait_for(r'"rank": 0, "world": 2, "attempt": 0, "pid": (\d+)')[0][1])
        job.wait_for('"attempt": 1', 2)
        assert wait_gone([stopped]) == []  # SIGSTOP does not save it
        stop.touch()
        done = job.finish()
    assert done.returncode == 0, done.err
    assert re.search(r"restart: rank 0 made no progress .*stopped by a signal \(state T\), and cannot show its stacks", done.err)


CPU_GROUP = Path("/sys/fs/cgroup/cpu")


@pytest.fixture
def starving_group() -> Iterator[Path]:
    """A group of processes that share a hundredth of a processor."""
    if not os.access(CPU_GROUP / "cpu.cfs_quota_us", os.W_OK):
        try:
            (CPU_GROUP / f"elastic_ext_{os.getpid()}").mkdir()
        except OSError as error:
            pytest.skip(f"no processor group can be made here: {error}")
    else:
        (CPU_GROUP / f"elastic_ext_{os.getpid()}").mkdir()
    group = CPU_GROUP / f"elastic_ext_{os.getpid()}"
    (group / "cpu.cfs_period_us").write_text("100000")
    (group / "cpu.cfs_quota_us").write_text("1000")
    yield group
    pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    assert wait_gone(pids) == []
    group.rmdir()


@pytest.mark.full
def test_a_starved_worker_differs_from_an_endless_loop(tmp_path, starving_group):
    verdict = tmp_path / "verdict"
    command = [*AGENT, "--nproc-per-node=2", "--max-restarts=0", "--rdzv-conf=hang_timeout=4", JOB, "starve:1"]
    env = {"STOP": str(tmp_path / "stop"), "GROUP": str(starving_group), "ELASTIC_EXT_VERDICT_FILE": str(verdict)}
    with Job(command, tmp_path, **env) as job:
        done = job.finish()
    assert done.returncode == 1, done.err
    assert re.search(r"rank 1 made .*starved: ready to run \d+%", verdict_of(verdict)["decision"]["reason"])


@pytest.mark.full
def test_both_nodes_name_the_culprit_and_its_node(tmp_path):
    """Four ranks on two nodes. One node sees nothing but workers that wait. On etcd: see test_waiting_jobs.py."""
    with ExitStack() as stack:
        jobs = start_two(stack, tmp_path, "deadlock:3", "--max-restarts=0")
        done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [1, 1], [each.err for each in done]
    found = [verdict_of(tmp_path / f"verdict-{name}") for name in "ab"]
    assert found[0] == found[1]
    told = [each for each in done if "rank 3 made no progress" in each.err.split("round 1 is over")[1].split("stop:")[0]]
    assert len(told) == 1  # only its own agent can look at it
    assert (found[0]["rank"], found[0]["decision"]["kind"]) == (3, "hang")
    assert found[0]["host"] == "ab"[done.index(told[0])]
    assert "on a: rank" in found[0]["stacks"]
    assert "on b: rank" in found[0]["stacks"]
    for each in done:
        assert re.search("stop: (on [ab]: )?rank 3 made no progress", each.err)


def start_two(stack: ExitStack, tmp_path: Path, fault: str, *options: str, conf: str = CONF, **env: str) -> list[Job]:
    store = stack.enter_context(EmbeddedServer())
    where = [f"--rdzv-endpoint={store.endpoint}", "--rdzv-id=job", "--nnodes=2", "--nproc-per-node=2"]
    how = [*store.options, f"--rdzv-conf={conf}"]
    own = [{"ELASTIC_EXT_NODE_NAME": name, "ELASTIC_EXT_VERDICT_FILE": str(tmp_path / f"verdict-{name}")} for name in "ab"]
    command, env = [*TORCHRUN, *how, *where, *options, JOB, fault], {"STOP": str(tmp_path / "stop"), **env}
    return [stack.enter_context(Job(command, tmp_path, **env, **each)) for each in own]


@pytest.mark.full
def test_a_node_awaiting_an_evaluation_is_patient(tmp_path):
    """Its own workers all stall for longer than their limit, which is longer for the one that evaluates."""
    stop = tmp_path / "stop"
    with ExitStack() as stack:
        jobs = start_two(stack, tmp_path, "eval:3", conf=PATIENT_CONF, EVAL_S="20")
        for job in jobs:
            job.wait_for('"attempt": 0', 2)
        until(lambda: any("the workers have resumed" in job.err for job in jobs))  # the first look after the evaluation
        assert any("evaluated" in job.out for job in jobs)
        stop.touch()
        done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 0], [each.err for each in done]
    assert any("no worker here has made progress" in each.err for each in done)
    assert any("the workers have resumed" in each.err for each in done)
    assert not any('"attempt": 1' in each.out for each in done)


@pytest.mark.seam
@pytest.mark.full("launcher1")
@pytest.mark.parametrize("launcher", [AGENT, [*TORCHRUN, "--standalone"]])
def test_the_health_barrier_names_who_is_missing(tmp_path, launcher):
    with Job([*launcher, "--nproc-per-node=2", SCRIPTS / "barrier_job.py"], tmp_path) as job:
        done = job.finish()
    assert done.returncode == 0, done.err
    assert done.out.count("passed") == 2
    assert re.findall(".* did not arrive.*", done.out) == ["rank 0: health barrier: rank 1 of 2 did not arrive within 2 s (1,)"]
