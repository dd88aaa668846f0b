"""Two nodes that cannot reach each other: who they are, what the job's verdict says of them, and which one leaves. Pure."""

import dataclasses
import itertools
from collections.abc import Iterable

import pytest

from elastic_ext.base.diagnosis import Response
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.failures.joint_evidence import NO_RANK, Reach, Silent, choose_cut, find_cuts, unanswered
from elastic_ext.failures.judgement import Circumstances, Lost, judge
from elastic_ext.failures.ledger import (
    Ledger,
    Report,
    decode_ledger,
    decode_report,
    decode_verdict,
    encode_ledger,
    encode_report,
    encode_verdict,
)
from elastic_ext.hangs import detector

ORDER = {"a": 0, "b": 2, "c": 4, "d": 6}
HOSTS = {id_: f"host-{id_}" for id_ in ORDER}
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "d": "fd00::4"}


def reaches(**silent: str) -> dict[str, Reach]:
    """Those of ORDER. silent: the names of the nodes from which one gets no answer, or addresses."""
    return {
        id_: Reach((address,), tuple(Silent(ORDER[id_], ADDRESSES.get(each, each), 20.0) for each in silent.get(id_, "").split()))
        for id_, address in ADDRESSES.items()
    }


@pytest.mark.parametrize(
    ("silent", "pairs", "leaves"),
    [
        ({}, [], None),
        ({"b": "c"}, ["bc"], "c"),
        ({"c": "b"}, ["bc"], "c"),  # it does not matter which of the two has noticed
        ({"b": "c", "c": "b"}, ["bc"], "c"),
        ({"a": "d"}, ["ad"], "d"),
        ({"b": "52.1.2.3"}, [], None),  # an object store
        ({"b": "10.0.0.2"}, [], None),  # itself
        ({"b": "c", "a": "b"}, ["ab", "bc"], "b"),  # b has two cuts
        ({"b": "a", "c": "a", "d": "a"}, ["ab", "ac", "ad"], "a"),  # even the first one
        ({"a": "b", "c": "d"}, ["ab", "cd"], "d"),
    ],
)
def test_the_pairs_and_who_leaves(silent, pairs, leaves):
    found = find_cuts(reaches(**silent))
    assert sorted("".join(sorted(cut.pair)) for cut in found) == pairs
    if leaves is not None:
        cut, node = choose_cut(found, ORDER, HOSTS)
        assert node == leaves
        assert node in cut.pair
        assert choose_cut(found[::-1], ORDER, HOSTS) == (cut, node)


def test_of_a_silent_pair_the_longer_waiter_reports():
    found = reaches(b="c", c="b")
    longer = Silent(4, ADDRESSES["b"], 25.0)
    assert find_cuts({**found, "c": Reach((ADDRESSES["c"],), (longer,))})[0].silent == longer


def test_an_address_of_two_nodes_names_neither():
    """Of a bridge that every host has, or of two agents on one host."""
    found = reaches(a="b")
    assert not find_cuts({**found, "c": Reach((ADDRESSES["b"],))})


# The verdict.


def reports(found: dict[str, Reach], resumed_at: int | None = 0, **more) -> dict[str, Report]:
    """All workers wait in a collective."""
    waits = {"hang": True, "hang_reason": "it waits", "hang_blame": (2, 5, 0, 2), "step": 5, **more}
    evidence = {id_: Evidence(ORDER[id_], node=f"host-{id_}", **waits) for id_ in found}
    return {id_: Report(f"host-{id_}", classify(evidence[id_]), resumed_at, reach=reach) for id_, reach in found.items()}


RULES = Circumstances(max_restarts=9, nodes=4, min_nodes=2)


