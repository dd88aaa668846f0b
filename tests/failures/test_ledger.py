"""One verdict over the reports of many nodes, the ledger, and their records. Pure."""

import dataclasses
import json
import random
import re

import pytest

from elastic_ext.base.diagnosis import Collective, Response
from elastic_ext.base.records import RecordError
from elastic_ext.failures import user_rules
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, Platform, Precedent, RaisedException, Wrapped
from elastic_ext.failures.judgement import Circumstances, Lost, going_back, judge
from elastic_ext.failures.ledger import (
    MAX_FAILURES,
    Ledger,
    PastFailure,
    Report,
    decode_ledger,
    decode_report,
    decode_verdict,
    encode_ledger,
    encode_report,
    encode_verdict,
    given_back,
)
from elastic_ext.failures.policy import NO_LIMIT, Action, Backoff
from elastic_ext.failures.rules import HANG_RULE
from elastic_ext.rendezvous.judging import ledger_of, report_of

RULES = Circumstances(max_restarts=3, nodes=3, min_nodes=2)


def report(host="h", type_=None, message="", resumed_at=None, order=0, **more):
    exception = RaisedException(type_, message, ("train.py:3 in step",)) if type_ else None
    evidence = Evidence(**{"rank": 0, "first_step_done": True, "node": host, "exception": exception, **more})
    return Report(host, dataclasses.replace(classify(evidence), order=order), resumed_at)


LOST = Lost("hc", id="c")
PEER = {"type_": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:1234"}
STORE = {"type_": "torch.distributed.DistStoreError", "message": "wait timeout after 3000ms, keys: /a/0//cpu//0/1"}


def moved(told, by):
    """The same report of other ranks, as after they have moved."""
    diagnosis = told.diagnosis
    evidence = dataclasses.replace(diagnosis.evidence, rank=diagnosis.evidence.rank + by)
    return dataclasses.replace(told, diagnosis=dataclasses.replace(diagnosis, evidence=evidence))


def again(reports, times, rules=RULES, moves=0):
    """Judge the same reports this many times; return the last ledger and all verdicts. moves: added to each rank every time."""
    ledger, verdicts = Ledger(), []
    for round_ in range(1, times + 1):
        told = {host: moved(each, moves * round_) for host, each in reports.items()}
        ledger, verdict = judge(told, ledger, rules, round_)
        verdicts.append(verdict)
    return ledger, verdicts


def test_a_hangs_rank_in_another_collective_is_named():
    """Over all nodes: each of them alone sees nothing wrong. All records travel as JSON."""
    operations = {0: "all_reduce", 1: "all_reduce", 2: "all_reduce", 3: "all_gather"}

    def told():
        found = {}
        for host, ranks in (("ha", (0, 1)), ("hb", (2, 3))):
            whole = report(host, rank=ranks[0], hang=True, hang_reason="it waits", hang_blame=(2, 5, 0, 2))
            collectives = tuple(Collective(rank, operations[rank], 412, "1", 0, 4) for rank in ranks)
            each = dataclasses.replace(whole, ranks=ranks, collectives=collectives)
            found[host] = decode_report(encode_report(each))
        return found

    _, verdict = judge(told(), Ledger(), RULES, 1)
    apart = "; rank 3 is in all_gather 412 of group 1, the others in all_reduce 412 of group 1"
    assert verdict.decision.reason.endswith(apart)
    operations[3] = "all_reduce"
    _, verdict = judge(told(), Ledger(), RULES, 1)
    assert "all_" not in verdict.decision.reason


def test_a_rank_outside_a_group_is_not_missed():
    """Ranks 4 to 7 are lost. Each second rank is in one group, of as many ranks as have reported."""
    found = [Collective(rank, "all_reduce", 5, "even", 0, 4) for rank in (0, 2)]
    found += [Collective(rank, "all_gather", 9, "odd", 1, 4) for rank in (1, 3)]
    whole = report("ha", rank=0, hang=True, hang_reason="it waits", hang_blame=(2, 5, 0, 2))
    reports = {"a": dataclasses.replace(whole, ranks=(0, 1, 2, 3), collectives=tuple(found))}
    _, verdict = judge(reports, Ledger(), dataclasses.replace(RULES, lost=(LOST,)), 1)
    assert verdict.decision.rule == HANG_RULE
    assert "all_" not in verdict.decision.reason


def test_victims_do_not_outvote_the_culprit():
    told = {
        "a": report("ha", **PEER, order=1, rank=0),
        "b": report("hb", "NameError", "x", order=3, rank=5),
        "c": report("hc", **PEER, order=2, rank=9),
    }
    _, verdict = judge(told, Ledger(), RULES, 4)
    assert (verdict.decision.action, verdict.decision.exit_code, verdict.ends_job) == (Action.STOP, 65, True)
    assert (verdict.round, verdict.node, verdict.host, verdict.rank, verdict.restarts) == (4, "b", "hb", 5, 0)
    assert verdict.for_node("a", "design") == verdict.decision


def test_across_nodes_the_first_known_is_the_cause():
    told = {"a": report("ha", signal="SIGSEGV", order=9, ended_ns=1), "b": report("hb", signal="SIGKILL", order=8, ended_ns=2)}
    assert judge(told, Ledger(), RULES, 1)[1].node == "b"


def test_the_drivers_word_beats_what_came_first():
    """Kernels of other nodes trap as a GPU is gone, and their agents have nothing to ask before they report."""
    told = {"a": report("ha", **LAUNCH), "b": report("hb", signal="SIGABRT", step=5, xids=(79,), order=2)}
    assert again(told, 1)[1][0].node == "b"
    told["a"] = report("ha", "NameError", "x")
    assert again(told, 1)[1][0].decision.exit_code == 65


def test_victims_are_free_only_beside_a_lost_node():
    told = {"a": report("ha", **PEER), "b": report("hb", **PEER)}
    _, charged = judge(told, Ledger(), RULES, 1)
    _, free = judge(told, Ledger(), dataclasses.replace(RULES, lost=(LOST,)), 1)
    assert (charged.decision.response, charged.restarts) == (Response.RESTART, 1)
    assert (free.decision.response, free.restarts) == (Response.RESTART_FREE, 0)


GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:4321. This may "
    "indicate that other ranks have failed, or that there are bugs in the application"
)


@pytest.mark.parametrize(
    ("lost", "begins"),
    [
        ((LOST,), "node hc was lost; then rank 1 raised RuntimeError: "),
        ((LOST, Lost("hd")), "node hc was lost (and 1 more); then rank 1 raised RuntimeError: "),
        ((Lost("hc", "has left"),), "node hc has left; then rank 1 raised RuntimeError: "),
    ],
)
def test_a_lost_nodes_victim_comes_second(lost, begins):
    told = {"a": report("ha", "RuntimeError", GLOO, rank=1, step=5)}
    ledger, verdict = judge(told, Ledger(), dataclasses.replace(RULES, lost=lost), 1)
    reason = verdict.decision.reason
    assert reason.startswith(begins)
    assert "Connection closed by peer [10.0.0.3]:4321" in reason
    assert re.search(r"\w…", reason), "cut at a word"
    assert reason.endswith(", on ha")
    assert len(reason) < 300
    assert (verdict.host, verdict.rank, verdict.node, verdict.decision.kind) == ("hc", -1, lost[0].id, "node_lost")
    assert (verdict.shown_by, verdict.gone) == ("a", lost[0].how), "the lost one logs nothing"
    assert ledger.failures[-1].node == "hc", "nothing is held against the victim's node"


@pytest.mark.parametrize(
    ("message", "decision", "node", "rank"),
    [
        ("rank 5: replay of step 812 differs", "replace_node", "b", 5),
        ("the replay differs on Rank 3", "replace_node", "a", 3),
        ("the replay differs", "replace_node", "a", 3),
        ("local rank 3 computes wrongly: global rank 4", "replace_node", "b", 4),
        ("rank 7: replay of step 812 differs", "restart", "a", 7),
    ],
)
def test_only_the_node_that_computes_wrongly_is_replaced(message, decision, node, rank):
    told = {
        "a": report("ha", "x.SDCReplayMismatch", message, rank=3),
        "b": dataclasses.replace(report("hb", **PEER, rank=5), ranks=(4, 5)),
    }
    _, verdict = judge(told, Ledger(), dataclasses.replace(RULES, nodes=3, min_nodes=2), 1)
    assert (verdict.decision.response.value, verdict.node, verdict.rank) == (decision, node, rank)


