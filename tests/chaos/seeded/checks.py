"""What must hold in every history, whatever was done to the job. Pure functions over a list of events, in the order of `t`.

An event is a dict: `what` it is, `t` on the machine's monotonic clock, and more:

    loaded, step, saving, done   by a worker, see tests/scripts/chaos_training.py
    published                    a checkpoint is whole in the shared directory: name, step
    held                         a checkpoint on one host's disk: host, name, step, manifest (a number, 0: none), missing (files)
    emptied                      a host has come back with an empty disk: host
    corrupted                    the suite has damaged this checkpoint: name
    strike, heal                 of a fault: number, kind, target (resolved), detail
    started, exit                an agent: host, pid, code
    dismissed                    the agent of a host came too late for a job that is done, and was told to end
    decision                     a verdict of the job, from the agents' events: host and the fields of elastic_ext's event
    ledger                       a verdict as the job's ledger has it in etcd at the end: the fields of a decision that checks use
    nobody, skipped              a fault that was not done: nobody was there, or it cannot be done here; kind
    all                          before the training was told to end: together (all hosts that have room trained), training, room,
                                 zombies (children of processes that ran, not waited for)
    dropped                      events that an agent could not write: host, count
    chosen                       what an agent has its workers begin with, likewise (checkpoint_chosen)
    led                          how many times the agents of a host have led the rendezvous, told at the end
    end                          the suite looked once more: processes, shm, tmp (what is left), stuck ("" or what did not come)
"""

from __future__ import annotations

import math
import signal
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from elastic_ext.checkpoints.formats.candidates import order_of, order_or_oldest
from tests.chaos.seeded.schedule import BETWEEN, HOSTS, KINDS, TRY_AGAIN, Plan

Event = Mapping[str, Any]
Check = Callable[[Plan, Sequence[Event], Sequence[str]], Iterator[str]]

HOST_DIES = ("kill host", "lose host", "kill container", "too few nodes")  # nobody is left to tidy up
SHM_OF_AGENT, SHM_OF_ETCD = "elastic_ext_", "elastic_ext_etcd_"
SURELY_CHARGED = (["kill worker"], ["terminate worker"])  # without any other fault
SLOW_LINKS = ("delay", "reorder")
KILLS_AGENTS = ("kill agent", *HOST_DIES)
PAUSE_WRITERS = ("pause worker", "pause agent", "pause copier", "pause host")
HOLD_UP_REQUESTS = (
    *("cut", "cut out", "cut in", "loss", "delay", "reorder", "store away"),
    *("kill host", "lose host", "too few nodes"),  # cut off first, and killed before a request has gone out
)
DISMISSED = {75, -signal.SIGTERM}  # what else an agent may leave with that came too late
MEMBER_BACK_S = 20.0  # from the start of a host's agent until its etcd has a member in place of the lost one, and some more
TOLD_TO_END = "terminate agent"
TRAINING = ("loaded", "step", "saving", "done")


def of(events: Iterable[Event], *whats: str) -> list[Event]:
    return [each for each in events if each["what"] in whats]


def groups(events: Sequence[Event]) -> dict[str, list[Event]]:
    """What the workers of each group told, in the order of the groups' first words."""
    found: dict[str, list[Event]] = defaultdict(list)
    for each in of(events, *TRAINING):
        found[f"{each['group']}.{each['restart']}"].append(each)
    return dict(found)


def launches(plan: Plan, events: Sequence[Event]) -> list[float]:
    """When restarts may count from 0 again: an agent started while none ran, and the job in etcd may have expired by then; or the
    etcd that the job brings lost a majority of its members, or its store its host, and with it all that it knew."""
    forgotten = majorities_lost(events) if plan.brought else store_hosts_lost(events) if plan.embedded else ()
    return sorted([*first_starts(events), *forgotten])


