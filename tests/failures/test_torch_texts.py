"""What torch's collective backends and NCCL say when a rank ends: by the table, in torch's own libraries, and in a job."""

from __future__ import annotations

import dataclasses
import json
import mmap
import re
from pathlib import Path

import pytest
import torch

from elastic_ext.base.diagnosis import Response
from elastic_ext.failures import torch_texts
from elastic_ext.failures.case import parse_evidence
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.failures.judgement import Circumstances, JobVerdict, Lost, judge
from elastic_ext.failures.ledger import Ledger, Report
from elastic_ext.failures.rules import RULES
from elastic_ext.failures.torch_texts import MISUSE, PEER_GONE, WORDINGS, How, Wording
from tests.jobs import ROOT
from tests.versions import number

REMOTE = "remote process exited or there was a network error"
GLOG = "E1129 09:00:00.123456 900 ProcessGroupNCCL.cpp:900] "
TC = f"{GLOG}[TC][rank=1][name=default_pg] "
ENDS = f"{TC}Aborting process on rank 1 due to error - timeout watchdog detected operation error\n"
STATUSES = [each for each in WORDINGS if each.how is How.STATUS]


CUDA = {
    "CUDA error: an illegal memory access was encountered": "gpu-access",
    "CUDA error: unspecified launch failure": "gpu-launch",
    "CUDA error: unknown error": "gpu-not-ready",
    "CUDA error: uncorrectable ECC error encountered": "gpu-dead",
}


def said(wording: Wording, inside: str = REMOTE) -> str:
    text = wording.text.replace("[TC]{}", TC).replace("|", "")
    return text.replace("{status}", inside).replace("{cuda}", inside).replace("{}", "1")


def shown(wording: Wording, text: str) -> list[Evidence]:
    """The ends of a worker that show this text of a wording."""
    noise = "step 41\nWARNING retrying: HTTP Error 429\n"
    line = text if "[TC]" in text else f"[rank1]:{GLOG}{text}"  # of torch's log
    if wording.how is How.ABORT:
        return [
            Evidence(1, signal="SIGABRT", stderr_tail=f"{noise}{line}\n"),
            Evidence(1, exit_code=134, stderr_tail=f"{line}\n"),
        ]
    if wording.how is How.LOG:
        return [Evidence(1, signal="SIGABRT", stderr_tail=f"{noise}{line}\n{ENDS}")]
    type_ = "RuntimeError" if wording.how is How.RAISE else "torch.distributed.DistBackendError"
    printed = f'{noise}Traceback (most recent call last):\n  File "train.py", line 9, in step\n    x()\n{type_}: {text}\n'
    return [Evidence(1, exit_code=1, exception=RaisedException(type_, text)), Evidence(1, exit_code=1, stderr_tail=printed)]


@pytest.mark.parametrize("wording", [each for each in WORDINGS if each.how is not How.STATUS], ids=lambda each: each.text)
def test_each_text_of_a_backend(wording):
    by_rule = [(said(wording), wording.rule)]
    if "{cuda}" in wording.text:
        by_rule = [(said(wording, error), rule) for error, rule in CUDA.items()]
    if "{status}" in wording.text:
        by_rule = [(said(wording, said(status)), status.rule) for status in STATUSES]
        by_rule += [(said(wording, "unknown result code"), wording.rule)] if wording.rule else []
    for text, rule in by_rule:
        for evidence in shown(wording, text):
            assert (text, classify(evidence).rule) == (text, rule)


@pytest.mark.parametrize("status", STATUSES, ids=lambda each: each.text)
def test_a_status_as_the_older_backend_raises_it(status):
    of_torch = f"NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3690, {said(status)}, NCCL version 2.30.7"
    found = classify(Evidence(1, exit_code=1, exception=RaisedException("torch.distributed.DistBackendError", of_torch)))
    assert found.rule == status.rule


def test_a_newer_reason_for_an_abort_follows():
    text = f"{GLOG}[TC][rank=3] Aborting process on rank 3 due to error - something new\n"
    assert classify(Evidence(3, signal="SIGABRT", stderr_tail=text)).rule == PEER_GONE


