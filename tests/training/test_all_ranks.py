"""The micro-steps that keep a global batch: pure cases, and jobs with other numbers of ranks."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import pytest

import elastic_ext
from elastic_ext.base.errors import UsageError
from elastic_ext.training import all_ranks
from tests.jobs import AGENT, SCRIPTS, run


@pytest.mark.parametrize(
    ("wanted", "micro_batch", "ranks", "micro_steps", "used"),
    [
        (512, 8, 64, 1, 512),
        (512, 8, 32, 2, 512),
        (512, 8, 1, 64, 512),
        (512, 8, 60, 1, 480),
        (512, 8, 24, 3, 576),  # 384 is 128 away, 576 is 64
        (60, 8, 5, 2, 80),  # as far from 40: the larger
        (8, 8, 4, 1, 32),  # at least one micro-step
        (1, 1, 1, 1, 1),
    ],
)
def test_the_nearest_global_batch(wanted, micro_batch, ranks, micro_steps, used):
    plan = all_ranks.micro_steps_of(wanted, micro_batch, ranks)
    assert (plan.micro_steps, plan.global_batch) == (micro_steps, used)
    assert plan.loss_factor * plan.micro_steps == 1
    assert (f"not {wanted}" in plan.reason) == (used != wanted)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "8", True, None])
@pytest.mark.parametrize("name", ["global_batch", "micro_batch", "ranks"])
def test_what_is_no_whole_number_is_refused(name, wrong):
    arguments = {"global_batch": 8, "micro_batch": 2, "ranks": 2, name: wrong}
    with pytest.raises(UsageError, match=f"{name} is .*, expected a whole number"):
        all_ranks.micro_steps_of(**arguments)


@pytest.fixture
def warned(monkeypatch, caplog):
    """The warnings so far; WORLD_SIZE and a group of this process do not count."""
    monkeypatch.setattr(all_ranks, "_warned", set())
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_present_number_of_ranks(monkeypatch, warned):
    assert elastic_ext.accumulation(12, 2).micro_steps == 6
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert elastic_ext.accumulation(12, 2).micro_steps == 2
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert elastic_ext.accumulation(12, 2).micro_steps == 3
    assert elastic_ext.accumulation(12, 2, ranks=1).micro_steps == 6
    assert warned() == []


def test_a_world_size_that_is_no_number(monkeypatch, warned):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="WORLD_SIZE is 'two'"):
        elastic_ext.accumulation(12, 2)


def test_rank_0_warns_once(monkeypatch, warned):
    monkeypatch.setenv("WORLD_SIZE", "5")
    for rank in ("1", "0", "0"):
        monkeypatch.setenv("RANK", rank)
        assert elastic_ext.accumulation(12, 2).global_batch == 10
    assert warned() == [all_ranks.micro_steps_of(12, 2, 5).reason]
    assert "the global batch is 10, not 12: 1 micro-step of 2 samples on each of 5 ranks" in warned()[0]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_gradient_is_the_global_batchs_mean(tmp_path, kind):
    """Each rank compares the gradient with that of all samples at once; here, losses of 4, 2 and 3 ranks are compared."""
    found = {}
    for ranks in (4, 2, 3):
        done = run(
            [*AGENT, f"--nproc-per-node={ranks}", "--max-restarts=0", SCRIPTS / "accumulating_job.py", kind, "24"], tmp_path
        )
        assert done.returncode == 0, done.all
        assert done.err.count("the global batch is") == 0
        found[ranks] = [float.fromhex(loss) for loss in re.findall(r"loss (\S+)", done.out)]
    assert len(found[4]) == 3
    assert found[2] == pytest.approx(found[4], rel=1e-5)
    assert found[3] == pytest.approx(found[4], rel=1e-5)

    done = run([*AGENT, "--nproc-per-node=4", "--max-restarts=0", SCRIPTS / "accumulating_job.py", kind, "28"], tmp_path)
    assert done.returncode == 0, done.all
    assert done.all.count("the global batch is 32, not 28: 4 micro-steps of 2 samples on each of 4 ranks") == 1