def judged(*rounds: dict[str, Reach], rules: Circumstances = RULES, steps: Iterable[int] = (), **more):
    """The verdicts on rounds that hung. All records travel as JSON. steps: done in each round; 5 in all others."""
    ledger, verdicts = Ledger(), []
    for number, (found, step) in enumerate(itertools.zip_longest(rounds, steps, fillvalue=5), 1):
        more |= {"step": step, "first_step_done": step > 0}
        told = {id_: decode_report(encode_report(each)) for id_, each in reports(found, **more).items()}
        ledger, verdict = judge(told, decode_ledger(encode_ledger(ledger)), rules, number)
        verdicts.append(decode_verdict(encode_verdict(verdict)))
    return verdicts


def test_a_hang_names_the_pair():
    (first,) = judged(reaches(b="c"))
    assert (first.decision.response, first.decision.kind, first.cut) == (Response.RESTART, "network", ("host-b", "host-c"))
    assert first.decision.reason.startswith(
        "rank 2 on host-b gets no answer from host-c, the host of rank 4 (10.0.0.3), for 20 s: the network between these two"
    )


ENOUGH = dataclasses.replace(RULES, max_restarts=99)


def test_silent_strangers_make_no_pair():
    verdicts = judged(reaches(b="c"), reaches(a="d"), reaches(a="52.1.2.3"), rules=ENOUGH)
    assert [verdict.decision.rule for verdict in verdicts] == ["network-cut", "network-cut", "hang"]
    assert verdicts[2].cut == ()
    assert "it waits" in verdicts[2].decision.reason


def test_a_cut_that_lasts_ends_the_job():
    """Whichever of the two notices. It is the network's, so a scheduler may start the job again."""
    verdicts = judged(reaches(b="c"), reaches(c="b"), reaches(b="c"), rules=ENOUGH)
    assert [verdict.decision.rule for verdict in verdicts] == ["network-cut", "network-cut", "ceiling"]
    assert (verdicts[-1].decision.response, verdicts[-1].decision.exit_code) == (Response.STOP, 75)


def test_all_cuts_of_one_node_are_counted():
    assert "(and 2 more between hosts of the job)" in judged(reaches(a="c", b="c", c="d"))[0].decision.reason


def test_a_hanging_nodes_broken_gpu_is_the_cause():
    """Every worker waits for it, whoever cannot reach whom."""
    (verdict,) = judged(reaches(b="c"), xids=(79,))
    assert (verdict.decision.rule, verdict.cut) == ("xid-replace", ())


def test_an_awaited_worker_is_still_the_cause():
    (verdict,) = judged(reaches(b="c"), hang_blame=(detector.CERTAIN, 5, 0, 0))
    assert (verdict.decision.rule, verdict.cut) == ("hang", ())
    (verdict,) = judged(reaches(b="c"), hang_blame=(detector.LIKELY, 5, 0, 0))
    assert verdict.decision.rule == "network-cut"


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        (
            "Last error:\nNET/IB : Got completion from peer 10.0.0.2<54862> with status=12 opcode=0 len=0 vendor err 129",
            "10.0.0.2",
        ),
        ("NET/IB: Got completion from peer 10.0.0.2<40554> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=129", "10.0.0.2"),
        ("NET/IB : Got completion from peer fd00::4%ib0<33397> with error 12, opcode 0, len 0, vendor err 129", "fd00::4"),
        ("NET/IB: Got completion from peer 10.0.0.2<51161> with status=4 opcode=32614 vendor err 81", ""),  # its own memory
        (
            "NET/IB: Got completion from peer 10.0.0.2<51161> with status=5 opcode=0 vendor err 249",
            "",
        ),  # what follows a first one
        ("NET/IB: Got completion from peer 10.0.0.2<51161> with status=120 opcode=0", ""),
        ("Connection closed by peer [10.0.0.2]:4321", ""),  # it may have ended as the others did
        ("completion from peer " + "9" * 100 + "<1> with status=12", ""),
    ],
)
def test_nccls_words_reveal_a_peer_without_acknowledgement(text, addresses):
    assert unanswered((text, f"[0] {text}\n{text}"), 5) == tuple(Silent(5, each, 0.0) for each in addresses.split())