def store_hosts_lost(events: Sequence[Event]) -> list[float]:
    """When the host of the store died. Its next agent may have begun the job anew before the others have told what they know."""
    return [each["t"] for each in of(events, "strike") if each["kind"] in HOST_DIES and HOSTS[0] in _hosts(each)]


def majorities_lost(events: Sequence[Event]) -> list[float]:
    """When more than one host was dead or without its member. A host that is back has one again soon after."""
    found: list[float] = []
    without: dict[str, float] = {}  # host -> until when
    for each in of(events, "strike", "started"):
        if each["what"] == "started":
            if each["host"] in without:
                without[each["host"]] = each["t"] + MEMBER_BACK_S
            continue
        if each["kind"] not in HOST_DIES:
            continue
        without = {host: until for host, until in without.items() if until > each["t"]}
        without.update(dict.fromkeys((each["target"] or each["detail"]).split(","), math.inf))
        if len(without) > 1:
            found.append(each["t"])
    return found


def first_starts(events: Sequence[Event]) -> list[float]:
    """When an agent started while none ran."""
    found: list[float] = []
    running: set[int] = set()
    for each in of(events, "started", "exit"):
        if each["what"] == "exit":
            running.discard(each["pid"])
            continue
        if not running:
            found.append(each["t"])
        running.add(each["pid"])
    return found


def restarts(plan: Plan, events: Sequence[Event]) -> dict[str, tuple[int, int]]:
    """For each group, how many launches and how many restarts there were before it."""
    begun = launches(plan, events)
    return {name: (bisect(begun, told[0]["t"]), told[0]["restart"]) for name, told in groups(events).items()}


