"""Write recording_rules.yml: each series of an agent with run_id and node, and what the alerts and the dashboard use of them.

    python entrypoints/monitoring/recording_rules.py [FILE]

A counter is labelled before any increase() looks at it. So what an agent counted stays that of its job when the agent is gone,
and when the agent of another job has taken its port.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

# What distinguishes one agent from another. `pod` is empty outside Kubernetes.
AGENT = "job, instance, pod"
NEWEST = "agent:elastic_ext_info:newest"

GAUGES = (
    *("agent_state", "round", "world_size", "restarts_charged", "max_restarts", "node_strikes", "refused_nodes"),
    *("last_recovery_seconds", "standbys", "goodput_ratio", "checkpoint_copy_lag_steps"),
    *("straggler_seconds", "straggler_ratio", "lateness_largest_ratio"),
    *("worker_info", "worker_last_step_timestamp_seconds", "worker_last_save_timestamp_seconds"),
    "worker_memory_step",
)
COUNTERS = (
    *("restarts_total", "failures_total", "decisions_total", "hangs_total", "goodput_seconds_total", "worker_starts_total"),
    *("recovery_seconds_sum", "recovery_seconds_count", "recovery_whole_seconds_bucket"),
    *("worker_steps_total", "worker_step_seconds_sum", "worker_step_seconds_count", "worker_checkpoint_saves_total"),
    *("worker_checkpoint_save_seconds_sum", "worker_checkpoint_save_seconds_count"),
    *("worker_checkpoint_load_seconds_sum", "worker_checkpoint_load_seconds_count"),
    *("checkpoint_copies_total", "checkpoint_copied_bytes_total"),
    *("worker_memory_copies_total", "worker_memory_parts_total", "memory_copies_lost_total"),
    *("etcd_calls_total", "etcd_reconnects_total", "etcd_call_seconds_bucket"),
)


@dataclass(frozen=True)
class Rule:
    """A recording rule. labels: added to what it records."""

    record: str
    expr: str
    labels: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        expr = "\n".join(f"          {line.strip()}" for line in self.expr.strip().splitlines())
        labels = "".join(f"\n          {name}: {value}" for name, value in self.labels)
        return f"      - record: {self.record}\n        expr: |\n{expr}" + (f"\n        labels:{labels}" if labels else "")


def labelled(name: str) -> str:
    """The recorded series of elastic_ext_NAME, with run_id and node."""
    return f"agent:elastic_ext_{name}:labelled"


def with_job(series: str) -> str:
    """The series with run_id and node, which are either labels of the target, or those of the agent's elastic_ext_info."""
    own = series.format('{run_id!=""}')
    return f"{own}\nor\n{series.format('{run_id=' + chr(34) * 2 + '}')} * on ({AGENT}) group_left (run_id, node) {NEWEST}"


def kept(name: str, record: str) -> Rule:
    """The newest of these times that has been seen while the job has agents: a worker that has just started shows none."""
    return Rule(
        record,
        f"max by (run_id) ({labelled(name)} or {record})\nand on (run_id) run:elastic_ext_agents:count",
    )


def last_time(grows: str, record: str) -> Rule:
    """When this was last above 0, while the job has agents."""
    return Rule(
        record,
        f"time() * (max by (run_id) ({grows}) > bool 0) > 0\nor\n{record} and on (run_id) run:elastic_ext_agents:count",
    )


LEASE = "elastic_ext_etcd_lease_expiry_timestamp_seconds{0}"
LABELLED = (
    Rule(NEWEST, f"topk by ({AGENT}) (1, timestamp(elastic_ext_info)) > bool 0"),
    *(Rule(labelled(name), with_job(f"elastic_ext_{name}{{0}}")) for name in GAUGES),
    *(Rule(labelled(name), with_job(f"elastic_ext_{name}{{0}}")) for name in COUNTERS),
    # Also what agents have left: when they ended.
    # Left at the scrape, not now: the agent has extended the lease since.
    Rule("agent:elastic_ext_etcd_lease_left_seconds:labelled", with_job(f"({LEASE} - timestamp({LEASE}))")),
)

STATE, RESTARTS, STARTS = labelled("agent_state"), labelled("restarts_total"), labelled("worker_starts_total")
DECISIONS = labelled("decisions_total")
HANGS = labelled("hangs_total")
SAVES, COPIES = labelled("worker_checkpoint_saves_total"), labelled("checkpoint_copies_total")
IN_MEMORY, PARTS = labelled("worker_memory_copies_total"), labelled("worker_memory_parts_total")
STEP_SUM, STEP_COUNT = labelled("worker_step_seconds_sum"), labelled("worker_step_seconds_count")
CALLS, CALL_SECONDS = labelled("etcd_calls_total"), labelled("etcd_call_seconds_bucket")
MEAN, MEDIAN = "worker:elastic_ext_worker_step_seconds:mean5m", "run:elastic_ext_worker_step_seconds:median5m"
FAILED_SAVES = "run:elastic_ext_checkpoint_failures:ratio_increase30m"
FAILED_IN_MEMORY = "run:elastic_ext_memory_failures:ratio_increase30m"
GOODPUT = labelled("goodput_seconds_total")


