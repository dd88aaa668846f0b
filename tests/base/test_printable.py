"""What others wrote reaches a terminal or a log without escape sequences, forged lines and credentials."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_ext.base import log_records
from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import Block, beginnings, cut, masked, ranks_in_words, redacted, shown, shown_block
from elastic_ext.checkpoints.directory.own_files import quarantine
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.cli import main
from tests.jobs import AGENT, EXT, Gate, Job, children, run

ESCAPES = "\x1b]0;title\x07\x9b2J\u202e"
FORGED = "elastic_ext: stop: forged"
HOSTILE = f"{ESCAPES}\n{FORGED}\r{FORGED}"
PLANTED = "hunter2/planted+secret"


@pytest.mark.parametrize(
    ("texts", "least", "joined"),
    [
        ([], 0, ""),
        (["abc"], 0, "abc"),
        (["abcdefghijklmnop"], 0, "abcdefghijkl"),
        (["abcdefgh", "x", "ABCDEFGH"], 0, "abcd\nx\nABCDE"),  # the short one leaves the others its share
        (["abcdefgh"] * 5, 5, "abcde\nabcde\n"),
    ],
)
def test_texts_share_the_room_for_them(texts, least, joined):
    assert beginnings(texts, 12, least) == joined


def line_of(level: str, text: str, node: str = "n2") -> str:
    """A pattern of a line of the log."""
    return rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} {node} {level} {text}"


def assert_fit(text: str) -> None:
    """Lines of printable text, none of which somebody else has begun."""
    for line in text.split("\n"):
        assert line.expandtabs().isprintable(), ascii(line)
        assert not line.startswith(FORGED), text


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("a peer closed it", 16, "a peer closed it"),
        ("a peer closed it", 15, "a peer closed…"),
        ("a peer closed it", 13, "a peer…"),  # the ellipsis has to fit, too
        ("at the end, then", 13, "at the end…"),
        ("/a/path/without/any/space", 10, "/a/path/w…"),
        ("no /a/path/without/any/space", 12, "no /a/path/…"),  # else too little would be left
        ("", 5, ""),
    ],
)
def test_a_long_text_ends_at_a_word(text, most, expected):
    assert cut(text, most) == expected
    assert len(expected) <= most


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([7], "rank 7"),
        ([1, 0], "ranks 0, 1"),
        ([3, 1, 0, 2, 7], "ranks 0 to 3, 7"),
        (range(1000), "ranks 0 to 999"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_in_words(ranks, said):
    assert ranks_in_words(ranks) == said


# Credentials.


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"s3://key:{PLANTED}@bucket/a", "s3://***@bucket/a"),
        (f"copied to sftp://me:{PLANTED}@host/x, s3://bucket/a", "copied to sftp://***@host/x, s3://bucket/a"),
        (f"https://host/a?sig={PLANTED}&x=1", "https://host/a?sig=***&x=1"),
        (f"s3://b/a?aws_secret_access_key={PLANTED}", "s3://b/a?aws_secret_access_key=***"),
        (f"az://c/a?sv=1&SECURITY-TOKEN={PLANTED}#f", "az://c/a?sv=1&SECURITY-TOKEN=***#f"),
        ("s3://bucket/run@v2/step_3", "s3://bucket/run@v2/step_3"),
        ("/data/a@b:c", "/data/a@b:c"),
        ("endpoint='me:pw@host:2379' (me:pw@host)", "endpoint='***@host:2379' (***@host)"),
        ('{"a": "me:b@host"}', '{"a": "***@host"}'),
        ("rank 0: a@host, 10:30:11 me@host", "rank 0: a@host, 10:30:11 me@host"),
    ],
)
def test_credentials_of_urls(text, kept):
    assert redacted(text) == kept
    assert redacted(kept) == kept


def test_a_long_text_of_urls_takes_no_time():
    assert len(redacted("a://b:" * 100_000)) == 600_000


def test_values_of_variables_named_like_a_secret():
    environ = {"DB_PASSWORD": PLANTED, "HOME": "/root", "SHORT_KEY": "a"}
    assert masked(f"a {PLANTED} in /root", environ) == "a *** in /root"


@pytest.fixture
def hostile_names(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    names = [f"ckpt_1{ESCAPES}.pt", f"ckpt_2\n{FORGED}.pt", f"ckpt_3\r{FORGED}.pt"]
    for name in names:
        torch.save({"step": 1}, folder / name)
    (folder / f"ckpt_4{ESCAPES}\n{FORGED}.pt").write_bytes(b"PK\x03\x04 no more")
    quarantine(open_storage(str(folder)), names[0], HOSTILE, "me")
    return folder


# Logs and errors.


def test_a_block_cannot_hold_a_log_line():
    assert shown_block(f"first\n{FORGED}\n\n  kept\n\tx") == f"first\n  {FORGED}\n\n  kept\n        x"
    assert isinstance(shown_block("a\nb"), Block)
    assert "\n" not in shown("a\nb")


def test_records_of_all_our_loggers(caplog):
    log_records.install()
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("elastic_ext.workers.somewhere")
    logger.info("%s, %r, %s at %d and %.1f", HOSTILE, {"a": HOSTILE}, OSError(2, "no", HOSTILE), 3, 0.5)
    logger.info("%(name)s", {"name": HOSTILE})
    logger.info("s3 is %s", Path(f"s3://key:{PLANTED}@x".replace("//", "/")))
    logger.info("to %s", f"s3://key:{PLANTED}@bucket")
    logger.info("it was at:\n%s", Block(f"File {HOSTILE}"))
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("it failed")
    assert_fit(caplog.text.replace("\n\n", "\n"))
    assert "at 3 and 0.5" in caplog.text
    assert "to s3://***@bucket" in caplog.text
    assert "Traceback (most recent call last):\n  File" in caplog.text
    assert len(caplog.records[0].getMessage().splitlines()) == 1


@pytest.mark.seam
@pytest.mark.parametrize(
    ("plain", "configured", "shown"),
    [
        (False, "", line_of("WARNING", "seen")),
        (True, "", "seen"),  # by a command for people at a terminal
        (False, "log_records.configure('INFO'); log_records.configure('INFO')", line_of("WARNING", "seen")),
        (False, "logging.basicConfig(); log_records.configure('INFO')", "WARNING:elastic_ext.a.b:seen"),
        (False, "logging.getLogger('elastic_ext').addHandler(logging.StreamHandler())", "seen"),
    ],
)
def test_each_record_is_shown_once_whoever_configures_logging(monkeypatch, plain, configured, shown):
    """Under stock torchrun nobody does: logging's handler of last resort shows warnings."""
    monkeypatch.setenv("ELASTIC_EXT_NODE_NAME", "n2")
    code = f"import logging\nfrom elastic_ext.base import log_records\nlog_records.install({plain})\n"
    code += f"{configured}\nlogger = logging.getLogger('elastic_ext.a.b')\n"
    code += f"logger.debug('no')\nlogger.warning('seen %s', {HOSTILE!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.count("seen") == 1
    assert len(done.stderr.splitlines()) == 1
    assert re.match(shown, done.stderr), done.stderr
    assert_fit(done.stderr)


