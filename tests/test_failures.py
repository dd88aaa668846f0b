"""Evidence, the table and the decision: pure, and the reader of error files on whatever a worker can leave."""

import json
import random

import pytest

from elastic_ext import policy
from elastic_ext.failures.classify import CASCADE, RULES, classify, root_cause
from elastic_ext.failures.evidence import MAX_ERROR_FILE_BYTES, Evidence, RaisedException, exit_status, read_error_file


def raised(type_, message="", **more):
    return Evidence(rank=0, exit_code=1, exception=RaisedException(type_, message, ("train.py:88 in step",)), **more)


# One row or more for each rule of the table: (rule, evidence, kind, another try would end the same way)
CASES = [
    ("stopped-by-agent", Evidence(0, signal="SIGTERM", stopped_by_agent=True), CASCADE, False),
    ("stopped-by-agent", raised("AttributeError", "in a SIGTERM handler", stopped_by_agent=True), CASCADE, False),
    ("peer-gone", raised("RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), CASCADE, False),
    ("peer-gone", raised("torch.distributed.DistBackendError", "NCCL error"), CASCADE, False),
    (
        "shared-object",
        raised("ImportError", "libcudnn.so.9: cannot open shared object file: Stale file handle"),
        "storage",
        False,
    ),
    ("code-always", raised("ModuleNotFoundError", "No module named 'flash_atn'"), "code", True),
    ("code-always", raised("NameError", "name 'x' is not defined", first_step_done=True), "code", True),
    ("code-before-first-step", raised("KeyError", "'input_ids'", first_step_done=False), "code", True),
    ("unknown", raised("KeyError", "'input_ids'", first_step_done=True), "unknown", False),
    ("unknown", raised("KeyError", "'input_ids'", first_step_done=None), "unknown", False),
    ("files-before-first-step", raised("FileNotFoundError", "data.bin", first_step_done=False), "data", True),
    ("unknown", raised("FileNotFoundError", "data.bin", first_step_done=True), "unknown", False),
    ("usage-exit", Evidence(0, exit_code=2), "code", True),
    ("usage-exit", Evidence(0, exit_code=127), "code", True),
    ("sysexits", Evidence(0, exit_code=65), "code", True),
    ("unknown", Evidence(0, exit_code=75), "unknown", False),
    ("unknown", Evidence(0, exit_code=1), "unknown", False),
    ("unknown", Evidence(0, signal="SIGKILL"), "unknown", False),
    ("unknown", Evidence(0), "unknown", False),
    ("unknown", raised("torch.OutOfMemoryError", "CUDA out of memory", first_step_done=False), "unknown", False),
]


@pytest.mark.parametrize(("rule", "evidence", "kind", "deterministic"), CASES)
def test_the_table_row_by_row(rule, evidence, kind, deterministic):
    diagnosis = classify(evidence)
    assert (diagnosis.rule, diagnosis.kind, diagnosis.deterministic) == (rule, kind, deterministic)
    assert f"rank {evidence.rank}" in diagnosis.reason


def test_every_rule_has_a_case():
    assert {rule.name for rule in RULES} == {case[0] for case in CASES}


def test_the_cause_is_not_the_first_one_seen():
    """A rank that raised is seen after its peers: they die of the closed connection while it is still ending."""
    bug = classify(Evidence(1, exit_code=1, exception=RaisedException("NameError", "x"), ended_ns=200))
    peer = classify(
        Evidence(0, exit_code=1, exception=RaisedException("RuntimeError", "Connection closed by peer"), ended_ns=100)
    )
    stopped = classify(Evidence(2, signal="SIGTERM", stopped_by_agent=True, ended_ns=50))
    assert root_cause([stopped, peer, bug]) == bug


def test_the_earliest_of_equals_is_the_cause():
    late = classify(Evidence(0, signal="SIGSEGV", ended_ns=20))
    early = classify(Evidence(1, signal="SIGKILL", ended_ns=10))
    assert root_cause([late, early]) == early


def test_a_cascade_alone_is_the_network():
    peer = classify(Evidence(0, exit_code=1, exception=RaisedException("RuntimeError", "Connection reset by peer")))
    assert root_cause([peer]).kind == "network"


@pytest.mark.parametrize(
    ("evidence", "charged", "limit", "action"),
    [
        (Evidence(0, signal="SIGKILL"), 0, 3, policy.Action.RESTART),
        (Evidence(0, signal="SIGKILL"), 2, 3, policy.Action.RESTART),
        (Evidence(0, signal="SIGKILL"), 3, 3, policy.Action.STOP),
        (Evidence(0, signal="SIGKILL"), 0, 0, policy.Action.STOP),
        (Evidence(0, signal="SIGKILL"), 10_000, policy.NO_LIMIT, policy.Action.RESTART),
        (raised("NameError"), 0, 3, policy.Action.STOP),
        (raised("NameError"), 0, policy.NO_LIMIT, policy.Action.STOP),
    ],
)
def test_decide(evidence, charged, limit, action):
    decision = policy.decide(classify(evidence), charged, limit)
    assert decision.action is action
    assert decision.reason


@pytest.mark.parametrize(
    ("exitcode", "split"),
    [(0, (0, None)), (1, (1, None)), (-9, (None, "SIGKILL")), (-35, (None, "signal 35")), (None, (None, None))],
)
def test_exit_status(exitcode, split):
    assert exit_status(exitcode) == split


GOOD = {"message": {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"}}}


def test_an_error_file_of_torchs_record(tmp_path):
    file = tmp_path / "error.json"
    file.write_text(json.dumps(GOOD))
    read = read_error_file(str(file))
    assert (read.data, read.path, read.problem) == (GOOD, str(file), "")
    assert read.exception == RaisedException("KeyError", "'x'")


def test_an_error_file_of_the_bootstrap(tmp_path):
    file = tmp_path / "error.json"
    ours = {"type": "pkg.Err", "message": "m", "frames": ["a.py:1 in f"], "monotonic_ns": 5}
    file.write_text(json.dumps({**GOOD, "elastic_ext": ours}))
    read = read_error_file(str(file))
    assert read.exception == RaisedException("pkg.Err", "m", ("a.py:1 in f",))
    assert read.raised_ns == 5


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"message": 1}',
        b'{"message": null}',
        b'{"message": {}}',
        b'{"message": {"extraInfo": 1}}',
        b'{"message": {"extraInfo": {"timestamp": "soon"}}}',
        b'{"message": {"extraInfo": {"timestamp": 1e300}}}',
        b'{"message": {"extraInfo": {"timestamp": 500000000000}}}',
        b'{"message": {"extraInfo": {"timestamp": -500000000000}}}',
        b'{"message": {"message": "m", "extraInfo": {"timestamp": "1", "py_callstack": 5}}}',
        b'{"message": "m", "timestamp": "x"}',
        json.dumps(GOOD).encode()[:-5],
        b'{"message": "' + b"x" * MAX_ERROR_FILE_BYTES + b'"}',
    ],
)
def test_a_broken_error_file_is_told_and_not_used(tmp_path, content):
    file = tmp_path / "error.json"
    file.write_bytes(content)
    read = read_error_file(str(file))
    assert read.data is None
    assert read.path == ""
    assert str(file) in read.problem


def test_no_error_file_is_no_problem(tmp_path):
    assert read_error_file(str(tmp_path / "none")).problem == ""
    assert read_error_file("").problem == ""
    assert read_error_file(str(tmp_path)).problem == ""


def test_odd_values_of_ours_do_not_hurt(tmp_path):
    file = tmp_path / "error.json"
    for ours in ({"type": 1}, {"type": "E", "frames": 3, "monotonic_ns": "x"}, [], "x", None):
        file.write_text(json.dumps({**GOOD, "elastic_ext": ours}))
        assert read_error_file(str(file)).data is not None


def test_random_bytes(tmp_path):
    """10,000 files: parts of a good one with bytes changed, cut and doubled."""
    rng = random.Random(7)
    good = json.dumps({**GOOD, "elastic_ext": {"type": "E", "message": "m", "frames": [], "monotonic_ns": 1}}).encode()
    file = tmp_path / "error.json"
    for _ in range(10_000):
        mutated = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(mutated))
            mutated[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        file.write_bytes(mutated[: rng.randrange(len(mutated) + 1)])
        read = read_error_file(str(file))
        assert (read.data is None) == bool(read.problem)
