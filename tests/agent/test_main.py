"""`python -m elastic_ext.agent`: every torchrun option, our defaults, clear errors."""

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from elastic_ext.agent import __main__, plugin
from elastic_ext.base.errors import UsageError
from tests.jobs import AGENT, EXT, ROOT, SCRIPTS, Gate, Job, command_of, descendants, environment, run
from tests.reference import DOCS
from tests.until import LIMIT_S, until

GLOO = str(SCRIPTS / "gloo_job.py")
OPTION = re.compile(r"`(--[a-z-]+)")
PLAIN = str(SCRIPTS / "plain_job.py")


def settled(*argv: str):
    return __main__.settle(__main__.parser().parse_args([*argv, "train.py"]))


def test_it_takes_every_option_of_torchrun():
    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    ours = {option for action in __main__.parser()._actions for option in action.option_strings}
    assert theirs
    assert theirs == ours


# Options of which older versions of torch know nothing, and the first minor version of 2 that has each, at the latest.
NEWER = {
    "--duplicate-stdout-filters": 13,
    "--duplicate-stderr-filters": 13,
    "--numa-binding": 13,
    "--shutdown-timeout": 13,
    "--signals-to-handle": 13,
    "--virtual-local-rank": 13,
    "--log-line-prefix-template": 14,
    "--print-completion": 14,
    "--exit-barrier-timeout": 16,
}


def test_the_page_names_every_option_of_torchrun():
    """A newer torch with another option fails here: find out what it means with our agent, and write that down."""
    section = (DOCS / "README.md").read_text().partition("| torchrun option |")[2].partition("And in your script:")[0]
    rows, _, others = section.partition("The others work as in torchrun:")
    documented = {each for row in rows.splitlines() for each in OPTION.findall(row.split("|")[1] if "|" in row else "")}
    documented |= set(OPTION.findall(others))
    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    theirs = {option for option in theirs if option.startswith("--") and "_" not in option} - {"--help"}
    assert theirs - documented == set()
    minor = int(torch.__version__.split(".")[1])
    assert {option for option in documented - theirs if NEWER.get(option, 0) <= minor} == set()


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
    args = settled("--max-restarts=-1", "--rdzv-conf=lease_ttl=9")
    assert (args.max_restarts, args.rdzv_conf) == (0, "lease_ttl=9,max_restarts=-1")


@pytest.mark.parametrize(
    ("lacks", "said"),
    [("/proc/self/fd", "run `mount -t proc proc /proc`"), ("temporary", r"No usable temporary directory found in \['/no/such'")],
)
def test_a_host_without_what_every_job_needs(monkeypatch, lacks, said):
    plugin.check_host()
    monkeypatch.setattr(plugin.os.path, "isdir", lambda path: path != lacks)
    monkeypatch.setattr(plugin.tempfile, "tempdir", None)
    if lacks == "temporary":
        monkeypatch.setattr(plugin.tempfile, "_candidate_tempdir_list", lambda: ["/no/such"])
    with pytest.raises(UsageError, match=f"{said}.*; nothing was started"):
        plugin.check_host()


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts over /proc in a mount namespace of its own, which only root may")
@pytest.mark.parametrize("command", [AGENT, EXT], ids=["agent", "torchrun"])
def test_without_proc_one_line_says_so(tmp_path, command):
    (tmp_path / "script.py").touch()
    shell = f"mount -t tmpfs none /proc && exec {shlex.join([*command, 'script.py'])}"
    job = run(["unshare", "--mount", "bash", "-c", shell], tmp_path, forks=False)
    assert job.returncode == 78, job.all
    (line,) = job.err.splitlines()
    assert "elastic_ext: /proc/self/fd does not exist; expected /proc to be mounted" in line


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
def test_wrong_usage_is_one_line_and_starts_nothing(tmp_path):
    (tmp_path / "ok.py").write_text("print('started')")
    job = run([*AGENT, "--nproc-per-node=0", "ok.py"], tmp_path)
    assert job.returncode == 78, job.all
    (line,) = [line for line in job.err.splitlines() if " ERROR elastic_ext: " in line]
    assert "expected 1 worker or more" in line
    assert "Traceback" not in job.err
    assert "started" not in job.out


@pytest.mark.seam
def test_torchs_text_of_a_failure_without_launcher_frames(tmp_path):
    job = run([*AGENT, "--standalone", "--nproc-per-node=2", GLOO, "key:0"], tmp_path, forks=False)
    assert job.returncode == 65
    assert "supervises this run: ext_c10d" in job.err
    assert "Root Cause (first observed failure)" in job.err
    assert job.err.count("Traceback (most recent call last)") == 1
    assert "torch/distributed/run.py" not in job.err.partition("gloo_job.py FAILED")[2]


