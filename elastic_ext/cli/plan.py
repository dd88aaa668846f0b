"""`elastic-ext plan`: what a job can expect before it runs, and what to set."""

from __future__ import annotations

import argparse
import json
from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from elastic_ext.cli import Commands, print_line
from elastic_ext.planning import advice

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": advice.DAY_S}
MOST = 1_000_000  # nodes
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15}


def add_command(commands: Commands) -> None:
    plan = commands.add_parser("plan", help="estimate the goodput of a job, its spares and its settings")
    plan.description = (
        "Estimate, before a job runs: the share of the time in which it trains (ETTR), what takes the rest, how many spares it "
        "needs, how often to save, the budget and the windows to set, and how much it depends on etcd. A closed form over "
        "published failure rates and our own measurements: the page planning.md says what it assumes."
    )
    for rows, required in ((_REQUIRED, True), (_OPTIONS, False)):
        for name, dest, parse, metavar, text in rows:
            plan.add_argument(name, dest=dest, type=parse, required=required, default=SUPPRESS, metavar=metavar, help=text)
    no_memory = "the script makes no copies in memory (Checkpointer.snapshot)"
    plan.add_argument("--no-memory", dest="memory", action="store_false", help=no_memory)
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 0. Raises UsageError."""
    known = {each.name for each in fields(advice.PlannedJob)}
    given = {name: value for name, value in vars(args).items() if name in known}
    found = advice.advise(advice.PlannedJob(**{"read_bytes_s": args.write_bytes_s, **given}), vars(args).get("target"))
    for line in (json.dumps(as_json(found)),) if args.json else lines(found):
        print_line(line)
    return 0


def as_json(found: advice.Advice) -> dict[str, Any]:
    """Return the plan as JSON values: shares from 0 to 1, times in seconds."""
    return {
        "job": asdict(found.job),
        "failures_per_day": found.job.rate_s * advice.DAY_S,
        "ettr": found.expected.productive,
        "goodput": found.expected.held,
        "lost": dict(found.expected.lost),
        "dominates": found.expected.dominates,
        "spares": found.spares,
        "disk_every_s": found.saves.disk_s,
        "disk_write_s": found.saves.write_s,
        "memory_every_steps": found.saves.memory_steps,
        "hang_limit_s": found.hang_limit_s,
        "settings": {name: {"value": value, "why": why} for name, (value, why) in found.settings.items()},
        "control_plane": dict(found.control_plane),
        "notes": list(found.notes),
    }


def lines(found: advice.Advice) -> list[str]:
    job, expected, saves = found.job, found.expected, found.saves
    between = _time(1 / job.rate_s)
    shown = [
        f"{job.nodes:,} nodes, {job.ranks:,} GPUs: a failure every {between}",
        f"ETTR      {expected.productive:8.2%}  of the job's time is new steps",
        f"goodput   {expected.held:8.2%}  of the time of all {job.nodes + found.spares:,} nodes, {found.spares} spares included",
        "",
        "lost to",
    ]
    ranked = sorted(expected.lost.items(), key=lambda item: -item[1])
    for name, share in ranked:
        if share >= 5e-5:
            shown.append(f"  {name:<18}{share:8.2%}  {_time(share / job.rate_s)} for each failure")
    memory = f"; to memory every {saves.memory_steps} steps" if saves.memory_steps else "; no copies in memory"
    shown += ["", "save", f"  to disk every {_time(saves.disk_s)}, written in {_time(saves.write_s)}{memory}", "", "set"]
    shown += [f"  {f'{name}={value}' if value else name:<28}{why}" for name, (value, why) in found.settings.items()]
    shown += ["", "control plane", *(f"  {name}: {value}" for name, value in found.control_plane.items())]
    return [*shown, "", *found.notes]


def _time(seconds: float) -> str:
    for unit, size in (("d", advice.DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"


def _quantity(units: dict[str, float], default: str, example: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = text.strip().lower()
        unit = next((each for each in sorted(units, key=len, reverse=True) if number.endswith(each)), "")
        try:
            value = float(number.removesuffix(unit)) * units[unit or default]
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text[:60]!r}: expected a number above 0 with its unit, e.g. {example}")
        return value

    return parse


_seconds = _quantity(_SECONDS, "s", "6s, 5min, 2h or 1d")
_bytes = _quantity(_BYTES, "b", "1.2TB")
_days = _quantity({"": advice.DAY_S}, "", "290")


def _rate(text: str) -> float:
    rate = text.strip().removesuffix("/s").removesuffix("/S")
    try:
        if rate.endswith(("Kb", "Mb", "Gb", "Tb", "Pb")):
            raise argparse.ArgumentTypeError("bits")
        return _bytes(rate)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text[:60]!r}: expected bytes per second, e.g. 40GB/s; Gb are bits") from error


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text[:9]) <= MOST:
            raise argparse.ArgumentTypeError(f"{text[:60]!r}: expected a whole number, {least} to {MOST:,}")
        return int(text)

    return parse


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:60]!r}: expected a share, e.g. 0.97 or 97%")
    return value


_count = _number(1)
# Option, field of PlannedJob, type, metavar and help.
_REQUIRED: tuple[tuple[str, str, Callable[[str], object], str, str], ...] = (
    ("--nodes", "nodes", _count, "N", "nodes that the job trains on"),
    ("--mtbf-node-days", "node_mtbf_s", _days, "DAYS", "mean days between two failures of one node"),
    ("--step", "step_s", _seconds, "TIME", "a training step, e.g. 6s"),
    ("--state", "state_bytes", _bytes, "SIZE", "the training state of the whole job, e.g. 1.2TB"),
    ("--storage", "write_bytes_s", _rate, "RATE", "what the storage writes for the job, e.g. 40GB/s"),
)
_OPTIONS: tuple[tuple[str, str, Callable[[str], object], str, str], ...] = (
    ("--storage-read", "read_bytes_s", _rate, "RATE", "what the storage reads for the job; default: as --storage"),
    ("--gpus-per-node", "gpus_per_node", _count, "N", "default: 8"),
    ("--spares", "spares", _number(0), "N", "nodes that wait beside the job; default: as many as are advised"),
    ("--target", "target", _share, "SHARE", "an ETTR to have spares for, e.g. 0.97 or 97%%"),
    ("--repair", "repair_s", _seconds, "TIME", "mean time until a node is back; default: 5.4 days, of a published trace"),
    ("--every", "every_s", _seconds, "TIME", "time between two checkpoints on disk; default: the best"),
    ("--setup", "setup_s", _seconds, "TIME", "what the script does before its first step; default: 10 s, assumed"),
    ("--connect", "connect_s", _seconds, "TIME", "until all ranks are connected; default: as published for NCCL"),
    ("--replaced", "replaced", _share, "SHARE", "failures after which a node leaves; default: 69%%, as in Llama 3's training"),
    ("--lost", "lost", _share, "SHARE", "failures that take a node at once; default: 7.6%%, as in Llama 3's training"),
    ("--hangs", "hangs", _share, "SHARE", "failures that are hangs; default: 9.9%%, as ByteRobust reports"),
    ("--etcd-away", "etcd_away_s", _seconds, "TIME", "how long etcd is away, once in 30 days; default: 5 min, assumed"),
)
