"""Write dashboard.json, for Grafana 9 and newer (Dashboards, New, Import). It needs the rules beside it in Prometheus.

python entrypoints/monitoring/dashboard.py [FILE]
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from recording_rules import labelled

HERE = Path(__file__).parent
WIDTH = 24  # columns of Grafana's grid
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
JOB = 'run_id="$run_id"'
WINDOWS = ("1h", "1d", "7d")


@dataclass(frozen=True)
class Panel:
    """A panel. queries: PromQL and legend. unit: as Grafana names it. about: what it shows, for people."""

    title: str
    kind: str
    unit: str
    width: int
    queries: tuple[tuple[str, str], ...]
    about: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]
    height: int = 8


def series(name: str, *matchers: str) -> str:
    return f"{labelled(name)}{{{','.join((JOB, *matchers))}}}"


def of_run(record: str) -> str:
    return f"{record}{{{JOB}}}"


def grown(name: str, by: str, *matchers: str, window: str = "$window") -> str:
    """How much a counter of each agent has grown in the window, summed over the agents."""
    return f"sum by ({by}) (increase({series(name, *matchers)}[{window}]))"


def job_wide(name: str, by: str, *matchers: str) -> str:
    """How much a counter that every agent keeps for the whole job has grown."""
    return f"max by ({by}) (sum by ({by}, job, instance, pod) (increase({series(name, *matchers)}[$window])))"


def mean(name: str, by: str, window: str = "$window") -> str:
    return f"{grown(f'{name}_sum', by, window=window)} / ({grown(f'{name}_count', by, window=window)} > 0)"


def goodput(window: str) -> str:
    everything = grown("goodput_seconds_total", "run_id", 'state!="idle"', window=window)
    return f"{grown('goodput_seconds_total', 'run_id', PRODUCTIVE, window=window)} / ({everything} > 0)"


def stat(title: str, unit: str, expr: str, about: str = "", width: int = 4) -> Panel:
    return Panel(title, "stat", unit, width, ((expr, ""),), about)


def bars(title: str, unit: str, expr: str, legend: str, about: str = "", width: int = 6) -> Panel:
    return Panel(title, "bargauge", unit, width, ((f"sort_desc({expr})", legend),), about)


def lines(title: str, unit: str, *queries: tuple[str, str], about: str = "", width: int = 8) -> Panel:
    return Panel(title, "timeseries", unit, width, queries, about)


PRODUCTIVE = 'state="productive"'
BAD = 'state!~"productive|idle"'
LAST_STEP, LAST_SAVE = (of_run(f"run:elastic_ext_last_{what}_timestamp_seconds:max") for what in ("step", "save"))
STEP = of_run("worker:elastic_ext_worker_step_seconds:mean5m")
WHOLE = f"sum by (le) (increase({series('recovery_whole_seconds_bucket')}[$window]))"
SHARES = (
    f"sum by (state) (rate({series('goodput_seconds_total')}[$__rate_interval])) "
    f"/ on () group_left () (sum(rate({series('goodput_seconds_total')}[$__rate_interval])) > 0)"
)

OVERVIEW = Row(
    "Overview",
    (
        stat("Agents that run", "none", of_run("run:elastic_ext_agents_running:count")),
        stat("Workers", "none", f"max({series('world_size')})"),
        stat("Round", "none", f"max({series('round')})"),
        stat("Last step, ago", "s", f"time() - {LAST_STEP}"),
        stat("Newest checkpoint, age", "s", f"time() - {LAST_SAVE}"),
        stat(
            "Restarts left",
            "none",
            of_run("run:elastic_ext_restarts_left:min"),
            "By the last verdict; a later checkpoint gives them back. Empty before the first, and without a limit.",
        ),
    ),
    height=4,
)
STATE = Row(
    "State",
    (
        lines("Alerts", "none", (f"sum by (alertname, alertstate) (ALERTS{{{JOB}}})", "{{alertname}} {{alertstate}}")),
        lines("Agents by state", "none", (f"sum by (state) ({series('agent_state')})", "{{state}}")),
        lines(
            "Steps per second",
            "none",
            (f"avg(rate({series('worker_steps_total')}[$__rate_interval]))", "steps"),
            about="Of one worker, in the mean.",
        ),
    ),
)
BADPUT = Row(
    "Badput",
    (
        *(
            stat(f"Goodput, {window}", "percentunit", goodput(window), "New steps, of the time of all nodes.")
            for window in WINDOWS
        ),
        bars(
            "Where the time went, most first",
            "s",
            grown("goodput_seconds_total", "state", BAD),
            "{{state}}",
            "Seconds of all nodes in the window, without new steps.",
            width=12,
        ),
        lines("All time, by state", "percentunit", (SHARES, "{{state}}"), width=16),
        stat("Goodput, as the job counts it", "percentunit", f"max({series('goodput_ratio')})", "Since its start.", width=8),
    ),
)
RECOVERIES = Row(
    "Recoveries",
    (
        bars("Mean time by phase", "s", mean("recovery_seconds", "phase"), "{{phase}}", width=8),
        lines(
            "Whole recovery",
            "s",
            *((f"histogram_quantile({share}, {WHOLE})", f"p{share * 100:.0f}") for share in (0.5, 0.9)),
            about="From the failure to the next step of all workers of a node.",
        ),
        lines("Last recovery", "s", (f"max by (node) ({series('last_recovery_seconds')})", "{{node}}")),
        bars("Restarts by cause", "none", job_wide("decisions_total", "kind", 'decision!~"stop|requeue"'), "{{kind}}"),
        bars("Failures by cause, on all nodes that saw one", "none", grown("failures_total", "kind"), "{{kind}}"),
        bars("Decisions", "none", job_wide("decisions_total", "decision, kind"), "{{decision}}: {{kind}}"),
        bars(
            "Starts of workers",
            "none",
            grown("worker_starts_total", "how, reason"),
            "{{how}} {{reason}}",
            "Warm: from a standby. Cold: why not.",
        ),
    ),
)
STRAGGLERS = Row(
    "Stragglers",
    (
        lines(
            "Late ranks and hosts, as a share of a step",
            "percentunit",
            (f"topk(10, max by (host, rank) ({series('straggler_ratio')}))", "{{host}} {{rank}}"),
            about="By how much later than the others they issue the collectives of a step. All ranks wait for the latest.",
        ),
        lines(
            "The latest rank or host, named or not",
            "percentunit",
            (f"max({series('lateness_largest_ratio')})", "share of a step"),
        ),
        lines(
            "Step time",
            "s",
            *((f"{how}({STEP})", how) for how in ("min", "max")),
            (of_run("run:elastic_ext_worker_step_seconds:median5m"), "median"),
        ),
        stat("Refused nodes", "none", f"max({series('refused_nodes')})", width=6),
        lines("Strikes", "none", (f"max by (node) ({series('node_strikes')})", "{{node}}"), width=6),
        stat("Hangs", "none", f"max(increase({series('hangs_total')}[$window]))", width=6),
        lines("Warm standbys", "none", (f"sum by (node) ({series('standbys')})", "{{node}}"), width=6),
    ),
)
CHECKPOINTS = Row(
    "Checkpoints",
    (
        lines("Mean time of a save", "s", (mean("worker_checkpoint_save_seconds", "node"), "{{node}}")),
        lines("Mean time of a load", "s", (mean("worker_checkpoint_load_seconds", "node"), "{{node}}")),
        lines("Failed attempts", "percentunit", (of_run("run:elastic_ext_checkpoint_failures:ratio_increase30m"), "{{what}}")),
        lines(
            "Copied to checkpoint_dir",
            "Bps",
            (f"sum by (node) (rate({series('checkpoint_copied_bytes_total')}[$__rate_interval]))", "{{node}}"),
            width=12,
        ),
        lines("Steps not yet copied", "none", (f"max by (node) ({series('checkpoint_copy_lag_steps')})", "{{node}}"), width=12),
    ),
)
MEMORY = Row(
    "Copies in memory",
    (
        lines("Step of the newest copy", "none", (f"min by (node) ({series('worker_memory_step')})", "{{node}}")),
        lines(
            "Failed attempts in memory",
            "percentunit",
            (of_run("run:elastic_ext_memory_failures:ratio_increase30m"), "{{what}}"),
            about="Copies that workers did not make, and parts that another node does not have.",
        ),
        bars(
            "Copies by outcome",
            "none",
            grown("worker_memory_copies_total", "outcome"),
            "{{outcome}}",
            "Unusable: damaged, or not fitting, when a worker wanted to load it.",
            width=4,
        ),
        stat(
            "Copies lost",
            "none",
            f"max(increase({series('memory_copies_lost_total')}[$window]))",
            "Rounds that resumed from an older checkpoint because no node had some part of the newest copy.",
        ),
    ),
)
ETCD = Row(
    "etcd",
    (
        lines("Calls, 99th percentile", "s", (of_run("agent:elastic_ext_etcd_call_seconds:p99_rate5m"), "{{node}}")),
        lines("Failed calls", "percentunit", (of_run("agent:elastic_ext_etcd_calls_failed:ratio_rate5m"), "{{node}}")),
        lines("Lease left", "s", (f"min by (node) ({series('etcd_lease_left_seconds')})", "{{node}}")),
    ),
)
ROWS = (OVERVIEW, STATE, BADPUT, RECOVERIES, STRAGGLERS, CHECKPOINTS, MEMORY, ETCD)


def place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def panel_json(panel: Panel, number: int, where: dict[str, int]) -> dict[str, object]:
    options: dict[str, object] = {}
    if panel.kind in ("stat", "bargauge"):
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "orientation": "horizontal"}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
                "instant": panel.kind != "timeseries",
                "range": panel.kind == "timeseries",
            }
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def panels() -> list[dict[str, object]]:
    """All panels, each row under its title, from left to right."""
    made: list[dict[str, object]] = []
    y = 0
    for row in ROWS:
        made.append(
            {
                "id": len(made) + 1,
                "title": row.title,
                "type": "row",
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        y, x = y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + row.height
            made.append(panel_json(panel, len(made) + 1, place(x, y, panel.width, row.height)))
            x += panel.width
        y += row.height
    return made


def variables() -> list[dict[str, object]]:
    runs = f"label_values({labelled('agent_state')}, run_id)"
    windows = [{"text": window, "value": window, "selected": window == WINDOWS[0]} for window in WINDOWS]
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "run_id",
            "label": "Job",
            "type": "query",
            "datasource": DATASOURCE,
            "definition": runs,
            "query": {"query": runs, "refId": "run_id"},
            "refresh": 2,  # when the time range changes
            "sort": 1,
        },
        {
            "name": "window",
            "label": "Window",
            "type": "custom",
            "query": ",".join(WINDOWS),
            "current": windows[0],
            "options": windows,
        },
    ]


def dashboard() -> dict[str, object]:
    return {
        "uid": "elastic-ext",
        "title": "elastic_ext",
        "tags": ["elastic_ext", "training"],
        "schemaVersion": 37,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables()},
        "panels": panels(),
    }


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "dashboard.json")
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")
