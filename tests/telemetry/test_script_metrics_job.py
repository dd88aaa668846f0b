"""What the scripts of a real job count is on its agent's page, over restarts, and in both formats."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.jobs import AGENT, SCRIPTS, STOCK, Job, run
from tests.until import LIMIT_S, until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def page(url: str, accept: str = "*/*") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=LIMIT_S) as answer:
        return answer.read().decode()


def of_the_job(url: str) -> dict[tuple[str, ...], float]:
    """The script's samples, by name and label values, the same in both formats but for what changes meanwhile."""
    families = [*parse_text(page(url))]
    list(parse_openmetrics(page(url, OPENMETRICS)))
    return {
        (each.name, *(value for _, value in sorted(each.labels.items()))): each.value
        for family in families
        for each in family.samples
        if each.name.startswith("job_")
    }


SUMMED = ("job_steps_total", "job_items_total", "job_step_seconds_count", "job_step_seconds_sum", "job_step_seconds_bucket")


@pytest.mark.seam
@pytest.mark.parametrize(
    ("loader", "standby"),
    [("fork", "off"), pytest.param("torch", "off", marks=pytest.mark.full), pytest.param("torch", "on", marks=pytest.mark.full)],
)
def test_counters_outlive_a_restart_gauges_do_not(tmp_path, loader, standby):
    command = [*AGENT, "--nproc-per-node=2", "--max-restarts=3", SCRIPTS / "metrics_job.py", loader]
    with Job(command, tmp_path, ELASTIC_EXT_BACKOFF="0", ELASTIC_EXT_STANDBY=standby) as job:
        (found,) = job.wait_for(r"http://127\.0\.0\.1:\d+/metrics")
        counted = job.wait_for(r"counted 0 (\d) (\d+) \w+", 2)
        before = of_the_job(found[0])
        assert before == {
            ("job_steps_total",): 16,
            ("job_items_total", "train"): 16,
            ("job_loss", "0", "0"): 0,
            ("job_loss", "1", "1"): 0.1,
            ("job_step_seconds_bucket", "0.1"): 0,
            ("job_step_seconds_bucket", "1.0"): 16,
            ("job_step_seconds_bucket", "+Inf"): 16,
            ("job_step_seconds_count",): 16,
            ("job_step_seconds_sum",): 8,
        }
        if standby == "on":  # else the standbys, whose server starts with the job, are not there yet
            until(lambda: "elastic_ext_standbys 2.0" in page(found[0]))
        last, twice = before, {key: 2 * value for key, value in before.items()}
        twice |= {("job_loss", "0", "0"): 1, ("job_loss", "1", "1"): 1.1}

        def counted_twice() -> bool:
            nonlocal last
            last, earlier = of_the_job(found[0]), last
            assert not [key for key in earlier if key[0].startswith(SUMMED) and last.get(key, 0) < earlier[key]]
            assert not [key for key in last if key[0] == "job_loss" and last[key] not in (0, 0.1, 1, 1.1)]
            return last == twice

        os.kill(int(counted[0][2]), signal.SIGKILL)
        until(counted_twice, limit_s=240)
        again = job.wait_for(r"counted 1 \d \d+ (\w+)", 2)
        assert {each[1] for each in again} == {"True" if standby == "on" else "False"}
        assert of_the_job(found[0]) == twice
        check(page(found[0]))


def check(text: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False)
        assert [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("job_")] == []


@pytest.mark.full
def test_a_script_that_counts_runs_under_stock_torchrun(tmp_path):
    (tmp_path / "job.py").write_text(
        "from elastic_ext import metrics\nmetrics.counter('job_steps', 'Steps.').inc()\nprint('counted', flush=True)"
    )
    done = run([*STOCK, "--nproc-per-node=2", tmp_path / "job.py"], tmp_path)
    assert (done.returncode, done.out.count("counted")) == (0, 2), done.all


@pytest.mark.full
def test_nothing_is_read_without_a_reader(tmp_path):
    (tmp_path / "job.py").write_text("import os; print(sorted(__import__('json').loads(os.environ['ELASTIC_EXT_WORKER'])))")
    done = run([*AGENT, tmp_path / "job.py"], tmp_path, ELASTIC_EXT_METRICS="off")
    assert "'agent'" in done.out, done.all
    assert "'metrics'" not in done.out
