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
from elastic_ext.failures.torch_texts import ABORTS, MISUSE, PEER_GONE, WORDINGS, How, Wording
from tests.jobs import ROOT

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
    if wording.how is How.ABORT:
        return [
            Evidence(1, signal="SIGABRT", stderr_tail=f"{noise}{text}\n"),
            Evidence(1, exit_code=134, stderr_tail=f"{text}\n"),
        ]
    if wording.how is How.LOG:
        return [Evidence(1, signal="SIGABRT", stderr_tail=f"{noise}{text}\n{ENDS}")]
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
def test_a_status_in_other_words(status):
    """As the older backend and NCCL itself print it."""
    of_torch = f"NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3690, {said(status)}, NCCL version 2.30.7"
    found = classify(Evidence(1, exit_code=1, exception=RaisedException("torch.distributed.DistBackendError", of_torch)))
    assert found.rule == status.rule
    thrown = f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {of_torch}\n"
    assert classify(Evidence(1, signal="SIGABRT", stderr_tail=thrown)).rule == status.rule


def test_a_newer_reason_for_an_abort_follows():
    text = f"{GLOG}[TC][rank=3] Aborting process on rank 3 due to error - something new\n"
    assert classify(Evidence(3, signal="SIGABRT", stderr_tail=text)).rule == PEER_GONE


def test_work_on_a_revoked_group_is_no_misuse():
    """NCCL calls it invalid usage, but another rank's failure has had the group revoked."""
    message = "NCCL AllReduce failed: invalid usage (run with NCCL_DEBUG=WARN for details) \nNCCL Last Error: {}"
    for last, rule in (("AllReduce: communicator was revoked", PEER_GONE), ("AllReduce: count must be 0", MISUSE)):
        assert classify(Evidence(1, exit_code=1, exception=RaisedException("RuntimeError", message.format(last)))).rule == rule


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
        texts = next(each.texts for each in RULES if each.name == rule)
        assert set(torch_texts.keys(rule)) <= set(texts)
    assert ABORTS in torch_texts.WATCHDOG_ENDS_IT


# The table against torch itself.

FOLDER = Path(torch.__file__).parent


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


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
        if wording.since and release(torch.__version__) >= release(wording.since) and path is not None:
            expected.setdefault(path, set()).update(filter(str.strip, re.split(r"\{\w*\}|\|", wording.text)))
    assert expected or release(torch.__version__) < (2, 13)
    for path, pieces in expected.items():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            assert [piece for piece in sorted(pieces) if data.find(piece.encode()) < 0] == [], path.name


# Failures of a job, as reports of its nodes: under nccl2 each ends as under the older backend.

WORDS = {
    "nccl-legacy": {
        "timeout": "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, "
        "Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n",
        "gone": f"[rank{{}}]: NCCL error in: NCCLUtils.cpp:77, {REMOTE}, NCCL version 2.30.7\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n",
        "system": "[rank{}]: NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), "
        "NCCL version 2.30.7\nterminate called after throwing an instance of 'c10::DistBackendError'\n",
    },
    "nccl2": {
        "timeout": f"{GLOG}[TC][rank={{0}}][name=0] Operation timed out after 600000 ms\n{GLOG}[TC][rank={{0}}][name=0] Aborting "
        "process on rank {0} due to timeout - timeout watchdog detected operation timeout\n",
        "gone": f"{GLOG}[TC][rank={{0}}][name=0] nccl hit async error on rank {{0}}: {REMOTE}\n{GLOG}[TC][rank={{0}}][name=0] "
        f"Aborting process on rank {{0}} due to error - nccl hit async error: {REMOTE}\n",
        "system": f"{GLOG}[TC][rank={{0}}][name=0] Aborting process on rank {{0}} due to error - nccl hit async error: unhandled "
        "system error (run with NCCL_DEBUG=INFO for details)\n",
    },
}
RULES_OF_JOB = Circumstances(max_restarts=3, nodes=3, min_nodes=2)


def aborted(backend: str, words: str, rank: int, step: int, **more) -> Evidence:
    printed = WORDS[backend][words].format(rank)
    evidence = Evidence(rank, signal="SIGABRT", stderr_tail=f"step {step}\n{printed}", step=step, first_step_done=True)
    return dataclasses.replace(evidence, node=f"h{rank}", **more)


def stopped(rank: int, step: int, **more) -> Evidence:
    return Evidence(rank, signal="SIGKILL", stopped_by_agent=True, step=step, first_step_done=True, node=f"h{rank}", **more)


SEQUENCES = {
    # one rank of two stands still; the other one waits, until torch's timeout ends it
    "hang of one rank": lambda backend, step: ([aborted(backend, "timeout", 0, step), stopped(1, step)], ()),
    "all time out": lambda backend, step: ([aborted(backend, "timeout", rank, step) for rank in (0, 1)], ()),
    "node lost": lambda backend, step: ([aborted(backend, "gone", rank, step) for rank in (0, 1)], (Lost("h2", id="n2"),)),
    "system error on all": lambda backend, step: ([aborted(backend, "system", rank, step) for rank in (0, 1, 2)], ()),
    "one rank with an Xid": lambda backend, step: (
        [
            aborted(backend, "gone", 0, step),
            aborted(backend, "timeout", 1, step),
            aborted(backend, "system", 2, step, xids=(79,)),
        ],
        (),
    ),
    "one rank with a bug": lambda backend, step: (
        [
            aborted(backend, "gone", 0, step),
            Evidence(1, exit_code=1, exception=RaisedException("KeyError", "'x'"), step=step, first_step_done=True, node="h1"),
        ],
        (),
    ),
}


def verdicts(backend: str, name: str, steps: tuple[int, ...]) -> list[JobVerdict]:
    """The verdicts over the same failure after these steps of the job."""
    ledger, found = Ledger(), []
    for round_, step in enumerate(steps, 1):
        workers, lost = SEQUENCES[name](backend, step)
        reports = {
            f"n{each.rank}": Report(each.node or "", dataclasses.replace(classify(each), order=order), 0)
            for order, each in enumerate(workers)
        }
        ledger, verdict = judge(reports, ledger, dataclasses.replace(RULES_OF_JOB, lost=lost), round_)
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
        assert verdict.decision.kind == "network"
        assert verdict.decision.response in (Response.RESTART, Response.RESTART_FREE)
    (verdict,) = verdicts(words, "one rank with an Xid", (5,))
    assert (verdict.decision.response, verdict.node) == (Response.REPLACE_NODE, "n2")
