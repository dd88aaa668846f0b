"""One run of a plan."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.chaos import processes
from tests.chaos.seeded import inject
from tests.chaos.seeded.history import History, Told
from tests.chaos.seeded.hosts import RUN_ID, Hosts
from tests.chaos.seeded.members import ledger, registered
from tests.chaos.seeded.schedule import LEASE_S, Fault, Plan
from tests.chaos.seeded.surroundings import unavailable
from tests.chaos.seeded.watching import Watching
from tests.jobs import wait_gone
from tests.programs import REQUIRE

LOOK_S = 0.05  # how often the store and /proc are looked at, of which no event tells
STUCK_S = 240.0  # without a word of any worker, or without an end after all is done
LEADS = "leads the rendezvous"  # as agents log it
LATE_S = 10.0  # after as many agents as trained have left with 0; one that came too late would begin anew, and wait
OF_AGENTS = {"decision": "decision", "checkpoint_chosen": "chosen", "events_dropped": "dropped"}  # by elastic_ext's names
PATIENCE_S = 30.0  # until a fault finds somebody that it can be done to: standbys import torch first
FIRST_WORD_S = 300.0  # until a worker tells something: all processors are busy with imports
LONGEST_S = 900.0  # of a run whose agents start again and again
LEARN_S = LEASE_S / 2  # after all is healed, until an agent knows that its lease is gone: it renews it each third of that time
AGAIN_STEPS = 6  # then, of all hosts that have room: at least one checkpoint
AGAIN_S = 300.0  # in which they must have made them; an etcd of the job that has lost its majority begins anew after a minute
ZOMBIE_S = 60.0  # for a parent to wait for its child, with all processors busy
MOST_RESTARTS = 1000  # that a worker counts


class Run:
    def __init__(self, plan: Plan, folder: Path, stack: ExitStack) -> None:
        self.plan, self.folder = plan, folder
        self._shm = set(os.listdir("/dev/shm"))
        self.history = History(folder)
        self.hosts = Hosts(plan, folder, self.history, stack)
        self._waiting = [each for each in enumerate(plan.faults) if self._possible(*each)]
        self._due: dict[int, float] = {}  # when a fault comes whose step has been reached, by its number
        self._heals: list[tuple[float, int, Fault, inject.Struck]] = []
        self._watching = Watching(self.hosts, self.history)
        self._settled: float | None = None  # when the last fault was healed, or struck if there is nothing to heal
        self._again: tuple[int, int] | None = None  # restart count and first step of the group that all train in since
        self._zombies: dict[int, float] = {}  # since when they are seen, by pid

    def _possible(self, number: int, fault: Fault) -> bool:
        why = unavailable(fault.kind)
        if why and os.environ.get(REQUIRE) == "1":
            raise RuntimeError(f"{fault.kind}: {why}")
        if why:
            print(f"left out: {fault.kind}: {why}", file=sys.stderr)
            self.history.record("skipped", number=number, kind=fault.kind, why=why)
        return not why

    def go(self) -> list[Told]:
        self.hosts.start()
        began = time.monotonic()
        stuck, enough = "", None
        while not stuck and (self.hosts.running or self._heals):
            self.history.wait(LOOK_S)
            self._watching.look()
            self._strike_what_is_due()
            self._heal_what_is_due()
            self._end_training_when_all_train()
            processes.reap_orphans(self.hosts.waited_for)
            if enough is None and self.hosts.enough:
                enough = time.monotonic()
            if enough is not None and time.monotonic() > enough + LATE_S:
                self.hosts.dismiss()
            stuck = self._stuck(began)
        self._end(stuck)
        return self.history.close()

    def _stuck(self, began: float) -> str:
        """What did not come, or came too often; "": the run may go on."""
        silent_s = time.monotonic() - max(self.history.heard, began)
        if silent_s > (STUCK_S if self.history.workers else FIRST_WORD_S):
            return f"nothing for {silent_s:.0f} s at step {self.history.step}; running: {self.hosts.running}"
        if time.monotonic() - began > LONGEST_S:
            return f"no end in {LONGEST_S:g} s, at step {self.history.step}; running: {self.hosts.running}"
        restarts = max((each["restart"] for each in self.history.workers.values()), default=0)
        return f"restart {restarts} at step {self.history.step}" if restarts > MOST_RESTARTS else ""

    def _strike_what_is_due(self) -> None:
        for number, fault in list(self._waiting):
            now = time.monotonic()
            if self.history.step >= fault.step:
                self._due.setdefault(number, now + fault.after_s)
            if self._due.get(number, now + 1) > now:
                continue
            try:
                struck = inject.strike(fault, self.hosts)
            except inject.NotYet:
                if now > self._due[number] + PATIENCE_S:
                    self._waiting.remove((number, fault))
                    self.history.record("nobody", number=number, kind=fault.kind)
                continue
            self._waiting.remove((number, fault))
            shown = {"number": number, "kind": fault.kind, "target": struck.target, "pids": struck.pids, "detail": struck.detail}
            self.history.record("strike", t=now, **shown, step=self.history.step)
            if struck.heal is not None:
                self._heals.append((time.monotonic() + fault.seconds, number, fault, struck))

    def _heal_what_is_due(self) -> None:
        now = time.monotonic()
        for each in sorted(self._heals, key=lambda each: each[0]):
            due, number, fault, struck = each
            if due <= now:
                self._heals.remove(each)
                assert struck.heal is not None
                struck.heal()
                self.history.record("heal", number=number, kind=fault.kind, target=struck.target)

    def _end_training_when_all_train(self) -> None:
        """When no fault is left, all is healed, and all hosts that have room have trained together; or have not for too long."""
        if self._waiting or self._heals or not self.history.workers or not self.hosts.train_on():
            self._settled = None
            return
        now = time.monotonic()
        self._settled = now if self._settled is None else self._settled
        group, room = self.history.group, min(self.plan.most_nodes, len(self.hosts.running))
        since = self._settled + LEARN_S
        told = [each["step"] for each in group.values() if each["what"] in ("step", "saving") and each["t"] > since]
        restart = next((each["restart"] for each in group.values()), -1)
        together = len(told) == len(group) == room
        if together and (self._again is None or self._again[0] != restart):
            self._again = restart, min(told)
        enough = together and self._again is not None and min(told) >= self._again[1] + AGAIN_STEPS and self._all_have_joined()
        late = now > self._settled + AGAIN_S
        if enough or late:
            zombies = {
                each.pid: f"{each.pid} of {parent.pid} {_shown(parent)}" for each, parent in processes.zombies(os.getpid())
            }
            self._zombies = {pid: self._zombies.get(pid, now) for pid in zombies}
            if not late and any(now < since + ZOMBIE_S for since in self._zombies.values()):
                return  # while the agents run: with them, all zombies go
            shown = {"together": enough, "training": sorted(group), "room": room, "running": self.hosts.running}
            self.history.record("all", **shown, zombies=[*zombies.values()])
            self.hosts.end()

    def _all_have_joined(self) -> bool:
        """Whether all agents that run are in the job: to one that comes after its end the same command is a new job."""
        found = registered(self.hosts.etcd, self.hosts.inside, RUN_ID)
        agents = [f"{host}-{self.hosts.agents[host].pid}-" for host in self.hosts.running]
        return all(any(node.startswith(agent) for node in found) for agent in agents)

    def _end(self, stuck: str) -> None:
        for number, fault in self._waiting:
            self.history.record("nobody", number=number, kind=fault.kind)
        waited_for = self.hosts.waited_for
        left = [each for each in processes.descendants(os.getpid()) if each.pid not in waited_for]
        if not stuck:
            alive = set(wait_gone([each.pid for each in left]))
            left = [each for each in left if each.pid in alive]
        for host in self.plan.hosts:
            self._told_by_agents(host)
            log = self.folder / f"agent-{host}.log"
            self.history.record("led", host=host, times=log.read_text().count(LEADS) if log.exists() else 0)
        self._told_by_the_ledger()
        self.history.record(
            "end",
            stuck=stuck,
            codes=self.hosts.codes,
            processes=[f"{each.pid} {_shown(each)} {each.state}" for each in left],
            shm=sorted(set(os.listdir("/dev/shm")) - self._shm),
            tmp=[
                f"{host}/{name}"
                for host in self.plan.hosts
                for name in os.listdir(self.folder / f"tmp-{host}")
                if not name.startswith("torchinductor_")  # torch's, for good
            ],
        )

    def _told_by_the_ledger(self) -> None:
        """The verdicts again, of which an agent that was killed could not tell."""
        found = ledger(self.hosts.etcd, self.hosts.inside, RUN_ID)
        for each in found.verdicts if found is not None else ():
            told = each.decision
            shown = {"decision": told.word, "charged": told.charged, "kind": told.kind, "rule": told.rule, "reason": told.reason}
            self.history.record("ledger", round=each.round, **shown)

    def _told_by_agents(self, host: str) -> None:
        path = self.folder / f"events-{host}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            told = json.loads(line)
            if what := OF_AGENTS.get(told["event"]):
                self.history.events.append({**told, "what": what, "t": told["monotonic"], "host": host})


def _shown(process: processes.Process) -> str:
    return process.role or " ".join(process.command)[:60]
