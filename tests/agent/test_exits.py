"""The verdict where schedulers look, whatever is in its place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from elastic_ext.agent import exits
from elastic_ext.agent.verdicts import Verdicts, for_others, remote_failure
from elastic_ext.base.settings import Settings
from elastic_ext.failures.ledger import MAX_TEXT, JobVerdict, decode_verdict, encode_verdict
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.rendezvous.contract import JobDone, NodeIdentity
from elastic_ext.rendezvous.round_store import unreachable
from tests.jobs import AGENT, EXT, ROOT, Finished, Job, run
from tests.launchers import LISTENS
from tests.ports import free_port

NO_ROOM = """
import resource, sys
from elastic_ext.agent import exits
resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))  # as a full disk does: the file is there, the bytes are not taken
exits.publish({"a": 1}, sys.argv[1])
"""


def test_the_verdict_file_is_replaced(tmp_path):
    path = tmp_path / "verdict"
    path.write_text("old")
    exits.publish({"a": 1}, str(path))
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["verdict"]


def test_a_verdict_holds_no_credentials_and_stays_json(tmp_path):
    reason = 's3://key:a/secret@bucket/x: "no", \'x://a?token=abc"d'
    exits.publish(
        {"reason": reason, "paths": ["https://h/a?sig=abc", "me@host", "a:b@host", "x\na:b@host"]}, str(tmp_path / "verdict")
    )
    told = {
        "reason": 's3://***@bucket/x: "no", \'x://a?token=***"d',
        "paths": ["https://h/a?sig=***", "me@host", "***@host", "x\n***@host"],
    }
    assert json.loads((tmp_path / "verdict").read_text()) == told


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGQUIT", 130), ("SIGTERM", 75), ("SIGHUP", 75)])
def test_the_exit_code_of_a_signal(monkeypatch, number, code):
    monkeypatch.setattr(exits, "job", exits.JobEnd("design"))
    assert exits.exit_code_of(SignalException("told", signal.Signals[number])) == code


@pytest.mark.parametrize(
    ("preset", "code", "others"),
    [("design", 69, 75), ("design", 75, 75), ("design", 65, 65), ("stock", 1, 1), ("kubeflow", 197, 203)],
)
def test_the_others_when_one_node_closes_the_job(preset, code, others):
    own = JobVerdict(Decision(Action.STOP, "unknown", "why", code), 2, "a", "a")
    told = decode_verdict(encode_verdict(for_others(own, preset)))
    assert (told.decision.exit_code, told.decision.reason, told.ends_job) == (others, "why", True)


def test_others_get_one_line_of_an_agents_error():
    verdicts = Verdicts(Settings(), SimpleNamespace(part=SimpleNamespace(round=2), node=NodeIdentity("a", "a", "")))
    decision = verdicts.of_agent(OSError("x" * 10**6)).decision
    assert decision.reason.startswith("the agent on a failed: OSError: xxx")
    assert len(decision.reason) <= MAX_TEXT


def test_all_end_alike_where_one_reaches_no_other():
    """The node itself by the exception, the others by the verdict that it leaves them."""
    handler = SimpleNamespace(part=SimpleNamespace(round=2), node=NodeIdentity("a", "a", ""))
    error = RendezvousConnectionError(unreachable("a (10.0.0.1)", ["10.0.0.2:4000", "10.0.0.2:4001"]))
    verdicts = Verdicts(Settings(), handler)
    with pytest.raises(RendezvousConnectionError), verdicts.left():
        raise error
    told = decode_verdict(encode_verdict(verdicts.closing))
    decision = told.for_node("b", "design")
    assert (decision.exit_code, decision.kind, told.keeps_ledger) == (exits.exit_code_of(error), "network", True)
    assert decision.reason.startswith("a (10.0.0.1) cannot reach 10.0.0.2:4000, 10.0.0.2:4001, the stores of 2 rounds in a row")
    assert "open all TCP ports between the hosts" in decision.reason


def test_a_job_closed_silently_ends_with_one_line(monkeypatch, capsys):
    """As by an agent other than ours."""
    ended = []
    monkeypatch.setattr(exits, "job", exits.JobEnd("design"))
    monkeypatch.setattr(exits, "end", ended.append)
    exits._hook(RendezvousClosedError, RendezvousClosedError("the job j is over: h closed the job"), None)
    assert ended == [1]
    assert capsys.readouterr().err.endswith(" ERROR elastic_ext: the job j is over: h closed the job; exit code 1\n")


@pytest.mark.parametrize("level", ["WARNING", "INFO"])
def test_another_nodes_verdict_is_the_last_line(monkeypatch, caplog, capsys, level):
    """Lines from INFO up, such as that of goodput, come after that of the verdict. Without them, it stands there once."""
    monkeypatch.setattr(exits, "job", exits.JobEnd("design"))
    monkeypatch.setattr(exits, "is_launcher", lambda: True)
    caplog.set_level(level, "elastic_ext")
    verdict = JobVerdict(Decision(Action.STOP, "code", "it failed", 65, "at-start"), 2, "b", "b", rank=1)
    verdicts = Verdicts(Settings(), SimpleNamespace(part=SimpleNamespace(round=2), node=NodeIdentity("a", "a", "")))
    failures = verdicts.stop(verdict, verdict.decision, remote_failure(verdict)).failures
    exits.say_last(ChildFailedError("job.py", failures), 65)
    said = capsys.readouterr().err.partition(" ERROR ")[2]
    assert said == ("elastic_ext: stop: on b: it failed (kind code, rule at-start); exit code 65\n" if level == "INFO" else "")


def test_torchs_own_agent_ends_with_our_line(monkeypatch, capsys):
    """As with `python -m elastic_ext.agent --rdzv-backend=c10d`."""
    monkeypatch.setattr(exits, "is_launcher", lambda: True)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=3, error_file="")
    exits.say_last(ChildFailedError("job.py", {0: failure}), 1)
    said = capsys.readouterr().err
    assert "job.py FAILED" in said
    assert said.endswith(" ERROR elastic_ext: the job has failed; exit code 1\n")


def test_a_late_node_says_why_it_ends(monkeypatch, caplog):
    """Its script never ran, so 0 needs a reason that everybody sees."""
    monkeypatch.setattr(exits, "set_succeeded", lambda: None)
    result = exits.succeeded_without(SimpleNamespace(workers=[SimpleNamespace(global_rank=-1)]), JobDone("the job j is over"))
    assert result.return_values == {-1: None}
    (record,) = caplog.records
    said = "the job j is over; nothing is left to do on this node: exit code 0"
    assert (record.levelname, record.getMessage()) == ("WARNING", said)


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts another /dev in a mount namespace of its own, which only root may")
def test_a_stream_to_a_file_stays_one(tmp_path):
    """As /dev/stderr of a job whose output goes to a file."""
    # What is imported may need the files of the usual /dev: torch opens /dev/urandom on some processors.
    mounted = "mount -t tmpfs dev /dev && ln -s /proc/self/fd/2 /dev/stderr"
    code = f"import os; from elastic_ext.agent import exits; os.system('{mounted}'); exits.publish(dict(a=1), '/dev/stderr')"
    shell = f'{sys.executable} -c "{code}" && ls -l /dev'
    with open(tmp_path / "err", "w") as file:
        command = ["unshare", "--mount", "bash", "-c", shell]
        done = subprocess.run(command, stdin=file, stdout=subprocess.PIPE, stderr=file, text=True, check=False, timeout=60)
    assert done.returncode == 0, (tmp_path / "err").read_text()
    assert "/dev/stderr -> /proc/self/fd/2" in done.stdout.replace(" stderr", " /dev/stderr")
    assert json.loads((tmp_path / "err").read_text()) == {"a": 1}


@pytest.mark.full
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    path = tmp_path / "verdict"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", NO_ROOM, str(path)], capture_output=True, text=True, check=True, timeout=60)
    assert "could not be written" in done.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["verdict"]


@pytest.mark.parametrize("path", ["/", ".", "..", "/dev/full", "{0}/pipe", "{0}", "{0}/no/verdict"])
def test_a_path_that_is_no_file_is_harmless(tmp_path, path, caplog):
    """A pipe without a reader would block for ever; a device must not be replaced by a file."""
    os.mkfifo(tmp_path / "pipe")
    exits.publish({"a": 1}, path.format(tmp_path))
    assert "could not be written" in caplog.text
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_pipe_and_a_device_are_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    exits.publish({"a": 1}, str(tmp_path / "link"))
    assert json.loads(os.read(reader, 4096)) == {"a": 1}
    os.close(reader)
    assert (tmp_path / "link").is_symlink()


# Each argument is what a program does, in a fork: it takes longest to import torch.
FORKS = """
import atexit, os, signal, sys, threading
from elastic_ext.agent import exits
from elastic_ext.base.errors import NodeRefused
for number, program in enumerate(sys.argv[1:]):
    if not (pid := os.fork()):
        signal.alarm(60)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(f"{stream.fileno()}.{number}", os.O_WRONLY | os.O_CREAT), stream.fileno())
        exec(program)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
