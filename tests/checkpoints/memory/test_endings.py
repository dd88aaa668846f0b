"""Copies in memory at the end of training, by real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ext.checkpoints.formats.candidates import order_or_oldest
from tests.checkpoints.memory.hosts import Hosts
from tests.checkpoints.rank_groups import RankGroups

pytestmark = pytest.mark.full


def test_ranks_end_together_although_one_skipped_a_copy(tmp_path: Path, groups: RankGroups) -> None:
    """The others wait in it for that rank, and that rank for them, at a barrier of the script. A second end waits for nobody."""
    hosts = Hosts(tmp_path, groups, [1, 1])
    results = hosts.task("left_out", {"timeout_s": 30})
    assert not any(result["lost"] for result in results)
    logged = groups.stderr.read_text()
    assert "no more copies in memory" not in logged
    assert "given up" not in logged
    assert order_or_oldest(hosts.newest())[1] == 3


def test_no_rank_waits_for_a_failed_exchange(tmp_path: Path, groups: RankGroups) -> None:
    """It leaves the group, so the others fail, too, long before the timeout."""
    results = Hosts(tmp_path, groups, [1, 1, 1]).task("exchange_fails", {"error": True, "timeout_s": 3600})
    assert [result["due"] for result in results] == [None] * 3
    logged = groups.stderr.read_text()
    assert logged.count("no more copies in memory: ") == 3
    assert "given up" not in logged


def test_the_end_waits_for_a_copy_limitedly(tmp_path: Path, groups: RankGroups) -> None:
    results = Hosts(tmp_path, groups, [1, 1, 1]).task("exchange_fails", {"error": False, "timeout_s": 3600})
    assert None not in results
    assert groups.stderr.read_text().count("the last copy in memory is given up: it has not ended within 0.5 s") == 3