def rerun(code, said, at, hosts="abc", resumed_at=40):
    """Megatron-LM leaves on all ranks with the same code; the one that found the result has logged why."""
    return {
        host: report(host, exit_code=code, rank=rank, step=12, resumed_at=resumed_at, stderr_tail=said if host == at else "")
        for rank, host in enumerate(hosts)
    }


ASKED = "found NaN in local forward loss calculation. Need to rerun on a different GPU to verify correctness"
DIFFERS = "Second rerun: result is not reproducible on a different GPU. Rank 1, node c, device 0: Possible persistent error!!"


@pytest.mark.parametrize("logged", ["", 'Traceback (most recent call last):\n  File "t.py", line 3, in f\nKeyError: 1\n'])
@pytest.mark.parametrize(
    ("asked_at", "hosts", "stopped", "decision", "node"),
    [
        ("b", "abc", "", "replace_node", "b"),
        ("b", "ac", "b", "replace_node", "b"),  # nothing failed there before its agent stopped it
        ("b", "acd", "", "restart", ""),
        (None, "abc", "", "restart", ""),
    ],
)
def test_megatron_compares_a_step_on_two_nodes(asked_at, hosts, stopped, decision, node, logged):
    """The ranks move once. A result that differs there speaks against the first node, and what was saved for it is refused."""
    rules = dataclasses.replace(RULES, members=3)
    ledger = Ledger()
    if asked_at is not None:
        ledger, verdict = judge(rerun(16, logged + ASKED, asked_at, resumed_at=40), ledger, rules, 1)
        ledger = decode_ledger(encode_ledger(ledger))
        asked = verdict.decision
        assert (asked.response.value, asked.moves_ranks, asked.checkpoints_back, verdict.node) == ("restart", True, 0, asked_at)
    rules = dataclasses.replace(rules, hosts={host: host for host in stopped})
    _, verdict = judge(rerun(17, DIFFERS, "c", hosts, resumed_at=52), ledger, rules, 2)
    assert (verdict.decision.response.value, verdict.node, verdict.refuse_newer) == (decision, node, 51)
    assert not verdict.decision.moves_ranks


def test_a_result_of_two_gpus_costs_no_node():
    """The checkpoint that the script made to compare them may be the only one, so that it compares them again on that node."""
    correct = rerun(17, "found NaN in loss\nRank 1: Correct result (but possible Application error)!", "c")
    _, (first, second) = again(correct, 2, dataclasses.replace(RULES, members=3))
    assert (first.decision.response.value, first.decision.checkpoints_back) == ("confirm", 1)
    assert (second.decision.response.value, second.decision.exit_code) == ("stop", 65)


def test_two_requests_for_another_gpu_are_no_bug():
    told = rerun(16, ASKED, "b") | {"c": rerun(16, ASKED, "c")["c"]}
    _, verdict = judge(told, Ledger(), dataclasses.replace(RULES, members=3), 1)
    assert verdict.decision.moves_ranks


FLAP, AWAY = {"links": ("mlx5_0 port 1", "mlx5_1 port 1")}, {"links": ("mlx5_0 port 1",), "link_away": True}
STOPPED = {"signal": "SIGTERM", "stopped_by_agent": True}
EARLY = {"first_step_done": False, "step": 0, "resumed_at": 0}
HUNG = {"hang": True, "hang_reason": "rank 1 waits in all_reduce", "hang_blame": (2,)}
STOPS_ITSELF = HUNG | {"hang_reason": "rank 1 was stopped by a signal", "hang_blame": (0,)}
NAMED = "mlx5_0 port 1 (and 1 more) of node hb went down"


@pytest.mark.parametrize(
    ("of_a", "of_b", "decision", "host", "said"),
    [
        (PEER, STOPPED | FLAP, "restart", "hb", f"{NAMED}: no link of another node went down; then rank 1 raised RuntimeError"),
        (PEER, PEER | FLAP, "restart", "hb", NAMED),
        (PEER, STOPPED | AWAY, "replace_node", "hb", "mlx5_0 port 1 of node hb went down, and is still down"),
        (STORE, STOPPED | AWAY, "replace_node", "hb", "and is still down"),
        ({"type_": "ConnectionError"}, STOPPED | AWAY, "replace_node", "hb", "and is still down"),
        (HUNG, HUNG | FLAP, "restart", "hb", NAMED),
        (STOPS_ITSELF, HUNG | FLAP, "restart", "ha", "was stopped by a signal"),
        (PEER | FLAP, STOPPED | AWAY, "restart", "ha", "links went down on 2 nodes, as with a switch: ha, hb"),
        ({"type_": "KeyError"}, STOPPED | AWAY, "confirm", "ha", "KeyError"),
        (
            {"type_": "RuntimeError", "message": "CUDA error: unspecified launch failure"},
            STOPPED | AWAY,
            "restart",
            "ha",
            "",
        ),
    ],
)
def test_a_link_that_went_down_is_to_blame(of_a, of_b, decision, host, said):
    told = {"a": report("ha", **of_a, rank=1), "b": report("hb", **of_b, rank=2)}
    _, verdict = judge(told, Ledger(), dataclasses.replace(RULES, members=3), 1)
    assert (verdict.decision.response.value, verdict.host) == (decision, host)
    assert said in verdict.decision.reason
    assert not (host == "hb" and verdict.decision.moves_ranks), "the link stays with the node"


def test_a_link_does_not_explain_a_local_hang():
    alone = dataclasses.replace(RULES, members=1)
    for how in (PEER, HUNG):
        _, verdict = judge({"a": report("ha", **how, **AWAY, rank=1)}, Ledger(), alone, 1)
        assert verdict.decision.response.value != "replace_node"
        assert "went down" not in verdict.decision.reason


def test_a_link_that_flaps_again_costs_the_node():
    told = {"a": report("ha", **PEER, rank=1, step=7), "b": report("hb", **STOPPED, **FLAP, rank=2, step=7)}
    _, (first, second) = again(told, 2, dataclasses.replace(RULES, members=3))
    assert [each.decision.response.value for each in (first, second)] == ["restart", "replace_node"]
    assert (second.decision.rule, second.host) == ("same-node", "hb")
    lost = dataclasses.replace(RULES, members=3, lost=(LOST,))
    _, verdict = judge(told, Ledger(), lost, 1)
    assert verdict.host == "hc", "a lost node explains more"


def test_unknown_progress_is_not_a_lack_of_progress():
    """A script that resumes from what only it knows: steps since its start say nothing."""
    ledger = Ledger()
    for number, (steps, began) in enumerate([(12, 0), (10, None), (6, None), (9, None)], 1):
        told = {"a": report("ha", "ConnectionError", "refused", resumed_at=began, step=steps)}
        ledger, verdict = judge(told, ledger, Circumstances(11, nodes=1), number)
        assert (verdict.ends_job, verdict.restarts) == (False, number)


SUSPECTED = [{"type_": "KeyError"}, {"type_": "FloatingPointError", "message": "loss is nan"}, {"signal": "SIGSEGV"}]


ALONE = Circumstances(11, nodes=1)


def tries(failure, *steps, rules=ALONE, begins=()):
    """The verdicts on a failure of a job without checkpoint_dir, at these steps since each start. begins: what it reported."""
    ledger, verdicts = Ledger(), []
    for number, step in enumerate(steps):
        told = report("ha", step=step, **failure)
        told = dataclasses.replace(told, counts_from=begins[number] if begins else None)
        ledger, verdict = judge({"a": told}, ledger, rules, number + 1)
        verdicts.append(verdict.decision)
    return verdicts


@pytest.mark.parametrize("failure", SUSPECTED)
def test_a_bug_of_a_resuming_script_restarts_once(failure):
    """No checkpoint_dir: where its script resumes is unknown. It has to make more steps than before to count as progress."""
    first, second = tries(failure, 33, 3)
    assert (first.action, second.action, second.rule, second.exit_code) == (Action.RESTART, Action.STOP, "repeated", 65)
    said = "; the same failure recurred and nothing shows progress: where no checkpoint is known, only more steps would"
    assert second.reason.endswith(said)
    assert [each.action for each in tries(failure, 33, 40, 50)] == [Action.RESTART] * 3
    expired = dataclasses.replace(ALONE, charges=0)  # budget_window: it may have trained for weeks
    assert [each.action for each in tries(failure, 33, 3, rules=expired)] == [Action.RESTART] * 2


