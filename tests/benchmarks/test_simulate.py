"""benchmarks/simulate.py: the simulated jobs agree with closed forms, and it is the product that decides in them."""

import json
from pathlib import Path

import compressed
import pytest
from scale import causes, decisions, inputs, job, rounds, scheduled, sides, study
from scale.causes import Truth
from scale.job import Job, Setup
from scale.scheduled import Measured, Planned, Scheduled
from scale.sides import IDEAL, OURS, OURS_DISK, SIDES, STOCK, STOCK_JOB, Scale
from scale.study import Effort

from elastic_ext.failures import judgement
from elastic_ext.planning.advice import WAITING as PLANNED_WAITING
from elastic_ext.planning.advice import FailureClass, Supply, expect
from tests.benchmarks.runs import BENCHMARKS, result

MANY = Effort(jobs=4, failures=1000, processes=1)


def published(name: str) -> dict:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def row(name: str, key: str, value: object) -> dict:
    return next(each for each in published(name)["rows"] if each[key] == value)


def test_figures_of_silence_and_cold_starts_are_published():
    assert pytest.approx(row("node_loss", "row", "link")["ours"]["phases_s"]["stop"], rel=0.25) == sides.SILENT_S
    assert [sides.cold_start_s(gpus) for gpus, _ in sides.COLD_STARTS] == [pytest.approx(s) for _, s in sides.COLD_STARTS]
    found = [sides.cold_start_s(gpus) for gpus in range(8, 200_000, 997)]
    assert found == sorted(found)


# Closed forms.


@pytest.mark.parametrize("gpus", [1024, 4096, 16_384])
def test_metas_formula_holds_where_its_assumptions_do(gpus):
    assert abs(study.against_meta(gpus, MANY)["off"]) < 0.05


@pytest.mark.parametrize("gpus", [1024, 16_384, 131_072])
def test_the_closed_form_holds_for_large_losses_too(gpus):
    found = study.against_closed_form(gpus, MANY, {"detection": 30.0, "restart": 200.0}, 6.5)
    assert abs(found["off"]) < 0.01
    assert (found["formula"] < 0.7) == (gpus == 131_072)


def test_failure_classes_and_memory_match_the_closed_form():
    """Side by side with copies in memory, from which each failure resumes."""
    scale = Scale(131_072)
    side = sides.Side("checked", memory=True, planned=True)
    phases = {"detection": 30.0, "restart": 200.0}
    setup = Setup(scale, 6.5, plain=True, phases=phases)
    rate_s = 6.5e-3 / 86400 * scale.nodes
    copies = sides.copies(side, scale, rate_s)
    ((_, every_s),) = copies.memory
    one = FailureClass("a failure", 1.0, phases, every_s, copies.memory_ready_s)
    expected = expect([one], rate_s, scale.nodes, 1 - copies.kept_s(1e6) / 1e6)
    accounts = [Job(setup, side, seed).run(2000, 0.0) for seed in range(4)]
    found = {name: sum(each.seconds[name] / each.counted_s for each in accounts) / 4 for name in (job.NEW, *expected.lost)}
    assert found[job.NEW] == pytest.approx(expected.productive, rel=0.01)
    assert found["restart"] == pytest.approx(expected.lost["restart"], rel=0.03)
    assert found["lost steps"] == pytest.approx(expected.lost["lost steps"], rel=0.1)


def test_copies_in_memory_become_rarer_while_nothing_fails():
    """Every 2 s of running for 10 s, then every 5 s, with a stall of half a second each."""
    copies = sides.Copies(((0.0, 2.0), (10.0, 5.0)), 0.0, 0.5, 300.0, 1.0, 0.0)
    assert [copies.newest_s(running_s) for running_s in (0.0, 1.9, 5.0, 14.0, 15.1)] == [0.0, 0.0, 4.0, 10.0, 15.0]
    assert [copies.kept_s(running_s) for running_s in (4.0, 20.0)] == [3.0, 16.5]
    assert copies.running_s(16.5) == pytest.approx(20.0, rel=1e-3)
    chosen = [every_s for _, every_s in sides.copies(OURS, Scale(16_384), 1.0).memory]
    assert chosen == sorted(chosen)
    assert chosen[-1] / chosen[0] == pytest.approx(16, rel=0.02), "after each step at first, then after 16: 0.03 % of the time"


@pytest.mark.parametrize("gpus", [64, 256])
def test_copies_in_memory_never_lose_to_stock(gpus):
    """At these sizes failures are rare, so that copies cost more than they save if they are made too often."""
    found = {each["side"]: each for each in study.sizes(Effort(jobs=6, failures=30, processes=1), [gpus])}
    ours, stock = found[OURS.name], found[STOCK.name]
    assert ours["ettr"] >= stock["ettr"] - stock["plus_minus"] - ours["plus_minus"]


