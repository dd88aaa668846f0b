"""One job in virtual time: a heap of events, and the account of its time. Nothing waits, and a seed decides everything.

Events: a failure, the end of a phase of a recovery, a node is back from repair, a fault that was left in shows again, the
platform takes a bad node away, etcd goes and comes back. Between two events the job trains or is in one phase; what it has saved
by then follows from the time for which it has trained.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from elastic_ext.base.diagnosis import Response
from elastic_ext.base.errors import EX_CODE, EX_TRY_AGAIN
from elastic_ext.failures.policy import NO_LIMIT
from elastic_ext.failures.rules import XIDS_REPLACE
from elastic_ext.planning.advice import DETECTION
from scale import sides
from scale.causes import CAUSES, Look, Shows, Truth, truth_of
from scale.decisions import Leader, Moment, Place
from scale.inputs import FIGURES, LLAMA_3, MULTIPLE_NODES, RATES, REPAIR_MEDIAN_S, REPAIR_SIGMA, Mix
from scale.sides import Scale, Side

DAY_S = 86400.0
NEW, LOST, SAVES, WAITING = "new steps", "lost steps", "saves", "waiting for nodes"
LEFT_IN, WRONG = "faults left in", "wrong decisions"  # a fault that a restart has left in shows again; a stop without a reason
BACKOFF, CONTROL, AGAIN, MENDING = "backoff", "control plane", "started again", "mending a bug"
STANDS = (WAITING, MENDING, WRONG)  # phases in which nothing runs that could fail
NOT_COUNTED = frozenset({MENDING})  # the same on all sides
GONE = Look(1.0, {}, Shows.GONE)
STOCK_RESTARTS = 3  # --max-restarts of stock: so often it starts a bug again
BAD_SHARE, THEIR_SHARE = FIGURES["nodes that fail again"].value, FIGURES["their failures"].value
SEVERAL_SHARE = FIGURES["several nodes at once"].value
AGAIN_S = FIGURES["a bad node fails again"].value
PLATFORM_S = FIGURES["the platform takes a bad node away"].value
LATER_S = 60.0  # the platform looks again, if the job stood when it would have taken a node away
RESUBMIT_S = FIGURES["somebody submits a stopped job again"].value
ETCD_AWAY_S, ETCD_EVERY_S = FIGURES["etcd is away"].value, 30 * DAY_S


@dataclass(frozen=True)
class Setup:
    """A job and its surroundings.

    Attributes:
        rate: failures per 1,000 node-days.
        spares: None: there is always one.
        restarts: budget within `window_s`, with charges.
        phases: replaces the times of the side, for checks: seconds by phase after any failure.
        plain: every failure is a worker that ends without a lasting fault, and no node is worse than others, for checks.
    """

    scale: Scale
    rate: float = RATES["Llama 3"].value
    mix: Mix = LLAMA_3
    spares: int | None = None
    restarts: int = NO_LIMIT
    window_s: float = 3600.0
    phases: Mapping[str, float] | None = None
    plain: bool = False
    repair_s: tuple[float, float] = (REPAIR_MEDIAN_S, REPAIR_SIGMA)


@dataclass
class Account:
    """Where the time went, in seconds, and what was decided."""

    seconds: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    restarts: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    @property
    def counted_s(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name not in NOT_COUNTED)

    @property
    def ettr(self) -> float:
        return max(0.0, self.seconds[NEW]) / self.counted_s


@dataclass(frozen=True)
class Fault:
    """What has failed. key: of `CAUSES`. again: it had failed before, and was left in."""

    key: str
    look: Look
    truth: Truth
    hosts: tuple[str, ...]
    again: bool = False


class Job:
    """One job on one side."""

    def __init__(self, setup: Setup, side: Side, seed: int) -> None:
        self.setup, self.side, self.scale = setup, side, setup.scale
        self.account = Account()
        self._random = random.Random(f"{seed} {setup.scale.gpus}")
        self._now, self._numbers, self._events = 0.0, itertools.count(), list[tuple[float, int, Callable[[], None]]]()
        self._copies = sides.copies(side, setup.scale, setup.rate / 1000 / DAY_S * setup.scale.nodes)
        nodes = self.scale.nodes
        self._leader = Leader(nodes, setup.spares or 1, setup.restarts, seed)
        self._charges: deque[float] = deque()
        self._spares, self._missing = setup.spares, 0
        self._bad = [f"bad{next(self._numbers)}" for _ in range(self._drawn(nodes, 0.0 if setup.plain else BAD_SHARE))]
        self._bad_to_come = 0
        self._phases: deque[tuple[str, float]] = deque()
        self._phase, self._phase_number, self._counts_as = "", 0, ""
        self._trained = self._from = self._disk_at = self._reached = 0.0
        self._warm = self._etcd_away = False
        self._faults: dict[str, Fault] = {}
        self._bug: tuple[Fault, float, int] | None = None
        self._failure_number = 0
        self._moves = Counter[str]()  # how often the ranks of a node have moved to another one

    def run(self, failures: int, seconds: float) -> Account:
        """Run until both limits are passed, and return the account."""
        self._start_of_repairs()
        self._next_failure()
        if self.side.judges:
            self._in(self._random.expovariate(1 / ETCD_EVERY_S), self._etcd_goes)
        while self.account.failures < failures or self._now < seconds:
            at, _, action = heapq.heappop(self._events)
            self._pass(at)
            action()
        self._settle(lost=0.0)
        return self.account

    # Time.

    def _in(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), action))

    def _pass(self, to: float) -> None:
        if self._phase:
            self.account.seconds[self._counts_as or self._phase] += to - self._now
        else:
            self._trained += to - self._now
        self._now = to

    def _settle(self, lost: float) -> None:
        """Account for what was trained in this round. lost: seconds of steps that have to be done again."""
        steps = self._copies.kept_s(self._trained)
        self.account.seconds[SAVES] += self._trained - steps
        self.account.seconds[NEW] += steps - lost
        self.account.seconds[self._counts_as or LOST] += lost
        self._from += steps - lost
        self._trained = 0.0

    # Nodes.

    def _rate_s(self) -> float:
        good, rate = self.scale.nodes - len(self._bad), self.setup.rate / 1000 / DAY_S
        if self.setup.plain:
            return rate * self.scale.nodes
        return rate * (good * (1 - THEIR_SHARE) / (1 - BAD_SHARE) + len(self._bad) * THEIR_SHARE / BAD_SHARE)

    def _host(self) -> str:
        bad = len(self._bad) * self.setup.rate / 1000 / DAY_S * THEIR_SHARE / BAD_SHARE / self._rate_s()
        if self._bad and self._random.random() < bad:
            return self._random.choice(self._bad)
        return f"n{self._random.randrange(self.scale.nodes)}"

    def _drawn(self, trials: int, share: float) -> int:
        """Return a binomial variable, by the normal distribution where there are many trials."""
        if trials > 500:
            return max(0, round(self._random.gauss(trials * share, (trials * share * (1 - share)) ** 0.5)))
        return sum(self._random.random() < share for _ in range(trials))

    def _start_of_repairs(self) -> None:
        """As if the job ran for ever: nodes are out for repair, for what is left of their time."""
        if self.setup.spares is None:
            return
        median_s, sigma = self.setup.repair_s
        mean_s = median_s * math.exp(sigma**2 / 2)
        leaving = sum(count * look.share for _, count, key in self.setup.mix for look in CAUSES[key].looks if _leaves(key, look))
        out = self._rate_s() * mean_s * leaving / sum(count for _, count, _ in self.setup.mix)
        number = min(self.setup.spares, max(0, round(self._random.gauss(out, out**0.5))))
        for _ in range(number):
            # The longer a repair takes, the likelier one is met in it.
            whole_s = median_s * math.exp(sigma**2 + self._random.gauss(0.0, sigma))
            self._in(whole_s * self._random.random(), self._repaired)
        self._spares = self.setup.spares - number

    def _leave(self, host: str) -> None:
        self._missing += 1
        self._faults.pop(host, None)
        if host in self._bad:
            self._bad.remove(host)
            self._bad_to_come += 1  # some come back from repair: their share stays, and with it the published rate
        if self._spares is not None:
            median_s, sigma = self.setup.repair_s
            self._in(self._random.lognormvariate(0.0, sigma) * median_s, self._repaired)

    def _repaired(self) -> None:
        assert self._spares is not None
        self._spares += 1
        if self._phase == WAITING:
            self._fill()

    def _fill(self) -> None:
        """Take spares; go on once none is missing."""
        taken = self._missing if self._spares is None else min(self._missing, self._spares)
        self._missing -= taken
        if self._spares is not None:
            self._spares -= taken
        coming = min(taken, self._bad_to_come)
        self._bad += [f"bad{next(self._numbers)}" for _ in range(coming)]
        self._bad_to_come -= coming
        if not self._missing:
            self._next_phase()

    # Phases of a recovery.

    def _recover(self, phases: list[tuple[str, float]], counts_as: str) -> None:
        self._phases, self._counts_as = deque(phases), counts_as
        self._next_phase()

    def _next_phase(self) -> None:
        self._phase_number += 1
        if not self._phases:
            self._train()
            return
        self._phase, seconds = self._phases.popleft()
        if self._phase == WAITING:
            self._fill()
        elif self._phase == CONTROL:
            if not self._etcd_away:
                self._next_phase()
        else:
            number = self._phase_number
            self._in(seconds, lambda: self._next_phase() if number == self._phase_number else None)

    def _train(self) -> None:
        self._phase, self._counts_as = "", ""
        number = self._phase_number
        for host, fault in self._faults.items():
            self._in(self._random.expovariate(1 / AGAIN_S), lambda host=host, fault=fault: self._shows_again(host, fault, number))
        if self._bug is not None:
            fault, at, _ = self._bug
            self._in(self._copies.running_s(max(0.0, at - self._from)), lambda: self._bug_again(fault, number))

    def _etcd_goes(self) -> None:
        self._etcd_away = True
        self._in(ETCD_AWAY_S, self._etcd_returns)

    def _etcd_returns(self) -> None:
        self._etcd_away = False
        self._in(self._random.expovariate(1 / ETCD_EVERY_S), self._etcd_goes)
        if self._phase == CONTROL:
            self._next_phase()

    # Failures.

    def _next_failure(self) -> None:
        self._failure_number += 1
        number = self._failure_number
        self._in(self._random.expovariate(self._rate_s()), lambda: self._failure() if number == self._failure_number else None)

    def _failure(self) -> None:
        self.account.failures += 1
        if self._phase not in STANDS:
            self._fails(self._drawn_fault())
        self._next_failure()

    def _drawn_fault(self) -> Fault:
        host = self._host()
        if self.setup.plain:
            return Fault("plain", Look(1.0, {"signal": "SIGKILL"}), Truth.PASSES, (host,))
        keys, counts = [key for _, _, key in self.setup.mix], [count for _, count, _ in self.setup.mix]
        key = self._random.choices(keys, counts)[0]
        cause = CAUSES[key]
        look = self._random.choices(cause.looks, [each.share for each in cause.looks])[0]
        truth, hosts = truth_of(cause, look), [host]
        if cause.several and truth is Truth.GONE and self._random.random() < SEVERAL_SHARE:
            group = self._random.choices(list(MULTIPLE_NODES), list(MULTIPLE_NODES.values()))[0]
            hosts += [f"n{self._random.randrange(self.scale.nodes)}" for _ in range(min(group, self.scale.nodes // 2) - 1)]
        return Fault(key, look, truth, tuple(dict.fromkeys(hosts)))

    def _shows_again(self, host: str, fault: Fault, number: int) -> None:
        if number == self._phase_number and self._faults.get(host) is fault:
            self._fails(replace(fault, again=True))

    def _bug_again(self, fault: Fault, number: int) -> None:
        if number == self._phase_number and self._bug is not None:
            self._fails(replace(fault, again=True))

    def _taken_away(self, host: str, fault: Fault) -> None:
        """The platform takes a bad node that is still in the job."""
        if self._faults.get(host) is not fault:
            return
        if self._phase in STANDS:
            self._in(LATER_S, lambda: self._taken_away(host, fault))
        else:
            self._fails(Fault("taken away", GONE, Truth.GONE, (host,), again=True))

    def _fails(self, fault: Fault) -> None:
        starting = bool(self._phase)
        self._reached = self._from + self._copies.kept_s(self._trained)
        began, steps = (int(at / self.scale.step_s + 1e-6) for at in (self._from, self._reached))
        saved = int(self._disk_at / self.scale.step_s + 1e-6)
        moment = Moment(steps - began, began, self._warm, steps if self.side.memory else None, saved)
        gone = fault.truth is Truth.GONE
        together = gone and len(fault.hosts) > 1  # a node and the one that keeps its copies
        self._counts_as = LEFT_IN if fault.again else ""
        self._lose(from_disk=together or not self.side.memory)
        detection_s = sides.detection_s(self.side, self.scale, fault.look.shows, starting)
        if gone:
            for host in fault.hosts:
                self._leave(host)
        self.account.restarts += 1
        after, counts_as = self._after(fault, moment)
        given = self.setup.phases
        self._recover([(DETECTION, detection_s), *after] if given is None else list(given.items()), counts_as)

    def _lose(self, from_disk: bool) -> None:
        """Go back to the newest copy that can be used."""
        copies, running = self._copies, self._trained
        reached = self._from + copies.kept_s(running)
        if running > copies.disk_ready_s:
            saved = (running - copies.disk_ready_s) // copies.disk_s * copies.disk_s
            self._disk_at = self._from + copies.kept_s(saved) if saved else self._disk_at
        at = self._disk_at
        if not from_disk:
            newest = copies.newest_s(max(0.0, running - copies.memory_ready_s))
            at = max(at, self._from + copies.kept_s(newest))
            at = reached if self.side.ideal else at
        self._settle(lost=reached - at)

    # Decisions.

    def _after(self, fault: Fault, moment: Moment) -> tuple[list[tuple[str, float]], str]:
        """Return the phases after the detection, and what they count as."""
        counts_as = LEFT_IN if fault.again else ""
        if not self.side.judges:
            return self._without_judgement(fault), counts_as
        hosts = fault.hosts
        if fault.key == "wrong numbers":  # any rank may see one
            hosts = (f"n{self._random.randrange(self.scale.nodes)}",)
        whose = fault.key if fault.truth is Truth.CODE else hosts[0]  # a bug stays with its rank, whichever node has that
        place = Place(hosts, ("n_a", "n_b"), 8 * ((zlib.crc32(whose.encode()) + self._moves[whose]) % self.scale.nodes))
        while self._charges and self._charges[0] < self._now - self.setup.window_s:
            self._charges.popleft()
        self._leader.spares = 1 if self._spares is None else self._spares
        verdict = self._leader.judge(fault.look, place, moment, len(self._charges))
        decision, response = verdict.decision, verdict.decision.response
        self._warm = not decision.cold
        if decision.charged:
            self._charges.append(self._now)
        self.account.decisions[response.value if response else "stop"] += 1
        if decision.exit_code == EX_TRY_AGAIN:  # the scheduler starts it again
            if not verdict.keeps_ledger:
                self._leader.forget()
            return [(WAITING, 0.0), *sides.cold(self.side, self.scale).items()], counts_as or AGAIN
        if verdict.ends_job:
            return self._stopped(fault, decision.exit_code == EX_CODE, decision.rule)
        left = [verdict.host] if response is Response.REPLACE_NODE else []
        if self.side.strikes and not left and fault.hosts[0] in self._faults:
            left = [fault.hosts[0]]
        for host in left:
            self._leave(host)
            if fault.truth in (Truth.PASSES, Truth.CODE) or host not in fault.hosts:
                self.account.wrong[f"a good node leaves: {fault.key}, {decision.rule}"] += 1
        self._moves[whose] += decision.moves_ranks and fault.truth is not Truth.CODE
        self._keep(fault, left, decision.moves_ranks)
        moved = bool(left) or fault.truth is Truth.GONE
        from_disk = not self.side.memory or len(fault.hosts) > 1 or verdict.refuse_copies
        restart = list(sides.restart(self.side, self.scale, moved, from_disk).items())
        return [(CONTROL, 0.0), restart[0], (BACKOFF, decision.delay_s), (WAITING, 0.0), *restart[1:]], counts_as

    def _stopped(self, fault: Fault, as_code: bool, rule: str) -> tuple[list[tuple[str, float]], str]:
        again = list(sides.cold(self.side, self.scale).items())
        self._leader.forget()
        if fault.truth in (Truth.CODE, Truth.LIMIT):
            self._bug = None
            return [(MENDING, RESUBMIT_S), *again], MENDING
        self.account.wrong[f"infrastructure is stopped{' as code' if as_code else ''}: {fault.key}, {rule}"] += 1
        for host in fault.hosts:  # the user who submits it again leaves the bad node out
            if self._faults.pop(host, None) or fault.truth is Truth.NODE:
                self._leave(host)
        return [(WRONG, RESUBMIT_S), (WAITING, 0.0), *again], WRONG

    def _keep(self, fault: Fault, left: list[str], moved: bool) -> None:
        """Remember what a restart leaves in the job. moved: the ranks of its host are on another one now."""
        host = fault.hosts[0]
        if fault.truth is Truth.CODE:
            at, seen = (self._bug[1], self._bug[2] + 1) if self._bug is not None else (self._reached, 1)
            moved = moved or host in left
            hosts = (f"n{self._random.randrange(self.scale.nodes)}",) if moved else fault.hosts  # that has its rank
            self._bug = (replace(fault, hosts=hosts), at, seen)
            if seen == 2 and self.side.judges:
                self.account.wrong[f"a bug is restarted more than once: {fault.key}"] += 1
        if fault.truth is not Truth.NODE or host in left:
            return
        if host not in self._faults:
            self._faults[host] = kept = Fault(fault.key, fault.look, fault.truth, fault.hosts)
            self._in(PLATFORM_S, lambda: self._taken_away(host, kept))
        elif self.side.judges:
            self.account.wrong[f"a bad node stays: {fault.key}"] += 1

    def _without_judgement(self, fault: Fault) -> list[tuple[str, float]]:
        """Restart whatever it was. In stock's favour, the platform takes away a node with a fatal Xid at once."""
        restart = list(sides.restart(self.side, self.scale, fault.truth is Truth.GONE, not self.side.memory).items())
        known = fault.truth is Truth.NODE and (
            self.side.ideal or not XIDS_REPLACE.isdisjoint(fault.look.evidence.get("xids", ()))
        )
        if known:
            self._leave(fault.hosts[0])
        elif fault.truth is Truth.CODE:
            if self.side.ideal or (self._bug is not None and self._bug[2] >= STOCK_RESTARTS):
                self._bug = None
                return [(MENDING, RESUBMIT_S), *restart]
            self._keep(fault, [], moved=False)
        else:
            self._keep(fault, [], moved=False)
        return [(WAITING, 0.0), *restart]


def _leaves(key: str, look: Look) -> bool:
    return truth_of(CAUSES[key], look) in (Truth.NODE, Truth.GONE)