@pytest.mark.parametrize("failure", SUSPECTED)
def test_reported_steps_count_where_no_checkpoint_is_known(failure):
    said = [each.reason.rpartition("; ")[2] for each in tries(failure, 33, 3, begins=(0, 30))]
    assert said[1] == "the same failure recurred without progress"
    assert [each.action for each in tries(failure, 33, 13, begins=(0, 30))] == [Action.RESTART] * 2


def test_what_is_no_bug_needs_no_known_progress():
    for failure in ({"type_": "ConnectionError"}, {"signal": "SIGKILL"}, {"exit_code": 9}):
        assert [each.action for each in tries(failure, 33, 30, 20, 10)] == [Action.RESTART] * 4


def test_without_checkpoints_nothing_goes_back():
    decision = tries(SUSPECTED[1], 33)[0]
    assert decision.reason.endswith("; no checkpoint is known, so the script alone chooses what it resumes from")
    assert decision.checkpoints_back == 0


def nan(copied_at=None, saved_at=None, resumed_at=0, step=61, message="loss is nan"):
    told = report("ha", "FloatingPointError", message, resumed_at=resumed_at, step=step)
    return {"a": dataclasses.replace(told, copied_at=copied_at, saved_at=saved_at)}


def test_numbers_out_of_range_go_back_a_tier():
    """Copies of each step, a checkpoint at 20 and 55: both are tried before the job stops."""
    ledger, rules = Ledger(), Circumstances(20, nodes=1)
    ledger, first = judge(nan(copied_at=60, saved_at=55), ledger, rules, 1)
    assert (first.refuse_copies, first.decision.checkpoints_back, first.decision.action) == (True, 0, Action.RESTART)
    assert "copies in memory (up to step 60) are refused, and the newest checkpoint (step 55) is tried" in first.decision.reason
    assert decode_verdict(encode_verdict(first)) == first
    ledger, second = judge(nan(copied_at=60, saved_at=55, resumed_at=55, step=6), decode_ledger(encode_ledger(ledger)), rules, 2)
    assert (second.refuse_copies, second.decision.checkpoints_back, second.decision.action) == (True, 1, Action.RESTART)
    assert "the newest checkpoint (step 55) was tried before, so the one before it is tried" in second.decision.reason
    _, third = judge(nan(copied_at=60, saved_at=20, resumed_at=20, step=41), ledger, rules, 3)
    assert (third.decision.rule, third.decision.exit_code, third.refuse_copies) == ("repeated", 65, False)


@pytest.mark.parametrize(
    ("saved_at", "step", "rule"), [(900, 101, "repeated"), (900, 99, "numeric"), (900, 102, "numeric"), (950, 51, "numeric")]
)
def test_numbers_out_of_range_twice_are_a_bug(saved_at, step, rule):
    """Unless the checkpoint may hold it: a script that looks every 50 steps sees that at the same step each time."""
    ledger, rules = Ledger(), Circumstances(20, nodes=1)
    ledger, _ = judge(nan(copied_at=1000, saved_at=saved_at, step=1001), ledger, rules, 1)
    _, second = judge(nan(copied_at=1000, saved_at=saved_at, resumed_at=saved_at, step=step), ledger, rules, 2)
    assert (second.decision.rule, second.decision.exit_code) == (rule, 65 if rule == "repeated" else None)


@pytest.mark.parametrize(
    ("tries", "decisions"),
    [
        # two optimizers, so two steps count as one of the checkpoints' steps
        ([(300, 1000, 1100), (500, 900, 1100), (700, 800, 1100)], ["confirm", "confirm", "stop"]),
        ([(500, 4, 4), (1500, 3, 4), (2500, 2, 4)], ["confirm", "confirm", "stop"]),  # numbered by epoch
        ([(500, None, None), (1500, None, None), (2500, None, None)], ["confirm", "confirm", "stop"]),
        ([(150, 1000, 1100), (4150, 900, 5000), (9150, 4900, 14000)], ["confirm", "confirm", "confirm"]),  # real progress
    ],
)
def test_to_go_back_is_not_to_get_further(tries, decisions):
    ledger, rules, found = Ledger(), Circumstances(20, nodes=1), []
    for number, (steps, resumed_at, saved_at) in enumerate(tries):
        told = nan(saved_at=saved_at, resumed_at=resumed_at, step=steps)
        told = {"a": dataclasses.replace(told["a"], resumed_from=f"/checkpoints/{number}")}
        ledger, verdict = judge(told, decode_ledger(encode_ledger(ledger)), rules, number)
        found.append(verdict.decision.response.value)
    assert found == decisions


def test_a_bug_explains_other_exit_codes():
    bug = report("ha", "KeyError", "'x'", order=1, rank=0)
    broken = classify(Evidence(rank=3, node="hb", xids=(79,)))
    wrong = classify(Evidence(rank=3, node="hb", exception=RaisedException("x.SDCReplayMismatch", "m")))
    own = classify(Evidence(rank=3, node="hb", exit_code=14))
    rule = user_rules.UserRule("link", "hardware", Response.REPLACE_NODE, pattern="status=12")
    of_user = classify(Evidence(rank=3, node="hb", exit_code=1, stderr_tail="completion with status=12"), (rule,))
    for diagnosis, host in ((own, "ha"), (of_user, "ha"), (broken, "hb"), (wrong, "hb")):
        other = Report("hb", dataclasses.replace(diagnosis, order=2))
        _, verdict = judge({"b": other, "a": bug}, Ledger(), dataclasses.replace(RULES, nodes=6, min_nodes=4, members=4), 1)
        assert verdict.host == host


@pytest.mark.parametrize("kind", ["device_memory", "numeric"])
def test_another_path_is_no_way_back(kind):
    """Checkpoints whose names hold no step: only a NaN takes a job back to an earlier one after it has done steps."""
    ledger, rules = Ledger(), Circumstances(20, nodes=1)
    raised = {"device_memory": ("OutOfMemoryError", "CUDA out of memory"), "numeric": ("FloatingPointError", "loss is nan")}[kind]
    for number, steps in enumerate((18_000, 21_000, 25_000)):
        told = dataclasses.replace(report("ha", *raised, step=steps), resumed_from=f"/checkpoints/2026-11-0{number}")
        ledger, verdict = judge({"a": told}, decode_ledger(encode_ledger(ledger)), rules, number)
    assert verdict.decision.kind == kind
    assert verdict.ends_job == (kind == "numeric")


LACKS = "[Errno 2] No such file or directory: '{}/optimizer.pt'"


@pytest.mark.parametrize(
    ("resumed_from", "named", "done", "blamed"),
    [
        ("/c/checkpoint-5", "/c/checkpoint-5", False, 1),
        ("s3://b/c/checkpoint-5", "b/c/checkpoint-5", False, 1),
        ("/c/checkpoint-5", "/c/checkpoint-55", False, 0),
        ("/c/checkpoint-5", "/data", False, 0),
        ("", "/c/checkpoint-5", False, 0),
        ("/c/checkpoint-5", "/c/checkpoint-5", True, 0),  # it may have been about to write it
    ],
)
def test_a_file_that_the_checkpoint_lacks(resumed_from, named, done, blamed):
    """The checkpoint is blamed before the code. What the one before it lacks, too, is a bug."""
    rules, ledger = dataclasses.replace(RULES, nodes=1, min_nodes=1, members=1), Ledger()
    found = report("ha", "FileNotFoundError", LACKS.format(named), resumed_at=5, exit_code=1, first_step_done=done)
    told = decode_report(encode_report(dataclasses.replace(found, resumed_from=resumed_from)))
    ledger, verdict = judge({"a": told}, ledger, rules, 1)
    assert (verdict.ends_job, verdict.decision.checkpoints_back) == (False, blamed)
    assert ("the checkpoint that it resumed from lacks it" in verdict.decision.reason) is bool(blamed)
    older = report("ha", "FileNotFoundError", LACKS.format("/c/checkpoint-4"), resumed_at=4, exit_code=1, first_step_done=False)
    _, verdict = judge({"a": dataclasses.replace(older, resumed_from="/c/checkpoint-4")}, ledger, rules, 2)
    assert (verdict.decision.exit_code, verdict.decision.checkpoints_back) == (65, 0)


