"""The scenarios of "Slurm, Slinky, chaos tests" and of "Fault tolerance and elastic training", one test each, by these names.

Real agents under stock torchrun, a real etcd, and `train_fsdp.py`, whose losses are those of an undisturbed run as long as every
state that it resumes from is the one that it saved. More of the documents' scenarios: see entrypoints/README.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.etcd import EtcdClient
from elastic_ext.rendezvous.keys import JobKeys
from tests.etcd_server import EtcdServer
from tests.jobs import ROOT, TIMEOUT_S, TORCHRUN, Job, descendants, run, wait_gone
from tests.lossy_network import DEVICE, LossyNetwork, Way
from tests.programs import needs
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.full

SCRIPT = ROOT / "entrypoints" / "train_fsdp.py"
# Without dropout, the loss of a step does not depend on the number of ranks.
TINY = shlex.split(
    "--device cpu --dim 16 --layers 1 --heads 2 --seq-len 16 --global-batch 12 --data-mb 0.0011 --dropout 0 "
    "--epochs 100000 --max-steps 100000 --log-every 1"
)
SAME = 1e-3  # sums of other numbers of ranks are rounded otherwise: a part in 10^6 after 1,300 steps
SAVED = r"(?m)^saved .*/step_0*(\d+)\."
LEASE_S = 15  # a busy machine keeps it
LOSS = re.compile(r"step (\d+) loss (\S+) \(")


class Nodes:
    """The agents of one job; each stands for a node. The first one that is started has rank 0 for as long as it lives."""

    def __init__(self, folder: Path, etcd: str, stack: ExitStack) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.jobs: dict[str, Job] = {}
        self._etcd, self._stack = etcd, stack

    def start(
        self, name: str, nnodes: str, *flags: str, conf: str = "", inside: list[str] | None = None, lease_ttl: int = LEASE_S
    ) -> Job:
        """conf: more settings. inside: where it runs."""
        conf = f"checkpoint_dir={self.checkpoints},lease_ttl={lease_ttl},backoff=0,{conf}".rstrip(",")
        conf += f",node_name={name},events_file={self.folder}/{name}.events"
        where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={self._etcd}", "--rdzv-id=job", f"--nnodes={nnodes}"]
        launcher = [*(inside or []), *TORCHRUN, *where, "--max-restarts=5", f"--rdzv-conf={conf}"]
        command = [*launcher, str(SCRIPT), *TINY, f"--checkpoint-dir={self.checkpoints}", *flags]
        variables = {"GLOO_SOCKET_IFNAME": DEVICE} if inside else {}
        self.jobs[name] = self._stack.enter_context(Job(command, self.folder, **variables))
        return self.jobs[name]

    def start_all(self, names: str, nnodes: str, *flags: str, conf: str = "") -> Job:
        """Return the one that has rank 0."""
        first, *others = names
        self.start(first, nnodes, *flags, conf=conf)
        with EtcdClient(self._etcd) as client, client.watch_with_snapshot(JobKeys("job").nodes) as watch:
            while not client.get_prefix(JobKeys("job").nodes).kvs:
                assert watch.get(LIMIT_S) is not None
        for name in others:
            self.start(name, nnodes, *flags, conf=conf)
        return self.jobs[first]

    def wait_for_members(self, count: int) -> None:
        """Until etcd knows of so many nodes, and no others."""
        with EtcdClient(self._etcd) as client, client.watch_with_snapshot(JobKeys("job").nodes) as watch:
            while len(client.get_prefix(JobKeys("job").nodes).kvs) != count:
                assert watch.get(LIMIT_S) is not None

    def join(self, name: str, nnodes: str, *flags: str, conf: str = "") -> tuple[str, str]:
        """Start one more, and wait until etcd knows it. Return what the first one had printed before that, and after it."""
        (first, *_) = self.jobs.values()
        with EtcdClient(self._etcd) as client:
            before = {each.key for each in client.get_prefix(JobKeys("job").nodes).kvs}
            self.start(name, nnodes, *flags, conf=conf)
            earlier = now = first.out

            def known() -> bool:
                nonlocal earlier, now
                earlier, now = now, first.out
                return not {each.key for each in client.get_prefix(JobKeys("job").nodes).kvs} <= before

            until(known, limit_s=TIMEOUT_S)
        return earlier, first.out

    def lose(self, name: str) -> None:
        """Kill all processes of a node."""
        job = self.jobs.pop(name)
        pids = descendants(job.process.pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.process.wait()
        assert wait_gone(pids) == []

    def leave(self) -> None:
        """Tell all to leave."""
        for job in self.jobs.values():
            job.process.terminate()
        for job in self.jobs.values():
            job.finish()

    def worlds(self, name: str) -> list[int]:
        """The world size of each round that a node has trained in."""
        return [each["world_size"] for each in self.events(name, "round_started")]

    def events(self, name: str, event: str) -> list[dict]:
        lines = (self.folder / f"{name}.events").read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["event"] == event]


@pytest.fixture
def nodes(tmp_path: Path, server: EtcdServer) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, server.endpoint, stack)


def losses(text: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in LOSS.findall(text)]


def resumed(text: str) -> list[int]:
    """The steps of the checkpoints that were resumed from."""
    return [int(step) for step in re.findall(r"resumed from \S+ at step (\d+)", text)]


def check_curve(text: str, folder: Path) -> list[int]:
    """Check that each loss is that of an undisturbed run at the same step, that each round goes on where the checkpoint is that
    it resumed from, and that none of its steps is missing. Return the steps of these checkpoints.
    """
    seen = losses(text)
    last = max(step for step, _ in seen)
    alone = run([sys.executable, str(SCRIPT), *TINY, f"--checkpoint-dir={folder}/alone", f"--stop-after-steps={last}"], folder)
    assert alone.returncode == 0, alone.err
    undisturbed = dict(losses(alone.out))
    for step, loss in seen:
        assert loss == pytest.approx(undisturbed[step], rel=SAME, abs=SAME), step
    rounds = [[step for step, _ in losses(part)] for part in text.split("resumed from ")]
    begins = [0, *resumed(text)]
    for begin, steps in zip(begins, rounds, strict=True):
        assert steps == list(range(begin + 1, begin + 1 + len(steps)))
    return begins[1:]


def test_a_node_is_lost_and_replaced(nodes: Nodes) -> None:
    """Hypothesis: 4 nodes become 3, and 4 again with a replacement, and the loss curve goes on as if nothing had happened.

    Method: `--nnodes=3:4`; all processes of a node are killed; another node starts with the same command.
    Observation: three rounds of 4, 3 and 4 ranks; each resumes, resharded, at the newest checkpoint; nothing is charged.
    """
    first = nodes.start_all("abcd", "3:4", "--save-every=10", conf="last_call_timeout=60")  # all, however slow the machine
    first.wait_for(SAVED, 2)
    nodes.lose("c")
    first.wait_for(r"resumed from", 1)
    begun = losses(first.out)[-1][0]
    first.wait_for(rf"step {begun + 25} loss")
    nodes.start("e", "3:4", "--save-every=10")
    first.wait_for(r"resumed from", 2)
    first.wait_for(rf"step {losses(first.out)[-1][0] + 15} loss")
    nodes.leave()
    assert nodes.worlds("a") == [4, 3, 4]
    begins = check_curve(first.out, nodes.folder)
    assert len(begins) == 2
    assert all(step % 10 == 0 and step >= 20 for step in begins)
    assert not any(each["charged"] for each in nodes.events("a", "decision"))


@pytest.mark.timeout(600)
def test_a_delay_of_100_ms_between_workers(tmp_path: Path) -> None:
    """Hypothesis: 100 ms between two hosts make training slow, and nothing else.

    Method: two hosts and an etcd behind links of their own; from the first step on every packet takes 100 ms.
    Observation: the same round trains on to the end; nothing restarts.
    """
    needs("ip")
    with ExitStack() as stack:
        network = stack.enter_context(LossyNetwork(["one", "two", "etcd"]))
        nodes = behind(network, tmp_path, stack)
        slow = ("--max-steps=20", "--save-every=10")
        for name in ("one", "two"):
            nodes.start(name, "2", *slow, inside=network.inside(name))
        rank_0(nodes)
        network.change({host: (Way(delay_s=0.1), Way()) for host in ("one", "two")})
        done = [job.finish(200) for job in nodes.jobs.values()]
        assert [each.returncode for each in done] == [0, 0], "".join(each.err for each in done)
        assert [nodes.worlds(name) for name in nodes.jobs] == [[2], [2]]
        assert [step for step, _ in losses("".join(each.out for each in done))] == list(range(1, 21))


def behind(network: LossyNetwork, folder: Path, stack: ExitStack) -> Nodes:
    etcd = EtcdServer(folder / "etcd", address=network.addresses["etcd"], inside=network.inside("etcd"))
    return Nodes(folder, stack.enter_context(etcd).endpoint, stack)


@pytest.mark.timeout(600)
def test_a_delay_beyond_the_collective_timeout(tmp_path: Path) -> None:
    """Hypothesis: a link slower than the collectives' timeout ends the round cleanly; once it is mended, training goes on.

    Method: every packet of a host takes 12 s, collectives 10 s at most; after the first failure the link is mended.
    Observation: the failure is logged as one of the network or a cascade, never of the code; no worker of the round is left, not
    as a zombie either; the next round resumes from the newest checkpoint.
    """
    needs("ip")
    with ExitStack() as stack:
        network = stack.enter_context(LossyNetwork(["one", "two", "etcd"]))
        nodes = behind(network, tmp_path, stack)
        flags = ("--collective-timeout=10", "--save-every=10")
        for name in ("one", "two"):
            nodes.start(name, "2", *flags, lease_ttl=60, inside=network.inside(name))  # etcd is beyond that link, too
        first = rank_0(nodes)
        first.wait_for(SAVED)
        workers = [pid for job in nodes.jobs.values() for pid in descendants(job.process.pid)]
        network.change({"two": (Way(delay_s=12), Way())})
        # etcd's connection may time out before; and while it is away the agent behind that link waits for the verdict.
        who_says(nodes, r"\[\S*gloo/\S+\] (Timed out waiting|.*by peer)|the workers of round 1 have failed")
        network.change({"two": (Way(), Way())})
        first.wait_for(r"resumed from \S+ at step \d+")
        first.wait_for(rf"step {losses(first.out)[-1][0] + 5} loss")
        agents = {job.process.pid for job in nodes.jobs.values()}
        left = [pid for pid in workers if pid not in agents and is_worker(pid)]
        assert wait_gone(left) == []
        until(lambda: not zombies(agents))  # any process may be one for a moment
        nodes.leave()
        assert len(check_curve(first.out, tmp_path)) == 1
        kinds = {each["kind"] for name in nodes.jobs for each in nodes.events(name, "decision")}
        assert kinds <= {"network", "node_lost", "hang", "cascade"}
        assert kinds


def rank_0(nodes: Nodes) -> Job:
    """Wait for its first step; return its agent."""
    return who_says(nodes, "step 1 loss")


def who_says(nodes: Nodes, pattern: str) -> Job:
    """Wait until one of the agents or its worker says it; return that agent."""
    jobs = nodes.jobs.values()
    return until(lambda: next((job for job in jobs if re.search(pattern, job.out + job.err)), None), pattern, TIMEOUT_S)


def is_worker(pid: int) -> bool:
    try:
        return (
            SCRIPT.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
            and b"TORCHELASTIC_RUN_ID" in Path(f"/proc/{pid}/environ").read_bytes()
        )
    except OSError:
        return False


def zombies(agents: set[int]) -> list[int]:
    """Processes below these agents that have ended and that nobody has waited for."""
    return [pid for agent in agents for pid in descendants(agent) if state(pid) == "Z"]


def state(pid: int) -> str:
    """Its letter in /proc; "" of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_the_control_plane_is_killed(nodes: Nodes, server: EtcdServer) -> None:
    """Hypothesis: a job that trains does not need its control plane; it needs it again for the next failure.

    Method: etcd is killed, and started again when many steps have been made without it; then a node is lost.
    Observation: no restart while it is away; after that, the job goes on with the node that is left.
    """
    first = nodes.start_all("ab", "1:2", "--save-every=10", conf="last_call_timeout=60")  # both, however slow the machine
    first.wait_for(SAVED)
    server.kill()
    at = losses(first.out)[-1][0]
    first.wait_for(rf"step {at + 300} loss")
    server.start()
    first.wait_for(rf"step {losses(first.out)[-1][0] + 50} loss")
    assert nodes.worlds("a") == [2]
    nodes.lose("b")
    first.wait_for(r"resumed from")
    first.wait_for(rf"step {losses(first.out)[-1][0] + 5} loss")
    nodes.leave()
    assert nodes.worlds("a") == [2, 1]
    assert len(check_curve(first.out, nodes.folder)) == 1


