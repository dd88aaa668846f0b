"""For the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
