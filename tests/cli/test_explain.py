"""`elastic-ext explain` and the rules that a user brings."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from elastic_ext.base import files
from elastic_ext.base.diagnosis import Response
from elastic_ext.base.errors import UsageError
from elastic_ext.cli import main
from elastic_ext.failures import rules as rules_of_failures
from elastic_ext.failures import user_rules
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.failures.ledger import JobVerdict, Ledger
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.rendezvous import job_status
from elastic_ext.rendezvous.round_records import Header, State
from tests.jobs import ROOT

CASES = ROOT / "tests" / "data" / "failure_cases.jsonl"


def explain(capsys, *arguments):
    code = main.main(["explain", *map(str, arguments)])
    said = capsys.readouterr()
    return code, [json.loads(line) for line in said.out.splitlines()], said.err.splitlines()


def test_one_object_per_case(capsys):
    code, told, err = explain(capsys, CASES)
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    assert (code, err) == (0, [])
    assert [one["id"] for one in told] == [case["id"] for case in cases]
    assert [(one["kind"], one["decision"]) for one in told] == [(c["expect"]["kind"], c["expect"]["decision"]) for c in cases]
    assert all(list(one) == ["id", "kind", "decision", "exit_code", "reason", "rule"] and one["reason"] for one in told)
    assert {(one["decision"], one["exit_code"]) for one in told} >= {
        ("stop", 65),
        ("stop", 130),
        ("requeue", 75),
        ("restart", None),
    }


def test_a_file_of_events_names_its_verb(capsys):
    file = CASES.with_name("timeline_events.jsonl")
    code, told, err = explain(capsys, file)
    assert (code, told) == (78, [])
    verb = f"elastic-ext timeline {file} -o job.svg"
    assert err == [f"elastic-ext: {file}: a job's events, and explain reads evidence; {verb} shows them"]


def test_the_full_evidence_of_the_specification(capsys, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(
        '{"id": "a", "exit_code": 1, "signal": null,\n'
        '"exception": {"type": "KeyError", "message": "\'x\'", "frames": ["train.py:88 in step"]},\n'
        '"stderr_tail": "", "step": 12, "first_step_done": true, "agent_signal": null, "oom_kills": 0, "xids": [],\n'
        '"platform": {"name": "kubernetes", "reason": "", "disruption_target": false}, "hang": false,\n'
        '"checkpoint_load": false, "node": "n1", "history": [{"same_fingerprint": true, "progress": false, "node": "n2"}]}'
    )
    code, (told,), _ = explain(capsys, file)
    assert (code, told["decision"], told["exit_code"], told["rule"]) == (0, "stop", 65, "repeated")
    assert "KeyError: 'x' at train.py:88 in step" in told["reason"]


@pytest.mark.parametrize(("moved", "decision"), [(None, "replace_node"), (True, "replace_node"), (False, "confirm")])
def test_a_restart_moves_ranks_unless_told_otherwise(capsys, tmp_path, moved, decision):
    past = {"same_fingerprint": True, "progress": False, "node": "n1", "moved": moved}
    (tmp_path / "a.json").write_text(json.dumps({"signal": "SIGSEGV", "first_step_done": True, "node": "n1", "history": [past]}))
    _, (told,), _ = explain(capsys, tmp_path / "a.json")
    assert told["decision"] == decision


@pytest.mark.seam
def test_the_commands_need_no_torch(tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    plan = ["plan", "--nodes=2", "--mtbf-node-days=264", "--step=6s", "--state=5GB", "--storage=1GB/s"]
    program = (
        "import sys; sys.modules['torch'] = None; import elastic_ext.cli.requests, elastic_ext.rendezvous.running_job\n"
        f"from elastic_ext.cli.main import main; sys.exit(main(['explain', 'empty.json']) or main({plan}))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    told, _, planned = done.stdout.partition("\n")
    assert (json.loads(told)["id"], json.loads(told)["decision"]) == (None, "restart")
    assert "ETTR" in planned


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"exitcode": 1, "sig": 2}', "unknown fields exitcode, sig"),
        ('{"platform": {"nam": "x"}}', "platform.nam"),
        ('{"exception": {"type": "E", "msg": "x"}}', "exception.msg"),
        ('{"exception": {}}', "exception.type"),
        ('{"history": [{}, {"same": true}]}', "history[1].same"),
        ('{"exit_code": "1"}', "exit_code"),
        ('{"exit_code": true}', "exit_code"),
        ('{"signal": "KILL"}', "SIGKILL"),
        ('{"xids": [1, "x"]}', "xids"),
        ('{"history": 3}', "history"),
        ("[]", "JSON object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_input_is_78_and_good_cases_appear(capsys, tmp_path, text, said):
    file = tmp_path / "cases.jsonl"
    file.write_text(f'{{"id": 1}}\n{text}\n\n{{"id": 2}}\n')
    code, told, err = explain(capsys, file)
    assert code == 78
    assert [one["id"] for one in told] == [1, 2]
    assert len(err) == 1
    assert f"{file}:2: " in err[0]
    assert said in err[0]


def test_a_missing_file_and_wrong_usage(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WAIT_S", 0.2)
    count = len(CASES.read_text().splitlines())
    code, told, err = explain(capsys, tmp_path / "none.json", CASES)
    assert (code, len(told), len(err)) == (78, count, 1)
    os.mkfifo(tmp_path / "fifo")
    for no_end, said in ((tmp_path / "fifo", "sent nothing"), (tmp_path, "directory"), ("/dev/zero", "longer than")):
        code, told, err = explain(capsys, no_end, CASES)
        assert (code, len(told), len(err)) == (78, count, 1)
        assert said in err[0]
    for arguments in ([], ["--rdzv-id=x"], ["--rdzv-id=x", "--rdzv-endpoint=y", CASES]):
        code, told, err = explain(capsys, *arguments)
        assert (code, told, len(err)) == (78, [], 1)
    for arguments in ([], ["explane", "x"]):
        with pytest.raises(SystemExit) as stopped:
            main.main(arguments)
        assert stopped.value.code == 78
        assert len(capsys.readouterr().err.splitlines()) == 1


RULES = """
[[rule]]
name = "license"
pattern = "License * not available"
kind = "network"
decision = "restart"