@pytest.mark.timeout(600)
def test_no_capacity_for_a_replacement(nodes: Nodes) -> None:
    """Hypothesis: with too few nodes a job waits, and does not fall over; it trains on as soon as there is a replacement.

    Method: of two nodes that are needed one is lost; another one starts once etcd has given it up and the workers have ended.
    Observation: the node that is left stays and runs no workers meanwhile, then resumes at the newest checkpoint.
    """
    first = nodes.start_all("ab", "2", "--save-every=10")
    first.wait_for(SAVED)
    nodes.lose("b")
    nodes.wait_for_members(1)
    until(lambda: not workers_of(first))
    assert first.process.poll() is None
    assert nodes.worlds("a") == [2]
    nodes.start("c", "2", "--save-every=10")
    first.wait_for(r"resumed from")
    first.wait_for(rf"step {losses(first.out)[-1][0] + 5} loss")
    nodes.leave()
    assert nodes.worlds("a") == [2, 2]
    assert len(check_curve(first.out, nodes.folder)) == 1


def workers_of(job: Job) -> list[int]:
    return [pid for pid in descendants(job.process.pid) if pid != job.process.pid and is_worker(pid)]


def test_all_die_and_the_same_command_restarts(nodes: Nodes) -> None:
    """Hypothesis: after a power cut the same command is enough.

    Method: all processes of all nodes are killed while they train; the same commands are run again.
    Observation: the second run resumes at the newest checkpoint, and has the losses of a run that was never stopped.
    """
    first = nodes.start_all("ab", "2", "--save-every=10")
    first.wait_for(SAVED, 2)
    for name in ("a", "b"):
        nodes.lose(name)
    for name in ("a", "b"):
        nodes.start(name, "2", "--save-every=10")
    again = who_says(nodes, "resumed from")
    again.wait_for(LOSS.pattern, 5)
    nodes.leave()
    (step,) = check_curve(first.out + again.out, nodes.folder)
    assert step >= 20