def test_a_repair_gives_a_new_budget():
    rules = Circumstances(2, nodes=4, members=4, min_nodes=4)
    ledger, verdicts = again({"a": report("ha", xids=(79,), step=5, resumed_at=0)}, 3, rules)
    assert (verdicts[-1].decision.exit_code, verdicts[-1].bad, verdicts[-1].keeps_ledger) == (69, ("a",), True)
    killed = {"b": report("hb", signal="SIGKILL", step=8000, resumed_at=0)}
    _, verdict = judge(killed, decode_ledger(encode_ledger(ledger)), rules, 4)
    assert (verdict.ends_job, verdict.restarts) == (False, 1)


@pytest.mark.parametrize("kind", ["network", "node_lost"])
def test_only_lost_nodes_count_as_lost(kind):
    """A user's rule may let the job restart for nothing as often as it likes."""
    own = user_rules.UserRule("license server", kind, Response.RESTART_FREE, exit_code=17)
    ledger = Ledger()
    for round_ in range(7):
        of_user = classify(Evidence(rank=0, node="ha", exit_code=17, step=7, first_step_done=True), (own,))
        ledger, verdict = judge({"a": Report("ha", of_user, 0)}, ledger, RULES, round_)
        assert verdict.decision.response is Response.RESTART_FREE
    lost = dataclasses.replace(RULES, members=3, lost=(LOST,))
    for round_ in range(8):
        ledger, verdict = judge({"a": report("ha", **PEER, step=7, resumed_at=0)}, ledger, lost, round_)
        assert verdict.decision.response is (Response.RESTART_FREE if round_ < 7 else Response.REQUEUE)


@pytest.mark.parametrize(
    ("tiers", "before", "back", "to"),
    [
        ((None, 40), None, 1, None),  # no copies
        ((None, None), None, 1, None),
        ((39, 40), None, 1, None),  # older ones
        ((40, 40), None, 1, None),
        ((41, 40), None, 0, 40),
        ((41, 0), None, 0, None),  # no checkpoint yet: from the beginning
        ((41, None), None, 0, None),
        ((60, 40), 40, 1, None),  # copies that were made since come from the checkpoint that was tried
        ((None, 40), 40, 1, None),
        ((90, 80), 40, 0, 80),  # a checkpoint was saved since
    ],
)
def test_what_numbers_out_of_range_go_back_to(tiers, before, back, to):
    earlier = () if before is None else (PastFailure("f", kind="numeric", gone_back_to=before), PastFailure("g", kind="network"))
    found = going_back(*tiers, earlier)
    assert (found.checkpoint, found.to) == (bool(back), to)


def test_a_new_generation_of_a_step_is_tried():
    earlier = (PastFailure("f", kind="numeric", gone_back_to=40), PastFailure("f", kind="numeric"))
    assert not going_back(60, 40, earlier).checkpoint


def test_a_cause_beside_a_lost_node_still_counts():
    told = {"a": report("ha", **PEER), "b": report("hb", "NameError", "x")}
    assert judge(told, Ledger(), dataclasses.replace(RULES, lost=(LOST,)), 1)[1].ends_job


def test_the_budget_is_the_jobs_not_the_nodes():
    ledger = Ledger()
    for number in range(4):
        told = {f"n{number}": report(f"h{number}", exit_code=20 + number)}
        ledger, verdict = judge(told, ledger, RULES, number + 1)
        assert verdict.ends_job == (number == 3), verdict
    assert (verdict.decision.rule, verdict.decision.exit_code, verdict.restarts) == ("budget", 1, 3)


def test_a_preemption_is_free():
    _, verdicts = again({"a": report("ha", exit_code=75)}, 10)
    assert {verdict.decision.response for verdict in verdicts} == {Response.RESTART_FREE}
    assert verdicts[-1].restarts == 0


def test_endless_requests_for_a_try_spend_the_budget():
    """exit 75 at the same step each time: five restarts are free, three are the budget."""
    _, verdicts = again({"a": report("ha", exit_code=75, step=7, resumed_at=0)}, 9)
    assert [verdict.restarts for verdict in verdicts] == [0, 0, 0, 0, 0, 1, 2, 3, 3]
    assert [verdict.ends_job for verdict in verdicts] == [False] * 8 + [True]
    assert (verdicts[-1].decision.rule, verdicts[-1].decision.exit_code) == ("budget", 1)


@pytest.mark.parametrize(
    ("failure", "times", "ends"),
    [
        ({"exit_code": 9, "first_step_done": False}, 3, ("ceiling", 1)),  # an exit code alone shows no bug
        ({"type_": "my.NoLicense", "message": "server 7", "first_step_done": False}, 3, ("repeated", 65)),
        ({"type_": "KeyError", "message": "'missing'", "step": 1}, 2, ("repeated", 65)),
    ],
    ids=["silent", "unknown", "bug"],
)
def test_the_same_failure_stops_a_job_without_limit(failure, times, ends):
    _, verdicts = again({"a": report("ha", **failure)}, times, Circumstances(NO_LIMIT, nodes=1, min_nodes=1))
    assert [verdict.ends_job for verdict in verdicts] == [False] * (times - 1) + [True]
    assert (verdicts[-1].decision.rule, verdicts[-1].decision.exit_code) == ends


@pytest.mark.parametrize("moves", [True, False])
def test_without_limit_progress_allows_more_restarts(moves):
    ledger, ends = Ledger(), []
    for number in range(30):
        told = {"a": report("ha", exit_code=20 + number, step=7, resumed_at=10 * number if moves else 0)}
        ledger, verdict = judge(told, ledger, Circumstances(NO_LIMIT), number)
        ends.append(verdict.ends_job)
    assert ends.index(True) == 7 if not moves else not any(ends)
    assert moves == ("no limit" in verdict.decision.reason)


def test_a_later_checkpoint_gives_the_budget_back():
    ledger = Ledger()
    for resumed_at, charged in ((0, 1), (0, 2), (5, 1), (5, 2), (9, 1)):
        ledger, verdict = judge({"a": report("ha", exit_code=40 + len(ledger.failures), resumed_at=resumed_at)}, ledger, RULES, 1)
        assert verdict.restarts == charged


def test_a_later_save_without_step_refunds_the_budget():
    """The first round began from nothing. One that is not recorded says nothing."""
    ledger = Ledger()
    for (resumed_at, number), charged in (((0, None), 1), ((None, 4), 1), ((None, 4), 2), ((None, 9), 1), ((None, None), 2)):
        told = report("ha", exit_code=40 + len(ledger.failures), resumed_at=resumed_at)
        ledger, verdict = judge({"a": dataclasses.replace(told, save_number=number)}, ledger, RULES, 1)
        ledger = decode_ledger(encode_ledger(ledger))
        assert verdict.restarts == charged


def test_a_node_that_fails_twice_alike_leaves():
    segv = {"a": report("ha", signal="SIGSEGV", step=3, resumed_at=0)}
    _, (first, second) = again(segv, 2, moves=8)
    assert first.decision.response is Response.CONFIRM
    assert (second.decision.response, second.ends_job) == (Response.REPLACE_NODE, False)
    assert (second.for_node("a", "design").action, second.for_node("a", "design").exit_code) == (Action.STOP, 69)
    assert (second.for_node("b", "design").action, second.for_node("b", "design").exit_code) == (Action.RESTART, None)
    assert second.keeps_ledger
    _, (*_, third) = again(segv, 3)  # as in a job that is submitted again: the node has the same ranks, so it shows nothing
    assert (third.decision.rule, third.decision.exit_code) == ("ceiling", 1)