def test_a_job_waits_for_nodes_as_erlang_says():
    """Every failure takes a node, repairs take the same mean as in the formula, and one spare is far too few."""
    gone = (("it is gone", 1, "power alone"),)
    looks = (causes.Look(1.0, {}, causes.Shows.GONE),)
    causes.CAUSES["power alone"] = causes.Cause(Truth.GONE, looks)  # type: ignore[index]
    try:
        scale, rate = Scale(4096), 4.0
        median_s, sigma = 3600.0, 0.5
        mean_s = median_s * 2.718281828 ** (sigma**2 / 2)
        setup = Setup(scale, rate * 12, gone, spares=1, repair_s=(median_s, sigma), phases={"waits": 0.0, job.WAITING: 0.0})
        accounts = [Job(setup, sides.Side("checked"), seed).run(1500, 0.0) for seed in range(4)]
    finally:
        del causes.CAUSES["power alone"]  # type: ignore[attr-defined]
    rate_s = rate * 12e-3 / 86400 * scale.nodes
    one = FailureClass("it is gone", 1.0, {"waits": 0.0}, 300.0, replaces=True)
    expected = expect([one], rate_s, scale.nodes, supply=Supply(1, mean_s)).lost[PLANNED_WAITING]
    found = sum(each.seconds[job.WAITING] for each in accounts) / sum(each.counted_s for each in accounts)
    assert expected > 0.05
    assert found == pytest.approx(expected, rel=0.1)


# Jobs.


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
def test_every_second_is_accounted_for(side):
    one = Job(study.setup_of(Scale(16_384)), side, 3)
    account = one.run(25, 0.0)
    assert sum(account.seconds.values()) == pytest.approx(one._now)
    assert 0 < account.ettr < 1
    assert account.failures == 25
    assert account.restarts >= 20
    assert min(account.seconds.values()) >= 0


def test_no_side_is_better_than_the_ideal_one():
    found = study.points([(study.setup_of(Scale(16_384)), side) for side in SIDES], Effort(2, 25, 1))
    ettr = {each["side"]: each["ettr"] for each in found}
    assert max(ettr, key=lambda name: ettr[name]) == IDEAL.name
    assert ettr[OURS.name] > ettr[OURS_DISK.name] - 0.02
    assert ettr[OURS.name] > ettr[STOCK_JOB.name] + 0.02


def test_a_schedule_is_played_as_it_stands():
    """Of 5 s half a second is lost since the last save, of 2 s as much, of 4 s a whole one."""
    measured = Measured(0.1, 0.0, 1.5, 0.1, {kind: 4.0 + number for number, kind in enumerate(scheduled.LOOKS)})
    schedule = [Planned(5.0, scheduled.KILLED, 0), Planned(2.0, scheduled.NODE_GONE, 1), Planned(4.0, scheduled.BAD_NODE, 2)]
    one = Scheduled(3, schedule, 3.0, measured)
    one.play()
    seconds = {job.NEW: 12.0, job.LOST: 2.0, scheduled.RESTART: 4.0 + 7.0 + 6.0}
    assert {name: one.account.seconds[name] for name in seconds} == pytest.approx(seconds)
    assert one.account.counted_s == pytest.approx(31.0)
    assert scheduled.decisions(one.verdicts) == ["killed: restart", "hardware-exit: replace_node"]
    assert one.account.restarts == 3