LAUNCHER = "__file__, __spec__ = '/bin/torchrun', None\n"


def ends(folder: Path, *programs: str) -> list[tuple[int, list[str], str]]:
    """Of each program the exit code, what it has printed, and its stderr."""
    done = subprocess.run([sys.executable, "-c", FORKS, *programs], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    out, err = ([(folder / f"{fd}.{number}").read_text() for number in range(len(programs))] for fd in (1, 2))
    return [(int(code), *texts) for code, *texts in zip(done.stdout.split(), map(str.splitlines, out), err, strict=True)]


ENDING = """
exits.install("design")
atexit.register(print, "an exit handler")
print("a line that waits in a buffer")
{more}
raise NodeRefused("this host was refused")
"""
THREAD = """
release = threading.Event()
threading.Thread(target=lambda: (release.wait(), print("a thread has ended"))).start()
threading._register_atexit(release.set)
"""


def assert_last(job: Finished, code: int, said: str) -> None:
    """The last line says what happened, and no traceback shows a file of ours."""
    last = job.err.splitlines()[-1].partition(" elastic_ext: ")[2]
    assert (job.returncode, last.startswith(said), last.endswith(f"; exit code {code}")) == (code, True, True), job.err
    assert not re.search(r'^ *File ".*/elastic_ext/', job.err, re.MULTILINE), job.err


ENDED_BY = [
    (signal.SIGINT, 130, "stopped by the user: SIGINT"),
    (signal.SIGTERM, 75, "stopped by SIGTERM"),
]
JOB = """
import signal, sys
if sys.argv[1:]:
    raise KeyError("lr")
print("up", flush=True)
signal.pause()
"""


@pytest.mark.seam
@pytest.mark.parametrize("launcher", [EXT, AGENT], ids=["torchrun", "agent"])
def test_the_last_line_is_ours(tmp_path, launcher):
    (tmp_path / "job.py").write_text(JOB)
    failed = run([*launcher, "job.py", "fail"], tmp_path)
    assert failed.err.count("Root Cause (first observed failure)") == 1
    assert_last(failed, 65, "stop: rank 0 raised KeyError: 'lr' at job.py:4 in <module>: raised before the first optimizer step")
    for number, code, said in ENDED_BY:
        with Job([*LISTENS, *launcher, "job.py"], tmp_path) as job:
            job.wait_for("(?m)^up$")
            job.process.send_signal(number)
            assert_last(job.finish(), code, said)


@pytest.mark.seam
@pytest.mark.parametrize(("number", "code", "said"), ENDED_BY)
def test_a_signal_ends_a_node_that_waits(tmp_path, number, code, said):
    """No worker has started, so torch handles no signal yet."""
    (tmp_path / "job.py").write_text("")
    where = [f"--rdzv-endpoint=localhost:{free_port()}", "--nnodes=2", "--rdzv-id=job"]
    with Job([*LISTENS, *AGENT, *where, "job.py"], tmp_path) as job:
        job.wait_for("leads the rendezvous")
        job.process.send_signal(number)
        assert_last(job.finish(), code, said)


@pytest.mark.seam
@pytest.mark.parametrize("launcher", [EXT, AGENT], ids=["torchrun", "agent"])
def test_ctrl_c_before_torch_is_there(tmp_path, launcher):
    """While torch is imported: in torchrun from when it knows of us."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED.format(module="torch" if launcher == AGENT else BEFORE_CREATORS))
    done = run([*launcher, "job.py"], tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert_last(done, 130, "stopped by the user: SIGINT")
    assert len(done.err.splitlines()) == 1


INTERRUPTED = """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "{module}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder)
"""
BEFORE_CREATORS = "torch.distributed.launcher.api"  # imported after the plug-ins are loaded


@pytest.mark.full
def test_an_ending_interpreter_loses_no_output(tmp_path):
    """It ends at once, or with a thread that the interpreter waits for."""
    alone, beside = ends(tmp_path, *(LAUNCHER + ENDING.format(more=more) for more in ("", THREAD)))
    for (code, printed, err), thread in ((alone, []), (beside, ["a thread has ended"])):
        assert code == 69
        assert err.endswith("ERROR elastic_ext: this host was refused; exit code 69\n")
        assert printed == ["a line that waits in a buffer", *thread, "an exit handler"]


SUCCESS = """
exits.install("design")
class Torn:
    def __del__(self):
        print("taken apart", flush=True)
torn = Torn()
atexit.register(print, "an exit handler")
exits.set_succeeded()
"""
APART = ["an exit handler", "taken apart"]
CALL = """
import time
from elastic_ext.base import threads
threads.await_calls.__defaults__ = (600.0,)  # longer than the alarm
answer = threading.Event()
threads.StoreCall(target=lambda: (answer.wait(), time.sleep(0.3), print("a call has returned")), daemon=True).start()
"""
ANSWER = "atexit.register(answer.set)\n"


@pytest.mark.seam
def test_a_launcher_ends_without_teardown_after_a_success(tmp_path):
    """Any other program does. A call to a store that returned meanwhile would abort it, so it waits: a launcher need not."""
    cases = [
        (LAUNCHER + CALL + SUCCESS, 0, APART[:1]),
        (CALL + ANSWER + SUCCESS, 0, [APART[0], "a call has returned", APART[1]]),
        (LAUNCHER + SUCCESS, 0, APART[:1]),
        (SUCCESS, 0, APART),
        (LAUNCHER + SUCCESS + "raise ValueError", 1, APART),
        (LAUNCHER + SUCCESS + "exits.end(75)", 75, APART[:1]),
        (SUCCESS + "exits.end(75)", 75, APART),
    ]
    ended = ends(tmp_path, *(program for program, *_ in cases))
    assert [(code, printed) for code, printed, _ in ended] == [(code, printed) for _, code, printed in cases], ended
