"""Jobs of simulated agents under random faults, and what must hold of them after each event."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from elastic_ext.agent.leaving import ask_for_save
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.cli import requests
from elastic_ext.embedded.keyspace import Change
from elastic_ext.etcd import Delete, Event, Put
from elastic_ext.failures.judgement import judge
from elastic_ext.failures.ledger import MAX_VERDICTS, Ledger, encode_ledger, encode_report, encode_verdict
from elastic_ext.rendezvous import board, drains, rounds, topics
from elastic_ext.rendezvous.drains import DrainRequest
from elastic_ext.rendezvous.judging import Judgement, RoundReports, ledger_of
from elastic_ext.rendezvous.round_part import EtcdRound
from elastic_ext.rendezvous.round_records import Assignment, Header, State, decode
from elastic_ext.rendezvous.round_records import Node as Record
from elastic_ext.rendezvous.rounds import Limits
from elastic_ext.rendezvous.tasks import HostRefused
from tests.failures.test_ledger import RULES, report
from tests.participants import part_of
from tests.simulation import KEYS, READER, Client, Node, World, header_in, stored

TTL_S = 10
STOP_S = 2.0  # that workers need to stop, at most
CONVERGES_S = 90.0  # after the last fault: a lease ends, then the next one; members get their time to come back; a round forms
SAVE_S = 5.0  # that a checkpoint takes, at most
STEP = 7
MEET_S = 20.0  # that workers wait for one another when a round begins
SETTLES_S = 6.0  # until those that leave have left
WINDOW_S = 3600
REPORT = encode_report(report("h", signal="SIGKILL"))
VERDICT = judge({"h": report("h", signal="SIGKILL")}, Ledger(), RULES, 1)[1]


class Restarts:
    """Lets the job go on after each failure, and counts that in the ledger.

    Attributes:
        judged: all that it was asked about.
    """

    def __init__(self) -> None:
        self.judged: list[RoundReports] = []
        self.rules = board.Rules(topics.RULED)

    def may_grow(self, round_: int) -> bool:
        return True

    def judge(self, reports: RoundReports, ledger: str) -> Judgement:
        self.judged.append(reports)
        before = ledger_of(ledger)
        verdict = replace(VERDICT, round=reports.round, restarts=before.charged + 1)
        after = Ledger((), before.charged + 1, (*before.verdicts, verdict)[-MAX_VERDICTS:])
        return Judgement(State.BROKEN, "restart", encode_verdict(verdict), encode_ledger(after), charged=True, window_s=WINDOW_S)


class Stage(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    JUDGING = "judging"
    LEFT = "left"


class Agent(Node):
    """Acts as an agent does: its workers run, stop when the round is over, and run again in the next one.

    Attributes:
        joins: the rounds that it was in.
        saves: it publishes a checkpoint when it is to leave.
    """

    def __init__(self, world: World, name: str, limits: Limits, agents: list[Agent] | None = None) -> None:
        """agents: all of the job; this one is added to them."""
        super().__init__(world, name, limits, TTL_S, Restarts(), host=drains.host_of(name))
        self._agents = agents if agents is not None else []
        self._agents.append(self)
        self.stage = Stage.WAITING
        self.saves = True
        self.joins: list[tuple[Header, Assignment]] = []
        self._after = self._saved = 0
        self._failed = self._away = False
        self.agent.run(lambda: self.ready(0))

    @property
    def lives(self) -> bool:
        return not self.process.dead and self.stage is not Stage.LEFT

    @property
    def part(self) -> EtcdRound:
        return part_of(self.participant, self.joins[-1])

    @property
    def is_steady(self) -> bool:
        """Whether it lives, and was never cut off and never stood still."""
        return self.lives and not self._away

    def stray(self) -> None:
        """Note that it will have missed something."""
        self._away = True

    def on_change(self) -> None:
        header, joined = self.participant.header, self.participant.joined
        drain = drains.of_node(header, self.name)
        released = drain is not None and drain.released and self.stage is Stage.WAITING
        if self.stage is Stage.LEFT:
            return
        if self.failure is not None or header.state in (State.DONE, State.CLOSED) or released:
            self._leave()
        elif self.stage is Stage.WAITING and joined is not None and joined[0].round > self._after:
            self.joins.append(joined)
            self.stage = Stage.RUNNING
            self.world.after(MEET_S, lambda: self.agent.run(lambda: self._meet(*joined)))
            self.on_change()
        elif self.stage is Stage.RUNNING and not (header.state is State.RUNNING and joined[1].of(header)):
            self._stop()
        elif self.stage is Stage.RUNNING and drain is not None and drain.number != self._saved and self.saves:
            self._saved = number = drain.number
            save_s = self.world.random.random() * SAVE_S
            ready = topics.ReadyToLeave(number, STEP)
            self.world.after(save_s, lambda: self.agent.run(lambda: self.part.post(topics.READY, ready)))
        elif self.stage is Stage.JUDGING and (header.verdict or header.round != self.joins[-1][0].round):
            self._wait()

    def _meet(self, header: Header, part: Assignment) -> None:
        """Break the round if not all of it have come: their workers wait for one another."""
        come = sum(any(theirs.seal == part.seal for _, theirs in each.joins) for each in self._agents)
        if come < header.nodes and self.stage is Stage.RUNNING and self.joins[-1][1] == part:
            self.participant.end_round(header.round, State.BROKEN, "some have not come")

    def fail(self) -> None:
        """Let a worker die."""
        if self.stage is Stage.RUNNING:
            self._failed = True
            self.participant.end_round(self.joins[-1][0].round, State.BROKEN, f"{self.name} failed")
            self._stop()

    def _stop(self, cut: bool = False) -> None:
        self.stage = Stage.STOPPING
        self.world.after(self.world.random.random() * STOP_S, lambda: self.agent.run(lambda: self._stopped(cut)))

    def _stopped(self, cut: bool) -> None:
        if self.stage is Stage.LEFT:
            return None
        if not self._failed:
            return self._wait(cut)
        self._failed = False
        self.stage = Stage.JUDGING
        self.part.report(REPORT, self.world.random.random() < 0.3)
        return self.on_change()

    def _wait(self, cut: bool = False) -> None:
        self.stage = Stage.WAITING
        self._after = self.joins[-1][0].round
        self.ready(self._after, cut=self._after if cut else 0)
        self.on_change()

    def go(self) -> None:
        """Leave the job, as when a scheduler takes the node."""
        if self.stage is Stage.RUNNING:
            self.participant.end_round(self.joins[-1][0].round, State.BROKEN, f"{self.name} leaves")
        self._leave()

    def _leave(self) -> None:
        self.stage = Stage.LEFT
        self.leave()

    def fence(self) -> None:
        """Stop the workers if the others can go on without this node."""
        others = any(each.client.reachable and not each.process.frozen for each in self._agents if each is not self)
        if self.stage is Stage.RUNNING and others and self.participant.registration.lease[1] < self.world.now + TTL_S / 10:
            self._stop(cut=True)


class Invariants:
    """What must hold of all that is written; `wrong` says what does not.

    A store that has lost the header may get an older one, or see a number again, if no node is there that knows better.
    """

    def __init__(self, agents: list[Agent]) -> None:
        self.wrong: list[str] = []
        self.lost = False
        self._agents = agents
        self._header: Header | None = None  # the last one
        self._sealed: dict[int, str] = {}
        self._verdicts: dict[tuple[int, str], str] = {}
        self._parts: dict[str, Assignment] = {}
        self._nodes: dict[str, Record] = {}

    def __call__(self, change: Change) -> None:
        self.take(Event.parse(change.event))

    def take(self, event: Event) -> None:
        kind, _, id_ = event.kv.key.decode()[len(KEYS.prefix) :].partition("/")
        if kind == "round":
            header = header_in(event.kv) if event.kind == "put" else None
            self.lost = self.lost or header is None
            if header is not None:
                self._on_header(header)
        elif kind == "assign" and event.kind == "put" and (part := READER.assignment(event.kv)) is not None:
            self._parts[id_] = part
        elif kind == "nodes" and event.kind == "delete":
            self._nodes.pop(id_, None)
        elif kind == "nodes" and READER.node(event.kv) is not None:
            self._nodes[id_] = decode(Record, event.kv.value, id_)
        elif kind == "ledger" and event.kind == "put" and (ledger := READER.ledger(event.kv)) is not None:
            judged = [verdict.round for verdict in ledger.verdicts]
            if len(judged) != len(set(judged)) and not self.lost:
                self.wrong.append(f"the ledger holds two verdicts on one round: {judged}")

    def _on_header(self, new: Header) -> None:
        old, self._header = self._header, new
        if old is not None and not self.lost and rounds.precedes(new, old):
            self.wrong.append(f"an older header: {new} came after {old}")
        if old is not None and old.job == new.job != "" and (old.min_nodes, old.max_nodes) != (new.min_nodes, new.max_nodes):
            self.wrong.append(f"another --nnodes: {new} came after {old}")
        if old is not None and old.job and new.job != old.job and self._is_known(old.round):
            self.wrong.append(f"another job: {new} came after {old}")
        if new.round and self._sealed.get(new.round) != new.seal:
            self._on_seal(new)
            if old is not None and not self.lost:
                self._on_turn(old, new)
        if new.verdict and self._verdicts.setdefault((new.round, new.seal), new.verdict) != new.verdict and not self.lost:
            self.wrong.append(f"a second verdict: {new}")

    def _on_turn(self, old: Header, new: Header) -> None:
        """A round begins after another one."""
        if old.state is not State.BROKEN or new.round != old.round + 1:
            self.wrong.append(f"a round out of turn: {new} came after {old}")
        if not old.verdict and any(node.report.round == old.round and node.report.failure for node in self._nodes.values()):
            self.wrong.append(f"a failure that nobody has judged: {new} came after {old}")
        if back := [id_ for id_ in drains.released(old) if id_ in self._parts and self._parts[id_].of(new)]:
            self.wrong.append(f"{back} were released: {new} came after {old}")

    def _is_known(self, round_: int) -> bool:
        """Whether a node that was never away has been in this round or a later one, or no record was lost."""
        return not self.lost or any(header.round >= round_ for each in self._agents if each.is_steady for header, _ in each.joins)

    def _on_seal(self, new: Header) -> None:
        if new.round <= max(self._sealed, default=0) and self._is_known(new.round):
            self.wrong.append(f"a number that was used before: {new}; before: {self._sealed}")
        self._sealed[new.round] = new.seal
        parts = {id_: part for id_, part in self._parts.items() if part.of(new)}
        by_rank = sorted(parts.values(), key=lambda part: part.rank)
        ends = [*(part.base_rank for part in by_rank), new.world]
        fits = [part.rank for part in by_rank] == list(range(new.nodes)) and ends[0] == 0
        fits = fits and all(first < second for first, second in itertools.pairwise(ends))
        if new.state is not State.RUNNING or not fits or not new.min_nodes <= new.nodes <= new.max_nodes:
            self.wrong.append(f"numbering: {new} {by_rank}")
        late = [id_ for id_ in parts if id_ in self._nodes and self._nodes[id_].after >= new.round]
        if late:
            self.wrong.append(f"{late} wait for a later round than {new}")


class Job:
    """A job of a seed: its agents come, faults happen, and in the end all that live are in one round."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, revision=seed % 2 or 7 << 32)
        self.random = self.world.random
        self.limits = Limits(least := self.random.randint(2, 4), self.random.randint(least + 1, least + 4), 0.5)
        self.agents: list[Agent] = []
        self.invariants = Invariants(self.agents)
        self.world.observers.append(self.invariants)
        self.log: list[str] = []
        self._drained: set[str] = set()
        self._operator = Client(self.world)
        self._names = (f"n{number}" for number in itertools.count())
        absent = [self.kill, self.freeze, self.cut, self.cut_all]
        lost = [self.delete, self.delete, self.overwrite, self.set_up_store]
        always = [self.fail, self.fail, self.late, self.drain, self.leave, self.break_round, self.compact, self.lose_answers]
        always.append(self.ask)
        self._faults: list[Callable[[], object]] = [*always, *self.random.choice([absent, lost, absent + lost])]
        for _ in range(self.random.randint(least, min(8, least + 4))):
            self.world.after(self.random.random() * 2, self.late)

    # Faults.

    @property
    def living(self) -> list[Agent]:
        return [each for each in self.agents if each.lives]

    def note(self, what: str) -> None:
        self.log.append(f"{self.world.now:.3f} {what}")

    def strike(self) -> None:
        """Let a random fault happen: now, or in the middle of a random call."""
        fault = self.random.choice(self._faults)
        if not self.living or self.random.random() < 0.5:
            return fault()
        client, part = (
            self.random.choice(self.living).client,
            self.random.choice(["", "/round", "/assign", "/ledger", "/nodes", "lease"]),
        )
        return self.random.choice([client.before, client.after])(part, fault)

    def one(self) -> Agent | None:
        return self.random.choice(self.living) if self.living else None

    def late(self) -> None:
        if len(self.living) < 8:
            name = next(self._names)
            self.note(f"{name} comes")
            other = replace(self.limits, max_nodes=self.limits.max_nodes + 1)
            Agent(self.world, name, other if int(name[1:]) % 3 == 2 else self.limits, self.agents)

    def ask(self) -> None:
        if (agent := self.one()) and agent.stage is Stage.RUNNING:
            self.note(f"{agent.name} asks for a save")
            agent.agent.run(lambda: ask_for_save(agent.part))

    def kill(self) -> None:
        if agent := self.one():
            self.note(f"{agent.name} is killed")
            agent.kill()

    def freeze(self) -> None:
        if agent := self.one():
            seconds = self.random.choice([0.5, 5.0, 15.0]) * self.random.random()
            self.note(f"{agent.name} stands still for {seconds}")
            agent.stray()
            agent.freeze(seconds)
            self.world.after(seconds, agent.fence)

    def cut(self) -> None:
        if agent := self.one():
            self._cut([agent])

    def cut_all(self) -> None:
        self._cut(self.living)

    def _cut(self, agents: list[Agent]) -> None:
        seconds = self.random.choice([1.0, 10.0, 40.0]) * self.random.random()
        self.note(f"{[each.name for each in agents]} are cut off for {seconds}")
        for each in agents:
            each.stray()
            each.cut(seconds)
            self.world.after(0.9 * TTL_S, each.fence)

    def lose_answers(self) -> None:
        if agent := self.one():
            self.note(f"answers to {agent.name} are lost")
            agent.client.lose_answers = self.random.randint(1, 3)

    def fail(self) -> None:
        for agent in self.random.sample(self.living, min(len(self.living), self.random.randint(1, 2))):
            self.note(f"a worker of {agent.name} fails")
            agent.agent.run(agent.fail)

    def leave(self) -> None:
        if agent := self.one():
            self.note(f"{agent.name} leaves")
            agent.agent.run(agent.go)

    def break_round(self) -> None:
        if agent := self.one():
            self.note(f"{agent.name} breaks its round")
            agent.participant.end_round(agent.round, State.BROKEN, "for a test")

    def drain(self) -> None:
        if agent := self.one():
            self.note(f"{agent.name} is drained")
            self._drained.add(agent.name)
            request = DrainRequest(agent.name, "", 60, self.random.random() < 0.3)
            try:
                requests._Job(self._operator, "job").ask(request, 5.0)
            except ElasticExtError as error:
                self.note(f"no drain: {error}")

    def compact(self) -> None:
        self.note("the history is compacted")
        self.world.compact()

    def delete(self) -> None:
        ids = [each.name for each in self.agents] or ["n0"]
        below = [*map(KEYS.node, ids), *map(KEYS.assignment, ids), KEYS.last_node, KEYS.job, KEYS.header, KEYS.header]
        key = self.random.choice(below)
        self.note(f"{key} is deleted")
        self._operator.txn([], [Delete(key)])

    def overwrite(self) -> None:
        ids = [each.name for each in self.agents] or ["n0"]
        key = self.random.choice([*map(KEYS.node, ids), *map(KEYS.assignment, ids), KEYS.job, KEYS.header, KEYS.ledger])
        self.note(f"{key} is overwritten")
        self._operator.txn([], [Put(key, self.random.choice(["", "{}", '{"schema": 3}']))])

    def set_up_store(self) -> None:
        self.note("the store is set up again")
        self.invariants.lost = True
        self.world.set_up_store(self.random.choice([1, self.world.store.revision + 50, self.world.store.revision + (1 << 32)]))

    # What must hold.

    def check(self) -> None:
        assert not self.invariants.wrong, "\n".join(self.invariants.wrong)
        for each in self.agents:
            refused = each.name in self._drained and isinstance(each.failure, HostRefused)  # it had to register again
            assert each.failure is None or refused, f"{each.name}: {each.failure!r}"

    def is_whole(self) -> bool:
        """All that live are in the round that runs, as far as it has room, and all records are there."""
        header, living = stored(self.world), self.living
        if header is None or header.state is not State.RUNNING or len(living) < self.limits.min_nodes:
            return False
        inside = [each for each in living if each.stage is Stage.RUNNING and each.joins[-1][1].of(header)]
        outside = [each for each in living if each not in inside]
        there = {kv.key.decode() for kv in self._operator.get_prefix(KEYS.prefix).kvs}
        needed = {KEYS.job, *(KEYS.node(each.name) for each in living), *(KEYS.assignment(each.name) for each in inside)}
        return (
            len(inside) == header.nodes == min(len(living), header.max_nodes)
            and all(each.stage is Stage.WAITING for each in outside)
            and needed <= there
        )

    def run(self) -> None:
        """Let the faults happen, then wait until the job is whole. Raises AssertionError."""
        for _ in range(self.random.randint(2, 8)):
            if self.random.random() < 0.7:  # else at the same time as the one before
                self.run_for(self.random.expovariate(0.2))
            self.strike()
        self.world.until(lambda: self.check() or not any(self._is_hampered(each) for each in self.living))
        self.run_for(STOP_S + SETTLES_S)
        while len(self.living) < self.limits.min_nodes:
            self.late()
        self.world.until(lambda: self.check() or self.is_whole(), CONVERGES_S)
        self._check_ends()

    def run_for(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.world.until(lambda: self.check() or self.world.now >= end)

    def _is_hampered(self, agent: Agent) -> bool:
        agent.client._hooks.clear()
        agent.client.lose_answers = 0
        return agent.process.frozen or not agent.client.reachable

    def _check_ends(self) -> None:
        """The header that has come back is the newest that anybody knows, and no node was in two places."""
        header = stored(self.world)
        for each in self.living:
            assert header is not None
            assert not any(rounds.precedes(header, known) for known in each.headers), (header, each.headers)
        ranks: dict[tuple[int, str, int], str] = {}
        for each in self.agents:
            for header, part in each.joins:
                assert part.of(header), each.name
                assert ranks.setdefault((part.round, part.seal, part.rank), each.name) == each.name
            numbers = [header.round for header, _ in each.joins]
            assert numbers == sorted(set(numbers)), numbers
