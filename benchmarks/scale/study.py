"""Many jobs: means and how sure they are, curves, checks against closed forms, and the decisions on the published mixes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elastic_ext.planning import advice
from elastic_ext.planning.advice import DAY_S, FailureClass, expect
from scale import decisions, inputs, rounds, sides
from scale.inputs import RATES
from scale.job import NEW, NOT_COUNTED, Account, Job, Setup
from scale.sides import IDEAL, OURS, OURS_DISK, OURS_PLANNED, OURS_STRIKES, SIDES, STOCK, Scale, Side

SIZES = (64, 256, 1024, 4096, 16_384, 32_768, 65_536, 131_072)
CURVE_SIZES = (16_384, 131_072)
# Student's quantile for 95 % on both sides, by the number of jobs.
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 12: 2.20, 16: 2.13, 20: 2.09}


@dataclass(frozen=True)
class Effort:
    """How much is simulated: jobs for each point, failures in each, and processes that share the work."""

    jobs: int = 6
    failures: int = 30
    processes: int = 2


def meta_ratio(nodes: int, failures_node_day: float, restart_s: float, every_s: float, save_s: float) -> float:
    """Return the expected ETTR by Meta's formula (arXiv 2410.21680), a first order: it holds while failures cost little.

    failures_node_day: failures of one node in a day. restart_s: u0, from a failure until training goes on. every_s: time from one
    checkpoint to the next. save_s: how long one stalls training.
    """
    rate_s = nodes * failures_node_day / 86400
    return (1.0 - rate_s * (restart_s + every_s / 2)) / (1.0 + save_s / every_s)


def planned(scale: Scale, rate: float) -> advice.Advice:
    """Return what `elastic-ext plan` advises for such a job."""
    job = advice.PlannedJob(
        scale.nodes,
        1000 / rate * DAY_S,
        scale.step_s,
        scale.state_bytes,
        scale.write_bytes_s,
        scale.read_bytes_s,
        every_s=scale.disk_every_s,
    )
    return advice.advise(job)


def setup_of(scale: Scale, rate: float = RATES["Llama 3"].value, spares: int | None = None) -> Setup:
    """Return a job with the spares and the budget that are advised for it."""
    found = planned(scale, rate)
    restarts = int(found.settings["--max-restarts"][0])
    return Setup(scale, rate, spares=found.spares if spares is None else spares, restarts=restarts)


def one(point: tuple[Setup, Side], seed: int, failures: int) -> Account:
    """Run one job."""
    setup, side = point
    return Job(setup, side, seed).run(failures, 0.0)


def points(wanted: Sequence[tuple[Setup, Side]], effort: Effort) -> list[dict[str, Any]]:
    """Return the result of each point."""
    tasks = [(point, seed) for point in wanted for seed in range(effort.jobs)]
    run = partial(_task, failures=effort.failures)
    if effort.processes > 1:
        with ProcessPoolExecutor(effort.processes) as pool:
            accounts = list(pool.map(run, tasks, chunksize=4))
    else:
        accounts = list(map(run, tasks))
    found = [accounts[at : at + effort.jobs] for at in range(0, len(accounts), effort.jobs)]
    return [summary(setup, side, each) for (setup, side), each in zip(wanted, found, strict=True)]


def _task(task: tuple[tuple[Setup, Side], int], failures: int) -> Account:
    return one(*task, failures)


def summary(setup: Setup, side: Side, accounts: Sequence[Account]) -> dict[str, Any]:
    """Return mean, confidence, and the split of what was lost."""
    ratios = [each.ettr for each in accounts]
    off = STUDENT.get(len(ratios), 2.0) * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    counted_s = sum(each.counted_s for each in accounts)
    seconds: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for each in accounts:
        seconds.update(each.seconds)
        wrong.update(each.wrong)
        made.update(each.decisions)
    lost = {name: s / counted_s for name, s in seconds.most_common() if name != NEW and name not in NOT_COUNTED and s > 0}
    ettr, nodes = statistics.mean(ratios), setup.scale.nodes
    return {
        "gpus": setup.scale.gpus,
        "side": side.name,
        "rate": round(setup.rate, 3),
        "spares": setup.spares,
        "ettr": round(ettr, 5),
        "plus_minus": round(off, 5),
        "goodput": round(ettr * nodes / (nodes + (setup.spares or 0)), 5),
        "lost": {name: round(share, 5) for name, share in lost.items()},
        "gpu_hours_lost_a_day": {name: round(share * setup.scale.gpus * 24, 1) for name, share in lost.items()},
        "restarts_a_day": round(sum(each.restarts for each in accounts) / counted_s * DAY_S, 3),
        "failures": sum(each.failures for each in accounts),
        "decisions": dict(made),
        "wrong": dict(wrong.most_common()),
    }


def sizes(effort: Effort, wanted: Iterable[int] = SIZES) -> list[dict[str, Any]]:
    """Return all sides at all sizes."""
    setups = [setup_of(Scale(gpus)) for gpus in wanted]
    return points([(setup, side) for setup in setups for side in SIDES], effort)


def curves(effort: Effort, at: Iterable[int] = CURVE_SIZES) -> dict[str, list[dict[str, Any]]]:
    """Return curves over failure rate, checkpoint interval, spares and detection time, and what two other things change."""
    wanted: list[tuple[str, float | str, Setup, Side]] = []
    for gpus in at:
        scale = Scale(gpus)
        base = setup_of(scale)
        advised = base.spares or 0
        for rate in sorted(each.value for each in RATES.values()):
            wanted += [
                ("failures per 1,000 node-days", round(rate, 2), setup_of(scale, rate), side) for side in (OURS, STOCK, IDEAL)
            ]
        for every_s in (60.0, 300.0, 900.0, 1800.0, 3600.0):
            saved = replace(base, scale=replace(scale, disk_every_s=every_s))
            wanted += [("seconds between checkpoints on disk", every_s, saved, side) for side in (OURS, OURS_DISK, STOCK)]
        for share in (0.0, 0.5, 0.75, 1.0, 1.5):
            wanted.append(("spares, of the advised", share, replace(base, spares=round(share * advised)), OURS))
        for factor in (0.0, 0.1, 0.5, 1.0, 2.0):
            wanted.append(("detection, times as long", factor, replace(base, scale=replace(scale, detect=factor)), OURS))
        for lazy in (False, True):
            name = "connected lazily (NCCLX)" if lazy else "connected as published for NCCL"
            wanted += [("connecting", name, replace(base, scale=replace(scale, lazy=lazy)), side) for side in (OURS, IDEAL)]
        wanted += [("bad nodes", side.name, base, side) for side in (OURS_PLANNED, OURS_STRIKES)]
    found = points([(setup, side) for _, _, setup, side in wanted], effort)
    result: dict[str, list[dict[str, Any]]] = {}
    for (curve, x, _, _), each in zip(wanted, found, strict=True):
        kept = ("gpus", "side", "ettr", "plus_minus", "goodput", "spares", "lost")
        result.setdefault(curve, []).append({"x": x, **{name: each[name] for name in kept}})
    return result


def decided() -> dict[str, dict[str, Any]]:
    """Return what the modules decide on each published mix, and each wrong decision."""
    return {name: of_mix(name) for name in inputs.MIXES}


def of_mix(name: str) -> dict[str, Any]:
    """Return the same for one mix."""
    played = list(decisions.episodes(inputs.MIXES[name]))
    faults: Counter[str] = Counter()
    for each in played:
        faults[each.fault or "right"] += each.share
    wrong = sorted((each for each in played if each.fault), key=lambda each: (each.fault, -each.share))
    return {
        "source": inputs.MIX_SOURCES[name],
        "ways": len(played),
        "shares": {fault: round(share, 6) for fault, share in faults.most_common()},
        "wrong": [_wrong(each) for each in wrong],
    }


def _wrong(each: decisions.Episode) -> dict[str, Any]:
    later = "after further steps each time" if each.progress else "without progress"
    return {
        "fault": each.fault,
        "cause": each.name,
        "shows": each.look,
        "is": each.truth.value,
        "when": "before the first step" if each.at_start else later,
        "share": round(each.share, 6),
        "restarts": each.restarts,
        "nodes_left": each.left,
        "end": each.end,
    }


# Checks.

CHECKED = Side("checked", memory=False)


def against_meta(gpus: int, effort: Effort, restart_s: float = 60.0, every_s: float = 600.0) -> dict[str, float]:
    """Compare with Meta's formula where it holds: losses are small, each restart takes the same, saves do not stall."""
    scale = Scale(gpus, disk_every_s=every_s)
    setup = Setup(scale, RATES["RSC-1"].value, plain=True, phases={"restart": restart_s})
    formula = meta_ratio(scale.nodes, setup.rate / 1000, restart_s, every_s, 0.0)
    return _compared(gpus, formula, setup, effort)


