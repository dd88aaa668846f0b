"""What is advised for a job."""

from dataclasses import replace

import pytest

from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.planning import advice
from elastic_ext.planning.advice import DAY_S, PlannedJob, advise, classes_of, saves_of

JOB = PlannedJob(2048, 264 * DAY_S, 6.0, 5.67e12, 160e9, 160e9)
SETTINGS = Settings()


def test_the_classes_are_all_failures():
    for job in (JOB, replace(JOB, memory=False), replace(JOB, replaced=0.0, lost=0.0, hangs=0.0), replace(JOB, together=0.0)):
        classes = classes_of(job, saves_of(job), SETTINGS)
        assert sum(each.share for each in classes) == pytest.approx(1.0)
        assert sum(each.share for each in classes if each.replaces) == pytest.approx(job.replaced + job.lost)


def test_shares_of_more_than_all_failures_are_refused():
    with pytest.raises(UsageError, match="add up to 1"):
        advise(replace(JOB, replaced=0.8, lost=0.2, hangs=0.1))


def test_copies_in_memory_save_steps():
    with_copies, without = advise(JOB), advise(replace(JOB, memory=False))
    assert with_copies.expected.productive > without.expected.productive
    assert without.saves.memory_steps == 0
    assert "memory_every" not in without.settings


def test_rare_failures_need_rarer_copies():
    """The product copies as often as the cost allows, whatever the rate of failures is."""
    rare = advise(replace(JOB, nodes=128, state_bytes=JOB.state_bytes / 16, write_bytes_s=10e9))
    assert rare.saves.memory_steps > advise(JOB).saves.memory_steps
    assert "more often costs more" in rare.settings["memory_every"][1]


def test_others_have_the_storage_most_of_the_time():
    found = advise(JOB)
    assert found.saves.disk_s == pytest.approx(found.saves.write_s / advice.STORAGE_SHARE)
    assert advise(replace(JOB, every_s=120.0)).saves.disk_s == 120.0


def test_spares_are_those_for_the_target():
    lower, higher = advise(JOB, 0.95), advise(JOB, 0.98)
    assert lower.spares < higher.spares
    assert lower.expected.productive >= 0.95 > advise(replace(JOB, spares=lower.spares - 1)).expected.productive
    assert higher.expected.productive >= 0.98
    assert advise(replace(JOB, spares=3)).spares == 3


def test_a_target_out_of_reach_is_named():
    notes = advise(JOB, 0.9999).notes
    assert any("99.99% is out of reach" in note for note in notes)
    assert not any("out of reach" in note for note in advise(JOB, 0.95).notes)


def test_what_limits_is_named():
    large = advise(replace(JOB, nodes=16_384, state_bytes=45e12, write_bytes_s=10e12, read_bytes_s=10e12))
    assert large.expected.dominates == advice.CONNECT
    text = "\n".join(large.notes)
    assert "the greatest loss: connect" in text
    assert "a hang is noticed after 1311 s" in text
    assert "extrapolated" in text
    assert "--connect" in text
    assert not any("a hang is noticed" in note for note in advise(replace(JOB, nodes=64, state_bytes=1e11)).notes)


def test_the_settings_exist():
    fields = set(Settings.__dataclass_fields__)
    for name in advise(JOB).settings:
        assert name.startswith("--") or name in fields, name
    assert int(advise(JOB).settings["--max-restarts"][0]) >= 1


def test_an_outage_of_etcd_costs_waiting_failures():
    def waits(job: PlannedJob) -> str:
        return advise(job).control_plane["an outage of etcd"]

    assert waits(JOB) != waits(replace(JOB, etcd_away_s=3600.0))
    assert "0 failures" in waits(replace(JOB, etcd_outages_s=0.0))


def test_a_single_nodes_copies_go_with_it():
    """It saves to disk as often as its losses ask for, not as if another node had its copies."""
    alone = replace(JOB, nodes=1, state_bytes=1e11, node_mtbf_s=DAY_S)
    one, two = saves_of(alone), saves_of(replace(alone, nodes=2, node_mtbf_s=2 * DAY_S, gpus_per_node=4))
    assert one.disk_s < 0.5 * two.disk_s
    taken = [each for each in classes_of(alone, one, SETTINGS) if each.replaces]
    assert {each.every_s for each in taken} == {one.disk_s}


def test_a_constantly_failing_job_is_refused():
    """A rate in place of the time between failures. The sum for the budget would take for ever."""
    with pytest.raises(UsageError, match="expected 1 at most; --mtbf-node-days"):
        advise(replace(JOB, node_mtbf_s=1e-6))
    advise(replace(JOB, node_mtbf_s=JOB.nodes * 1.01))
