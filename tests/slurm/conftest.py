"""Fixtures of the tests with a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import Training


@pytest.fixture
def training(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Training]:
    """What submits entrypoints/slurm/train.sbatch to the module's cluster."""
    with Training(cluster, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Three nodes, for the tests of a module that leave them as they were."""
    with SlurmCluster(3) as made:
        yield made
