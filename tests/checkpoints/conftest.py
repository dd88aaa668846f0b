"""For the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.memory.hosts import Hosts
from tests.checkpoints.rank_groups import RankGroups


@pytest.fixture(scope="session")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroups]:
    """One for all tests: it imports torch first, which takes longer than most of them."""
    with RankGroups(tmp_path_factory.mktemp("ranks") / "stderr") as started:
        yield started


@pytest.fixture(scope="session")
def forking_too(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroups]:
    with RankGroups(tmp_path_factory.mktemp("ranks") / "stderr") as started:
        yield started


@pytest.fixture
def groups(forking: RankGroups) -> Iterator[RankGroups]:
    with forking.lent() as lent:
        yield lent


@pytest.fixture
def successor(forking_too: RankGroups) -> Iterator[RankGroups]:
    """For a group that begins while one of `groups` is there."""
    with forking_too.lent() as lent:
        yield lent


@pytest.fixture
def hosts(tmp_path: Path, groups: RankGroups) -> Hosts:
    """One with two ranks, at first."""
    return Hosts(tmp_path, groups, [2])


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Of the checkpoints of `groups`."""
    return str(tmp_path / "checkpoints")