def with_progress(hosts, nodes, spares=1, failures=({"signal": "SIGBUS"},), rank=None, repaired=()):
    """Judge one failure after another, each on the node of a letter, each after further steps; return the rules.

    nodes: that run, or a number of them for each failure. repaired: before these failures the node was given back.
    """
    ledger, found = Ledger(), []
    for number, host in enumerate(hosts):
        if number in repaired:
            ledger = given_back(ledger, host)
        running = nodes if isinstance(nodes, int) else nodes[number]
        rules = Circumstances(NO_LIMIT, nodes=running, min_nodes=running - spares)
        ranks = ord(host) + 1000 * number if rank is None else rank  # as they move after each failure
        failure = {"rank": ranks, "step": 5, **failures[number % len(failures)]}
        ledger, verdict = judge({host: report(host, resumed_at=10 * number, **failure)}, ledger, rules, number)
        ledger = decode_ledger(encode_ledger(ledger))
        assert verdict.decision.charged == (verdict.decision.rule != "bad-node"), "who leaves costs the job no restart"
        found.append(verdict.decision.rule)
    return found


@pytest.mark.parametrize(
    ("hosts", "nodes", "leaves"),
    [
        *((hosts, 4, leaves)
          for hosts, leaves in (("aa", False), ("aaa", True), ("baaa", True), ("abacdefa", False), ("aabaa", False))),
        *((hosts, nodes, leaves) for nodes in (64, 2048)
          for hosts, leaves in (("aa", False), ("aaa", True), ("abacdefa", True), ("abacdefga", False), ("abcdefab", False))),
        *(("aaaaa", nodes, False) for nodes in (2, 3)),
        *(("baaaaaa", nodes, True) for nodes in (2, 3)),
    ],
)  # fmt: skip
def test_the_third_failure_of_hardware_costs_the_node(hosts, nodes, leaves):
    """In a row, with progress each time. A bug may hit any rank, so in time it comes back to each node."""
    *before, last = with_progress(hosts, nodes)
    assert set(before) <= {"bus-error"}
    assert last == ("bad-node" if leaves else "bus-error")


def test_a_report_keeps_what_its_exception_held():
    """The exceptions inside and the end of a long message are not in it; what they said of an outage, a module, a rank is."""
    lost = Wrapped("OSError", "Input/output error", errno=5)
    module = Wrapped("ModuleNotFoundError", "No module named 'x'", ("ImportError",))
    told = [
        classify(Evidence(0, exception=RaisedException("my.Trouble", "x" * 3000, wrapped=(each,)))) for each in (lost, module)
    ]
    of_rank = RaisedException("torch.distributed.checkpoint.api.CheckpointException", "CheckpointException ranks:dict_keys([9])")
    told.append(classify(Evidence(0, exception=of_rank)))
    for each in told:
        read = decode_report(encode_report(Report("h", each))).diagnosis
        assert (read.outage, read.lacks_module, read.of_other) == (each.outage, each.lacks_module, each.of_other)
    assert [each.outage for each in told] == [True, None, None]
    assert [each.lacks_module for each in told] == [False, True, False]
    assert [each.of_other for each in told] == [False, False, True]


def test_a_bad_nodes_other_failures_count_too():
    several = {"signal": "SIGBUS"}, {"exit_code": 1, "xids": (94,)}, {"signal": "SIGSEGV"}
    assert with_progress("aaa", 64, failures=several) == ["bus-error", "xid-restart", "bad-node"]
    assert with_progress("aaa", 64, spares=0) == ["bus-error"] * 3
    assert with_progress("aaa", 1) == ["bus-error"] * 3


def test_a_rank_failing_on_many_nodes_clears_them():
    assert with_progress("baaa", 2048, rank=7) == ["bus-error"] * 4
    # In a job that is submitted again a node may have its old ranks again, so nothing shows whether they fail or the node.
    assert with_progress("aaaa", 2048, rank=7) == ["bus-error"] * 4


STALE = {"type_": "OSError", "message": "[Errno 116] Stale file handle: '/data'"}


@pytest.mark.parametrize(
    ("hosts", "ranks", "rules", "moves"),
    [
        ("aaa", (7, 7, 7), "ill ill ill", "111"),  # some rank is the first to use an ill storage: does it fail elsewhere?
        ("aaaa", (7, 7, 7, 9), "ill ill ill bad", "1110"),  # no: another one fails on this node
        ("aaa", (7, 8, 9), "ill ill bad", "110"),  # perhaps no other node uses it
        ("aaab", (7, 7, 7, 7), "ill ill ill ill", "1111"),
        ("aaaba", (7, 7, 7, 7, 7), "ill ill ill ill ill", "11111"),
        ("abc", (7, 8, 9), "ill ill ill", "111"),
    ],
)
def test_a_repeatedly_bad_mount_differs_from_its_rank(hosts, ranks, rules, moves):
    ledger, found = Ledger(), []
    for number, (host, rank) in enumerate(zip(hosts, ranks, strict=True)):
        told = {host: report(host, **STALE, rank=rank, step=5, resumed_at=10 * number)}
        ledger, verdict = judge(told, ledger, Circumstances(NO_LIMIT, nodes=64, min_nodes=63), number)
        ledger = decode_ledger(encode_ledger(ledger))
        found.append(verdict.decision)
    names = {"ill": "file-system-ill", "bad": "bad-node"}
    assert [each.rule for each in found] == [names[each] for each in rules.split()]
    assert "".join(str(int(each.moves_ranks)) for each in found) == moves


@pytest.mark.parametrize(
    ("failure", "exit_code"),
    [
        ({"type_": "TimeoutError", "message": "timed out"}, 75),
        ({"type_": "ConnectionRefusedError", "message": "[Errno 111] Connection refused"}, 75),
        (STALE, 75),
        ({"signal": "SIGKILL"}, 1),
    ],
)
def test_what_only_rank_0_meets_costs_no_node(failure, exit_code):
    """It meets it wherever it runs, after its first step. What one node causes makes that one leave, whichever ranks it has."""

    def decisions(of_rank):
        ledger, first, found = Ledger(), "ha", []
        for number in range(3):
            told = {"ha": report(first if of_rank else "ha", rank=0 if of_rank or not number else 8, step=5, **failure)}
            ledger, verdict = judge(told, ledger, Circumstances(NO_LIMIT, nodes=5, min_nodes=4), number)
            first = {"ha": "hb", "hb": "hc"}.get(first, "ha") if verdict.decision.moves_ranks else first
            found.append((verdict.decision.response.value, verdict.decision.exit_code))
        return found

    assert decisions(of_rank=True) == [("restart", None), ("restart", None), ("stop", exit_code)]
    assert decisions(of_rank=False)[:2] == [("restart", None), ("replace_node", 69)]


def test_a_service_costs_no_node_wherever_ranks_are():
    ledger, found = Ledger(), []
    for number, rank in enumerate((0, 8, 16)):
        told = {"ha": report("ha", "wandb.errors.CommError", "timed out", rank=rank, step=5)}
        ledger, verdict = judge(told, ledger, Circumstances(NO_LIMIT, nodes=5, min_nodes=4), number)
        found.append((verdict.decision.response.value, verdict.decision.exit_code))
    assert found == [("restart", None), ("restart", None), ("stop", 75)]


@pytest.mark.parametrize(
    ("second", "moves", "ends"),
    [(("hb", 0), True, ("stop", 65)), (("ha", 8), True, ("replace_node", 69))],
    ids=["its data", "its GPU"],
)
def test_a_crash_shows_whether_it_follows_its_node(second, moves, ends):
    ledger, four, found = Ledger(), dataclasses.replace(RULES, nodes=5, min_nodes=4, members=4), []
    for number, (host, rank) in enumerate((("ha", 0), second)):
        told = {host: report(host, signal="SIGSEGV", rank=rank, step=40, resumed_at=0)}
        ledger, verdict = judge(told, ledger, four, number)
        found.append((verdict.decision.response.value, verdict.decision.exit_code))
        assert verdict.decision.moves_ranks == (moves and not number)
    assert found == [("confirm", None), ends]


