"""How a worker that has ended is judged, and what the log says of a failure, on each node."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from elastic_ext.agent import verdicts
from elastic_ext.agent.companion import LocalWorkers
from elastic_ext.base import diagnosis
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import ErrorFile, Evidence, Platform, RaisedException
from elastic_ext.failures.host import HostEvidence
from elastic_ext.failures.joint_evidence import Ended
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.workers.processes import Exit
from elastic_ext.workers.progress import Progress

SPENT = Decision(Action.STOP, diagnosis.UNKNOWN, "rank 3 was killed by SIGKILL; the budget of 3 restarts is spent", 1, "budget")


def failed(**evidence) -> verdicts.FailedWorker:
    raised = RaisedException("RuntimeError", "Connection closed by peer", ("job.py:3",)) if not evidence else None
    diagnosis = classify(Evidence(rank=1, exit_code=1, exception=raised, step=7, **evidence))
    data = {"message": {"message": "it", "extraInfo": {"py_callstack": "Traceback: all of it", "timestamp": "1"}}}
    return verdicts.FailedWorker(0, 11, 1, ErrorFile("error.json", data), diagnosis)


def text_on(node: str, decision: Decision, **evidence) -> str:
    verdict = JobVerdict(decision, 4, "n2-17-a3b2c1", "n2", 3, shown_by="n2-17-a3b2c1")
    return verdicts.failure_text(failed(**evidence), [failed(hang=True, hang_reason="it waits")], verdict, decision, node)


def test_one_node_logs_all_others_one_line():
    decision = replace(SPENT, action=Action.RESTART, exit_code=None, rule="killed", delay_s=2.0)
    line, *more = text_on("n2-17-a3b2c1", decision).splitlines()
    assert line == f"elastic_ext: restart: {decision.reason} (kind unknown, rule killed); in 2.0 s"
    assert any("rank 1 on " in each and " since its start" in each for each in more)
    assert any("also ended: " in each for each in more)
    assert any("Traceback: all of it" in each for each in more)
    line = f"elastic_ext: restart: on n2: {decision.reason} (kind unknown, rule killed); in 2.0 s"
    assert text_on("n3-18-d4e5f6", decision) == f"{line}; more in the log of n2"
    own = text_on("n3-18-d4e5f6", decision, hang=True, hang_reason="rank 1 made no progress")
    assert own == f"{line}; here: rank 1 made no progress; more in the log of n2"


def test_the_causes_place_comes_before_the_decision():
    verdict = JobVerdict(SPENT, 4, "n2-17-a3b2c1", "n2", 3, shown_by="n2-17-a3b2c1")
    text = verdicts.line_elsewhere(verdict, SPENT, "n3-18-d4e5f6")
    assert text == f"elastic_ext: stop: on n2: {SPENT.reason} (kind unknown, rule budget); exit code 1; more in the log of n2"


def test_without_a_culprit_each_node_logs_one_line():
    """As of a node that cannot go on itself: the reason says where, and no log has more."""
    text = verdicts.line_elsewhere(JobVerdict(SPENT, 4, "n3-18-d4e5f6", "n3"), SPENT, "n3-18-d4e5f6")
    assert text == f"elastic_ext: stop: {SPENT.reason} (kind unknown, rule budget); exit code 1"


SENT_NS = 100  # when the agent first sent a signal
BY_AGENT, BY_ANOTHER = SENT_NS, None
TERM, KILL, SEGV = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV


def judged(folder, exitcode: int, stop_sent_ns: int | None, raised_ns: int | None, row: Progress | None) -> verdicts.FailedWorker:
    """A worker that ended so. raised_ns: when it raised the KeyError of its error file; None: it has none."""
    path = folder / "error.json"
    if raised_ns is not None:
        account = {"type": "KeyError", "message": "'lr'", "monotonic_ns": raised_ns}
        message = {"message": "KeyError: 'lr'", "extraInfo": {"timestamp": "1", "py_callstack": "Traceback"}}
        path.write_text(json.dumps({"message": message, "elastic_ext": account}))
    processes = SimpleNamespace(pids={0: 11}, exits={0: Exit(0, 11, exitcode, stop_sent_ns, 200)})
    table = None if row is None else SimpleNamespace(read=lambda local_rank: row)
    workers = LocalWorkers(processes, table, {0: 5}, {0: str(path)}, {})
    tails = SimpleNamespace(tail=lambda local_rank: "")
    host = HostEvidence(7, (), Platform())
    (worker,) = verdicts.failed_workers(verdicts.EndedRound("n1", host, workers, tails, (), {}, {}, False), ())
    assert verdicts.failed_by_itself(workers) == (not worker.diagnosis.evidence.stopped_by_agent)
    return worker


@pytest.mark.parametrize(
    ("exitcode", "stop_sent_ns", "raised_ns", "code", "ended_by", "stopped"),
    [
        (1, None, 90, 1, None, False),
        (TERM, BY_AGENT, 90, 1, None, False),  # two ranks raise at once: the agent stops the one that has not said so yet
        (KILL, BY_AGENT, 90, 1, None, False),  # its exit handlers outlived the grace period
        (1, BY_AGENT, 90, 1, None, False),
        (TERM, BY_AGENT, 110, None, "SIGTERM", True),  # it raised because of the signal
        (1, BY_AGENT, 110, 1, None, True),
        (TERM, BY_AGENT, None, None, "SIGTERM", True),
        (TERM, BY_ANOTHER, 90, None, "SIGTERM", False),
        (KILL, BY_ANOTHER, 90, None, "SIGKILL", False),
        (SEGV, BY_ANOTHER, 90, None, "SIGSEGV", False),
    ],
)
def test_the_agents_signal_hides_no_exception(tmp_path, exitcode, stop_sent_ns, raised_ns, code, ended_by, stopped):
    worker = judged(tmp_path, exitcode, stop_sent_ns, raised_ns, None)
    seen = worker.diagnosis.evidence
    assert (seen.exit_code, seen.signal, seen.stopped_by_agent) == (code, ended_by, stopped)
    assert (seen.oom_kills is not None) == (ended_by == "SIGKILL")
    assert worker.exitcode == (exitcode if code is None else code)
    if code is not None and not stopped:
        alone = judged(tmp_path, 1, None, raised_ns, None).diagnosis
        assert (worker.diagnosis.rule, worker.diagnosis.fingerprint) == (alone.rule, alone.fingerprint)


@pytest.mark.parametrize(
    ("exitcode", "stop_sent_ns", "row", "well"),
    [
        (0, None, None, True),
        (0, BY_AGENT, None, False),  # as with a handler of SIGTERM
        (0, BY_AGENT, Progress(11, phase="exit", sign_ns=110), False),
        (TERM, BY_AGENT, Progress(11, phase="exit", sign_ns=90), True),  # stopped while its interpreter ended
        (KILL, BY_AGENT, Progress(11, phase="exit", sign_ns=110), False),
        (TERM, BY_AGENT, Progress(11, phase="exit", sign_ns=90, ends_with=3), False),
        (TERM, BY_AGENT, Progress(11, phase="eval", sign_ns=90), False),
        (SEGV, BY_ANOTHER, Progress(11, phase="exit", sign_ns=90), True),  # crashed as its interpreter ended
        (3, BY_ANOTHER, Progress(11, phase="exit", sign_ns=90), False),  # by an exit handler
    ],
)
def test_who_has_ended_well(monkeypatch, exitcode, stop_sent_ns, row, well):
    processes = SimpleNamespace(pids={0: 11}, exits={0: Exit(0, 11, exitcode, stop_sent_ns, 200)})
    table = (
        None if row is None else SimpleNamespace(read=lambda local_rank: Progress(12) if local_rank else replace(row, steps=7))
    )
    workers = LocalWorkers(processes, table, {0: 5}, {}, {})
    monkeypatch.setattr(verdicts.time, "monotonic_ns", lambda: 200 + 3 * 10**9)
    assert verdicts.ended_well(workers) == ((Ended(5, None if row is None else 7, 3.0),) if well else ())
    tails = SimpleNamespace(tail=lambda local_rank: "")
    ended = verdicts.EndedRound("n1", HostEvidence(7, (), Platform()), workers, tails, (), {}, {}, False)
    assert [each.exitcode for each in verdicts.failed_workers(ended, ())] == ([exitcode] if exitcode else [])
    processes.pids[1], workers.ranks[1] = 12, 6
    for other, counts in ((Exit(1, 12, 1, None, 200), not well), (Exit(1, 12, TERM, BY_AGENT, 200), True)):
        processes.exits[1] = other  # what has ended well explains the failure of no other, unless the agent stopped that
        ranks = [each.rank for each in verdicts.failed_workers(ended, ())]
        assert ranks == ([5, 6] if exitcode and counts else [6])


@pytest.mark.parametrize(("ended_ns", "code", "stopped"), [(90, 3, False), (110, None, True)])
def test_the_agents_signal_hides_no_exit_code(tmp_path, ended_ns, code, stopped):
    """sys.exit(3) leaves no error file, but the worker's row says so."""
    row = Progress(11, ends_with=3, ended_ns=ended_ns)
    seen = judged(tmp_path, KILL, BY_AGENT, None, row).diagnosis.evidence
    assert (seen.exit_code, seen.stopped_by_agent) == (code, stopped)