def failed_share(counter: str) -> str:
    failed = counter + '{outcome="failed"}'
    return f"sum by (run_id) (increase({failed}[30m]))\n/ (sum by (run_id) (increase({counter}[30m])) > 0)"


OF_JOBS = (
    Rule("run:elastic_ext_agents:count", f'count by (run_id) ({STATE}{{state!="ended"}} == 1)'),
    Rule("run:elastic_ext_agents_running:count", f'count by (run_id) ({STATE}{{state="running"}} == 1)'),
    # An agent on which nothing has failed counts a restart as one of membership, unless a node was lost; on ext_etcd it knows the
    # verdict, too.
    Rule(
        "run:elastic_ext_restarts:increase15m",
        "max by (run_id) (\n"
        + "\nor\n".join(
            f'label_replace(sum by (run_id, {AGENT}) (increase({counter}[15m])), "of", "{of}", "", "")'
            for of, counter in (
                ("restarts", f'{RESTARTS}{{kind!="membership"}}'),
                ("verdicts", f'{DECISIONS}{{decision!~"stop|requeue"}}'),
            )
        )
        + "\n)",
    ),
    Rule(
        "run:elastic_ext_restarts_left:min",
        f"min by (run_id) ({labelled('max_restarts')} - {labelled('restarts_charged')})",
    ),
    # Of a restart after a failure, up to 2 minutes late: that is how far it looks back.
    last_time(f'increase({RESTARTS}{{kind!="membership"}}[2m])', "run:elastic_ext_last_restart_timestamp_seconds:max"),
    # Of the end of a hang, up to 2 minutes late.
    last_time(f"increase({HANGS}[2m])", "run:elastic_ext_last_hang_timestamp_seconds:max"),
    # Of workers, up to 2 minutes late. The first scrape of an agent may already show its starts.
    last_time(
        f"increase({STARTS}[2m]) > 0 or ({STARTS} > 0 unless {STARTS} offset 2m)",
        "run:elastic_ext_last_start_timestamp_seconds:max",
    ),
    kept("worker_last_step_timestamp_seconds", "run:elastic_ext_last_step_timestamp_seconds:max"),
    kept("worker_last_save_timestamp_seconds", "run:elastic_ext_last_save_timestamp_seconds:max"),
    Rule(FAILED_SAVES, failed_share(SAVES), (("what", "save"),)),
    Rule(FAILED_SAVES, failed_share(COPIES), (("what", "copy"),)),
    Rule(FAILED_IN_MEMORY, failed_share(IN_MEMORY), (("what", "copy"),)),
    Rule(FAILED_IN_MEMORY, failed_share(PARTS), (("what", "transfer to another node"),)),
    Rule(MEAN, f"rate({STEP_SUM}[5m]) / (rate({STEP_COUNT}[5m]) > 0)"),
    Rule(MEDIAN, f"quantile by (run_id) (0.5, {MEAN})"),
    Rule(
        "agent:elastic_ext_etcd_calls_failed:ratio_rate5m",
        f'sum by (run_id, node, {AGENT}) (rate({CALLS}{{outcome="failed"}}[5m]))\n'
        f"/ (sum by (run_id, node, {AGENT}) (rate({CALLS}[5m])) > 0)",
    ),
    Rule(
        "agent:elastic_ext_etcd_call_seconds:p99_rate5m",
        f"histogram_quantile(0.99, sum by (run_id, node, {AGENT}, le) (rate({CALL_SECONDS}[5m]))) >= 0",
    ),
    # Above a second. An agent makes some hundred calls in this time: one slow one alone is their 99th percentile.
    Rule(
        "agent:elastic_ext_etcd_slow_calls:increase5m",
        f'sum by (run_id, node, {AGENT}) (increase({CALL_SECONDS}{{le="+Inf"}}[5m]))\n'
        f'- sum by (run_id, node, {AGENT}) (increase({CALL_SECONDS}{{le=~"1|1.0"}}[5m]))',
    ),
)
SLOW = (
    Rule("run_state:elastic_ext_goodput_seconds:increase1h", f"sum by (run_id, state) (increase({GOODPUT}[1h]))"),
    Rule(
        "run:elastic_ext_goodput_seconds:increase1h",
        'sum by (run_id) (run_state:elastic_ext_goodput_seconds:increase1h{state!="idle"})',
    ),
    Rule(
        "run:elastic_ext_goodput:ratio_increase1h",
        'sum by (run_id) (run_state:elastic_ext_goodput_seconds:increase1h{state="productive"})\n'
        "/ (run:elastic_ext_goodput_seconds:increase1h > 0)",
    ),
)

HEAD = """\
# Made by recording_rules.py; change that, not this.
# Load it into Prometheus beside alert_rules.yml. Names: level:metric:operations, as Prometheus' guide has them.
# level: agent = one agent (run_id, node, job, instance), worker = one worker of it, run = one job (run_id).
groups:
"""


def text() -> str:
    groups = (("elastic_ext", "", (*LABELLED, *OF_JOBS)), ("elastic_ext_goodput", "\n    interval: 1m", SLOW))
    blocks = (
        f"  - name: {name}{interval}\n    rules:\n" + "\n".join(rule.text() for rule in rules) for name, interval, rules in groups
    )
    return HEAD + "\n".join(blocks) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "recording_rules.yml").write_text(text())