def test_repeated_losses_without_progress_end_with_75():
    """Its script may bring them down: each such restart is free of charge. Steps of some scripts are not counted."""
    lost = dataclasses.replace(RULES, lost=(LOST,))
    stuck, trains, uncounted = Ledger(), Ledger(), Ledger()
    for number in range(1, 9):
        ledger, verdict = judge({"a": report("ha", **PEER, step=7, resumed_at=0)}, stuck, lost, number)
        stuck = decode_ledger(encode_ledger(ledger))
        trains, goes_on = judge({"a": report("ha", **PEER, step=7, resumed_at=100 * number)}, trains, lost, number)
        uncounted, unknown = judge({"a": report("ha", **PEER, step=0, first_step_done=False)}, uncounted, lost, number)
        assert verdict.ends_job == (number == 8)
        for each in (goes_on, unknown):
            assert (each.decision.response, each.decision.charged) == (Response.RESTART_FREE, False)
    assert (verdict.decision.response, verdict.decision.exit_code) == (Response.REQUEUE, 75)
    assert "loss 8 of a node without progress" in verdict.decision.reason


@pytest.mark.parametrize(
    ("preset", "codes"), [("design", (69, 75)), ("kubeflow", (197, 203)), ("stock", (1, 1))], ids=lambda value: str(value)
)
def test_an_indispensable_bad_node_alone_has_its_code(preset, codes):
    """A scheduler keeps nodes with 69 out of the next run: all of the job would be none."""
    needs_all = Circumstances(NO_LIMIT, nodes=2, min_nodes=2, members=2, exit_codes=preset)
    told = {"a": report("ha", exit_code=14, step=5, xids=(79,)), "b": report("hb", signal="SIGTERM", step=5, order=2)}
    verdict = decode_verdict(encode_verdict(again(told, 3, needs_all)[1][-1]))
    assert verdict.ends_job
    assert (verdict.for_node("a", preset).exit_code, verdict.for_node("b", preset).exit_code) == codes
    assert verdict.for_node("a spare", preset).action is Action.STOP


LAUNCH = {"type_": "torch.AcceleratorError", "message": "CUDA error: unspecified launch failure", "step": 5, "resumed_at": 0}


@pytest.mark.parametrize(
    ("hosts", "rules", "replaced"),
    [
        ("a", {"max_restarts": 0}, ""),  # the budget is spent: nothing says that this node is bad
        ("abc", {"min_nodes": 3}, ""),  # it was on another node each time
        ("aaa", {"min_nodes": 3}, "a"),
        ("aa", {}, "a"),
    ],
)
@pytest.mark.parametrize("preset", ["design", "stock"])
def test_only_a_node_to_be_replaced_is_bad(hosts, rules, replaced, preset):
    """By bad_node_command, which may drain its host: a failure that ends the job is no proof."""
    ledger, unlimited = Ledger(), Circumstances(NO_LIMIT, nodes=3, min_nodes=2, members=3, exit_codes=preset)
    for number, host in enumerate(hosts):
        told = {host: report(host, rank=number, **LAUNCH)}
        ledger, verdict = judge(told, ledger, dataclasses.replace(unlimited, **rules), number)
    assert (verdict.for_node(hosts[-1], preset).action, verdict.decision.kind) == (Action.STOP, "hardware")
    assert "".join(node for node in "abc" if verdict.replaces(node)) == replaced


def test_a_rank_that_failed_elsewhere_costs_no_node():
    """Rank 0 alternates between two nodes, and each time it gets to another step."""
    ledger = Ledger()
    for number, (host, step) in enumerate((("ha", 16), ("hb", 13), ("ha", 14))):
        told = {"a": report(host, "my.QueueEmpty", "the queue is empty", rank=0, step=step, resumed_at=0)}
        ledger, verdict = judge(told, ledger, Circumstances(NO_LIMIT, nodes=5, min_nodes=4), number)
    assert verdict.decision.response is Response.RESTART


MISSING = {"type_": "FileNotFoundError", "message": "[Errno 2] No such file or directory: '/data/train.idx'"}


@pytest.mark.parametrize(
    "failure", [MISSING, {"type_": "ModuleNotFoundError", "message": "No module named 'apex'"}, {"exit_code": 127}]
)
@pytest.mark.parametrize(
    ("places", "ends"),
    [
        ([("hd", 8), ("hd", 0)], ("replace_node", 69)),  # a spare that lacks it
        ([("hd", 8), ("ha", 8)], ("stop", 65)),  # it is the rank's
        ([("hd", 0, 8), ("hd", 0, 8)], ("stop", 65)),  # it is everyone's
    ],
)
def test_a_trained_job_outlives_what_one_node_lacks(failure, places, ends):
    four = dataclasses.replace(RULES, nodes=5, min_nodes=4, members=4)
    ledger, _ = judge({"a": report("ha", signal="SIGKILL", step=70, resumed_at=0)}, Ledger(), four, 1)
    found = []
    for number, (host, *ranks) in enumerate(places):
        of_hosts = zip((host, "hb"), ranks, strict=False)
        told = {at: report(at, **failure, rank=rank, first_step_done=False, resumed_at=60, step=0) for at, rank in of_hosts}
        told = {at: dataclasses.replace(each, resumed_from="step_60") for at, each in told.items()}
        ledger, verdict = judge(told, ledger, four, 2 + number)
        found.append((verdict.decision.response.value, verdict.decision.exit_code))
        assert verdict.decision.checkpoints_back == 0
        assert verdict.decision.moves_ranks == (number == 0 and len(ranks) == 1)
    assert found == [("confirm", None), ends]


def test_a_bug_beside_a_bad_mount_stays_one():
    failures = STALE, STALE, STALE, {"type_": "KeyError", "message": "'x'"}
    assert with_progress("aaaa", 64, failures=failures)[-1] == "arguments"


def test_a_storage_outage_never_counts_against_a_node():
    several = STALE, STALE, {"signal": "SIGBUS"}
    assert with_progress("aaa", 64, failures=several)[-1] == "bus-error"
    assert (
        with_progress("aaaaaa", 64, failures=({"signal": "SIGBUS", "rank": 9},) * 5 + (STALE,), rank=7)[-1] == "file-system-ill"
    )
    assert with_progress("aaaaa", 64, failures=({"signal": "SIGBUS"},) * 4 + (STALE,), rank=7)[-1] == "file-system-ill"


@pytest.mark.parametrize(
    ("hosts", "nodes", "repaired", "leaves"),
    [
        ("aaaa", 64, (), True),
        ("aaaa", 64, (3,), False),
        ("aaaaa", 64, (3,), False),
        ("aaaaaa", 64, (3,), True),  # it is as bad as before
        ("aaaa", 64, (1, 2), False),
        ("aabbb", 64, (4,), False),
        ("aabbb", 64, (1,), True),  # b is no better for a's repair
    ],
)
def test_a_repaired_node_begins_without_failures(hosts, nodes, repaired, leaves):
    assert with_progress(hosts, nodes, repaired=repaired)[-1] == ("bad-node" if leaves else "bus-error")


@pytest.mark.parametrize(("ranks", "leaves"), [((19, 3, 0), False), ((19, 11, 0), True)])
def test_another_worker_with_equal_ranks_shows_nothing(ranks, leaves):
    """As in a job that was submitted again: rank 0 may have a bug."""
    ledger = Ledger()
    for number, rank in enumerate(ranks):
        first = rank - rank % 8
        told = report("a", rank=rank, signal="SIGBUS", step=5, resumed_at=10 * number)
        told = dataclasses.replace(told, ranks=tuple(range(first, first + 8)))
        ledger, verdict = judge({"a": told}, ledger, Circumstances(NO_LIMIT, nodes=2048, min_nodes=2047), number)
    assert verdict.decision.rule == ("bad-node" if leaves else "bus-error")


def test_moved_ranks_of_another_node_show_nothing():
    ledger = Ledger()
    for number, (host, rank) in enumerate((("b", 9), ("b", 17), ("a", 0), ("a", 0))):
        rules = Circumstances(NO_LIMIT, nodes=2048, min_nodes=2047)
        failed = {host: report(host, rank=rank, signal="SIGBUS", step=5, resumed_at=10 * number)}
        ledger, verdict = judge(failed, ledger, rules, number)
    assert verdict.decision.rule == "bus-error"


def test_failures_before_a_repair_show_nothing_of_ranks():
    """The job is submitted again after each further failure, so the node has rank 0 again: perhaps that has a bug."""
    ledger = Ledger()
    for number, rank in enumerate((17, 9, 0, 0)):
        ledger = given_back(ledger, "a") if number == 2 else ledger
        rules = Circumstances(NO_LIMIT, nodes=2048, min_nodes=2047)
        told = {"a": report("a", rank=rank, signal="SIGBUS", step=5, resumed_at=10 * number)}
        ledger, verdict = judge(told, ledger, rules, number)
    assert verdict.decision.rule == "bus-error"