def against_closed_form(gpus: int, effort: Effort, phases: Mapping[str, float], rate: float) -> dict[str, float]:
    """Compare with the planner's closed form, with one class of failures, also where losses are not small."""
    scale = Scale(gpus)
    rate_s = rate / 1000 / DAY_S * scale.nodes
    copies = sides.copies(CHECKED, scale, rate_s)
    failure = FailureClass("a failure", 1.0, phases, copies.disk_s, copies.disk_ready_s)
    expected = expect([failure], rate_s, scale.nodes, copies.stalled)
    return _compared(gpus, expected.productive, Setup(scale, rate, plain=True, phases=phases), effort)


def _compared(gpus: int, formula: float, setup: Setup, effort: Effort) -> dict[str, float]:
    found = statistics.mean(one((setup, CHECKED), seed, effort.failures).ettr for seed in range(effort.jobs))
    return {"gpus": gpus, "formula": round(formula, 5), "simulated": round(found, 5), "off": round(found / formula - 1, 5)}


def against_plan(found: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Compare the plan of each size with jobs that run as planned, which have lasting faults and wrong decisions as well."""
    rows = []
    for each in found:
        if each["side"] == OURS_PLANNED.name:
            plan, simulated = planned(Scale(each["gpus"]), RATES["Llama 3"].value).expected.productive, each["ettr"]
            rows.append(
                {"gpus": each["gpus"], "plan": round(plan, 5), "simulated": simulated, "off": round(simulated / plan - 1, 5)}
            )
    return rows


def leader_cpu(wanted: Iterable[int] = (512, 4096, 16_384)) -> dict[str, float]:
    """Return the processor seconds of a leader for one loss, by the number of nodes."""
    return {str(nodes): round(rounds.one_loss(nodes).cpu_s, 4) for nodes in wanted}