def of_nccl(silent: str, resumed_at: int = 0) -> dict[str, Report]:
    """The reports of ORDER, whose workers all ended as NCCL failed. silent: as "a:b c:b", whom each of them misses."""
    missing = dict(each.split(":") for each in silent.split())
    raised = RaisedException(
        "torch.distributed.DistBackendError", "NCCL error: remote process exited or there was a network error"
    )
    told = {}
    for id_, reach in reaches(**missing).items():
        evidence = Evidence(ORDER[id_], 1, exception=raised, step=5, first_step_done=True, node=HOSTS[id_])
        found = dataclasses.replace(classify(evidence), order=ORDER[id_])
        told[id_] = decode_report(encode_report(Report(HOSTS[id_], found, resumed_at, reach=reach)), ORDER[id_])
    return told


@pytest.mark.parametrize(
    ("rounds", "progress", "rules", "last"),
    [
        (("a:c b:c", "b:c d:c"), False, ("network-cut",) * 2, "c"),
        (("a:b", "a:c c:a"), False, ("network-cut",) * 2, "a"),
        (("a:b", "b:a", "a:b"), False, ("network-cut", "network-cut", "ceiling"), "b"),  # of one pair, either may be the bad one
        (("a:b",) * 3, True, ("network-cut",) * 3, "b"),
        (("a:b", "c:d a:b", "a:b"), False, ("network-cut", "network-cut", "ceiling"), "b"),
        (("b:a", "c:d"), False, ("network-cut",) * 2, "d"),  # no node is in both
        (("a:c b:c",) * 3, True, ("network-cut", "network-cut", "bad-node"), "c"),
        (("c:d", "c:b", "a:c"), True, ("network-cut", "network-cut", "bad-node"), "c"),
        (("c:d", "a:b", "a:c"), True, ("network-cut",) * 3, "c"),
        (("a:10.9.9.9",) * 3, True, ("peer-gone",) * 3, "a"),  # of no host of the job
    ],
)
def test_a_bad_link_that_returns_costs_the_node(rounds, progress, rules, last):
    """If it is in three pairs, with several others. All fail at once: a reports first. progress: between two failures."""
    ledger, found = Ledger(), []
    for number, silent in enumerate(rounds):
        circumstances = Circumstances(-1, nodes=65, members=64, min_nodes=64)
        ledger, verdict = judge(of_nccl(silent, 10 * number * progress), ledger, circumstances, number)
        ledger = decode_ledger(encode_ledger(ledger))
        found.append(verdict.decision.rule)
    assert (tuple(found), verdict.host) == (rules, HOSTS[last])
    assert not verdict.decision.moves_ranks
    assert verdict.decision.rule != "ceiling" or verdict.decision.exit_code == 75
    assert ledger.failures[-1].kind == "network"


def test_a_node_with_nothing_to_report_is_missed():
    ledger, hosts, places = Ledger(), {"c": HOSTS["c"]}, {"c": Reach((ADDRESSES["c"],))}
    found = []
    for number, silent in enumerate(("a:c", "b:c")):
        told = {id_: each for id_, each in of_nccl(silent).items() if each.reach.silent}
        circumstances = Circumstances(-1, nodes=4, members=3, min_nodes=2, reaches=places, hosts=hosts)
        ledger, verdict = judge(told, ledger, circumstances, number)
        found.append((verdict.decision.rule, verdict.shown_by))
    assert found == [("network-cut", "a"), ("network-cut", "b")]
    assert (verdict.node, verdict.host, verdict.rank) == ("c", HOSTS["c"], NO_RANK)


def test_a_lost_node_explains_what_nccl_misses():
    lost = Lost(HOSTS["d"], id="d")
    told = {id_: each for id_, each in of_nccl("a:c b:c").items() if id_ != "d"}
    _, verdict = judge(told, Ledger(), dataclasses.replace(RULES, lost=(lost,)), 1)
    assert (verdict.host, verdict.decision.response) == (HOSTS["d"], Response.RESTART_FREE)
    assert verdict.decision.kind == "node_lost"