@pytest.mark.full
def test_what_the_readme_says_of_torchruns_options(tmp_path):
    """Those of its table that no other test shows."""
    (tmp_path / "ok.py").write_text("print('ran')")
    (tmp_path / "once.py").write_text("import os; os._exit(9 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))")
    stock = run([*EXT, "--standalone", "ok.py"], tmp_path)
    assert (stock.returncode, "supervises this run" in stock.err) == (0, False), stock.all
    refused = run([*EXT, "--max-restarts=-1", "ok.py"], tmp_path)
    assert (refused.returncode, "ran" in refused.out) == (1, False)
    late = ["--monitor-interval=1000", "--rdzv-conf=max_restarts=-1", "--node-rank=7", "--start-method=fork", "once.py"]
    job = run([*EXT, *late], tmp_path)
    assert job.returncode == 0, job.all
    assert "restart 1, no limit" in job.err


@pytest.mark.full
def test_slurm_says_that_the_user_ends_the_job(tmp_path):
    """A script stands for scontrol; the formats are those of Slurm's own."""
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\necho 'JobId=7 JobName=train JobState=CANCELLED Restarts=0'\n")
    tool.chmod(0o755)
    with Job(
        [*AGENT, "--nproc-per-node=1", PLAIN, "hang:0"], tmp_path, SLURM_JOB_ID="7", PATH=f"{tmp_path}:{os.environ['PATH']}"
    ) as job:
        job.wait_for(r"\"rank\"")
        job.process.send_signal(signal.SIGTERM)
        assert job.finish().returncode == 130, job.err


@pytest.mark.seam
def test_metrics_are_served_where_the_log_says(tmp_path):
    (tmp_path / "second.py").write_text(
        "import os, signal\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(9)\n"
        "print('second', flush=True); signal.pause()\n"
    )
    with Job([*AGENT, "--nproc-per-node=2", "--max-restarts=1", "second.py"], tmp_path, forks=False) as job:
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


@pytest.mark.seam
def test_a_job_under_nohup_outlives_its_terminal(tmp_path):
    """Torch takes SIGHUP for the end at each start of workers; under nohup it was ignored before."""
    gate = Gate(tmp_path / "gate")
    command = ["nohup", *EXT, "--max-restarts=1", str(SCRIPTS / "elastic_job.py"), "exit3:0"]
    with Job(command, tmp_path, forks=False, NODE="a", GATE=str(gate.path)) as job:
        job.wait_for('"attempt": 1')
        job.process.send_signal(signal.SIGHUP)
        gate.open()
        assert job.finish().returncode == 0, job.err


@pytest.mark.seam
@pytest.mark.parametrize("command", [EXT, AGENT], ids=["torchrun", "agent"])
def test_a_job_whose_standard_descriptors_are_closed_restarts(tmp_path, command):
    """What is written to stderr must not go to a socket that got its number, such as that of the signals."""
    closed = f"exec {shlex.join([*command, '--max-restarts=1', str(SCRIPTS / 'elastic_job.py'), 'exit3:0'])} <&- >&- 2>&-"
    events = tmp_path / "events"
    environ = environment(NODE="a", GATE=os.devnull, ELASTIC_EXT_EVENTS_FILE=str(events))
    done = subprocess.run(["sh", "-c", closed], cwd=tmp_path, env=environ, timeout=LIMIT_S, check=False)
    assert done.returncode == 0
    assert '"restart"' in events.read_text()


CHLD_IGNORED = ["env", "--ignore-signal=CHLD"]  # as Ray starts its children


def ignores_children(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGCHLD - 1) & 1)


@pytest.mark.seam
@pytest.mark.parametrize("command", [EXT, AGENT], ids=["torchrun", "agent"])
def test_exit_codes_count_where_sigchld_was_ignored(tmp_path, command):
    gate = Gate(tmp_path / "gate")
    command = [*CHLD_IGNORED, *command, "--max-restarts=1", str(SCRIPTS / "elastic_job.py"), "exit3:0"]
    with Job(command, tmp_path, NODE="a", GATE=str(gate.path), ELASTIC_EXT_STANDBY="on") as job:
        job.wait_for('"attempt": 1')
        started = descendants(job.process.pid)
        assert len(started) > 2  # the agent, a worker, helpers
        assert [command_of(pid) for pid in started if ignores_children(pid)] == []
        gate.open()
        done = job.finish()
    assert done.returncode == 0, done.all
    assert "restart: rank 0 ended with exit code 3" in done.err


@pytest.mark.seam
def test_an_ignored_sigchld_is_mended_on_threads():
    program = (
        "import subprocess, threading\n"
        "from elastic_ext.workers import limits\n"
        "mends = threading.Thread(target=limits.mend_start)\n"
        "mends.start()\n"
        "mends.join()\n"
        "print(subprocess.run(['false']).returncode)\n"
    )
    command = [*CHLD_IGNORED, sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "1\n"