def test_giving_back_one_leaves_other_failures_alone():
    past = tuple(PastFailure("f", node=node, of_node=counts) for node, counts in (("a", True), ("a", False), ("b", True)))
    after = given_back(Ledger(past, 3), "a")
    assert [each.before_repair for each in after.failures] == [True, False, False]
    assert given_back(after, "b").failures[0].before_repair
    assert [dataclasses.replace(each, before_repair=False) for each in after.failures] == list(past)
    assert (after.charged, given_back(after, "a"), given_back(after, "c")) == (3, after, after)


def hangs_of(blames, nodes=64, steps=(1, 2, 3)):
    """Judge hangs of two nodes with such a blame each, of which the first always reports first; return the rules."""
    ledger, found = Ledger(), []
    rules = Circumstances(NO_LIMIT, nodes=nodes + 1, members=nodes, min_nodes=nodes)
    for move, number in enumerate(steps):
        hung = {"step": 5, "resumed_at": 10 * number, "hang": True, "hang_reason": "it waits"}
        placed = enumerate(zip("ab", blames, strict=True))
        reports = {
            host: report(host, rank=8 * place + 64 * move, order=place, hang_blame=blame, **hung)
            for place, (host, blame) in placed
        }
        ledger, verdict = judge(reports, ledger, rules, number)
        ledger = decode_ledger(encode_ledger(ledger))
        assert verdict.node == "a"
        found.append(verdict.decision.rule)
    return found


def test_hangs_that_look_alike_blame_no_node():
    """As where all ranks wait in loss.item() for NCCL: that which reports first is named, often the leader's, and may be well."""
    behind, same = ((1, 4, 0, 1), (1, 5, 0, 1)), ((1, 5, 0, 1),) * 2
    assert hangs_of(behind) == [HANG_RULE, HANG_RULE, "bad-node"]
    assert hangs_of(same) == [HANG_RULE] * 3
    assert hangs_of(behind, steps=(1, 1)) == [HANG_RULE, "same-node"]
    assert hangs_of(same, steps=(1, 1, 1)) == [HANG_RULE, HANG_RULE, "ceiling"]


def at_once(hosts, **failure):
    return {host: report(host, step=7, rank=place, order=place, resumed_at=0, **failure) for place, host in enumerate(hosts)}


@pytest.mark.parametrize(
    ("failure", "alone", "on_all"),
    [
        ({"type_": "MemoryError"}, ["host-memory", "same-node"], ["host-memory", "repeated"]),
        ({"type_": "ConnectionError"}, ["network", "same-node"], ["network", "network", "ceiling"]),
        ({"signal": "SIGSEGV"}, ["crash", "same-node"], ["crash", "repeated"]),
        ({"signal": "SIGBUS"}, ["bus-error", "same-node"], ["bus-error", "bus-error", "ceiling"]),
    ],
)
def test_a_node_is_blamed_while_others_are_well(failure, alone, on_all):
    """What fails on all nodes at once is named after that which reports first, as a rule the leader's."""

    def rules(hosts, times):
        found = again(at_once(hosts, **failure), times, Circumstances(NO_LIMIT, nodes=4, min_nodes=3), moves=8)
        return [verdict.decision.rule for verdict in found[1]]

    assert rules("a", 2) == alone
    assert rules("ab", len(on_all)) == on_all


def test_failures_once_on_several_nodes_blame_none():
    segv = at_once("ab", signal="SIGSEGV")
    rules = Circumstances(NO_LIMIT, nodes=4, min_nodes=3)
    ledger, _ = judge(segv, Ledger(), rules, 1)
    _, verdict = judge({"a": segv["a"]}, decode_ledger(encode_ledger(ledger)), rules, 2)
    assert verdict.decision.rule == "repeated"


@pytest.mark.parametrize("failure", [{"type_": "NameError", "message": "name 'lr' is not defined"}, {"exit_code": 127}])
@pytest.mark.parametrize(
    ("places", "others", "decisions"),
    [
        ("a", {}, ["confirm", ("stop", 65)]),  # on this node only, but by chance: three nodes, or none may leave
        ("ab", {}, ["confirm", ("stop", 65)]),
        (("ab",), {}, [("stop", 65)]),  # on all that came that far
        (("ab",), {"c": STOPPED}, [("stop", 65)]),  # the agent stopped that one before
        (("ab", "ab"), {"c": PEER}, ["confirm", ("stop", 65)]),  # that one came further
        (("a", "b"), {"c": STOPPED}, ["confirm", ("stop", 65)]),
    ],
)
def test_a_bug_stops_at_once_only_everywhere(failure, places, others, decisions):
    """Before the first step; else one more try shows whether a node lacks something."""
    ledger, found = Ledger(), []
    for number, hosts in enumerate((*places, *places)[: len(decisions)]):
        told = {host: report(host, **failure, rank=8 * number + 64 * at, **EARLY) for at, host in enumerate(hosts)}
        told |= {host: report(host, **how, rank=99, **EARLY) for host, how in others.items()}
        ledger, verdict = judge(told, decode_ledger(encode_ledger(ledger)), dataclasses.replace(RULES, members=3), number)
        decision = verdict.decision
        found.append((decision.response.value, decision.exit_code) if verdict.ends_job else decision.response.value)
    assert found == decisions


def test_a_node_that_alone_lacks_a_module_leaves():
    four, ledger, found = dataclasses.replace(RULES, nodes=5, min_nodes=4, members=4), Ledger(), []
    for number in range(2):
        told = {"a": report("a", "ModuleNotFoundError", "No module named 'apex'", rank=8 * number, **EARLY)}
        told["b"] = report("b", **STOPPED, rank=50, **EARLY)
        ledger, verdict = judge(told, ledger, four, number)
        found.append((verdict.decision.response.value, verdict.decision.moves_ranks))
    assert found == [("confirm", True), ("replace_node", False)]
    alone = Circumstances(NO_LIMIT, nodes=1, min_nodes=1, members=1)
    assert judge({"a": told["a"]}, Ledger(), alone, 1)[1].decision.exit_code == 65


@pytest.mark.parametrize(
    ("failure", "response"),
    [
        ({"exit_code": 14}, "restart"),
        ({"type_": "torch.AcceleratorError", "message": "CUDA error: uncorrectable ECC error encountered"}, "restart"),
        ({"signal": "SIGABRT", "xids": (79,)}, "replace_node"),  # the driver of each host speaks of its own GPUs
        ({"signal": "SIGABRT", "gpu_recovery": ("gpu_reset",)}, "replace_node"),
    ],
)
def test_what_all_report_is_no_nodes_hardware(failure, response):
    rules = Circumstances(NO_LIMIT, nodes=5, min_nodes=2, members=4)
    assert again(at_once("a", **failure), 1, rules)[1][0].decision.response is Response.REPLACE_NODE
    assert again(at_once("ab", **failure), 1, rules)[1][0].decision.response.value == response


def test_a_ledger_of_an_older_version_is_read():
    """It counted the nodes of a round where this one says that a node may have caused the failure."""
    ledger = json.loads(encode_ledger(again({"a": report("a", signal="SIGBUS")}, 1)[0]))
    del ledger["failures"][0]["of_node"]
    ledger["failures"][0]["of_nodes"] = 64
    assert not decode_ledger(json.dumps(ledger)).failures[0].of_node


def test_an_exit_code_costs_no_node():
    """Twice on one node, of other ranks each time: anything may end with 1."""
    _, verdicts = again({"a": report("ha", exit_code=1, step=5, resumed_at=0)}, 3, Circumstances(NO_LIMIT, nodes=5), moves=8)
    assert [each.decision.response.value for each in verdicts] == ["restart", "restart", "stop"]
    assert (verdicts[-1].decision.rule, verdicts[-1].decision.exit_code) == ("ceiling", 1)


NAMED = dataclasses.replace(RULES, max_restarts=NO_LIMIT, lost=(LOST,))


