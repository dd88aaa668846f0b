"""The kill loop: a real job, and from a seed what is killed, how, and when. After each kill the job must go on as promised.

    python -m tests.chaos.kills etcd --kills 300 --seed 7 --folder /some/empty/folder

Backends: `etcd`: three nodes on this host with a disk each, a shared checkpoint_dir, an etcd. `c10d`: one node of two workers,
with the same two tiers and a ledger file. FOLDER gets the agents' logs, history.jsonl (what the workers told, and an object for
each kill: who, how, when, what followed) and what the job saves. Exit code 0: every promise was kept; else each broken one is a
line on stderr, with the seed.

After each kill is checked: all ranks train again and get further than before; a group that begins does so at the newest
checkpoint that was whole on the nodes' disks, or in the remote directory, when the kill came; all ranks loaded that one, and the
state after a step is the same to the bit whenever it comes; nothing is charged to the budget but what a killed worker may cost;
no agent leaves but one that was struck. At the end: exit code 0 on all nodes, and nothing is left: no process, nothing in shared
memory, no temporary file.

A process that is killed leaves this process its children (see `processes`), so run it as a process of its own. Its /dev/shm is
its own, too, where that can be had.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from elastic_ext.base import records
from elastic_ext.checkpoints.formats.manifest import order_or_oldest
from elastic_ext.etcd import EtcdClient
from elastic_ext.failures import ledger as job
from elastic_ext.own_etcd.saved_keys import SCHEMA, SavedFile
from elastic_ext.rendezvous.keys import JobKeys
from tests.chaos import disks, processes
from tests.chaos.processes import Process
from tests.chaos.seeded.history import History, Told
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, SCRIPTS, environment, wait_gone
from tests.until import LIMIT_S

SCRIPT = SCRIPTS / "chaos_training.py"
RUN_ID = "chaos"
BOUND_S = END_S = 300.0  # for all to train again, or to end; the host may be busy with other things
LOOK_S = 0.2  # how often /proc is looked at while something is waited for that no event tells of
FURTHER = 5  # steps beyond those that were done when the kill came
LEAVES = {69, 75}  # exit codes that ask a scheduler to start the node again
_NOT_BOTH = {"agent", "reaper"}  # who kills the reaper with its agent has to kill the workers, too
_CLONE_NEWNS = 0x00020000

KILL, STOP, TERM = "SIGKILL", "SIGSTOP", "SIGTERM"


@dataclass(frozen=True)
class Card:
    """What is done to whom."""

    role: str
    signal: str

    @property
    def ends_round(self) -> bool:
        return self.role in ("worker", "agent") and self.signal != STOP

    @property
    def may_be_charged(self) -> bool:
        return self.role == "worker" and self.signal != STOP


_ALL = [
    *[Card("worker", KILL)] * 4,
    *[Card("worker", TERM), Card("worker", STOP)],
    *[Card("agent", KILL)] * 2,
    *[Card("agent", STOP), Card("agent", TERM)],
    *[Card(role, KILL) for role in ("standby server", "standby", "relay", "reaper", "copier")] * 2,
    *[Card(role, STOP) for role in ("standby server", "standby", "relay", "reaper", "copier")],
]
_ETCD = [Card("etcd", KILL), Card("etcd", STOP)]


@dataclass
class Deck:
    """Deals all cards before any comes again."""

    cards: Sequence[Card]
    rng: random.Random
    _left: list[Card] = field(default_factory=list)

    def deal(self) -> Card:
        if not self._left:
            self._left = self.rng.sample(self.cards, len(self.cards))
        return self._left.pop()


class Events(History):
    """What the workers tell, and what else happens."""

    def __init__(self, folder: Path) -> None:
        self.ranks: dict[int, Told] = {}  # what each has told last
        self.world = 0
        self.loaded: list[Told] = []
        self.saving = 0
        self.wrong: list[str] = []
        self._digests: dict[int, str] = {}  # of the state after each step
        super().__init__(folder)

    def _take(self, told: Told) -> None:
        with self.changed:
            if "rank" in told:
                self._note(told)
            super()._take(told)

    def _note(self, told: Told) -> None:
        self.world = told["world"]
        what, rank, step = told["what"], told["rank"], told["step"]
        told["group"] = f"{told['group']}.{told['restart']}"
        if what == "loaded":
            self.loaded.append(told)
        if what in ("loaded", "step"):
            self.ranks[rank] = told
        self.saving += what == "saving"
        if self._digests.setdefault(step, told["digest"]) != told["digest"]:
            self.wrong.append(f"rank {rank}, {what}: another state of step {step} than before")
        if told.get("error"):
            self.wrong.append(f"rank {rank} could not save at the end: {told['error']}")

    @property
    def furthest(self) -> int:
        return max((told["step"] for told in self.ranks.values()), default=0)

    @property
    def all_in(self) -> str:
        """The group of all ranks; "" while they differ."""
        groups = {told["group"] for told in self.ranks.values()}
        return groups.pop() if len(groups) == 1 and len(self.ranks) == self.world else ""

    @property
    def all_at(self) -> int:
        return min((told["step"] for told in self.ranks.values()), default=0)


class Stuck(AssertionError):
    """Something did not happen in time: the loop cannot go on."""


class Nodes:
    """The agents; one that leaves is started again on the same host with the same disk, as a scheduler would."""

    def __init__(self, loop: Loop, stack: ExitStack) -> None:
        self._loop = loop
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.exits: list[tuple[str, int]] = []  # while the job was not to finish
        self.codes: dict[str, int] = {}  # at the end
        self.finishing = False
        stack.callback(self.stop)
        for node in loop.nodes:
            self._start(node)

    def _start(self, node: str) -> None:
        log = (self._loop.folder / f"agent-{node}.log").open("ab")
        with log:
            process = subprocess.Popen(
                self._loop.command,
                cwd=self._loop.folder,
                env=self._loop.environment(node),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[node] = process
        threading.Thread(target=self._wait, args=(node, process), daemon=True).start()

    def _wait(self, node: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._loop.events.changed:
            if self.finishing and code in (0, -9):
                self.codes[node] = code
            else:
                self.exits.append((node, code))
                self._start(node)
            self._loop.events.changed.notify_all()

    def node_of(self, pid: int) -> str:
        return next((node for node, process in self.processes.items() if process.pid == pid), "")

    def stop(self) -> None:
        self.finishing = True


class Loop:
    def __init__(self, backend: str, seed: int, folder: Path, stack: ExitStack) -> None:
        self.backend, self.seed, self.folder = backend, seed, folder
        self.rng = random.Random(seed)
        self.problems: list[str] = []
        self.nodes = ("a", "b", "c") if backend == "etcd" else ("a",)
        self.remote, self.tmp = folder / "remote", folder / "tmp"
        self.tmp.mkdir(parents=True)
        self._shm = set(os.listdir("/dev/shm"))
        self._finish = folder / "finish"
        self.events = Events(folder)
        stack.callback(self.events.close)
        self.etcd = stack.enter_context(EtcdServer(folder / "etcd")) if backend == "etcd" else None
        conf = f"checkpoint_dir={self.remote},backoff=0,lease_ttl=10,refuse_node=2,copy_mb_s={self.rng.choice((0, 0.05))}"
        where = ["--rdzv-backend=ext_c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"]
        if self.etcd is not None:
            where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={self.etcd.endpoint}", "--nnodes=3", "--nproc-per-node=1"]
        else:
            conf += f",ledger_file={self._ledger_file}"
        options = [f"--rdzv-id={RUN_ID}", f"--log-dir={folder / 'logs'}", "--max-restarts=-1", f"--rdzv-conf={conf}"]
        self.command = [str(part) for part in (*AGENT, *where, *options, SCRIPT, self.events.pipe, 0, self._finish)]
        self.deck = Deck([*_ALL, *(_ETCD if self.etcd is not None else [])], random.Random(f"{seed} cards"))
        self._victim_node: dict[int, str] = {}  # by pid; "": not the job's
        self._verdicts: tuple[job.JobVerdict, ...] = ()
        stack.callback(processes.kill_all, os.getpid())
        self.agents = Nodes(self, stack)

    @property
    def _ledger_file(self) -> Path:
        return self.folder / "ledger.json"

    def environment(self, node: str) -> dict[str, str]:
        return environment(
            CHAOS_HOST=node,
            ELASTIC_EXT_NODE_NAME=node,
            ELASTIC_EXT_LOCAL_DIR=str(self.folder / f"disk-{node}"),
            ELASTIC_EXT_STANDBY="on",
            TMPDIR=str(self.tmp),
        )

    # Waiting.

    def wait(self, what: str, done: Callable[[], bool], bound_s: float = BOUND_S, look_s: float | None = None) -> None:
        """Until `done`, which is asked at each event. look_s: and so often besides. Raises Stuck."""
        deadline = time.monotonic() + bound_s
        with self.events.changed:
            while not done():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise Stuck(f"{what}: not in {bound_s:g} s")
                self.events.changed.wait(left_s if look_s is None else min(left_s, look_s))
                if look_s is not None:
                    processes.reap_orphans(self._waited_for)

    @property
    def _waited_for(self) -> set[int]:
        etcd = {self.etcd.process.pid} if self.etcd is not None and self.etcd.process is not None else set()
        return etcd | {process.pid for process in self.agents.processes.values()}

    # One kill.

    def kill(self, number: int) -> None:
        events, rng = self.events, self.rng
        instant = self._await_instant()
        cards = [self.deck.deal()]
        if rng.random() < 0.1:
            cards.append(self.deck.deal())
        if {card.role for card in cards} == _NOT_BOTH:
            del cards[1]
        before = len(events.loaded), len(self.agents.exits), events.furthest
        newest, group = self._newest(), events.all_in
        began, victims, resumed = time.monotonic(), [], []
        gone: set[int] = set()
        for position, card in enumerate(cards):
            if position:
                time.sleep(rng.uniform(0, 1))  # in the middle of what the first has set off, of which nothing tells
            victims.append(victim := self._strike(card, victims, resumed))
            if victim is not None and card.ends_round:
                gone |= self._workers_beside(victim)
        for each in resumed:
            each.join()
        ends = any(card.ends_round and victim is not None for card, victim in zip(cards, victims, strict=True))
        at = before[2]

        def trains_again() -> bool:
            there = events.all_in != "" and events.all_at >= at + FURTHER
            # A second kill may have struck the group that came after the first.
            return there and (not ends or events.all_in != group) and gone.isdisjoint(self._workers())

        self.wait(f"training after {cards} at step {at}", trains_again, look_s=LOOK_S)
        took = time.monotonic() - began
        groups: dict[str, list[Told]] = defaultdict(list)
        for told in events.loaded[before[0] :]:
            groups[told["group"]].append(told)
        exits = self.agents.exits[before[1] :]
        verdicts = self._new_verdicts()
        problems = [
            *self._starts(groups, newest),
            *self._charges(cards, verdicts),
            *self._leavings(cards, victims, exits),
        ]
        decided = ("kind", "rule", "charged", "reason")
        events.record(
            "kill",
            seed=self.seed,
            number=number,
            instant=instant,
            cards=[asdict(card) for card in cards],
            victims=[victim and {"pid": victim.pid, "node": self._victim_node.get(victim.pid, "")} for victim in victims],
            step=at,
            seconds=round(took, 2),
            newest=newest,
            groups={group: sorted({each["path"] for each in loaded}) for group, loaded in groups.items()},
            exits=exits,
            verdicts=[{"round": each.round, **{name: getattr(each.decision, name) for name in decided}} for each in verdicts],
            problems=problems,
        )
        self.problems += [f"kill {number}, {[f'{card.signal} {card.role}' for card in cards]}: {problem}" for problem in problems]

    def _await_instant(self) -> str:
        """After some steps, or in the middle of a save."""
        events, rng = self.events, self.rng
        steps = rng.randint(1, 12)
        at, saving = events.furthest, events.saving
        if rng.random() < 0.3:
            self.wait("a save", lambda: events.saving > saving)
            delay = rng.uniform(0, 0.1)  # it takes so long; nothing tells of its parts
            time.sleep(delay)
            return f"{delay:.3f} s into a save"
        self.wait("steps", lambda: events.furthest >= at + steps)
        return f"after {steps} steps"

    def _newest(self) -> str:
        return disks.newest_whole({node: self.folder / f"disk-{node}" for node in self.nodes}, self.remote)

    # Victims.

    def _strike(self, card: Card, earlier: Sequence[Process | None], resumed: list[threading.Thread]) -> Process | None:
        """None: there was nobody of that role."""
        if card.role == "etcd":
            return self._strike_etcd(card, resumed)
        found: list[Process] = []
        taken = {each.pid for each in earlier if each is not None}

        def there() -> bool:
            nonlocal found
            found = [each for each in self._of_role(card.role) if each.pid not in taken]
            return bool(found)

        try:
            self.wait(f"a {card.role}", there, bound_s=30, look_s=LOOK_S)
        except Stuck:
            if not earlier and card.role in ("agent", "worker"):
                raise
            return None
        victim = self.rng.choice(sorted(found, key=lambda each: (self._node_of(each), each.pid)))
        self._victim_node[victim.pid] = self._node_of(victim)
        victim.send(signal.Signals[card.signal])
        if card.signal == STOP:
            self._later(victim, self.rng.uniform(0.5, 3), resumed)
        return victim

    def _workers_beside(self, victim: Process) -> set[int]:
        """Those that told something last on the node that it was of; it may be one of them."""
        node = self._victim_node[victim.pid]
        return {told["pid"] for told in self.events.ranks.values() if told["host"] == node}

    def _workers(self) -> set[int]:
        return {told["pid"] for told in self.events.ranks.values()}

    def _strike_etcd(self, card: Card, resumed: list[threading.Thread]) -> Process:
        assert self.etcd is not None
        assert self.etcd.process is not None
        victim = Process(self.etcd.process.pid, os.getpid(), "", "etcd", ())
        if card.signal == KILL:
            self.etcd.restart()  # on this thread: the kernel ends it with the thread that started it
        else:
            victim.send(signal.SIGSTOP)
            self._later(victim, self.rng.uniform(0.5, 3), resumed)
        return victim

    @staticmethod
    def _later(victim: Process, seconds: float, resumed: list[threading.Thread]) -> None:
        timer = threading.Timer(seconds, victim.send, (signal.SIGCONT,))
        timer.start()
        resumed.append(timer)

    def _of_role(self, role: str) -> Iterator[Process]:
        workers = self._workers()
        for each in processes.descendants(os.getpid()):
            is_agent = bool(self.agents.node_of(each.pid))
            works = each.pid in workers or (not each.role and str(SCRIPT) in each.command)
            found = "worker" if works else "" if each.role == "agent" and not is_agent else each.role
            if found == role and self._node_of(each):
                yield each

    def _node_of(self, process: Process) -> str:
        return self.agents.node_of(process.pid) or self.agents.node_of(process.parent)

    # Promises.

    def _starts(self, groups: Mapping[str, list[Told]], newest: str) -> Iterator[str]:
        for loaded in groups.values():
            names = {each["path"] for each in loaded}
            if len(names) > 1 or len({each["step"] for each in loaded}) > 1:
                yield f"the ranks loaded different checkpoints: {sorted(names)}"
            if any(order_or_oldest(name) < order_or_oldest(newest) for name in names):
                yield f"the group began at {sorted(names)[0] or 'nothing'}, and {newest} was whole"

    @staticmethod
    def _charges(cards: Sequence[Card], verdicts: Sequence[job.JobVerdict]) -> Iterator[str]:
        allowed = sum(card.may_be_charged for card in cards)
        charged = [each.decision for each in verdicts if each.decision.charged]
        if len(charged) > allowed:
            told = [f"{each.kind}, {each.rule}: {each.reason}" for each in charged]
            yield f"{len(charged)} restarts were charged, {allowed} expected at most: {told}"

    def _leavings(
        self, cards: Sequence[Card], victims: Sequence[Process | None], exits: Sequence[tuple[str, int]]
    ) -> Iterator[str]:
        struck = defaultdict(list)
        for card, victim in zip(cards, victims, strict=True):
            if victim is not None:
                struck[self._victim_node.get(victim.pid, "")].append(card)
        for node, code in exits:
            told_to = any(card.role == "agent" and card.signal != STOP for card in struck[node])
            may_leave = any(card.role in ("agent", "worker") for card in struck[node])
            if code == 0 or not (told_to or (code in LEAVES and may_leave)):
                yield f"the agent of node {node} left with {code}"

    def _new_verdicts(self) -> list[job.JobVerdict]:
        ledger = self._ledger()
        known, self._verdicts = self._verdicts, ledger.verdicts
        return [each for each in ledger.verdicts if each not in known]

    def _ledger(self) -> job.Ledger:
        if self.etcd is None:
            if not self._ledger_file.exists():
                return job.Ledger()
            saved = records.read(SavedFile, self._ledger_file.read_bytes(), "ledger_file", SCHEMA).keys
            texts = [base64.b64decode(each.value).decode() for each in saved if each.key == "ledger"]
            return job.decode_ledger(texts[0]) if texts else job.Ledger()
        with EtcdClient(self.etcd.endpoint) as client:
            found = client.get(JobKeys(RUN_ID).ledger, timeout_s=LIMIT_S).kv
        return job.decode_ledger(found.value.decode()) if found is not None else job.Ledger()

    # The end.

    def finish(self) -> None:
        self.agents.finishing = True
        self._finish.touch()
        self.wait("the end of all agents", lambda: len(self.agents.codes) == len(self.nodes), END_S, look_s=LOOK_S)
        if any(self.agents.codes.values()):
            self.problems.append(f"at the end the agents left with {self.agents.codes}")
        etcd = {self.etcd.process.pid} if self.etcd is not None and self.etcd.process is not None else set()
        here = [each for each in processes.descendants(os.getpid()) if each.pid not in etcd]
        left = wait_gone([each.pid for each in here])
        if left:
            self.problems.append(f"left behind: {[each for each in here if each.pid in left]}")
        if shm := sorted(set(os.listdir("/dev/shm")) - self._shm):
            self.problems.append(f"left in shared memory: {shm}")
        if files := sorted(name for name in os.listdir(self.tmp) if not name.startswith("torchinductor_")):  # torch's, for good
            self.problems.append(f"left in the temporary directory: {files}")


def own_shared_memory() -> bool:
    """A /dev/shm of this process and its children alone: what others put into theirs is not to be seen. False: not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return False
    for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]):
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return False
    return True


def run(backend: str, seed: int, kills: int, folder: Path, stop_at_first: bool = False) -> list[str]:
    """Return the broken promises."""
    with ExitStack() as stack:
        loop = Loop(backend, seed, folder, stack)
        number = 0
        try:
            loop.wait("the first steps", lambda: loop.events.all_in != "" and loop.events.all_at >= FURTHER)
            for number in range(1, kills + 1):
                loop.kill(number)
                if stop_at_first and loop.problems + loop.events.wrong:
                    break
            loop.finish()
        except Stuck as stuck:
            loop.problems.append(f"kill {number}: {stuck}; running: {_shown()}")
        return loop.problems + loop.events.wrong


def _shown() -> list[str]:
    return [f"{each.pid} {each.role or ' '.join(each.command)[:60]} {each.state}" for each in processes.descendants(os.getpid())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("etcd", "c10d"))
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stop-at-first", action="store_true", help="end after the first broken promise")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by the way of all exits: nothing stays
    own_shared_memory()
    processes.adopt_orphans()
    problems = run(args.backend, args.seed, args.kills, args.folder.resolve(), args.stop_at_first)
    for problem in problems:
        print(f"seed {args.seed}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