def raised(message: str, type_: str = "RuntimeError", **more) -> Evidence:
    return Evidence(1, exception=RaisedException(type_, message, ("train.py:9 in step",)), **{"exit_code": 1, **more})


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (
            "invalid usage (run with NCCL_DEBUG=WARN for details) \nNCCL Last Error: AllReduce: communicator was revoked",
            PEER_GONE,
        ),
        (
            "invalid argument (run with NCCL_DEBUG=WARN for details) \nNCCL Last Error: AllReduce : comm argument is NULL",
            PEER_GONE,
        ),
        ("invalid usage (run with NCCL_DEBUG=WARN for details) \nNCCL Last Error: AllReduce: count must be 0", MISUSE),
        ("communicator was revoked\nExpected to have finished reduction in the prior iteration", MISUSE),
    ],
)
def test_use_of_a_lost_group_is_no_misuse(message, rule):
    """NCCL calls it invalid usage, but another rank's failure has had torch revoke or abort the group."""
    assert classify(raised(f"NCCL AllReduce failed: {message}")).rule == rule


# What may stand beside a backend's own lines: nccl2 waits 15 s after them, and other threads print on.
NOISE = [
    "wandb: ERROR 403 Client Error: Forbidden\n",
    "loss is nan, skipping step\n",
    "INFO nccl2 reconfigure took 3.1 s\n",
    "WARNING retry: NCCL communicator cannot shrink while work is pending\n",
    f"{TC}NCCL redOpDestroy failed: invalid argument (run with NCCL_DEBUG=WARN for details) at ProcessGroupNCCL.cpp:90\n",
    'Exception in thread T:\nTraceback (most recent call last):\n  File "t.py", line 3, in run\n    x()\nKeyError: 1\n',
    f"{TC}Waiting 15000 ms for health check and flight recorder dump before aborting\n",
    "Fatal Python error: Aborted\n\nThread 0x00007f (most recent call first):\n",
]


@pytest.mark.parametrize("noise", NOISE)
def test_only_a_backends_own_lines_explain_its_abort(noise):
    abort = f"{TC}Aborting process on rank 1 due to {{}}\n"
    for reason, rule in (
        ("timeout - timeout watchdog detected operation timeout", PEER_GONE),
        ("error - nccl hit async error: invalid usage (run with NCCL_DEBUG=WARN for details)", MISUSE),
    ):
        for tail in (noise + abort.format(reason), abort.format(reason) + noise, noise + abort.format(reason) + noise):
            assert (tail, classify(Evidence(1, signal="SIGABRT", stderr_tail=tail)).rule) == (tail, rule)


def test_the_older_backends_last_words_come_first():
    """Between its first and its last words other threads print on."""
    first = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran for 600010 milliseconds\n"
    last = "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    for begin in (first, "Received a dump signal due to a collective timeout from rank 2\n"):
        for noise in NOISE[:2]:
            assert classify(Evidence(1, signal="SIGABRT", stderr_tail=begin + noise + last)).rule == PEER_GONE


@pytest.mark.parametrize("more", [{"exit_code": 1}, {"exit_code": None, "signal": "SIGABRT"}], ids=["exit", "abort"])
@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("CUDA error during end event query: CUDA error: an illegal memory access was encountered", "gpu-access"),
        ("CUDA error during start event query: CUDA error: unspecified launch failure", "gpu-launch"),
        ("nccl hit async error on rank 1: invalid usage (run with NCCL_DEBUG=WARN for details)", MISUSE),
        (f"nccl hit async error on rank 1: {REMOTE}", PEER_GONE),
    ],
)
def test_a_backends_line_says_why_its_operation_failed(line, rule, more):
    """The exception says only that it did. A bug that the script has raised counts nevertheless."""
    for message in ("NCCL operation failed", "NCCL Async Error: no error \nNCCL Last Error: "):
        failed = raised(message, "torch.distributed.DistBackendError", stderr_tail=f"{TC}{line}\n", **more)
        assert classify(failed).rule == rule
    assert classify(raised("'x'", "KeyError", stderr_tail=f"{TC}{line}\n{ENDS}", **more)).rule == "arguments"


