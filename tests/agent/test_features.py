"""Which features of the agent are on, that each is what its row says, and what a bare job loads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ext.agent import feature
from elastic_ext.agent.feature import Feature
from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.features.row import AgentFacts
from elastic_ext.features.table import FEATURES
from tests.jobs import SCRIPTS, run

BARE = ["stragglers", "hangs"]  # of two workers on one machine, with no setting


def on(**settings: Any) -> list[str]:
    facts: dict[str, Any] = {"one_machine": True, "workers": 2}
    facts |= {name: settings.pop(name) for name in ("one_machine", "workers", "nccl") if name in settings}
    return [row.name for row in FEATURES if row.on(AgentFacts(Settings(**settings), **facts))]


def test_a_bare_job_needs_two():
    assert on() == BARE


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({"checkpoint_dir": "/c"}, {"resume", "record of saves"}),
        ({"checkpoint_dir": "/c", "local_dir": "/l"}, {"resume", "record of saves", "copies to checkpoint_dir"}),
        ({"one_machine": False}, {"drains"}),
        ({"one_machine": False, "checkpoint_dir": "/c"}, {"resume", "record of saves", "drains with checkpoint_dir"}),
        ({"integrity_every": 10}, {"integrity"}),
        ({"nccl": True}, {"hangs with NCCL"}),
    ],
)
def test_what_turns_a_feature_on(given, more):
    assert set(on(**given)) - set(BARE) == more


@pytest.mark.parametrize(
    ("given", "off"),
    [
        ({"workers": 1}, "stragglers"),
        ({"stragglers": "off"}, "stragglers"),
        ({"hang_timeout": 0.0}, "hangs"),
        ({"nccl": True}, "hangs"),
    ],
)
def test_what_turns_a_feature_off(given, off):
    assert off not in on(**given)


def test_one_worker_of_several_nodes_is_compared():
    assert "stragglers" in on(workers=1, one_machine=False)


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_each_row_names_a_feature(row):
    assert issubclass(feature.class_of(row), Feature)


def test_a_feature_refuses_its_settings():
    with pytest.raises(UsageError, match="local_dir is set but checkpoint_dir is not"):
        feature.load(AgentFacts(Settings(local_dir="/l")))


def test_a_job_on_one_machine_is_known():
    from elastic_ext.embedded import one_machine

    assert one_machine.OneMachine.__module__ == feature.ONE_MACHINE


@pytest.mark.seam
def test_a_bare_job_loads_no_feature_more(tmp_path: Path) -> None:
    """Through a failure, a restart and its end: nothing is imported late, either."""
    loaded = tmp_path / "loaded"
    (tmp_path / "job.py").write_text("import os, sys; sys.exit(1 - int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    command = [sys.executable, str(SCRIPTS / "modules_of_agent.py"), "--nproc-per-node=1", "--max-restarts=1", "job.py"]
    done = run(command, tmp_path, LOADED=str(loaded))
    assert done.returncode == 0, done.all
    found = set(loaded.read_text().split())
    facts = AgentFacts(Settings(), one_machine=True, nccl=torch.distributed.is_nccl_available())
    for row in FEATURES:
        loads = f"elastic_ext.features.{row.where.partition(':')[0]}" in found
        assert row.on(facts) <= loads <= row.name.startswith("hangs"), row.name
    assert not {name for name in found if name.startswith("elastic_ext.checkpoints")}
    asked_for = ("events.output", "failures.slurm", "failures.user_rules", "features.stragglers.decide", "workers.standby.pool")
    assert not found & {f"elastic_ext.{name}" for name in asked_for}