def test_each_line_has_time_and_node(capsys, monkeypatch):
    """One format, also for the last words of a command, and for what an agent starts."""
    monkeypatch.setattr(log_records, "_node", "")
    monkeypatch.setenv("ELASTIC_EXT_NODE_NAME", "n2")
    log_records.say(f"elastic_ext: {HOSTILE}")
    log_records.set_node("n3")
    record = logging.LogRecord("elastic_ext.a.b", logging.WARNING, "", 0, "%s is lost", ("n4",), None)
    ours = log_records.LineFormatter().format(record)
    record.name = "torch.somewhere"
    said = capsys.readouterr().err
    assert re.fullmatch(line_of("ERROR", r"elastic_ext: .*\n"), said), said
    assert re.fullmatch(line_of("WARNING", "n4 is lost", "n3"), ours), ours
    assert log_records.LineFormatter().format(record).endswith(" n3 WARNING torch.somewhere: n4 is lost")


@pytest.mark.seam
def test_our_lines_in_a_worker_are_marked(tmp_path, monkeypatch):
    """Also one that imported this package before it knew which worker it is. The arguments stay what they were for handlers."""
    monkeypatch.setenv("ELASTIC_EXT_NODE_NAME", "n2")
    code = "import logging, os\nfrom elastic_ext import save_requested\nfrom elastic_ext.base.printable import Block\n"
    code += "logger = logging.getLogger('elastic_ext.a')\nlogger.warning('before')\n"
    code += "os.environ['ELASTIC_EXT_WORKER'] = '{}'\nlogger.warning('%s and %d\\n100 %%', Block('one\\ntwo'), 3)\n"
    code += "try:\n    raise ValueError('a\\nb')\nexcept ValueError:\n    logger.exception('failed')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    first, one, *others = done.stderr.splitlines()
    assert re.fullmatch(line_of("WARNING", "before"), first)
    assert re.fullmatch(line_of("WARNING", "elastic_ext: one"), one)
    said = [
        *[("WARNING", "  two and 3"), ("WARNING", "  100 %")],
        ("ERROR", "failed"),
        ("ERROR", "Traceback (most recent call last):"),
    ]
    assert all(
        re.fullmatch(line_of(level, re.escape(f"elastic_ext: {text}")), line)
        for (level, text), line in zip(said, others, strict=False)
    )
    assert all(re.match(line_of("ERROR", "elastic_ext: "), line) for line in others[2:])


