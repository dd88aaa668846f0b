"""The times of the phases: the measured ones are those of the published results, the limits are those of the product."""

import json

import pytest

from elastic_ext.hangs import detector
from elastic_ext.planning import advice
from tests.jobs import ROOT


def published(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def row(name: str, key: str, value: object) -> dict:
    return next(each for each in published(name)["rows"] if each[key] == value)


def test_the_measured_times_are_the_published_ones():
    """A new run may differ by a quarter; then the constant is to follow."""
    rates = next(each for each in published("memory_tier")["rates"] if each["mb"] == 1000)
    stall_s = published("checkpoint_stall")["elastic_ext"]["stall_s"]
    idle = published("steady_state")
    assert {
        "EXIT_S": row("restart", "row", "sigkill")["warm"]["phases_s"]["agent"],
        "LOST_S": row("node_loss", "row", "node")["ours"]["phases_s"]["stop"],
        "WARM_START_S": row("warm/node_loss", "row", "node")["warm"]["phases_s"]["start"],
        "REJOIN_S_NODE": row("rendezvous", "agents", 4096)["ours"]["rejoin"]["seconds"] / 4096,
        "VERDICT_S": published("verdict")["sides"]["ours"]["verdict_s"],
        "SAVE_STALL_S_BYTE": stall_s / 500e6,
        "COPY_BYTES_S": rates["out_gb_s"] * 1e9,
        "PEER_BYTES_S": rates["peer_gb_s"] * 1e9,
        "BACK_BYTES_S": rates["back_gb_s"] * 1e9,
        "REQUESTS_S_NODE": sum(idle["ours"]["requests_s"].values()) / idle["agents"],
    } == {
        name: pytest.approx(getattr(advice, name), rel=0.25)
        for name in (
            *("EXIT_S", "LOST_S", "WARM_START_S", "REJOIN_S_NODE", "VERDICT_S", "SAVE_STALL_S_BYTE"),
            *("COPY_BYTES_S", "PEER_BYTES_S", "BACK_BYTES_S", "REQUESTS_S_NODE"),
        )
    }


def test_published_points_are_met_and_never_fall_between():
    points = advice.CONNECTS
    assert [advice.along(points, x) for x, _ in points] == [pytest.approx(y) for _, y in points]
    found = [advice.along(points, x) for x in range(8, 200_000, 997)]
    assert found == sorted(found)
    assert advice.connect_s(8) == advice.CONNECTS[0][1]
    assert advice.connect_s(131_072) > advice.CONNECTS[-1][1]


def test_the_limit_of_a_hang_is_the_detectors():
    assert advice.hang_limit_s(0.5, 64) == detector.WAIT_FLOOR_S[detector.WaitFor.QUEUED]
    assert advice.hang_limit_s(6.0, 131_072) == pytest.approx(detector.CONNECT_S * 131_072)
    assert advice.hang_limit_s(60.0, 64) > advice.hang_limit_s(6.0, 64) > advice.hang_limit_s(0.5, 64)


def test_copies_are_as_frequent_as_the_products():
    every, stall_s, ready_s = advice.copies(5.67e12, 2048, 8, 6.0)
    assert every == 1
    assert stall_s < 0.01 * 6.0
    assert ready_s < 6.0
    assert advice.copies(5.67e12, 32, 8, 6.0)[0] > 10
