"""What the scripts of a real job report is on its agent's page, in both formats, and ends with their workers."""

from __future__ import annotations

import os
import signal
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.jobs import AGENT, STOCK, Job, run
from tests.until import LIMIT_S, until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SCRIPT = """
import os, signal, elastic_ext
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
elastic_ext.report(job_loss=attempt + rank / 10)
if attempt == 0 and rank == 1:
    elastic_ext.report(job_first=1)
if not (child := os.fork()):
    elastic_ext.report(job_of_child=1)
    os._exit(0)
os.waitpid(child, 0)
print(f"reported {attempt} {rank} {os.getpid()}", flush=True)
signal.pause()
"""


def of_the_job(url: str, accept: str = "*/*") -> dict[tuple[str, ...], float]:
    """The script's samples, by name, local rank and rank."""
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=LIMIT_S) as answer:
        page = answer.read().decode()
    families = parse_openmetrics(page) if accept == OPENMETRICS else parse_text(page)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("job_")]
    return {(each.name, each.labels["local_rank"], each.labels["rank"]): each.value for each in samples}


@pytest.mark.seam
def test_gauges_end_with_their_workers(tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    command = [*AGENT, "--nproc-per-node=2", "--max-restarts=3", "job.py"]
    with Job(command, tmp_path, ELASTIC_EXT_BACKOFF="0") as job:
        ((url,),) = [each.groups() for each in job.wait_for(r"(http://127\.0\.0\.1:\d+/metrics)")]
        reported = job.wait_for(r"reported 0 \d (\d+)", 2)
        first = {("job_loss", "0", "0"): 0.0, ("job_loss", "1", "1"): 0.1, ("job_first", "1", "1"): 1.0}
        assert of_the_job(url) == of_the_job(url, OPENMETRICS) == first
        os.kill(int(reported[0][1]), signal.SIGKILL)
        job.wait_for(r"reported 1 \d (\d+)", 2)
        until(lambda: of_the_job(url) == {("job_loss", "0", "0"): 1.0, ("job_loss", "1", "1"): 1.1})


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "settings"), [(STOCK, {}), (AGENT, {"ELASTIC_EXT_METRICS_PORT": "off"})])
def test_a_script_that_reports_runs_without_readers(tmp_path, launcher, settings):
    (tmp_path / "job.py").write_text("import elastic_ext\nelastic_ext.report(loss=1)\nprint('reported', flush=True)")
    done = run([*launcher, "--nproc-per-node=2", tmp_path / "job.py"], tmp_path, **settings)
    assert (done.returncode, done.out.count("reported")) == (0, 2), done.all
