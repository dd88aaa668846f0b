"""Each check on a history that is as it must be, and on one that is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.seeded import checks
from tests.chaos.seeded.schedule import Plan

PLAN = Plan(0, 2, "own hosts", "2", False, False, False, "folder", (), 4)
ALONE = ["s0", "s1", "s2", "s3", "s4"]
History = list[dict]


def worker(what: str, t: float, restart: int, rank: int, step: int, **more: object) -> dict:
    told = {"what": what, "t": t, "group": f"a:{restart}", "restart": restart, "host": "ab"[rank], "rank": rank, "world": 2}
    return {**told, "pid": 100 * restart + rank, "step": step, "digest": ALONE[step], "path": "", "error": None, **more}


def both(what: str, t: float, restart: int, step: int, **more: object) -> History:
    return [worker(what, t, restart, 0, step, **more), worker(what, t + 0.01, restart, 1, step, **more)]


def good() -> History:
    """Two steps, a worker is killed, and the second group goes on from step 1."""
    return [
        {"what": "started", "t": 0.0, "host": "a", "pid": 10},
        *both("loaded", 1.0, 0, 0),
        *both("step", 1.1, 0, 1),
        {"what": "published", "t": 1.15, "name": "one", "step": 1},
        *both("step", 1.2, 0, 2),
        {"what": "strike", "t": 1.25, "number": 0, "kind": "kill worker", "target": "a", "pids": [0], "detail": ""},
        {**DECISION, "t": 1.3},
        *both("loaded", 2.0, 1, 1, path="one"),
        *both("step", 2.1, 1, 2),
        *both("step", 2.2, 1, 3),
        *both("step", 2.3, 1, 4),
        *both("done", 2.4, 1, 4),
        {"what": "exit", "t": 2.5, "host": "a", "pid": 10, "code": 0},
        {"what": "end", "t": 2.6, "stuck": "", "codes": {"a": 0, "b": 0}, "processes": [], "shm": [], "tmp": []},
    ]


DECISION = {
    **{"what": "decision", "host": "a", "round": 1, "decision": "restart", "charged": True, "kind": "crash", "rule": "killed"},
    "reason": "worker 0 was killed",
}


def having(change: Callable[[dict], dict | None]) -> History:
    return sorted((changed for each in good() if (changed := change(each)) is not None), key=lambda each: each["t"])


def with_(*more: dict) -> History:
    return sorted([*good(), *more], key=lambda each: each["t"])


def of_group(restart: int, what: str, **new: object) -> Callable[[dict], dict]:
    def change(each: dict) -> dict:
        return {**each, **new} if each["what"] == what and each["restart"] == restart else each

    return change


def ending(**new: object) -> History:
    return having(lambda each: {**each, **new} if each["what"] == "end" else each)


def test_a_good_history_breaks_nothing():
    assert checks.broken(PLAN, good(), ALONE) == []


def counted(first: int, second: int, *more: dict) -> History:
    """The groups have these restart counts; the agent of host a starts again between them."""
    count = {0: first, 1: second}
    found = having(lambda each: {**each, "restart": count[each["restart"]]} if "restart" in each else each)
    return sorted([*found, {"what": "started", "t": 1.8, "host": "a", "pid": 12}, *more], key=lambda each: each["t"])


@pytest.mark.parametrize(("check", "first"), [("one world each round", 0), ("restarts count up", 1), ("ends", 1)])
def test_restarts_count_afresh_only_after_all_agents_died(check: str, first: int):
    died = {"what": "exit", "t": 1.7, "host": "a", "pid": 10, "code": -9}
    assert list(checks.CHECKS[check](PLAN, counted(first, 0), ALONE))
    assert not list(checks.CHECKS[check](PLAN, counted(first, 0, died), ALONE))


def struck_by(kind: str) -> History:
    return having(lambda each: {**each, "kind": kind} if each["what"] == "strike" else each)


def dead(host: str, t: float, back: float) -> History:
    struck = {"what": "strike", "t": t, "number": 1, "kind": "kill host", "target": host, "pids": [], "detail": ""}
    return [struck, {"what": "started", "t": back, "host": host, "pid": 50}]


@pytest.mark.parametrize(
    ("etcd", "others", "forgotten"),
    [
        ("job:", [*dead("b", 1.3, 1.5), *dead("c", 1.6, 1.8)], True),  # the member of b was not back yet
        ("job:", [*dead("b", 1.3, 1.5)], False),
        ("job:", [*dead("b", -90.0, -60.0), *dead("c", 1.3, 1.5)], False),  # it was
        ("own hosts", [*dead("b", 1.3, 1.5), *dead("c", 1.6, 1.8)], False),
        ("embedded", [*dead("a", 1.3, 1.5)], True),
        ("embedded", [*dead("b", 1.3, 1.5), *dead("c", 1.6, 1.8)], False),
    ],
)
def test_restarts_count_afresh_once_the_store_forgot_all(etcd: str, others: History, forgotten: bool):
    plan = replace(PLAN, etcd=etcd)
    assert bool(list(checks.CHECKS["restarts count up"](plan, counted(1, 0, *others), ALONE))) is not forgotten


def struck(kind: str, code: int, t: float = 2.05) -> History:
    """The agent of host b, on which a worker trains from 2.0 to 2.4, is struck and leaves."""
    return with_(
        {"what": "strike", "t": t, "number": 1, "kind": kind, "target": "b", "pids": [11], "detail": ""},
        {"what": "exit", "t": 2.5, "host": "b", "pid": 11, "code": code},
    )


def dismissed(code: int) -> History:
    """An agent that came too late is told to end, and leaves."""
    leaves = {"what": "exit", "t": 2.55, "host": "c", "pid": 12, "code": code}
    told = {"what": "dismissed", "t": 2.51, "host": "c"}
    return sorted([*ending(codes={"a": 0, "b": 0, "c": code}), told, leaves], key=lambda each: each["t"])


LATE: History = [
    {"what": "published", "t": 2.25, "name": "step_00000003.g0002", "step": 3},
    {"what": "published", "t": 2.26, "name": "step_00000004.g0001", "step": 4},
]

ALL = {"what": "all", "t": 2.35, "together": True, "training": ["a", "b"], "room": 2, "running": ["a", "b"], "zombies": []}

BAD: list[tuple[str, History]] = [
    ("one world each round", having(lambda each: {**each, "world": 3} if each.get("pid") == 101 else each)),
    ("one world each round", having(lambda each: {**each, "rank": 2} if each.get("pid") == 101 else each)),
    ("one world each round", having(lambda each: {**each, "rank": 0} if each.get("pid") == 101 else each)),
    ("one world each round", having(lambda each: {**each, "host": "a"} if each.get("pid") == 101 else each)),
    ("one world each round", having(lambda each: None if each.get("pid") == 101 else each)),
    ("one world each round", with_(worker("step", 2.21, 1, 0, 3, group="b:1"), worker("step", 2.21, 1, 1, 3, group="b:1"))),
    ("one start", having(lambda each: {**each, "path": "two"} if each["what"] == "loaded" and each["pid"] == 101 else each)),
    ("same to the bit", having(of_group(1, "loaded", digest="torn"))),
    ("same to the bit", having(of_group(1, "done", digest="other"))),
    ("not behind", having(of_group(1, "loaded", step=0, digest="s0"))),
    ("one group at a time", with_(worker("step", 2.15, 0, 0, 3))),
    ("no late commit", with_(*LATE)),
    ("restarts count up", having(lambda each: {**each, "restart": 1 - each["restart"]} if "restart" in each else each)),
    ("budget and verdict", struck_by("kill agent")),
    ("budget and verdict", having(lambda each: {**each, "decision": "stop"} if each["what"] == "decision" else each)),
    ("budget and verdict", with_({**DECISION, "what": "ledger", "t": 2.55, "round": 2})),
    ("budget and verdict", with_({"what": "dropped", "t": 2.55, "host": "a", "count": 3})),
    ("alone", struck_by("clock step")),
    ("alone", struck_by("kill etcd leader")),
    ("alone", struck_by("delay")),
    ("alone", struck_by("memory pressure")),
    ("leaders", with_(*({"what": "led", "t": 2.5, "host": host, "times": 2} for host in "ab"))),
    ("leavings", with_({"what": "exit", "t": 2.5, "host": "a", "pid": 10, "code": 1})),
    ("leavings", with_({"what": "exit", "t": 2.5, "host": "b", "pid": 11, "code": 75})),
    ("leavings", with_({"what": "exit", "t": 2.5, "host": "b", "pid": 11, "code": -9})),
    ("leavings", struck("pause agent", -9)),
    ("leavings", struck("terminate agent", -9)),
    ("leavings", struck("terminate agent", -15)),
    ("leavings", struck("terminate agent", 0)),
    ("leavings", struck("kill agent", 1)),
    ("ends", ending(stuck="nothing for 90 s")),
    ("ends", ending(codes={"a": 0, "b": 65})),
    ("ends", ending(codes={"a": 0, "b": -15})),
    ("ends", dismissed(1)),
    ("leavings", dismissed(-9)),
    ("ends", having(lambda each: None if each["what"] == "done" and each["rank"] == 1 else each)),
    ("ends", having(of_group(1, "done", error="no space"))),
    ("ends", having(lambda each: {**each, "step": 3} if each["what"] == "done" and each["rank"] == 1 else each)),
    ("ends", with_({**ALL, "together": False, "training": ["a"]})),
    ("nothing left", ending(processes=["100 worker S"])),
    ("nothing left", with_({**ALL, "zombies": ["100 of 10 agent"]})),
    ("nothing left", ending(shm=["elastic_ext_x"])),
    ("nothing left", ending(tmp=["a/file"])),
]


@pytest.mark.parametrize(("check", "history"), BAD)
def test_each_check_can_fail(check: str, history: History):
    assert check in {problem.partition(":")[0] for problem in checks.broken(PLAN, history, ALONE)}


def test_all_checks_are_shown_to_fail():
    assert {check for check, _ in BAD} == checks.CHECKS.keys()


def ending_after(kind: str, target: str, detail: str = "", **left: list[str]) -> History:
    strike = {"target": target, "kind": kind, "detail": detail}
    return [{**each, **strike} if each["what"] == "strike" else each for each in ending(**left)]


@pytest.mark.parametrize(
    ("history", "plan", "seen"),
    [
        (ending_after("kill host", "a", shm=["elastic_ext_1"], tmp=["a/file"]), PLAN, False),
        (ending_after("too few nodes", "", "a,b", shm=["elastic_ext_1", "elastic_ext_2"], tmp=["b/file"]), PLAN, False),
        (ending_after("lose host", "a", shm=["elastic_ext_1", "elastic_ext_etcd_1"]), replace(PLAN, etcd="job:"), False),
        (ending_after("lose host", "a", shm=["elastic_ext_etcd_1"]), PLAN, True),
        (ending_after("kill host", "a", shm=["elastic_ext_1", "elastic_ext_2"]), PLAN, True),
        (ending_after("kill host", "a", shm=["torch_1"]), PLAN, True),
        (ending_after("kill host", "a", tmp=["b/file"]), PLAN, True),
        (ending_after("kill reaper", "a", shm=["elastic_ext_1"]), PLAN, True),
        (ending_after("kill reaper", "a", tmp=["a/file"]), PLAN, True),
    ],
)
def test_a_dying_host_may_leave_its_own_things(history: History, plan: Plan, seen: bool):
    assert bool(list(checks.nothing_left(plan, history, ALONE))) == seen


def held(t: float, host: str, missing: list[str], **more: object) -> dict:
    return {"what": "held", "t": t, "host": host, "name": "two", "step": 2, "manifest": 7, "missing": missing, **more}


TOGETHER = [held(1.17, "a", ["b"]), held(1.18, "b", ["a"])]


def test_what_the_groups_disks_hold_must_be_used():
    assert [problem.partition(":")[0] for problem in checks.broken(PLAN, with_(*TOGETHER), ALONE)] == ["not behind"]


AGAIN = {"what": "started", "t": 1.5, "host": "b", "pid": 12}