@pytest.mark.parametrize("first_step_done", [True, False])
@pytest.mark.parametrize(
    ("reporters", "progress", "nodes", "answers"),
    [
        ("a a a", False, 2, "restart restart stop"),  # a lives; b may be bad, or the way between them
        ("a a a", False, 64, "restart restart stop"),
        ("ab ab ab", False, 2, "restart restart stop"),
        ("abcd abcd abcd", False, 64, "restart restart stop"),  # a is the leader, say
        ("a b c", False, 64, "restart restart stop"),
        ("ab bc bd", False, 64, "restart restart stop"),
        ("abc bac cab", False, 64, "restart restart stop"),
        ("a a a a a a a a", True, 2048, "restart " * 8),
        ("ab ab ab ab ab ab ab ab", True, 64, "restart " * 8),
    ],
)
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("loss", [PEER, STORE])
def test_reporting_a_lost_peer_costs_no_node(reporters, progress, nodes, answers, spares, loss, first_step_done):
    """By names of nodes, in the order of their reports. Without progress the scheduler may try on other nodes."""
    ledger, found = Ledger(), []
    for number, hosts in enumerate(reporters.split()):
        seen = {"step": 7 * first_step_done, "first_step_done": first_step_done, "resumed_at": 10 * number * progress}
        reports = {host: report(host, **loss, rank=ord(host), order=order, **seen) for order, host in enumerate(hosts)}
        rules = Circumstances(NO_LIMIT, nodes=nodes + spares, members=nodes, min_nodes=nodes - 1)
        ledger, verdict = judge(reports, ledger, rules, number)
        ledger = decode_ledger(encode_ledger(ledger))
        found.append(verdict.decision.response.value)
    assert found == answers.split()
    assert verdict.decision.exit_code == (None if progress else 75)


@pytest.mark.parametrize(("steps", "exit_code"), [((100, 100, 100), 1), ((100, 100, 99), 75), ((7, 7, 7), 75)])
def test_peers_lost_at_one_step_have_a_bug(steps, exit_code):
    """A rank that has fewer batches ends well, and the others lose it: no other node and no other day would help."""
    ledger = Ledger()
    for number, step in enumerate(steps):
        ledger, verdict = judge({"a": report("ha", **PEER, step=step, resumed_at=50)}, ledger, RULES, number)
    assert (verdict.decision.rule, verdict.decision.exit_code) == ("ceiling", exit_code)
    assert ("always at the same step" in verdict.decision.reason) == (exit_code == 1)


def test_a_lost_node_may_later_report_a_loss():
    """It is back, and lives."""
    ledger, lost = judge({"a": report("ha", **PEER, step=7, resumed_at=0)}, Ledger(), NAMED, 1)
    assert (lost.host, lost.decision.response) == ("hc", Response.RESTART_FREE)
    _, verdict = judge({"c": report("hc", **PEER, step=7, resumed_at=0)}, ledger, dataclasses.replace(NAMED, lost=()), 2)
    assert (verdict.host, verdict.decision.response) == ("hc", Response.RESTART)


def test_the_ledger_is_bounded():
    ledger, _ = again({"a": report("ha", exit_code=75, type_="E" * 500)}, 200, Circumstances(NO_LIMIT))
    assert len(encode_ledger(ledger)) < 200_000
    assert len(ledger.failures) == MAX_FAILURES


@pytest.mark.parametrize("type_", [None, "KeyError"])
def test_records(type_):
    told = report(
        "h",
        type_,
        "m" * 10_000,
        resumed_at=7,
        xids=(79, 48),
        platform=Platform("slurm", "PREEMPTED", True),
        stderr_tail="t" * 9000,
        history=(Precedent(True),),
    )
    if (raised := told.diagnosis.evidence.exception) is not None:
        caused = dataclasses.replace(told.diagnosis.evidence, exception=dataclasses.replace(raised, causes=("c" * 2000,) * 8))
        told = dataclasses.replace(told, diagnosis=dataclasses.replace(told.diagnosis, evidence=caused))
    back = decode_report(encode_report(told), order=5)
    assert len(encode_report(told)) < 8000
    assert (back.host, back.resumed_at, back.diagnosis.order) == ("h", 7, 5)
    for name in ("kind", "response", "rule", "fingerprint", "tier", "checkpoints_back"):
        assert getattr(back.diagnosis, name) == getattr(told.diagnosis, name)
    assert (back.diagnosis.evidence.xids, back.diagnosis.evidence.platform.reason) == ((79, 48), "PREEMPTED")
    ledger, verdict = judge({"a": back}, Ledger(), RULES, 1)
    assert decode_verdict(encode_verdict(verdict)) == verdict
    assert decode_ledger(encode_ledger(ledger)) == ledger


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "decision": 3}'])
@pytest.mark.parametrize("decode", [decode_report, decode_verdict, decode_ledger])
def test_what_is_no_record_is_refused(decode, text):
    with pytest.raises(RecordError) as error:
        decode(text)
    assert "\n" not in str(error.value)


def changed(random_, value):
    """A copy of a JSON value in which one part is another."""
    if isinstance(value, dict) and value and random_.random() < 0.9:
        key = random_.choice(list(value))
        if random_.random() < 0.1:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: changed(random_, value[key])}
    if isinstance(value, list) and value and random_.random() < 0.9:
        at = random_.randrange(len(value))
        return [*value[:at], changed(random_, value[at]), *value[at + 1 :]]
    return random_.choice([None, True, -1, 1 << 70, 0.5, "", "\udce9\x1b[2J", "stop", [], {}, [[]], {"x": 1}, ["x"], "y" * 5000])


def test_foreign_records_never_end_the_leader(caplog):
    """10,000 reports and ledgers, with one part or several replaced by what it may not be; what is logged fits a terminal."""
    random_ = random.Random(4)
    good = report("ha", "KeyError", "x", node="ha", xids=(44,))
    ledger, _ = judge({"a": good, "b": report("hb", **PEER)}, Ledger(), RULES, 1)
    for _ in range(5000):
        told, kept = json.loads(encode_report(good)), json.loads(encode_ledger(ledger))
        for _ in range(random_.randint(1, 3)):
            told, kept = changed(random_, told), changed(random_, kept)
        after, verdict = judge({"a": report_of(json.dumps(told), 3)}, ledger_of(json.dumps(kept)), RULES, 2)
        decode_verdict(encode_verdict(verdict))
        decode_ledger(encode_ledger(after))
    assert [told for told in caplog.messages if not told.isprintable()] == []


def test_the_wait_grows_until_progress_ends_it():
    rules = Circumstances(NO_LIMIT, backoff=Backoff(1.0))
    ledger, waits = Ledger(), []
    for number in range(9):
        ledger, verdict = judge({"a": report("ha", exit_code=20 + number, resumed_at=0)}, ledger, rules, number)
        waits.append(verdict.decision.delay_s)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    _, verdict = judge({"a": report("ha", exit_code=40, resumed_at=7)}, ledger, rules, 9)
    assert verdict.decision.delay_s == 0
    assert Backoff(1.0).delay_s(3, jitter=1.0) == 1.0
    assert Backoff(0.0).delay_s(30, jitter=0.0) == 0


def test_unreadable_records_still_leave_the_job_a_verdict(caplog):
    told = {"a": report_of("{", 3), "b": report("hb", **PEER, order=4)}
    ledger, verdict = judge(told, ledger_of('{"schema": 99}'), RULES, 1)
    assert (verdict.node, verdict.decision.kind, verdict.decision.action) == ("a", "unknown", Action.RESTART)
    assert len(ledger.failures) == 1
    assert caplog.text.count("cannot be read") == 2


def test_a_charge_past_its_time_stops_counting():
    ledger = Ledger()
    for code in (20, 21):
        ledger, _ = judge({"a": report("ha", exit_code=code)}, ledger, Circumstances(2), code)
    assert ledger.charged == 2
    told = {"a": report("ha", exit_code=22)}
    assert judge(told, ledger, Circumstances(2), 3)[1].decision.rule == "budget"
    assert judge(told, ledger, Circumstances(2, charges=2), 3)[1].decision.rule == "budget"
    after, verdict = judge(told, ledger, Circumstances(2, charges=1), 3)
    assert (verdict.decision.action, verdict.restarts, after.charged) == (Action.RESTART, 2, 2)
