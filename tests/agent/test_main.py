"""`python -m elastic_ext.agent`: every torchrun option, our defaults, clear errors."""

import os
import signal
import urllib.request
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from elastic_ext.agent import __main__
from elastic_ext.base.errors import UsageError
from tests.jobs import AGENT, EXT, SCRIPTS, Job, run
from tests.until import LIMIT_S, until

GLOO = str(SCRIPTS / "gloo_job.py")
PLAIN = str(SCRIPTS / "plain_job.py")


def settled(*argv: str):
    return __main__.settle(__main__.parser().parse_args([*argv, "train.py"]))


def test_it_takes_every_option_of_torchrun():
    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    ours = {option for action in __main__.parser()._actions for option in action.option_strings}
    assert theirs
    assert theirs == ours


def test_defaults_and_standalone():
    for argv in ((), ("--standalone",)):
        args = settled(*argv)
        assert (args.rdzv_backend, args.rdzv_endpoint, args.standalone) == ("ext_c10d", "localhost:0", False)
        assert args.rdzv_id != "none"
    args = settled("--rdzv-backend=c10d", "--rdzv-endpoint=host:1", "--rdzv-id=x")
    assert (args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == ("c10d", "host:1", "x")


def test_pet_variables_win_over_our_defaults(monkeypatch):
    monkeypatch.setenv("PET_RDZV_BACKEND", "c10d")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "host:29400")
    args = settled()
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "host:29400")


def test_no_limit_becomes_a_setting():
    args = settled("--max-restarts=-1", "--rdzv-conf=stop_grace=1")
    assert (args.max_restarts, args.rdzv_conf) == (0, "stop_grace=1,max_restarts=-1")


@pytest.mark.parametrize(
    "argv",
    [["--nproc-per-node=0"], ["--nproc-per-node=-1"], ["--nproc-per-node=many"], ["--nnodes=0"], ["--nnodes=3:2"], ["--nnodes=a"],
     ["--nnodes=1:2:3"], ["--max-restarts=-2"]],
)  # fmt: skip
def test_options_that_cannot_be(argv):
    with pytest.raises(UsageError) as error:
        settled(*argv)
    assert argv[0].partition("=")[2] in str(error.value)


@pytest.mark.seam
@pytest.mark.full("argv1", "argv3", "argv5", "argv6")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nproc-per-node=0", "ok.py"], "expected 1 worker or more"),
        (["no_such.py"], "the script 'no_such.py' does not exist"),
        (["--no-python", "no-such-command"], "the command 'no-such-command' was not found"),
        (["PYTHON_EXEC", "ok.py"], "the command '/no/such/python' was not found"),
        (["--rdzv-conf=bootstrp=off", "ok.py"], "did you mean 'bootstrap'"),
        (
            ["--rdzv-conf=last_call_timeout=60,join_timeout=30", "ok.py"],
            "last_call_timeout=60 must not be more than join_timeout=30",
        ),
        (["--rdzv-conf=checkpoint_dir=ok.py", "ok.py"], "ok.py is a file"),
    ],
)
def test_wrong_usage_is_one_line_and_78_and_nothing_is_started(tmp_path, argv, said):
    (tmp_path / "ok.py").write_text("print('started')")
    missing = {"PYTHON_EXEC": "/no/such/python"} if argv[0] == "PYTHON_EXEC" else {}
    job = run([*AGENT, *argv[bool(missing) :]], tmp_path, **missing)
    assert job.returncode == 78, job.all
    (line,) = [line for line in job.err.splitlines() if line.startswith("elastic_ext: ")]
    assert said in line
    assert "Traceback" not in job.err
    assert "started" not in job.out


@pytest.mark.full
def test_an_unreadable_checkpoint_directory(tmp_path):
    """Permission bits do not bind root, so the whole command runs as nobody."""
    (tmp_path / "ok.py").write_text("print('started')")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o000)
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == 0 and directory != Path("/") and "pytest" in str(directory):
            directory.chmod(0o755)
    code = (
        "import encodings.idna, os, sys, fsspec.implementations.local\n"
        "from elastic_ext.agent import __main__ as agent, supervisor\n"
        "from elastic_ext.rendezvous.c10d import handler\n"  # the interpreter may be where nobody may read
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "os.environ['HOME'] = '/tmp'\n"
        f"sys.exit(agent.main(['--rdzv-conf=checkpoint_dir={locked}', 'ok.py']))\n"
    )
    job = run([AGENT[0], "-c", code], tmp_path)
    assert job.returncode == 78, job.all
    assert str(locked) in job.err
    assert "cannot be read" in job.err
    assert "started" not in job.out


