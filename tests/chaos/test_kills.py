"""The kill loop of `kills`, in its short form; ELASTIC_EXT_TEST_KILLS is the number of kills (`make chaos`: 300 each)."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from tests.jobs import ended

FEW = 4
SHORT = {"etcd": 1405, "c10d": 228}  # seeds whose first cards are a worker, an agent, and two of the rest
KILLS = int(os.environ.get("ELASTIC_EXT_TEST_KILLS", FEW))
SEED = os.environ.get("ELASTIC_EXT_TEST_SEED")

TIMEOUT_S = 600 + 60 * KILLS  # a kill takes 4 s on two cores that have nothing else to do


@pytest.mark.full
@pytest.mark.full("c10d")
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("backend", ["etcd", "c10d"])
def test_a_job_goes_on_as_promised_whatever_is_killed(backend: str, tmp_path: Path) -> None:
    seed = SEED or (random.SystemRandom().randrange(10**6) if KILLS > FEW else SHORT[backend])
    command = [sys.executable, "-m", "tests.chaos.kills", backend, f"--kills={KILLS}", f"--seed={seed}", "--folder", tmp_path]
    loop = ended(command, TIMEOUT_S)
    again = f"{' '.join(map(str, command[1:-1]))} ..."
    assert loop.returncode == 0, f"{loop.err}\nagain: {again}\nhistory and logs: {tmp_path}"
    assert (tmp_path / "history.jsonl").read_text().count('"what": "kill"') == KILLS