def test_the_account_of_a_real_job():
    """Two rounds of 10 and 3 steps of a second; the second one resumes at step 8, and began 5 s after the failure."""

    def trained(pid, first, until, began_s):
        steps = range(first + 1, until + 1)
        told = [{"pid": pid, "step": step, "saved": step // 4 * 4, "ns": int((began_s + step - first) * 1e9)} for step in steps]
        saved = [{"step": each["step"], "ns": each["ns"] + 10**8} for each in told if each["step"] % 4 == 0]
        return compressed.Round({0: {"pid": pid, "step": first}}, told, saved)

    played = compressed.Played((), [trained(1, 0, 10, 100.0), trained(2, 8, 11, 115.5)], [110.5], 118.5, ())
    assert played.account(1.0) == {job.NEW: 11.0, job.LOST: 2.0, scheduled.RESTART: 5.0, job.SAVES: 0.5}
    assert (played.ready_s(), set(played.steps_s())) == ([0.1, 0.1], {1.0})


def test_what_stock_takes_is_as_published():
    killed = row("restart", "row", "sigkill")["stock"]
    assert killed["phases_s"]["agent"] == pytest.approx(sides.STOCK_EXIT_S, rel=0.25)
    assert killed["median_s"] - killed["phases_s"]["agent"] == pytest.approx(sides.STOCK_START_S, rel=0.25)
    assert row("warm/node_loss", "row", "node")["stock"]["median_s"] == pytest.approx(sides.STOCK_LOST_S, rel=0.25)
    assert published("verdict")["sides"]["stock"]["gone_s"] == pytest.approx(sides.STOCK_ENDS_S, rel=0.25)
    assert row("handlers", "agents", 128)["stock"]["rejoin"] == pytest.approx(sides.STOCK_ROUND_S, rel=0.25)
    stall_s = published("checkpoint_stall")["dcp.async_save"]["stall_s"]
    assert stall_s / 500e6 == pytest.approx(sides.STOCK_SAVE_STALL_S_BYTE, rel=0.25)


# Decisions.


def test_it_is_the_product_that_decides():
    assert decisions.judge is judgement.judge
    leader = decisions.Leader(nodes=64, spares=1)
    look = causes.Look(1.0, {"signal": "SIGABRT", "xids": (79,)})
    verdict = leader.judge(look, decisions.Place(("n7",), ("n8", "n9")), decisions.Moment(100, 0, False))
    assert (verdict.decision.rule, verdict.host) == ("xid-replace", "n7")
    assert leader.ledger.verdicts == (verdict,)


@pytest.mark.parametrize("name", inputs.MIXES)
def test_every_way_is_played_and_wrong_ones_listed(name):
    played = list(decisions.episodes(inputs.MIXES[name]))
    found = study.of_mix(name)
    assert sum(each.share for each in played) == pytest.approx(1.0)
    assert sum(found["shares"].values()) == pytest.approx(1.0, abs=1e-4)
    assert len(found["wrong"]) == sum(bool(each.fault) for each in played)
    # Regressions: no worse than in the published result.
    assert "infrastructure is stopped as code" not in found["shares"]
    assert found["shares"]["right"] >= {"Llama 3": 0.973, "Acme": 0.995, "ByteRobust": 0.987, "Philly": 0.999}[name]
    assert "a bug is restarted more than once" not in found["shares"]


def test_what_is_wrong_is_found():
    right = decisions.Episode("a", "b", Truth.CODE, False, False, 1.0, 1, "stopped as code")
    assert right.fault == ""
    faults = {
        (Truth.CODE, 2, "stopped as code", 0): "a bug is restarted more than once",
        (Truth.NODE, 1, "stopped as code", 0): "infrastructure is stopped as code",
        (Truth.PASSES, 1, "stopped", 0): "infrastructure is given up",
        (Truth.NODE, 12, "kept on", 0): "a bad node stays",
        (Truth.PASSES, 1, "went on", 1): "a good node leaves",
        (Truth.CODE, 1, "stopped as code", 1): "a good node leaves",
        (Truth.NODE, 1, "went on", 0): "",
        (Truth.LIMIT, 2, "stopped as code", 1): "",
    }
    for (truth, restarts, end, wrongly), fault in faults.items():
        assert decisions.Episode("a", "b", truth, False, False, 1.0, restarts, end, wrongly, wrongly).fault == fault


def test_a_causes_looks_add_up_to_one():
    assert {key for mix in inputs.MIXES.values() for _, _, key in mix} <= causes.CAUSES.keys()
    for cause in causes.CAUSES.values():
        assert sum(look.share for look in cause.looks) == pytest.approx(1.0)


def test_every_figure_has_a_source():
    known = ("arXiv", "ATC", "torch", inputs.ASSUMED)
    assert [name for name, _, source in inputs.table() if not any(word in source for word in known)] == []
    totals = {name: sum(count for _, count, _ in mix) for name, mix in inputs.MIXES.items()}
    assert (totals["Llama 3"], totals["Acme"]) == (419, 281 + 404 + 1890)


@pytest.mark.parametrize("nodes", [2, 8, 512])
def test_leaders_of_many_or_few_nodes_decide_alike(nodes):
    found = rounds.one_loss(nodes)
    assert found.decisions == ("Wait", "End", "Conclude", "Seal")
    assert found.ranks == tuple(range(nodes))


# The script.


@pytest.mark.seam
def test_a_short_run(tmp_path: Path):
    options = ("--sizes=64,1024", "--jobs=2", "--failures=3", "--processes=1", "--parts=decisions,checks")
    record = result("simulate.py", tmp_path, *options)
    assert [(each["gpus"], each["side"]) for each in record["sizes"]] == [
        (gpus, side.name) for gpus in (64, 1024) for side in SIDES
    ]
    assert record["decisions"].keys() == inputs.MIXES.keys()
    assert record["checks"]["Meta's formula"]