@pytest.mark.parametrize(
    "printed",
    [
        f"{TC}ProcessGroupNCCL::shutdown: finalize() raised, treating as no-op: Work timed out during finalize\n",
        f"{TC}ProcessGroupNCCL::shutdown: finalize() raised, treating as no-op: NCCL Async Error: invalid usage (run with "
        "NCCL_DEBUG=WARN for details) \nNCCL Last Error: \n",
        "caught: NCCL operation timed out\n",
    ],
)
def test_what_torch_logs_and_survives_makes_no_victim(printed):
    """As `destroy_process_group()` at the end of a script that has failed."""
    assert classify(raised("the batch is empty", stderr_tail=printed)).rule == "runtime-error"
    assert classify(raised("the batch is empty", "ValueError", stderr_tail=printed)).rule == "arguments"


def test_nccls_last_error_is_in_the_reason():
    message = f"NCCL AllReduce failed: {REMOTE} \nNCCL Last Error: NET/IB: Got completion from peer 10.0.0.2<5> with status=12"
    reason = classify(Evidence(1, exit_code=1, exception=RaisedException("RuntimeError", message))).reason
    assert f"failed: {REMOTE} (NET/IB: Got completion from peer 10.0.0.2<5> with status=12)" in reason


CASES = [json.loads(line) for line in (ROOT / "tests" / "data" / "nccl2_cases.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_end_of_a_rank_under_nccl2(case):
    found = classify(parse_evidence(case))
    assert {"kind": found.kind, "decision": found.response.value} == case["expect"]


def test_rules_search_for_every_text_of_the_table():
    for rule in {each.rule for each in WORDINGS} - {""}:
        found = next(each for each in RULES if each.name == rule)
        assert set(torch_texts.keys(rule, printed=True)) <= set(found.texts)
        of_exceptions = set(torch_texts.keys(rule, printed=False))
        assert of_exceptions <= {*found.messages, *torch_texts.OWN_LINES}


# The table against torch itself.

FOLDER = Path(torch.__file__).parent


def library_of(wording: Wording) -> Path | None:
    """The file that has the pieces of a wording; None where this build of torch lacks it, as one for CPUs lacks NCCL."""
    lib = FOLDER / "lib"
    places = {
        "gloo": lib / "libtorch_cpu.so",
        "torch": lib / "libtorch_cuda.so",
        "python": FOLDER / "distributed" / "_watchdog.py",
        "nccl": next(FOLDER.parent.glob("nvidia/nccl*/lib/libnccl.so.2"), lib / "none"),
    }
    found = places[wording.library]
    return found if found.exists() or wording.library == "python" else None


def test_torchs_libraries_have_every_text_of_the_table():
    """A wording that has changed fails this test, and no job. Of a build for CPUs only gloo's are looked for."""
    expected: dict[Path, set[str]] = {}
    for wording in WORDINGS:
        path = library_of(wording)
        if wording.since and number(torch.__version__) >= number(wording.since) and path is not None:
            expected.setdefault(path, set()).update(filter(str.strip, re.split(r"\{\w*\}|\|", wording.text)))
    assert expected or number(torch.__version__) < (2, 13)
    for path, pieces in expected.items():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            assert [piece for piece in sorted(pieces) if data.find(piece.encode()) < 0] == [], path.name


# Failures of a job, as reports of its nodes: under nccl2 each ends as under the older backend.

_DUE = f"{GLOG}[TC][rank={{0}}][name=0] Aborting process on rank {{0}} due to "
_WAITS = f"{GLOG}[TC][rank={{0}}][name=0] Waiting 15000 ms for health check and flight recorder dump before aborting\n"
_BETWEEN = "wandb: ERROR 403 Client Error: Forbidden\n"  # another thread of the script prints on
_THROWN = f"{_BETWEEN}terminate called after throwing an instance of 'c10::DistBackendError'\n"
WORDS = {
    "nccl-legacy": {
        "timeout": "[Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, "
        f"Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n{_THROWN}",
        "gone": f"[rank{{0}}]: NCCL error in: NCCLUtils.cpp:77, {REMOTE}, NCCL version 2.30.7\n{_THROWN}",
        "system": "[rank{0}]: NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), "
        f"NCCL version 2.30.7\n{_THROWN}",
    },
    "nccl2": {
        "timeout": f"{GLOG}[TC][rank={{0}}] Operation timed out after 600000 ms\n{_DUE}timeout - timeout watchdog detected "
        f"operation timeout\n{_WAITS}{_BETWEEN}",
        "gone": f"{GLOG}[TC][rank={{0}}] nccl hit async error on rank {{0}}: {REMOTE}\n{_DUE}error - nccl hit async error: "
        f"{REMOTE}\n{_WAITS}{_BETWEEN}",
        "system": f"{_DUE}error - nccl hit async error: unhandled system error (run with NCCL_DEBUG=INFO for details)\n{_WAITS}"
        f"{_BETWEEN}",
    },
}
RULES_OF_JOB = Circumstances(max_restarts=3, nodes=3, min_nodes=2)


def aborted(backend: str, words: str, rank: int, step: int, **more) -> Evidence:
    printed = WORDS[backend][words].format(rank)
    evidence = Evidence(rank, signal="SIGABRT", stderr_tail=f"step {step}\n{printed}", step=step, first_step_done=True)
    return dataclasses.replace(evidence, node=f"h{rank}", **more)


def stopped(rank: int, step: int, **more) -> Evidence:
    return Evidence(rank, signal="SIGKILL", stopped_by_agent=True, step=step, first_step_done=True, node=f"h{rank}", **more)


def hang(backend: str, step: int, other: int) -> list[Evidence]:
    """One rank of two stands still, another one in each round; the other waits, until torch's timeout ends it."""
    return [aborted(backend, "timeout", other, step), stopped(1 - other, step)]


def bug(rank: int, step: int) -> Evidence:
    return dataclasses.replace(raised("'x'", "KeyError", step=step, first_step_done=True, node=f"h{rank}"), rank=rank)


# The ends of the workers by backend, step and number of the round.
SEQUENCES = {
    "hang of one rank": lambda backend, step, round_: hang(backend, step, round_ % 2),
    "all time out": lambda backend, step, _: [aborted(backend, "timeout", rank, step) for rank in (0, 1)],
    "node lost": lambda backend, step, _: [aborted(backend, "gone", rank, step) for rank in (0, 1)],
    "system error on all": lambda backend, step, _: [aborted(backend, "system", rank, step) for rank in (0, 1, 2)],
    "one rank with an Xid": lambda backend, step, _: [
        aborted(backend, "gone", 0, step),
        aborted(backend, "timeout", 1, step),
        aborted(backend, "system", 2, step, xids=(79,)),
    ],
    "one rank with a bug": lambda backend, step, _: [aborted(backend, "gone", 0, step), bug(1, step)],
}
LOST = {"node lost": (Lost("h2", id="n2"),)}


def verdicts(backend: str, name: str, steps: tuple[int, ...]) -> list[JobVerdict]:
    """The verdicts over the same failure after these steps of the job."""
    ledger, found = Ledger(), []
    circumstances = dataclasses.replace(RULES_OF_JOB, lost=LOST.get(name, ()))
    for round_, step in enumerate(steps, 1):
        reports = {
            f"n{each.rank}": Report(each.node or "", dataclasses.replace(classify(each), order=order), 0)
            for order, each in enumerate(SEQUENCES[name](backend, step, round_))
        }
        ledger, verdict = judge(reports, ledger, circumstances, round_)
        found.append(verdict)
    return found


@pytest.mark.parametrize("steps", [(5, 5), (5, 5, 5), (5, 15, 25)], ids=lambda steps: "-".join(map(str, steps)))
@pytest.mark.parametrize("name", SEQUENCES, ids=lambda name: name.replace(" ", "_"))
def test_a_failure_ends_as_under_the_older_backend(name, steps):
    def decisions(backend: str) -> list[tuple[object, ...]]:
        return [
            (each.decision.rule, each.decision.kind, each.decision.response, each.decision.exit_code, each.node, each.restarts)
            for each in verdicts(backend, name, steps)
        ]

    assert decisions("nccl2") == decisions("nccl-legacy")


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("name", ["hang of one rank", "node lost"])
def test_a_peers_failure_costs_no_node(name, words):
    for verdict in verdicts(words, name, (5, 5)):
        assert verdict.decision.kind == ("node_lost" if name in LOST else "network")
        assert verdict.decision.response in (Response.RESTART, Response.RESTART_FREE)
    (verdict,) = verdicts(words, "one rank with an Xid", (5,))
    assert (verdict.decision.response, verdict.node) == (Response.REPLACE_NODE, "n2")