@pytest.mark.full
@pytest.mark.parametrize("module", ["training", "checkpoints.writing.checkpointer"])
def test_records_of_what_scripts_import(module):
    code = f"import logging, elastic_ext.{module}\nlogging.getLogger('elastic_ext.a').warning('seen %s', {HOSTILE!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "seen" in done.stderr
    assert_fit(done.stderr.strip())


def test_errors_are_one_line():
    error = UsageError(f"checkpoint_dir s3://a:{PLANTED}@b: {HOSTILE}")
    assert str(error).startswith("checkpoint_dir s3://***@b: \\x1b]0;")
    assert str(error).isprintable()


@pytest.mark.full
@pytest.mark.parametrize("command", [EXT, AGENT])
def test_errors_and_file_names_forge_no_agent_line(tmp_path, command, hostile_names):
    """What it raises once in the agent's own block, where it goes on, and once in torch's, at the end."""
    (tmp_path / "job.py").write_text(f"raise RuntimeError({HOSTILE!r})")
    done = run(
        [*command, "--nproc-per-node=1", "--max-restarts=1", "job.py"], tmp_path, ELASTIC_EXT_CHECKPOINT_DIR=str(hostile_names)
    )
    assert done.returncode != 0
    assert "ckpt_3\\r" in done.err or command == EXT  # stock torchrun shows warnings only
    assert "elastic_ext: restart: rank 0 raised RuntimeError" in done.err
    assert "Root Cause (first observed failure)" in done.err
    assert_fit(done.err)


# The commands.


@pytest.mark.parametrize(
    "words",
    [("ls",), ("verify", "--all"), ("prune",), ("cp",), ("pin", "not there"), ("verify", f"no{HOSTILE}"), (f"no{HOSTILE}",)],
)
def test_names_of_files_cannot_steer_the_terminal(hostile_names, tmp_path, capsys, words):
    action, *more = words
    names = [path.name for path in hostile_names.glob("ckpt_[123]*")] + ["--to", str(tmp_path / "to")] if action == "cp" else more
    try:
        main.main(["checkpoints", action, str(hostile_names), *names])
    except SystemExit as error:
        assert error.code == 78  # noqa: PT017 - argparse's way
    told = capsys.readouterr()
    assert told.out + told.err
    assert_fit(told.out)
    assert_fit(told.err)


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_json_is_escaped_and_names_files_as_is(hostile_names, capsys, action):
    main.main(["checkpoints", action, str(hostile_names), "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert {json.loads(line)["name"] for line in lines} <= set(os.listdir(hostile_names))


# Where a URL with credentials goes.

WAITS = """
import fcntl
print("waits", flush=True)
with open("gate") as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
"""


def commands_of(agent: int) -> str:
    """The arguments of a job's processes, as every user of the machine can read them."""
    as_another = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    paths = [f"/proc/{pid}/cmdline" for pid in (agent, *children(agent))]
    return subprocess.run(["cat", *paths], capture_output=True, text=True, timeout=60, **as_another).stdout


@pytest.mark.full
def test_checkpoint_dir_credentials_are_never_shown(tmp_path):
    (tmp_path / "job.py").write_text(WAITS)
    gate = Gate(tmp_path / "gate")
    variables = {
        "ELASTIC_EXT_CHECKPOINT_DIR": f"memory://key:{PLANTED}@bucket/x",
        "ELASTIC_EXT_LOCAL_DIR": str(tmp_path / "local"),
        "LOGLEVEL": "INFO",
    }
    with Job([*AGENT, "--nproc-per-node=1", "job.py"], tmp_path, **variables) as job:
        job.wait_for("waits")
        commands = commands_of(job.process.pid)
        gate.open()
        done = job.finish()
    assert done.returncode == 0, done.all
    assert "replicate" in commands
    assert PLANTED not in commands
    assert PLANTED not in done.all
    assert "memory://***@bucket/x" in done.err
    kept = [text for path in (tmp_path / "local").rglob("*") if path.is_file() and (text := path.read_text())]
    assert kept == ["memory://***@bucket/x"]


class Signal(Exception):
    """As torch's: raised by a signal handler, wherever the main thread is."""

    sigval = 15


def test_a_signal_goes_through_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging would print it as an error of its own, with a traceback of our files, and go on."""

    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            raise Signal

    monkeypatch.setattr(sys, "stderr", Interrupted())
    with pytest.raises(Signal):
        log_records._Lines().handle(logging.makeLogRecord({"msg": "a line"}))