[[rule]]
name = "ours"
exit_code = 17
exception = "pkg.OursError"
kind = "data"
decision = "stop"

[[rule]]
name = "usr1"
signal = "SIGUSR1"
kind = "preemption"
decision = "requeue"
"""


@pytest.fixture
def rules(tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    return file


@pytest.mark.parametrize(
    ("evidence", "rule"),
    [
        (Evidence(0, exit_code=1, stderr_tail="x\nlicense server not available\n"), "license"),
        (Evidence(0, exit_code=1, exception=RaisedException("NameError", "License x not available")), "license"),
        (Evidence(0, exit_code=1, stderr_tail="license\nnot available"), "no-evidence"),
        (Evidence(0, exit_code=17, exception=RaisedException("pkg.OursError", "")), "ours"),
        (Evidence(0, exit_code=17, exception=RaisedException("other.OursError", "")), "no-evidence"),
        (Evidence(0, exit_code=1, exception=RaisedException("pkg.OursError", "")), "no-evidence"),
        (Evidence(0, exit_code=138), "usr1"),
        (Evidence(0, signal="SIGUSR1", agent_signal="SIGINT"), "cancelled"),
        (Evidence(0, signal="SIGUSR1", xids=(79,)), "usr1"),
    ],
)
def test_a_users_rules_come_after_requested_stops(rules, evidence, rule):
    assert classify(evidence, user_rules.load(str(rules))).rule == rule


def test_explain_takes_rules(capsys, rules, tmp_path):
    file = tmp_path / "case.json"
    file.write_text('{"signal": "SIGUSR1"}')
    _, (told,), _ = explain(capsys, "--rules", rules, "--exit-codes=kubeflow", file)
    assert (told["rule"], told["decision"], told["exit_code"]) == ("usr1", "requeue", 203)
    assert str(rules) in told["reason"]


GOOD = {"name": "n", "exit_code": 3, "kind": "code", "decision": "stop"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "expected a name"),
        ({"name": "network"}, "a rule of elastic_ext has this name"),
        ({"kind": "bug"}, "kind='bug': expected one of code, data"),
        ({"kind": []}, "kind="),
        ({"kind": "cascade"}, "kind='cascade'"),
        ({"decision": "follow"}, "decision='follow'"),
        ({"exit_code": 0}, "1 to 255"),
        ({"exit_code": "3"}, "1 to 255"),
        ({"signal": "USR1"}, "SIGUSR1"),
        ({"exception": "not a name"}, "name of a class"),
        ({"pattern": "(a+)+"}, None),
        ({"pattern": "loss .* nan"}, "not a regular expression"),
        ({"pattern": "**"}, "plain text"),
        ({"pattern": "x" * 501}, "500 characters"),
        ({"patern": "x"}, "unknown field patern"),
    ],
)
def test_a_bad_rule_is_told_in_one_line(change, said):
    tables = [GOOD, {**GOOD, **change}]
    if said is None:
        assert len(user_rules.from_tables(tables, "here")) == 2
        return
    with pytest.raises(UsageError) as error:
        user_rules.from_tables(tables, "rules file r.toml")
    assert "rules file r.toml: rule 2" in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [('[[rule]]\nname = "n"\nexit_code = 0x' + "f" * 5000, "exit_code=<"),
     ('[[rule]]\nname = "n"\nexit_code = {a' + ".a" * 2000 + " = 1}", "exit_code=<"),
     ("[[rule", "TOML"), ("\xff", "TOML"), ("rule = 3", "[[rule]]"), ("rules = []", "rules"), ("rule = [3]", "expected a table"),
     ('[[rule]]\nname = "n"\nkind = "code"\ndecision = "stop"', "at least one of"),
     ('[[rule]]\nname = "n"\nexit_code = 3\nkind = "code"', "expected a decision")],
)  # fmt: skip
def test_a_bad_file_is_told_with_its_name(tmp_path, text, said):
    file = tmp_path / "r.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"r\.toml") as error:
        user_rules.load(str(file))
    assert said in str(error.value)
    with pytest.raises(UsageError):
        user_rules.load(str(tmp_path / "none.toml"))


def entry_point_rules():
    return [GOOD, user_rules.UserRule("made", "code", Response.STOP, signal="SIGHUP")]


def broken_entry_point():
    raise RuntimeError("no\nrules")


def test_entry_points_bring_rules():
    def point(name):
        return EntryPoint(name, f"{__name__}:{name}", rules_of_failures.GROUP)

    assert [rule.name for rule in user_rules.from_entry_points([point("entry_point_rules")])] == ["n", "made"]
    for name in ("broken_entry_point", "not_there", "CASES"):
        with pytest.raises(UsageError, match=name):
            user_rules.from_entry_points([point(name)])


def test_what_etcd_holds_cannot_steer_the_terminal():
    header = Header(1, State.BROKEN, reason="\x1b]0;title\x07")
    told = JobVerdict(Decision(Action.RESTART, "code", "\x9b"), 1, stacks='on a: rank 1\n  File "x\x1b[2J"')
    shown = list(job_status.lines(job_status.JobStatus("x\x1b[2J", header, {}, {}, Ledger((), 0, (told,)), {"h\n": "\x9b1m"})))
    assert shown[-2:] == ["    on a: rank 1", '      File "x\\x1b[2J"']
    assert all(line.isprintable() for line in shown)
    assert "\\x1b]0;title\\x07" in shown[1]
