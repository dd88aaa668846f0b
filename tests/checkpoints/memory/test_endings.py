"""Copies in memory at the end of training, by real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ext.checkpoints.formats.manifest import order_or_oldest
from tests.checkpoints.memory.hosts import Hosts
from tests.checkpoints.rank_groups import RankGroups

pytestmark = pytest.mark.full


def test_ranks_end_together_although_one_has_left_out_the_last_copy(tmp_path: Path, groups: RankGroups) -> None:
    """The others wait in it for that rank, and that rank for them, at a barrier of the script."""
    hosts = Hosts(tmp_path, groups, [1, 1])
    results = hosts.task("left_out", {"timeout_s": 30})
    assert all(result["next"] is not None for result in results)
    assert "no more copies in memory" not in groups.stderr.read_text()
    assert order_or_oldest(hosts.newest())[1] == 3
