"""The files that Prometheus and its node exporter read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http import HTTPStatus

import pytest

from elastic_ext.agent.observation import Serving
from elastic_ext.base.settings import Settings
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.http import pages, server

LABELS = {"run_id": "team/job_1", "node": "n0"}


def test_prometheus_finds_an_agent_while_it_runs(tmp_path):
    remove = server.announce(str(tmp_path / "sd"), ("127.0.0.1", 9402), LABELS)
    (file,) = (tmp_path / "sd").iterdir()
    assert file.suffix == ".json"
    assert json.loads(file.read_text()) == [{"targets": ["127.0.0.1:9402"], "labels": LABELS}]
    remove()
    remove()
    assert list((tmp_path / "sd").iterdir()) == []


def test_an_agent_listening_everywhere_is_reached_by_name():
    assert server.target("0.0.0.0", 9401, "node1.cluster") == "node1.cluster:9401"
    assert server.target("::", 9401, "fe80::1") == "[fe80::1]:9401"
    assert server.target("10.0.0.7", 9401, "node1") == "10.0.0.7:9401"
    assert server.target("::1", 9401, "node1") == "[::1]:9401"


@pytest.mark.seam
@pytest.mark.parametrize(
    ("alone", "host", "warned"), [(True, "127.0.0.1", False), (False, "127.0.0.1", True), (False, "0.0.0.0", False)]
)
def test_an_address_that_only_this_host_reaches(tmp_path, caplog, alone, host, warned):
    settings = Settings(metrics_host=host, metrics_port=0, metrics_discovery_dir=str(tmp_path))
    Serving({"/metrics": lambda query: pages.text(HTTPStatus.OK, "")}, settings, LABELS, Wakeup(), alone).close()
    assert ("where only a Prometheus on this host finds this agent" in caplog.text) is warned


@pytest.mark.seam
def test_a_killed_agents_file_goes_with_the_next(tmp_path):
    announce = f"announce({str(tmp_path)!r}, ('::1', 1), {{}})"
    code = f"import os; from elastic_ext.http.server import announce; {announce}; os._exit(1)"
    subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    (left,) = tmp_path.iterdir()
    of_another_host = tmp_path / left.name.replace(server._where(), "elsewhere")
    of_another_host.touch()
    alive = tmp_path / left.name.replace(left.stem.rpartition("_")[2], str(os.getppid()))
    alive.touch()
    server.announce(str(tmp_path), ("127.0.0.1", 2), LABELS)
    assert not left.exists()
    assert of_another_host.exists()
    assert alive.exists()


def test_an_unwritable_directory_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    server.announce(str(tmp_path / "file" / "sd"), ("127.0.0.1", 1), LABELS)()
    assert len(caplog.records) == 1
