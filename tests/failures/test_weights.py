"""Evidence before words: where a text stands decides whether it counts, and what the answer may be."""

import pytest

from elastic_ext.base.diagnosis import Response, Weight
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.failures.rules import GPU_DEAD, RULES

IRREVERSIBLE = {Response.STOP, Response.REPLACE_NODE, Response.REQUEUE}
TEXTS = sorted({one if isinstance(one, str) else " ".join(one) for rule in RULES for one in (*rule.texts, *rule.messages)})
# Of the user's own code, of torch, of clients and of a class that no rule knows.
KNOWN = (
    ("KeyError", "'labels'"),
    ("ValueError", "lr must be positive"),
    ("TypeError", "an integer is required"),
    ("AssertionError", "bad batch"),
    ("ModuleNotFoundError", "No module named 'a'"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/a'"),
    ("MemoryError", ""),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    ("botocore.exceptions.NoCredentialsError", "Unable to locate credentials"),
    ("ConnectionRefusedError", "[Errno 111] Connection refused"),
    ("FloatingPointError", "loss is nan at step 400"),
    ("RuntimeError", "my bug"),
    ("my.Trouble", "my bug"),
)
# Lines of stderr around a text that the script has survived.
SURVIVED = (
    "/v/lib/python3.11/site-packages/torch/nn/modules/conv.py:456: UserWarning: {} (Triggered internally at Conv_v8.cpp:919.)",
    "2026-11-29 10:00:00,123 WARNING trainer: {}, trying again",
    "+ grep -q '{}' /var/log/dmesg",
    "{}",
)


def answer(evidence):
    found = classify(evidence)
    return found.rule, found.kind, found.response


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_in_quotes_or_paths_says_nothing(text):
    for type_ in ("ValueError", "RuntimeError", "OSError", "AssertionError", "wandb.errors.CommError", "my.Trouble"):
        for sample in ("unknown policy for {!r}", "cannot parse /data/{}/a.npy", "no such option --{}=1 in `{}`"):
            of_sample = sample.format(text, text) if "{!r}" not in sample else sample.format(text)
            if "--" in sample:
                of_sample = f"no such option in `{text}`"
            plain = answer(Evidence(0, 1, exception=RaisedException(type_, "unknown policy", ("train.py:8 in main",))))
            mutated = answer(Evidence(0, 1, exception=RaisedException(type_, of_sample, ("train.py:8 in main",))))
            assert (of_sample, type_, mutated) == (of_sample, type_, plain)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_beside_an_exception_changes_no_answer(text):
    for type_, message in KNOWN:
        exception = RaisedException(type_, message, ("train.py:8 in main",))
        for first_step_done in (True, False):
            alone = answer(Evidence(0, 1, exception=exception, first_step_done=first_step_done))
            for line in SURVIVED:
                tail = f"step 1\n{line.format(text)}\nstep 2\n"
                beside = answer(Evidence(0, 1, exception=exception, first_step_done=first_step_done, stderr_tail=tail))
                assert (tail, type_, beside) == (tail, type_, alone)


@pytest.mark.parametrize("text", TEXTS)
def test_a_survived_text_explains_no_signal(text):
    ends = ({"signal": "SIGABRT"}, {"signal": "SIGSEGV"}, {"signal": "SIGKILL"}, {"exit_code": 75}, {"exit_code": 2})
    for line in SURVIVED:
        for more in ends:
            last = "double free or corruption (out)\n" if more.get("signal") == "SIGABRT" else ""
            tail = f"step 1\n{line.format(text)}\nstep 2\n{last}"
            assert (tail, answer(Evidence(0, stderr_tail=tail, **more))) == (tail, answer(Evidence(0, **more)))


@pytest.mark.parametrize("text", TEXTS)
def test_a_printed_text_alone_only_restarts(text):
    for line in SURVIVED:
        assert answer(Evidence(0, 1, stderr_tail=f"{line.format(text)}\n", first_step_done=False))[2] is Response.RESTART


@pytest.mark.parametrize("weight", Weight)
def test_an_answer_is_bounded_by_its_evidence(weight):
    for rule in RULES:
        answered = rule.answer(weight)
        assert weight.certain or answered not in IRREVERSIBLE, rule.name
        assert weight is not Weight.PRINTED or answered in (Response.RESTART, Response.RESTART_FREE), rule.name
        assert not weight.certain or answered is rule.response, rule.name


def test_only_a_devices_own_error_costs_a_node():
    """No other rule ends a job, or has a node leave, for a message alone."""
    by_message = [each for each in RULES if each.response in IRREVERSIBLE and (each.texts or each.messages)]
    assert [each.name for each in by_message] == [GPU_DEAD]
    ecc = "CUDA error: uncorrectable ECC error encountered"
    for type_, message, response in (
        ("torch.AcceleratorError", ecc, Response.REPLACE_NODE),
        ("RuntimeError", ecc, Response.REPLACE_NODE),
        ("RuntimeError", f"cannot tokenize: user says {ecc}", Response.CONFIRM),
        ("ValueError", f"bad sample:\nRuntimeError: {ecc}", Response.CONFIRM),
        ("my.Trouble", ecc, Response.RESTART),
    ):
        assert classify(Evidence(0, 1, exception=RaisedException(type_, message))).response is response
    handled = RaisedException("my.Trouble", "step 9", causes=(f"RuntimeError: {ecc}",))
    assert classify(Evidence(0, 1, exception=handled)).response is Response.RESTART


def test_the_table_stays_small():
    assert len(RULES) <= 70
    assert sum(len(rule.texts) + len(rule.messages) for rule in RULES) <= 300
