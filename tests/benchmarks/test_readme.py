"""benchmarks/README.md names every script and every result, and its figures are those of the published JSON lines."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import ROOT

BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
README = (BENCHMARKS / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL))
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
PUBLISHED = sorted(path.relative_to(RESULTS).with_suffix("").as_posix() for path in RESULTS.rglob("*.json"))

Rows = Iterator[list[str]]


def seconds(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f} s"


def restart_reliability(record: dict[str, Any]) -> Rows:
    for side in ("ours", "stock"):
        yield [side, *(str(record[side][what]) for what in ("clean", "burned", "hung", "failed", "tries"))]


def restart(record: dict[str, Any]) -> Rows:
    titles = {
        "sigkill": "SIGKILL",
        "early": "SIGKILL in the first second",
        "exit": "`sys.exit(3)`",
        "raise": "`raise RuntimeError`",
        "sigsegv": "SIGSEGV",
        "ignore": "SIGKILL, the other ignores SIGTERM",
        "ddp": "SIGKILL, two steps of DDP",
        "fsdp": "SIGKILL, two steps of FSDP2",
        "eight": "SIGKILL of 1 of 8 workers",
    }
    for row in record["rows"]:
        times = [seconds(row[side]["median_s"]) for side in ("warm", "ours", "stock")]
        yield [titles[row["row"]], *times, f"{row['ratio_warm']:.1f}"]


def node_loss(record: dict[str, Any]) -> Rows:
    titles = {
        "node": "a node is killed with its workers",
        "container": "a container is killed whole",
        "agent": "only the agent is killed",
        "link": "a node's link is cut",
        "join": "a node joins (2 to 3)",
        "rank0": "the node of rank 0 is killed",
        "etcd": "the leader of 3 etcd members is killed",
    }

    def cell(side: dict[str, Any]) -> str:
        if side["median_s"] is not None:
            return f"{seconds(side['median_s'])} ({' + '.join(f'{each:.2f}' for each in side['phases_s'].values())})"
        shown = {
            "nothing": "not in {:.0f} s",
            "job dies": "the job dies after {:.0f} s",
            "trains on": "longest pause {:.2f} s",
        }
        kinds = {kind for kind, _ in side["outcomes"]}
        return "; ".join(shown[kind].format(max(s for each, s in side["outcomes"] if each == kind)) for kind in kinds) or "-"

    for row in record["rows"]:
        yield [titles[row["row"]], *(cell(row[side]) for side in record["tries"])]


def hangs(record: dict[str, Any]) -> Rows:
    titles = {
        "sleep": "ranks in different collectives, asleep (gloo)",
        "spin": "the same, spinning (as NCCL)",
        "stopped": "a rank is stopped by a signal",
        "cut": "two of three hosts cannot reach each other",
    }

    def cell(side: dict[str, Any], limit_s: float) -> str:
        if side["median_s"] is not None:
            return seconds(side["median_s"], 1)
        died_s = side["died_s"]
        return f"the job dies after {max(died_s):.0f} s" if len(died_s) == side["lost"] else f"not in {limit_s:g} s"

    for row in record["rows"]:
        cells = [cell(row[side], row.get("limit_s", 0.0)) for side in ("ours", "stock")]  # an old result has no limit
        yield [titles[row["row"]], *cells, "-" if row["ratio"] is None else f"{row['ratio']:.1f}"]


def rendezvous(record: dict[str, Any]) -> Rows:
    for row in record["rows"]:
        cells = []
        parts = (("ours", "form"), ("sketch", "form"), ("ours", "rejoin"), ("embedded", "form"), ("embedded", "rejoin"))
        for side, part in parts:
            phase = row.get(side, {}).get(part)
            cells.append(seconds(phase["seconds"] if phase else None))
        yield [f"{row['agents']:,}", *cells]


def handlers(record: dict[str, Any]) -> Rows:
    for row in record["rows"]:
        sides = [row.get(side, {}) for side in ("etcd", "embedded", "stock")]
        times = [seconds(side.get(part)) for part in ("form", "rejoin") for side in sides]
        yield [str(row["agents"]), *times, *(f"{side['cpu_ms']:.0f} ms" if side.get("cpu_ms") else "-" for side in sides)]


def steady_state(record: dict[str, Any]) -> Rows:
    for name in ("ours", "stock"):
        side = record[name]
        rates = [f"{sum(side['requests_s'].values()):.1f}", f"{side['bytes_s'] / 1e3:.1f}"]
        yield [name, *rates, *(f"{100 * side[key]:.1f} %" for key in ("client_cpu", "server_cpu"))]


def overhead(record: dict[str, Any]) -> Rows:
    for name in ("ours", "stock"):
        side = record["sides"][name]
        memory = f"{side['standby_mb']:.0f} MB" if side["standby_mb"] is not None else "-"
        yield [name, f"{side['tokens_s']:,.0f}", f"{100 * side['agent_cpu']:.2f} %", memory]
    yield ["ours / stock", f"{record['ratio']:.3f}", "", ""]
    yield ["ours / `metrics=off`", f"{record['ratio_off']:.4f}", "", ""]


def scrape_load(record: dict[str, Any]) -> Rows:
    of_quiet = {"quiet": 1.0, **record["of_quiet"]}
    for name, side in record["sides"].items():
        scrapes = f"{side['scrapes_s']:.0f}" if side["scrapes_s"] is not None else "-"
        yield [name, f"{side['tokens_s']:,.0f}", f"{of_quiet[name]:.3f}", f"{100 * side['agent_cpu']:.1f} %", scrapes]
    yield ["storm / control", f"{record['ratio']:.3f}", "", "", ""]


def own_etcd(record: dict[str, Any]) -> Rows:
    for row, sides in record["rows"].items():
        yield [row, seconds(sides["running"]), seconds(sides["own"]), seconds(record["more_s"][row])]


def verdict(record: dict[str, Any]) -> Rows:
    for name, side in record["sides"].items():
        yield [name, seconds(side["verdict_s"]), seconds(side["gone_s"]), " ".join(side["codes"])]


def code_bug_waste(record: dict[str, Any]) -> Rows:
    for fault, sides in record["rows"].items():
        costs = [sides[name] for name in ("ours", "stock")]
        cells = [[str(cost["returncode"]), str(cost["restarts"]), f"{cost['worker_seconds']:.1f}"] for cost in costs]
        yield [fault, *cells[0], *cells[1]]
    yield ["all bugs, stock / ours", "", "", "", "", "", f"{record['stock_by_ours_worker_seconds']:.1f}"]


def classification(record: dict[str, Any]) -> Rows:
    for kind, row in record["rows"].items():
        yield [kind, f"{row['median_ms']:.2f} ms", f"{row['max_ms']:.2f} ms"]


def checkpoint_stall(record: dict[str, Any]) -> Rows:
    for name in ("torch.save", "dcp.async_save", "elastic_ext"):
        yield [f"`{name}`", seconds(record[name]["stall_s"], 3), seconds(record[name]["whole_s"], 3)]


def checkpoints(record: dict[str, Any]) -> Rows:
    for kind, row in record["rows"]["choose"].items():
        yield [f"choose among {record['count']:,}, {kind}", seconds(row["median_s"], 3)]
    row = record["rows"]["verify"]
    yield [f"read {row['megabytes']} MiB", seconds(row["read_s"], 3)]
    yield ["verify the same", f"{seconds(row['verify_s'], 3)} ({row['verify_by_read']:.2f} times)"]


def memory_tier(record: dict[str, Any]) -> Rows:
    for row in record["cost"]:
        every = "-" if row["way"] == "no saves" else f"{row['every']:.0f}"
        yield [f"{row['way']}, {row['mb']} MB", every, f"{row['throughput']:.2f}", f"{1000 * row['stall_s']:.1f} ms"]
    for row in record["failure"]:
        memory, disk = ([seconds(row[f"{tier}_s"]), str(row[f"{tier}_steps"])] for tier in ("memory", "disk"))
        yield [f"{row['fault']}, {row['nodes']} nodes, {row['mb']} MB", *memory, *disk, f"{row['ratio']:.1f}"]
    for row in record["rates"]:
        speeds = [f"{row[f'{way}_gb_s']:.1f}" for way in ("copy", "out", "back", "socket", "peer")]
        yield [f"{row['mb']} MB", *speeds, *(f"{row[share]:.2f}" for share in ("out_of_copy", "back_of_copy", "peer_of_socket"))]


TABLES: dict[str, Callable[[dict[str, Any]], Rows]] = {
    **{table.__name__: table for table in (restart_reliability, restart, node_loss, hangs, handlers, rendezvous)},
    **{
        table.__name__: table
        for table in (steady_state, overhead, scrape_load, own_etcd, verdict, code_bug_waste, classification)
    },
    **{table.__name__: table for table in (checkpoint_stall, checkpoints, memory_tier)},
}


def shown_rows(name: str) -> list[str]:
    """The rows of one published result, as the page shows them."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    return ["| " + " | ".join(cells) + " |" for cells in TABLES[record["benchmark"]](record)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_a_section_with_a_command_that_it_understands(script: Path):
    section = SECTIONS[script.name]
    assert f"python benchmarks/{script.name}" in section
    row = next(line for line in README.splitlines() if line.startswith(f"| [{script.name}]"))
    options = set(re.findall(r"--[\w-]+", row + section.partition(f"python benchmarks/{script.name}")[2].partition("\n")[0]))
    assert options
    assert not [option for option in options if f'"{option}"' not in script.read_text()]


def test_no_section_is_about_a_script_that_is_gone():
    assert SECTIONS.keys() == {script.name for script in SCRIPTS}


def test_every_result_file_is_named():
    files = [path.relative_to(BENCHMARKS).as_posix() for path in RESULTS.rglob("*") if path.is_file()]
    assert [path for path in files if f"({path})" not in README] == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_figures_are_those_of_the_published_result(name):
    section = SECTIONS[f"{Path(name).name}.py"]
    assert [row for row in shown_rows(name) if row not in section.splitlines()] == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_machine_class_is_that_of_the_published_result(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    machine = record.get("machine", record)  # an old result has it at the top
    device = record.get("device", "cpu")
    which = "no GPU" if device == "cpu" else device.replace("1 x ", "an ")
    assert f"with {machine['cores']} cores and {which}, Python {machine['python']}, torch {machine['torch']}." in README