def one_world_each_round(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """Ranks are unique and contiguous, all of a round see the same world, and no other group has its restart count."""
    by_restart: dict[tuple[int, int], set[str]] = defaultdict(set)
    for name, restart in restarts(plan, events).items():
        by_restart[restart].add(name)
    for name, told in groups(events).items():
        worlds = {each["world"] for each in told}
        if len(worlds) != 1:
            yield f"group {name} has the worlds {sorted(worlds)}"
        pids: dict[int, set[int]] = defaultdict(set)
        for each in told:
            pids[each["rank"]].add(each["pid"])
        if wrong := {rank for rank in pids if not 0 <= rank < max(worlds)}:
            yield f"group {name} of {max(worlds)} has the ranks {sorted(wrong)}"
        if double := {rank: sorted(found) for rank, found in pids.items() if len(found) > 1}:
            yield f"group {name}: more than one worker has the same rank: {double}"
        hosts = {(each["host"], each["rank"]) for each in told}
        if len({host for host, _ in hosts}) != len(hosts):
            yield f"group {name}: a host has more than one rank: {sorted(hosts)}"
        if of(told, "step") and set(pids) != set(range(max(worlds))):
            yield f"group {name} of {max(worlds)} trained with the ranks {sorted(pids)} only"
    for (_, restart), names in by_restart.items():
        stepped = [name for name in names if of(groups(events)[name], "step")]
        if len(stepped) > 1:
            yield f"two groups trained as restart {restart}: {sorted(stepped)}"


def choices(events: Sequence[Event]) -> list[tuple[int, dict[str, tuple[str, int]]]]:
    """What the agent of each host chose, by round. Rounds count from 1 again if a node comes when the job has ended."""
    found: list[tuple[int, dict[str, tuple[str, int]]]] = []
    for each in of(events, "chosen"):
        now = next((chosen for round_, chosen in found[-2:] if round_ == each["round"] and each["host"] not in chosen), None)
        if now is None:
            found.append((each["round"], now := {}))
        now[each["host"]] = ((each["path"] or "").rpartition("/")[2], each["step"])
    return found


def one_start(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """All ranks of a group begin with the same checkpoint; their agents told them so, whether or not they came to load it."""
    for round_, chosen in choices(events):
        if len({*chosen.values()}) > 1:
            yield f"the agents of round {round_} chose different checkpoints: {chosen}"
    for name, told in groups(events).items():
        starts = {(each["path"], each["step"]) for each in of(told, "loaded")}
        if len(starts) > 1:
            yield f"the ranks of group {name} loaded different checkpoints: {sorted(starts)}"


def same_to_the_bit(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """Each state, loaded or trained, is that of an undisturbed run at its step: no torn load, and the same end."""
    for each in of(events, *TRAINING):
        if each["digest"] != alone[each["step"]]:
            yield f"rank {each['rank']} of group {each['group']}, {each['what']}: not the state of step {each['step']}"


def not_behind(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """A group begins with nothing older than the newest checkpoint that was whole when the group before it made its last step, in
    the store or on the disks of the hosts that are in the group."""
    bad = {each["name"] for each in of(events, "corrupted")}
    before: list[Event] = []
    for name, told in groups(events).items():
        loaded = of(told, "loaded")
        if loaded and before:
            until = max((each["t"] for each in before if each["t"] < loaded[0]["t"]), default=0.0)
            known = [each for each in events if each["t"] < until]
            later = [each for each in events if until <= each["t"] < loaded[0]["t"]]
            kept = {each["host"] for each in loaded} - {each["host"] for each in of(later, "emptied")}
            whole = [each for each in [*of(known, "published"), *_held_together(known, kept)] if each["name"] not in bad]
            newest = max(whole, key=lambda each: _order(each["name"], each["step"]), default=None)
            start = _order(loaded[0]["path"], loaded[0]["step"])
            if newest is not None and start < _order(newest["name"], newest["step"]):
                yield f"group {name} began at step {loaded[0]['step']}, and {newest['name']} was whole"
        before += told


def _held_together(events: Sequence[Event], hosts: set[str]) -> Iterator[Event]:
    """Of each checkpoint that these hosts' disks have together one event. One that has no manifest of it does not count."""
    parts: dict[str, dict[str, Event]] = defaultdict(dict)
    for each in of(events, "held"):
        if each["host"] in hosts:
            parts[each["name"]][each["host"]] = each
    for by_host in parts.values():
        found = [each for each in by_host.values() if each["manifest"]]
        if len({each["manifest"] for each in found}) == 1 and not set.intersection(*(set(each["missing"]) for each in found)):
            yield found[0]


def _order(name: str, step: int) -> tuple[int, int]:
    """Of later groups' checkpoints all are newer, see elastic_ext/checkpoints/directory/own_files.py."""
    return order_of(name) or (0, step)


def one_group_at_a_time(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """No group makes a step after a later one has made its first. A step counts when the first of its ranks has told of it:
    a worker that is paused between a collective and its report reports late."""
    began = first_steps(events)
    for name, told in groups(events).items():
        times: dict[int, float] = {}
        for each in of(told, "step"):
            times[each["step"]] = min(times.get(each["step"], each["t"]), each["t"])
        if times:
            last = max(times.values())
            for other, since in began.items():
                if other != name and began[name] < since < last:
                    yield f"group {name} made a step {last - since:.2f} s after group {other} had begun"


def first_steps(events: Sequence[Event]) -> dict[str, float]:
    found = {name: of(told, "step") for name, told in groups(events).items()}
    return {name: min(each["t"] for each in told) for name, told in found.items() if told}


def no_late_commit(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """A group commits nothing after a later one has. Not looked at: pauses, which may come between a group's look for a later one
    and its commit; and where the store is on the network, what may hold up a request: the kernel of its host sends it later."""
    may_be_late = {*PAUSE_WRITERS, *(HOLD_UP_REQUESTS if plan.s3 else ())}
    if any(each["kind"] in may_be_late for each in of(events, "strike")):
        return
    newest = 0
    for each in of(events, "published"):
        generation, step = order_or_oldest(each["name"])
        if generation < newest:
            yield f"generation {generation} committed step {step} after generation {newest} had committed"
        newest = max(newest, generation)


def restarts_count_up(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """A broken round is never resumed: each group that trains has a higher restart count than those of its launch before it."""
    order, counted = sorted(first_steps(events).items(), key=lambda each: each[1]), restarts(plan, events)
    counts = [counted[name] for name, _ in order]
    if counts != sorted(set(counts)):
        yield f"the launches and restart counts of the groups, in the order in which they trained: {counts}"


def verdicts(events: Iterable[Event]) -> list[Event]:
    """As the agents told them, and as the job's ledger has them: of the same verdict more than one."""
    return of(events, "decision", "ledger")


def budget(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """Nothing is charged but what the faults may cost, a worker that fails by itself is, and no verdict ends the job."""
    decisions = {(each["round"], each["decision"], each["charged"]): each for each in verdicts(events)}
    charged = [each for each in decisions.values() if each["charged"]]
    for each in of(events, "dropped"):
        yield f"{each['count']} events of the agent of host {each['host']} were not written, maybe decisions"
    strikes = of(events, "strike")
    allowed = sum(KINDS[each["kind"]].charges for each in strikes)
    if not charged and [each["kind"] for each in strikes] in SURELY_CHARGED:
        yield f"no restart was charged after {strikes[0]['kind']}"
    if len(charged) > allowed:
        told = [f"round {each['round']}: {each['kind']}, {each['rule']}: {each['reason']}" for each in charged]
        yield f"{len(charged)} restarts were charged, {allowed} expected at most: {told}"
    for each in decisions.values():
        if each["decision"] == "stop":
            yield f"the verdict of round {each['round']} ends the job: {each['kind']}, {each['rule']}: {each['reason']}"


def alone_it_does_what_it_must(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """A fault that is the only one has no effect, or is named by the verdict, if its kind says so."""
    strikes = of(events, "strike")
    kinds = {each["kind"] for each in strikes}
    worlds = [told[0]["world"] for told in groups(events).values()]
    grew = all(before < after for before, after in pairwise(worlds))  # a node may come late, where there is room for it
    if all(KINDS[kind].harmless for kind in kinds) and not adds_up(kinds) and not grew:
        yield f"a further round began: {sorted(groups(events))}"
    rules = {each["rule"] for each in verdicts(events)}
    if len(strikes) == 1 and (rule := KINDS[strikes[0]["kind"]].rule) and rule not in rules:
        yield f"no verdict by the rule {rule}; there were {sorted(rules)}"


def adds_up(kinds: Collection[str]) -> bool:
    """Whether these are harmless by themselves only.

    In an outage of etcd a node trains on if it hears in time that all are in it. On slow links, with leases as short as here, it
    may not.
    """
    stops_members = any(KINDS[kind].scope == "etcd" or kind == "kill keeper" for kind in kinds)  # a member dies with its keeper
    return stops_members and any(kind in SLOW_LINKS for kind in kinds)


def leaders(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """Who leads stays the same, but for what is done to it: else nodes lose their leases and come back, again and again."""
    led = {each["host"]: each["times"] for each in of(events, "led")}
    if sum(led.values()) > len(of(events, "started")) + 2 * len(of(events, "strike")):
        yield f"the leader changed too often; how often each host led: {led}"


def leavings(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """An agent leaves with 0, or with a code that what was done to it or its host explains."""
    for each in of(events, "exit"):
        before = [other for other in events if other["t"] <= each["t"]]
        explained = {0}
        if any(late["host"] == each["host"] for late in of(before, "dismissed")):
            explained |= DISMISSED
        for strike in of(before, "strike"):
            if KINDS[strike["kind"]].may_leave and (not strike["target"] or each["host"] in strike["target"].split(BETWEEN)):
                explained |= {*TRY_AGAIN}
            if each["pid"] in strike["pids"] and strike["kind"] in KILLS_AGENTS:
                explained.add(-signal.SIGKILL)
        told_to = [strike for strike in of(before, "strike") if strike["kind"] == TOLD_TO_END and each["pid"] in strike["pids"]]
        if any(_trains(each["host"], strike["t"], events) for strike in told_to):
            explained.discard(0)  # the job would go on without the node
        elif told_to:
            explained.add(-signal.SIGTERM)
        if each["code"] not in explained:
            yield f"the agent of host {each['host']} left with {each['code']}, expected {sorted(explained)}"


def _trains(host: str, at: float, events: Sequence[Event]) -> bool:
    """Whether a worker of the host told something before, and something after."""
    told = [each for each in of(events, *TRAINING) if each["host"] == host]
    return bool({each["pid"] for each in told if each["t"] < at} & {each["pid"] for each in told if each["t"] > at})


def ends(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """All ranks of the last group reach the last step, and all agents leave with 0 but those that came too late."""
    end = events[-1]
    if end["stuck"]:
        yield f"stuck: {end['stuck']}"
        return
    counted = restarts(plan, events)
    last = groups(events)[max(counted, key=lambda name: counted[name])] if counted else []
    at = {each["rank"]: each["step"] for each in of(last, "done") if each["step"] >= plan.steps}
    if not last or at.keys() != set(range(last[0]["world"])) or len(set(at.values())) != 1:
        yield f"the ranks of the last group reached the end, and their last steps: {at}"
    for each in of(events, "all"):
        if not each["together"]:
            yield f"long after all was healed {each['training']} trained, with room for {each['room']} of {each['running']}"
    for host, code in end["codes"].items():
        dismissed = any(late["host"] == host for late in of(events, "dismissed"))
        if code != 0 and not (dismissed and code in DISMISSED):
            yield f"at the end the agent of host {host} left with {code}"
    for each in of(last, "done"):
        if each["error"]:
            yield f"rank {each['rank']} could not save at the end: {each['error']}"


def nothing_left(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> Iterator[str]:
    """No process, and no zombie while the agents run; in shared memory and among temporary files only what hosts that died whole
    had no time to remove."""
    end = events[-1]
    if end["stuck"]:
        return
    if end["processes"]:
        yield f"left behind: {end['processes']}"
    for each in of(events, "all"):
        if each["zombies"]:
            yield f"nobody waited for {each['zombies']}"
    died = [host for each in of(events, "strike") if each["kind"] in HOST_DIES for host in _hosts(each)]
    if tmp := [each for each in end["tmp"] if each.partition("/")[0] not in died]:
        yield f"left among temporary files: {tmp}; hosts that died: {died}"
    of_etcd = {each for each in end["shm"] if each.startswith(SHM_OF_ETCD)}
    of_agents = {each for each in end["shm"] if each.startswith(SHM_OF_AGENT)} - of_etcd
    most_of_etcd = len(died) if plan.brought else 0
    if {*end["shm"]} - of_etcd - of_agents or len(of_agents) > len(died) or len(of_etcd) > most_of_etcd:
        yield f"left in shared memory, one of each agent expected whose host died, {died}: {end['shm']}"


def _hosts(strike: Event) -> list[str]:
    return (strike["target"] or strike["detail"].replace(",", BETWEEN)).split(BETWEEN)


CHECKS: dict[str, Check] = {
    "one world each round": one_world_each_round,
    "one start": one_start,
    "same to the bit": same_to_the_bit,
    "not behind": not_behind,
    "one group at a time": one_group_at_a_time,
    "no late commit": no_late_commit,
    "restarts count up": restarts_count_up,
    "budget and verdict": budget,
    "alone": alone_it_does_what_it_must,
    "leaders": leaders,
    "leavings": leavings,
    "ends": ends,
    "nothing left": nothing_left,
}


def broken(plan: Plan, events: Sequence[Event], alone: Sequence[str]) -> list[str]:
    """All that does not hold, each with the name of its check."""
    return [f"{name}: {problem}" for name, check in CHECKS.items() for problem in check(plan, events, alone)]
