"""Each check on a history that is as it must be, and on one that is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.seeded import checks
from tests.chaos.seeded.hosts import finishers
from tests.chaos.seeded.schedule import Plan
from tests.chaos.seeded.table import outcomes, rows

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
def test_restarts_count_from_0_again_only_after_all_agents_died(check: str, first: int):
    died = {"what": "exit", "t": 1.7, "host": "a", "pid": 10, "code": -9}
    assert list(checks.CHECKS[check](PLAN, counted(first, 0), ALONE))
    assert not list(checks.CHECKS[check](PLAN, counted(first, 0, died), ALONE))


def struck_by(kind: str) -> History:
    return having(lambda each: {**each, "kind": kind} if each["what"] == "strike" else each)


def test_an_outage_of_etcd_on_slow_links_may_cost_a_round():
    one = next(each for each in struck_by("delay") if each["what"] == "strike")
    both = sorted([*struck_by("kill etcd leader"), {**one, "number": 1}], key=lambda each: each["t"])
    assert list(checks.CHECKS["alone"](PLAN, struck_by("kill etcd leader"), ALONE))
    assert not list(checks.CHECKS["alone"](PLAN, both, ALONE))


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
def test_restarts_count_from_0_again_after_what_the_job_brings_has_forgotten_all(etcd: str, others: History, forgotten: bool):
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


@pytest.mark.parametrize(
    "history",
    [
        struck("pause agent", 0),
        struck("pause agent", 75),
        struck("kill agent", -9),
        struck("terminate agent", 75),
        struck("terminate agent", -15, t=1.5),
        struck("terminate agent", 0, t=2.45),
        *(dismissed(code) for code in (0, 75, -15)),
    ],
)
def test_an_agent_may_leave_as_what_was_done_to_it_explains(history: History):
    assert checks.broken(PLAN, history, ALONE) == []


@pytest.mark.parametrize(
    ("kind", "plan", "seen"),
    [
        ("kill agent", PLAN, True),
        ("kill agent", replace(PLAN, local=True), True),
        ("pause etcd", PLAN, True),
        ("store slow", PLAN, True),
        ("store errors", replace(PLAN, store="s3"), True),
        ("cut", PLAN, True),
        ("cut", replace(PLAN, store="s3"), False),
        ("kill host", replace(PLAN, store="s3"), False),
        ("kill container", replace(PLAN, store="s3"), True),
        ("pause worker", PLAN, False),
    ],
)
def test_a_commit_may_be_late_only_if_its_writer_was_paused_or_its_packets_held_up(kind: str, plan: Plan, seen: bool):
    history = sorted([*struck_by(kind), *LATE], key=lambda each: each["t"])
    assert bool(list(checks.no_late_commit(plan, history, ALONE))) == seen


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
def test_a_host_that_dies_may_leave_what_is_its_own(history: History, plan: Plan, seen: bool):
    assert bool(list(checks.nothing_left(plan, history, ALONE))) == seen


def test_who_trained_to_the_end_is_not_dismissed():
    told = {
        "a": worker("done", 2.4, 1, 0, 4),
        "b": worker("done", 1.4, 0, 1, 4),  # came back too late for the last group
        "c": worker("done", 2.4, 1, 0, 4),  # and so did this one, whose worker was of it
        "d": worker("step", 2.4, 1, 0, 4),
    }
    assert finishers(told, {"a": 0.0, "b": 2.0, "c": 2.5, "d": 0.0, "e": 2.0}) == {"a"}


def test_a_worker_that_was_paused_before_it_told_of_a_step_is_no_second_group():
    history = with_(worker("step", 1.3, 0, 1, 3), worker("step", 2.25, 0, 0, 3))
    assert not [problem for problem in checks.broken(PLAN, history, ALONE) if problem.startswith("one group at a time")]


def test_a_verdict_of_which_only_the_ledger_tells_counts_and_one_of_which_both_tell_counts_once():
    of_ledger = {**DECISION, "what": "ledger", "t": 2.55}
    only_there = [each for each in with_(of_ledger) if each["what"] != "decision"]
    for history in (only_there, with_(of_ledger)):
        assert checks.broken(PLAN, history, ALONE) == []


def test_a_corrupted_checkpoint_may_be_passed_over():
    history = with_({"what": "published", "t": 1.17, "name": "two", "step": 2}, {"what": "corrupted", "t": 1.18, "name": "two"})
    assert checks.broken(PLAN, history, ALONE) == []


def held(t: float, host: str, missing: list[str], **more: object) -> dict:
    return {"what": "held", "t": t, "host": host, "name": "two", "step": 2, "manifest": 7, "missing": missing, **more}


TOGETHER = [held(1.17, "a", ["b"]), held(1.18, "b", ["a"])]


def test_what_the_disks_of_the_group_have_together_may_not_be_passed_over():
    assert [problem.partition(":")[0] for problem in checks.broken(PLAN, with_(*TOGETHER), ALONE)] == ["not behind"]


@pytest.mark.parametrize(
    "more",
    [
        [TOGETHER[0]],
        [TOGETHER[0], held(1.18, "b", ["a", "b"])],
        [TOGETHER[0], held(1.18, "b", ["a"], manifest=8)],
        [TOGETHER[0], held(1.18, "c", ["a"])],
        [TOGETHER[0], held(1.3, "b", ["a"])],
        [*TOGETHER, held(1.19, "b", [], manifest=0)],
        [*TOGETHER, {"what": "emptied", "t": 1.5, "host": "b"}],
    ],
    ids=["a part", "a file lacks", "two manifests", "not in the group", "too late", "removed", "emptied"],
)
def test_what_the_disks_of_the_group_do_not_have_together_may_be_passed_over(more: History):
    assert checks.broken(PLAN, with_(*more), ALONE) == []


def test_the_table_tells_how_long_nobody_trained_until_the_next_group_did():
    (outcome,) = outcomes(good())
    assert (outcome.new_round, outcome.charged, outcome.left) == (True, True, False)
    assert outcome.seconds == pytest.approx(2.11 - 1.25)
    assert rows([outcome])[-1] == "| kill worker | 1 | 1 | 1 | 0 | 0.9 | 0.9 |"


def test_a_group_is_another_one_by_its_restart_count_too():
    same_store = having(lambda each: {**each, "group": "a"} if "group" in each else each)
    assert outcomes(same_store) == outcomes(good())


def without_a_new_round(*more: dict) -> History:
    """Steps 1 and 2 at 1.1 and 1.2, 3 at 3.0 and 4 at 3.1, all of one group; a fault from 1.25 on."""
    steps = [*both("step", 3.0, 0, 3), *both("step", 3.1, 0, 4)]
    first = [each for each in good() if each.get("restart") != 1 and each["what"] != "decision"]
    return sorted([*first, *steps, *more], key=lambda each: each["t"])


def test_without_a_new_round_the_table_tells_how_long_the_group_stood_still_until_the_fault_was_healed():
    for heals, expected in (([], 3.01 - 1.25), ([HEAL], 3.01 - 1.25)):
        (outcome,) = outcomes(without_a_new_round(*heals))
        assert not outcome.new_round
        assert outcome.seconds == pytest.approx(expected)
    late = both("step", 9.0, 0, 4)  # has nothing to do with it
    assert outcomes(without_a_new_round(HEAL, *late)) == outcomes(without_a_new_round(HEAL))


HEAL = {"what": "heal", "t": 2.0, "number": 0, "kind": "kill worker", "target": "a"}


@pytest.mark.parametrize(
    "history",
    [
        having(lambda each: {**each, "target": "c"} if each["what"] == "strike" else each),
        having(lambda each: {**each, "target": "a-c"} if each["what"] == "strike" else each),
        having(lambda each: None if each["t"] > 1.3 and each["what"] == "step" else each),
        having(lambda each: None if each["t"] < 1.3 and "rank" in each else each),
        without_a_new_round({**HEAL, "t": 3.2}),
    ],
    ids=["spare host", "one of two", "no step after", "no step before", "healed too late"],
)
def test_a_fault_that_met_no_training_is_not_in_the_table(history: History):
    assert outcomes(history) == []


def leaving(code: int, *more: dict) -> History:
    return with_({"what": "exit", "t": 1.4, "host": "b", "pid": 11, "code": code}, *more)


AGAIN = {"what": "started", "t": 1.5, "host": "b", "pid": 12}


@pytest.mark.parametrize(
    ("history", "left"),
    [
        (leaving(75, AGAIN), True),
        (leaving(75), False),
        (leaving(0, AGAIN), False),
        (leaving(-15, AGAIN, {"what": "dismissed", "t": 1.35, "host": "b"}), False),
    ],
)
def test_an_agent_left_that_nobody_struck_or_dismissed_and_that_came_again(history: History, left: bool):
    assert [each.left for each in outcomes(history)] == [left]
