"""Replicas that are not equal any more: what is compared, who is named, and what may not be resumed from. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from elastic_ext.base.diagnosis import Response
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.joint_evidence import Difference, Hashed, difference
from elastic_ext.failures.judgement import Circumstances, judge
from elastic_ext.failures.ledger import (
    JobVerdict,
    Ledger,
    Report,
    decode_ledger,
    decode_report,
    decode_verdict,
    encode_ledger,
    encode_report,
    encode_verdict,
)


def hashes(*ranks: str, of: str = "s", every: int = 10) -> list[Hashed]:
    """One text for each rank: its hash after step 10, after step 20 and so on; "." where it is not known."""
    return [
        Hashed(of, len(ranks), every * at, value, (rank,))
        for rank, values in enumerate(ranks)
        for at, value in enumerate(values, 1)
        if value != "."
    ]


def told(found: Difference | None) -> tuple[int, int | None, tuple[int, ...], int] | None:
    return (found.step, found.agreed, found.odd, found.majority) if found is not None else None


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((), None),
        (("a",), None),  # nothing to compare it with
        (("ab", "ab", "ab"), None),
        (("abc", "abx", "abc"), (30, 20, (1,), 2)),
        (("abcd", "abxy", "abcd"), (30, 20, (1,), 2)),  # the first difference counts
        (("abc", "abx"), (30, 20, (0, 1), 0)),
        (("abc", "abx", "aby"), (30, 20, (0, 1, 2), 0)),
        (("abc", "abx", "abc", "abx"), (30, 20, (0, 1, 2, 3), 0)),
        (("abc", "abx", "abc", "aby", "abc"), (30, 20, (1, 3), 3)),
        (("abc", "abx", "ab."), None),  # one is late
        (("abcd", ".bxy", "ab.d"), (40, 20, (1,), 2)),  # compared where all are known
        (("x", "a", "a"), (10, None, (0,), 2)),
        (("xa", "aa", "aa"), (10, None, (0,), 2)),  # never equal: what follows shows nothing
    ],
)
def test_what_differs(ranks, expected):
    assert told(difference(hashes(*ranks))) == expected


def test_a_round_that_is_over_awaits_no_latecomer():
    assert told(difference(hashes("abc", "abx", "ab."), over=True)) == (30, 20, (0, 1), 0)
    assert told(difference(hashes("abc", "abc", "ab."), over=True)) is None


def test_sets_are_compared_separately_once_equal_ones_first():
    never, later, first = hashes("x", "y", of="never"), hashes("aab", "aac", of="later"), hashes("ab", "ac", of="first")
    assert told(difference([*never, *later, *first])) == (20, 10, (0, 1), 0)
    assert told(difference([*never, *later])) == (30, 20, (0, 1), 0)
    assert told(difference(never)) == (10, None, (0, 1), 0)
    assert difference([*hashes("a", of="one"), *hashes("b", of="two")]) is None
    assert difference([Hashed("s", 2, 10, "a", (0,)), Hashed("s", 3, 10, "b", (1,))]) is None  # sets of other sizes


def counted(found: list[Hashed], divided_by: int) -> list[Hashed]:
    """As if another optimizer made a step after every so many of this one."""
    return [dataclasses.replace(each, counted=each.step // divided_by) for each in found]


def test_of_two_optimizers_the_older_difference_comes_first():
    often, rare = counted(hashes("aab", "aac", of="often", every=100), 50), hashes("aab", "aac", of="rare")
    assert told(difference([*often, *rare])) == (300, 200, (0, 1), 0)
    assert difference([*often, *rare]).counted == 4


def test_it_is_said_in_one_line():
    assert difference(hashes("abc", "abx", "abc")).text == (
        "the replica of rank 1 differs from 2 others, which are equal, after step 30 of this round; all were equal after step 20"
    )
    both = difference(hashes("abc", "abx")).text
    assert both == "the replicas of ranks 0, 1 differ after step 30 of this round; all were equal after step 20"
    many = difference(hashes(*[f"a{each}" for each in "bcdefghijk"])).text
    assert "ranks 0 to 9 differ" in many
    assert "not the hardware is to blame but the script" in difference(hashes("a", "b")).text


# The verdict.

RULES = Circumstances(max_restarts=3, nodes=4, min_nodes=3)


def reports(hashed: Iterable[Hashed], nodes: dict[str, tuple[int, ...]], counts_from: int | None = 100, **more):
    """Workers that were ended by their agents. nodes: the ranks of each."""
    ended = {"signal": "SIGKILL", "stopped_by_agent": True, "first_step_done": True, **more}
    hashed = list(hashed)
    return {
        id_: Report(
            f"host-{id_}",
            classify(Evidence(ranks[0], node=f"host-{id_}", **ended)),
            counts_from,
            ranks=ranks,
            hashed=tuple(each for each in hashed if set(each.ranks) <= set(ranks)),
            counts_from=counts_from,
        )
        for id_, ranks in nodes.items()
    }


def judged(*rounds: dict[str, Report], rules: Circumstances = RULES) -> list[JobVerdict]:
    """All records travel as JSON."""
    ledger, verdicts = Ledger(), []
    for number, found in enumerate(rounds, 1):
        received = {id_: decode_report(encode_report(each)) for id_, each in found.items()}
        ledger, verdict = judge(received, decode_ledger(encode_ledger(ledger)), rules, number)
        verdicts.append(decode_verdict(encode_verdict(verdict)))
    return verdicts


THREE = {"a": (0,), "b": (1,), "c": (2,)}


def test_the_odd_ones_node_leaves_another_marks_checkpoints():
    (verdict,) = judged(reports(hashes("abx", "abc", "abc"), THREE))
    decision = verdict.decision
    assert (decision.response, decision.kind, decision.rule) == (Response.REPLACE_NODE, "hardware", "replicas-differ")
    assert (verdict.node, verdict.host, verdict.rank) == ("a", "host-a", 0)
    assert (verdict.refuse_newer, verdict.refused_by) == (120, "b")
    assert verdict.for_node("a", "design").exit_code == 69
    assert verdict.for_node("b", "design").exit_code is None
    assert decision.reason == (
        "the replica of rank 0 differs from 2 others, which are equal, after step 30 of this round; all were equal after step "
        "20, on host-a: checkpoints after step 120 of the job are refused"
    )


def test_two_hosts_restart_once_then_both_are_named():
    found = reports(hashes("abx", "abc"), {"a": (0,), "b": (1,)})
    first, second = judged(found, found, rules=dataclasses.replace(RULES, nodes=2, min_nodes=2))
    assert (first.decision.response, first.decision.kind, first.refuse_newer) == (Response.RESTART, "hardware", 120)
    assert (second.decision.response, second.decision.exit_code) == (Response.STOP, 69)
    assert second.ends_job
    assert second.refuse_newer == 120
    assert second.refused_by in ("a", "b")
    assert "no majority shows which of host-a and host-b is bad: replace them all" in second.decision.reason


def test_the_second_time_only_differing_ones_are_replaced():
    found = reports(hashes("abx", "abc"), {"a": (0,), "b": (1,), "c": (2,)})
    second = judged(found, found)[-1]
    assert [second.for_node(node, "design").exit_code for node in "abc"] == [69, 69, 75]


def test_both_on_one_host_are_its_own():
    (verdict,) = judged(
        reports(hashes("abx", "abc", of="s"), {"a": (0, 1)}), rules=dataclasses.replace(RULES, nodes=1, min_nodes=1)
    )
    assert (verdict.decision.response, verdict.host) == (Response.RESTART, "host-a")
    assert "the job cannot run without it" in verdict.decision.reason


def test_it_comes_before_any_other_cause():
    found = reports(hashes("abx", "abc", "ab."), THREE, signal="SIGSEGV", stopped_by_agent=False)
    (verdict,) = judged(found)
    assert (verdict.decision.rule, verdict.refuse_newer) == ("replicas-differ", 120)
    (verdict,) = judged(reports(hashes("x", "a", "a"), THREE, signal="SIGSEGV", stopped_by_agent=False))  # never equal
    assert (verdict.decision.rule, verdict.refuse_newer, verdict.refused_by) == ("crash", None, "")


def test_checkpoints_are_refused_by_the_slowest_optimizers_steps():
    (verdict,) = judged(reports(counted(hashes("abx", "abc", "abc"), 5), THREE))
    assert verdict.refuse_newer == 104
    assert "all were equal after step 20, on host-a: checkpoints after step 104 of the job are refused" in verdict.decision.reason


def test_without_a_first_step_this_rounds_count():
    (verdict,) = judged(reports(hashes("abx", "abc", "abc"), THREE, counts_from=None))
    assert verdict.refuse_newer == 20