@pytest.mark.timeout(600)
def test_a_node_joins_at_once(nodes: Nodes) -> None:
    """Hypothesis: with grow_at=now a node that comes later joins the training that is under way, whenever the next checkpoint is.

    Method: two nodes train on from a checkpoint, and save no other; a third one starts.
    Observation: a round of 2 ranks is followed by one of 3, which resumes from that one checkpoint.
    """
    alone = [sys.executable, str(SCRIPT), *TINY, f"--checkpoint-dir={nodes.checkpoints}", "--stop-after-steps=10"]
    before = run(alone, nodes.folder)
    assert before.returncode == 0, before.err
    once = ("--save-every=100000",)
    first = nodes.start_all("ab", "2:3", *once, conf="grow_at=now,last_call_timeout=10")
    first.wait_for("step 11 loss")
    nodes.start("c", "2:3", *once, conf="grow_at=now")
    first.wait_for("resumed from", 2)
    first.wait_for("step 15 loss", 2)
    nodes.leave()
    assert nodes.worlds("a") == [2, 3]
    assert resumed(first.out) == [10, 10]
    assert check_curve(before.out + first.out, nodes.folder) == [10, 10]


@pytest.mark.timeout(400)  # whatever was trained while the third one started is trained once more for the comparison
def test_a_node_joins_at_the_next_checkpoint(nodes: Nodes) -> None:
    """Hypothesis: with grow_at=checkpoint a node that comes later joins the training right after the next checkpoint.

    Method: two nodes train; a third one starts; a checkpoint is saved every 300 steps, a second or more.
    Observation: a round of 2 ranks is followed by one of 3, which begins at the first checkpoint that was saved after the node
    came: all that is trained again are the steps since that one, 300 at most.
    """
    conf, flags = "grow_at=checkpoint", ("--save-every=300",)
    first = nodes.start_all("ab", "2:3", *flags, conf=f"{conf},last_call_timeout=10")
    first.wait_for(SAVED)
    earlier, known = nodes.join("c", "2:3", *flags, conf=conf)
    first.wait_for("resumed from")
    first.wait_for(rf"step {losses(first.out)[-1][0] + 5} loss")
    nodes.leave()
    assert nodes.worlds("a") == [2, 3]
    (step,) = check_curve(first.out, nodes.folder)
    of_two, _ = first.out.split("resumed from ")
    saved_since = [int(each) for each in re.findall(SAVED, of_two.removeprefix(earlier))]
    assert saved_since[-1:] == [step]
    assert len(re.findall(SAVED, of_two[len(known) :])) <= 2  # one, or one more that was under way when the agent heard of it
    assert step <= losses(of_two)[-1][0] <= step + 300  # the save after so many may have begun