@pytest.mark.seam
def test_a_job_a_failure_and_the_text_of_torch_without_the_launchers_frames(tmp_path):
    job = run([*AGENT, "--standalone", "--nproc-per-node=2", GLOO, "key:0"], tmp_path)
    assert job.returncode == 65
    assert "Root Cause (first observed failure)" in job.err
    assert job.err.count("Traceback (most recent call last)") == 1
    assert "torch/distributed/run.py" not in job.err.partition("gloo_job.py FAILED")[2]


@pytest.mark.full
def test_module_no_python_and_run_path(tmp_path):
    (tmp_path / "tool.py").write_text("import sys; print('ran', __name__, sys.argv[1:])")
    assert "ran __main__ ['x']" in run([*AGENT, "-m", "tool", "x"], tmp_path).out
    assert run([*AGENT, "--no-python", "echo", "ran"], tmp_path).out == "ran\n"
    assert "ran __main__ ['x']" in run([*AGENT, "--run-path", str(tmp_path / "tool.py"), "x"], tmp_path).out


@pytest.mark.full
def test_what_the_readme_says_of_torchruns_options(tmp_path):
    """Those of its table that no other test shows."""
    (tmp_path / "ok.py").write_text("print('ran')")
    once = tmp_path / "once.py"
    once.write_text("import os; os._exit(9 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))")
    stock = run([*EXT, "--standalone", "ok.py"], tmp_path)
    assert (stock.returncode, "supervises this run" in stock.err) == (0, False), stock.all
    assert "supervises this run: ext_c10d" in run([*AGENT, "--standalone", "ok.py"], tmp_path).err
    refused = run([*EXT, "--max-restarts=-1", "ok.py"], tmp_path)
    assert (refused.returncode, "ran" in refused.out) == (1, False)
    late = ["--monitor-interval=1000", "--rdzv-conf=max_restarts=-1", "--node-rank=7", "--start-method=fork", str(once)]
    job = run([*EXT, *late], tmp_path)
    assert job.returncode == 0, job.all
    assert "restart 1, no limit" in job.err


@pytest.mark.full
@pytest.mark.parametrize(("state", "code"), [("CANCELLED", 130), ("PREEMPTED", 75)])
def test_slurm_says_whether_the_user_or_the_platform_ends_the_job(tmp_path, state, code):
    """A script stands for scontrol; the formats are those of Slurm's own."""
    tool = tmp_path / "scontrol"
    tool.write_text(f"#!/bin/sh\necho 'JobId=7 JobName=train JobState={state} Restarts=0'\n")
    tool.chmod(0o755)
    with Job(
        [*AGENT, "--nproc-per-node=1", PLAIN, "hang:0"], tmp_path, SLURM_JOB_ID="7", PATH=f"{tmp_path}:{os.environ['PATH']}"
    ) as job:
        job.wait_for(r"\"rank\"")
        job.process.send_signal(signal.SIGTERM)
        assert job.finish().returncode == code, job.err


@pytest.mark.seam
@pytest.mark.full("2-130")
@pytest.mark.parametrize(("sig", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_signals(tmp_path, sig, code):
    with Job([*AGENT, "--nproc-per-node=1", PLAIN, "hang:0"], tmp_path) as job:
        job.wait_for(r"\"rank\"")
        job.process.send_signal(sig)
        assert job.finish().returncode == code
        assert f"stopped by {sig.name}" in job.err


@pytest.mark.seam
def test_metrics_are_served_where_the_log_says(tmp_path):
    script = tmp_path / "second.py"
    script.write_text(
        "import os, signal\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(9)\n"
        "print('second', flush=True); signal.pause()\n"
    )
    with Job([*AGENT, "--nproc-per-node=2", "--max-restarts=1", str(script)], tmp_path) as job:
        (url,) = job.wait_for(r"(http://127\.0\.0\.1:\d+)/metrics")
        job.wait_for("second", 2)
        expected = [
            'elastic_ext_restarts_total{kind="unknown"} 1.0',
            "elastic_ext_round 2.0",
            "elastic_ext_world_size 2.0",
            'elastic_ext_workers{state="running"} 2.0',
            *(f'elastic_ext_recovery_seconds_count{{phase="{phase}"}} 1.0' for phase in ("stop", "rendezvous", "start")),
            "elastic_ext_torchelastic_last_value",
        ]

        def all_shown() -> bool:
            with urllib.request.urlopen(url[1] + "/metrics", timeout=LIMIT_S) as answer:
                text = answer.read().decode()
            return all(each in text for each in expected)

        until(all_shown, "the workers may say something before their agent has counted them")
