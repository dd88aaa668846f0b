"""The agent on real jobs: restarts, stops, signals, orphans, environment, logs, error files."""

import json
import os
import re
import signal
import sys

import pytest
import torch
from torch.distributed.run import get_args_parser

import elastic_ext
from elastic_ext.agent.launch import start_line
from elastic_ext.base import settings
from elastic_ext.base.contracts import Resumption
from tests.failures.test_sources import memory_group
from tests.jobs import AGENT, EXT, SCRIPTS, Gate, Job, run, stop_grace

GLOO = str(SCRIPTS / "gloo_job.py")


def reports(out: str) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"\{\"rank\".*\}", out)]


@pytest.mark.seam
def test_a_failure_is_named_and_the_job_returns(tmp_path):
    job = run([*EXT, "--nproc-per-node=2", "--max-restarts=1", GLOO, "kill:1"], tmp_path, forks=False)
    assert job.returncode == 0, job.all
    assert "restart: rank 1 was killed by SIGKILL" in job.err
    assert sorted((line["rank"], line["attempt"]) for line in reports(job.out)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(re.findall(r"finished \d", job.out)) == 2


@pytest.mark.full
def test_our_threads_logs_do_not_hide_script_ends(tmp_path):
    """As the saver of copies in memory does, when another rank's end cuts it off."""
    (tmp_path / "bug.py").write_text(
        "import logging, sys, elastic_ext\nelastic_ext.report_progress()\n"
        "try:\n    raise RuntimeError('[gloo/transport/tcp/pair.cc:537] Connection reset by peer')\n"
        "except RuntimeError as error:\n"
        "    logging.getLogger('elastic_ext.checkpoints').exception('no more copies: %s', error)\nsys.exit(1)\n"
    )
    job = run([*AGENT, "--max-restarts=0", "bug.py"], tmp_path)
    assert job.returncode == 1
    assert "elastic_ext: no more copies: [gloo/transport/tcp/pair.cc:537] Connection reset by peer" in job.err
    assert "elastic_ext: stop: rank 0 ended with exit code 1" in job.err
    assert "no other cause is known" not in job.err


@pytest.mark.seam
def test_the_budget_ends_and_giving_up_is_failing(tmp_path):
    (tmp_path / "always.py").write_text(
        "import logging, os; n = os.environ['TORCHELASTIC_RESTART_COUNT']; print('attempt', n, flush=True)\n"
        "from elastic_ext.base import log_records; log_records.install()\n"
        "logging.getLogger('elastic_ext.training').warning('seen')\n"
        "os.write(2, b'x' * 50_000 + b'\\nlast words\\n'); os._exit(20 + int(n))"
    )
    job = run([*EXT, "--rdzv-conf=node_name=n2", "--nproc-per-node=1", "--max-restarts=1", "always.py"], tmp_path)
    assert job.returncode == 1
    assert re.findall(r"attempt (\d)", job.out) == ["0", "1"]
    assert job.err.index("last words") < job.err.index("rank 0 ended with exit code 20")
    assert "the budget of 1 restart (--max-restarts)" in job.err
    for line in ("WARNING elastic_ext .* supervises", "WARNING elastic_ext: seen", "ERROR elastic_ext: stop: "):
        assert re.search(rf"^[\d-]+ [\d:,]+ n2 {line}", job.err, re.MULTILINE), job.err
    assert "ChildFailedError" in job.err
    assert "exitcode  : 21" in job.err


@pytest.mark.seam
def test_a_rank_that_ends_early_is_named(tmp_path):
    (tmp_path / "early.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "weight = torch.ones(1, requires_grad=True)\n"
        "for step in range(1, 30):\n"
        "    weight.grad = torch.ones(1)\n"
        "    dist.all_reduce(weight.grad)\n"
        "    torch.optim.SGD([weight], 0.1).step()\n"
        "    if (step, dist.get_rank()) == (12, 1):\n"
        "        os._exit(0)\n"
    )
    job = run([*EXT, "--nproc-per-node=2", "--max-restarts=10", "early.py"], tmp_path)
    assert job.returncode == 65, job.all
    said = "rank 1 ended with 0 at step 12 since it started, the others wait for it"
    found = re.findall(r"ERROR elastic_ext: (\w+): (.*), as with a bug", job.err)
    assert found == [("restart", said), ("stop", said), ("stop", said)], "at once, and as the last line"
    assert "also ended" not in job.err


@pytest.mark.seam
@pytest.mark.parametrize("saves_at", [0, 30])
def test_a_bug_after_the_first_step_restarts_once(tmp_path, saves_at):
    """Also where the script resumes from a checkpoint of its own, of which the agent knows nothing."""
    (tmp_path / "late.py").write_text(
        "import os, torch\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)\n"
        "for step in range(30 if os.path.exists('saved') else 0, 33):\n"
        "    optimizer.step()\n"
        f"    {saves_at} == step + 1 and open('saved', 'w')\n"
        "{}['missing']\n"
    )
    job = run([*EXT, "--nproc-per-node=1", "--max-restarts=10", "late.py"], tmp_path)
    assert job.returncode == 65
    assert re.findall(r"attempt (\d)", job.out) == ["0", "1"]
    said = "and nothing shows progress: where no checkpoint is known, only more steps would" if saves_at else "without progress"
    assert f"the same failure recurred {said} (kind code, rule repeated)" in job.err


@pytest.mark.seam
def test_a_ledger_file_outlives_a_killed_agent(tmp_path):
    (tmp_path / "spends.py").write_text(
        "import os, pathlib\n"
        "tries = pathlib.Path('tries')\n"
        "number = len(tries.read_text()) if tries.exists() else 0\n"
        "tries.write_text('x' * (number + 1))\n"
        "print('try', number, flush=True)\n"
        "if number == 2:\n"
        "    import signal; signal.pause()\n"
        "os._exit(20 + number)\n"
    )
    command = [*AGENT, "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=mine", "--rdzv-conf=backoff=0", "spends.py"]
    with Job(command, tmp_path, ELASTIC_EXT_LEDGER_FILE="ledger") as job:
        job.wait_for("try 2")
        job.process.kill()
    job = run(command, tmp_path, ELASTIC_EXT_LEDGER_FILE="ledger")
    assert job.returncode == 1
    assert re.findall(r"try (\d)", job.out) == ["3", "4"]
    assert "the budget of 3 restarts (--max-restarts)" in job.err
    # Whoever starts it after that has seen the verdict.
    job = run([*command[:-1], "tries"], tmp_path, ELASTIC_EXT_LEDGER_FILE="ledger")
    assert "budget" not in job.err


@pytest.mark.seam
def test_an_early_bug_stops_the_job_traceback_last(tmp_path):
    job = run([*EXT, "--nproc-per-node=2", "--max-restarts=10", GLOO, "key:1"], tmp_path, forks=False)
    assert job.returncode == 65
    assert {line["attempt"] for line in reports(job.out)} == {0}
    assert "stop: rank 1 raised KeyError: 'missing' at gloo_job.py:" in job.err
    assert job.all.count('{}["missing"]') == 1
    tail = job.err[job.err.index("Root Cause (first observed failure):") :]
    assert '{}["missing"]' in tail
    assert "rank      : 1" in tail
    *_, end, last = tail.splitlines()
    assert end.startswith("===")
    assert "elastic_ext: stop: rank 1 raised KeyError" in last


@pytest.mark.parametrize(
    ("conf", "metrics", "resumed", "end"),
    [
        ({}, "http://[::1]:1", Resumption(), "metrics http://[::1]:1, starts from nothing: no checkpoint_dir is set"),
        ({"metrics_port": "off"}, None, Resumption(), "metrics off, starts from nothing: no checkpoint_dir is set"),
        ({}, None, Resumption(), "metrics not served, starts from nothing: no checkpoint_dir is set"),
        (
            {"checkpoint_dir": "s3://me:pw/d@bucket/c"},
            None,
            Resumption("s3://me:pw@bucket/c/step_1?sig=secret&x=1", None),
            "resumes from s3://***@bucket/c/step_1?sig=***&x=1, step unknown",
        ),
        ({"checkpoint_dir": "/c"}, None, Resumption(reason="resume_from=none"), "starts from nothing: resume_from=none"),
    ],
)
def test_what_the_start_line_says(conf, metrics, resumed, end):
    assert start_line("ext_etcd", "job1", metrics, settings.read(conf, {}), resumed).endswith(end)


@pytest.mark.parametrize(("run_id", "said"), [("job1", "ext_c10d, run id job1, "), ("none", "ext_c10d, no --rdzv-id, ")])
def test_a_run_without_id_is_not_called_none(run_id, said):
    assert said in start_line("ext_c10d", run_id, None, settings.read({}, {}), Resumption())


@pytest.mark.full
def test_a_survivors_failing_cleanup_is_not_the_cause(tmp_path):
    """It raises what would be a code bug, while it answers the SIGTERM that another worker's death brought it."""
    (tmp_path / "cleanup.py").write_text(
        "import os, signal\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1': raise SystemExit\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: None.close())\n"
        "    open('fifo', 'w').write('up')\n"
        "    signal.pause()\n"
        "open('fifo').read()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    os.mkfifo(tmp_path / "fifo")
    job = run([*EXT, "--nproc-per-node=2", "--max-restarts=1", "cleanup.py"], tmp_path)
    assert job.returncode == 0, job.all
    assert "restart: rank 1 was killed by SIGKILL" in job.err


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a full tmpfs in a mount namespace of its own, which only root may")
def test_a_full_shared_memory_costs_only_step_counts(tmp_path):
    """The table is on disk then, in a directory of its own: others can write beside it in /tmp, where they see its name."""
    places = "print('ran', os.listdir(os.environ['TMPDIR']), os.path.dirname(told['progress']))"
    (tmp_path / "ok.py").write_text(f"import json, os\ntold = json.loads(os.environ['ELASTIC_EXT_WORKER'])\n{places}\n")
    (tmp_path / "tmp").mkdir()
    shell = "mount -t tmpfs -o size=64k none /dev/shm && head -c 1000000 /dev/zero > /dev/shm/fill; exec " + " ".join(
        [*AGENT, "--nproc-per-node=2", "ok.py"]
    )
    job = run(["unshare", "-m", "sh", "-c", shell], tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert job.returncode == 0, job.all
    assert job.out.count("ran") == 2
    assert "no room for the progress table in /dev/shm" in job.err
    assert f"] {tmp_path}/tmp/elastic_ext_" in job.out
    assert "progress." not in job.out
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.seam
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs in a mount namespace of its own, which only root may")
def test_a_full_log_dir_is_the_cause(tmp_path):
    """What the script says of it is lost with the rest of its output."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "talks.py").write_text("while True: print('x' * 1000, flush=True)\n")
    shell = "mount -t tmpfs -o size=256k none logs; exec " + " ".join(
        [*AGENT, "--nproc-per-node=1", "--max-restarts=1", "--log-dir=logs", "--redirects=3", "talks.py"]
    )
    job = run(["unshare", "-m", "sh", "-c", shell], tmp_path)
    cause = "rank 0 ended with exit code 1: the disk or the quota is full (on "
    full = f" the file system of the logs in {tmp_path}/logs is full, 0 bytes are free: free some, or give another --log-dir)"
    (line,) = [line for line in job.err.splitlines() if "elastic_ext: restart: " in line]
    assert cause in line, job.all
    assert full in line
    assert "(kind storage, rule disk-full)" in line


@pytest.mark.full
def test_log_directories_are_kept_and_hold_the_traceback(tmp_path):
    logs = tmp_path / "logs"
    (tmp_path / "twice.py").write_text(
        "import os, sys\nn = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('this is', n)\n"
        "if n == '0': sys.exit(9)\nraise NameError('boom')"
    )
    job = run([*EXT, "--nproc-per-node=1", "--max-restarts=5", "--log-dir", str(logs), "--redirects=3", "twice.py"], tmp_path)
    assert job.returncode == 65, job.all
    (run_dir,) = logs.iterdir()
    assert {path.name: (path / "0" / "stdout.log").read_text() for path in run_dir.iterdir()} == {
        f"attempt_{n}": f"this is {n}\n" for n in range(2)
    }
    assert (run_dir / "attempt_1" / "0" / "stderr.log").read_text().endswith("NameError: boom\n")
    assert job.err.count("raise NameError('boom')") == 1  # torch's text, at the end


@pytest.mark.seam
@pytest.mark.full("SIGINT")
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_forwarded_signal_leaves_workers_the_whole_timeout(tmp_path, sig):
    (tmp_path / "slow.py").write_text(
        "import signal, sys, threading\n"
        "got = threading.Event()\n"
        "def handler(number, frame): print('got', number, flush=True); threading.Timer(1.5, done).start()\n"
        "def done(): print('saved', flush=True); got.set()\n"
        "signal.signal(signal.SIGTERM, handler); signal.signal(signal.SIGINT, handler)\n"
        "print('up', flush=True)\n"
        "got.wait()\n"
    )
    # 1.5 s is more than the grace after a failure, and less than the shutdown timeout: 30 s in torch 2.8, which has no option
    options = ["--nproc-per-node=1"]
    options += ["--shutdown-timeout=200"] if "--shutdown-timeout" in get_args_parser().format_help() else []
    with Job([*EXT, *options, "slow.py"], tmp_path, **stop_grace(tmp_path, 0.5)) as job:
        job.wait_for("(?m)^up$")
        job.process.send_signal(sig)
        assert job.finish().returncode != 0
        assert f"got {int(sig)}" in job.out
        assert "saved" in job.out


@pytest.mark.full
def test_a_broken_error_file_never_hurts_the_agent(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os\n"
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file: file.write('{\"message\": {\"message\": \"x\"}}')\n"
        "os._exit(5)\n"
    )
    job = run([*EXT, "--nproc-per-node=1", "--max-restarts=1", "broken.py"], tmp_path)
    assert job.returncode == 1, job.all
    assert "restart: rank 0 ended with exit code 5" in job.err
    assert "error file" in job.err
    assert "ChildFailedError" in job.err
    assert "exitcode  : 5" in job.err


@pytest.mark.full
def test_a_worker_stuck_in_the_kernel_has_failed(tmp_path):
    """Torch's own agent ends such a job with exit code 0 (its result is UNHEALTHY, which is_failed() does not count)."""
    torch_agent = pytest.importorskip("torch.distributed.elastic.agent.server.local_elastic_agent")
    if not hasattr(torch_agent, "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"):
        pytest.skip("this torch has no check for it (2.13 has)")
    (tmp_path / "stuck.py").write_text(
        "import os\n"
        "os.mkfifo('fifo')\n"
        "print('up', flush=True)\n"
        # vfork: the parent sleeps in the kernel (state D) until the child has opened the FIFO, which nobody writes to
        "os.posix_spawn('/bin/true', ['true'], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 0, 'fifo', os.O_RDONLY, 0)])\n"
    )
    job = run(
        [*EXT, "--nproc-per-node=1", "--max-restarts=3", "stuck.py"], tmp_path, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="1"
    )
    assert job.returncode == 69, job.all
    assert "slept in the kernel" in job.err
    assert job.out.count("up") == 1
    # One that ends well when it is told to: there is no failed worker then, and it is a failure all the same.
    (tmp_path / "stuck.py").write_text(
        "import ctypes, os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "print('up', flush=True)\n"
        "CLONE_VFORK, SIGCHLD, SYS_clone = 0x4000, 17, 56\n"
        "if ctypes.CDLL(None).syscall(SYS_clone, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL); signal.pause()\n"
        "signal.pause()\n"
    )
    job = run(
        [*EXT, "--nproc-per-node=1", "--max-restarts=3", "stuck.py"], tmp_path, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="1"
    )
    assert job.returncode == 69, job.all
    assert "slept in the kernel" in job.err
    assert "ChildFailedError" in job.err


ENV_SCRIPT = """
import json, os, sys
names = '''RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR
MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_ERROR_FILE OMP_NUM_THREADS
TORCH_NCCL_ASYNC_ERROR_HANDLING CUDA_VISIBLE_DEVICES'''.split()
sys.stdout.write(json.dumps({"rank": 0, **{name: os.environ.get(name) for name in names}}) + "\\n")
sys.stderr.write("to err\\n")
"""


@pytest.mark.seam
def test_variables_prefixes_tee_and_redirects_match_torchrun(tmp_path):
    (tmp_path / "env.py").write_text(ENV_SCRIPT)
    options = ["--nproc-per-node=2", "--role=trainer", "--max-restarts=4", "--rdzv-id=job7"]
    options += ["--log-dir=logs", "--redirects=1:3", "--tee=0:1", "env.py"]
    template = "[${role_name}${local_rank}|${rank}]: "
    job = run([*EXT, *options], tmp_path, CUDA_VISIBLE_DEVICES="0,1", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=template)
    assert job.returncode == 0, job.all
    assert job.out.count('[trainer0|0]: {"rank"') == job.all.count('{"rank"') == job.all.count("to err") == 1
    (attempt,) = (tmp_path / "logs").glob("*/attempt_0")
    assert (attempt / "1" / "stderr.log").read_text() == "to err\n"
    found = [*reports(job.out), *reports((attempt / "1" / "stdout.log").read_text())]
    assert len(found) == 2
    for rank, env in enumerate(found):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "trainer",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_RUN_ID": "job7",
            "OMP_NUM_THREADS": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "CUDA_VISIBLE_DEVICES": "0,1",
        }
        assert {name: env[name] for name in expected} == expected
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"attempt_0/{rank}/error.json")
        assert env["MASTER_ADDR"]
        assert int(env["MASTER_PORT"]) > 0


@pytest.mark.seam
def test_record_and_the_launchers_own_error_file(tmp_path):
    """A scheduler that starts torchrun with TORCHELASTIC_ERROR_FILE gets the root cause of the worker, as with stock."""
    (tmp_path / "recorded.py").write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise NameError('later')\nmain()\n"
    )
    job = run([*EXT, "--nproc-per-node=2", "recorded.py"], tmp_path, TORCHELASTIC_ERROR_FILE=str(tmp_path / "launcher.json"))
    assert job.returncode == 65
    message = json.loads((tmp_path / "launcher.json").read_text())["message"]
    assert message["message"] == "NameError: later"
    assert "in main" in message["extraInfo"]["py_callstack"]


@pytest.mark.seam
def test_modules_commands_and_the_switch(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tool.py").write_text("import sys; print('module', __name__, sys.argv[1:], open('/proc/self/cmdline').read())")
    job = run([*EXT, "--nproc-per-node=1", "-m", "pkg.tool", "a", "b"], tmp_path)
    assert re.search(r"module __main__ \['a', 'b'\] .*bootstrap\.py", job.out), job.all
    job = run([*EXT, "--nproc-per-node=2", "--no-python", "sh", "-c", "echo command $RANK"], tmp_path)
    assert sorted(re.findall(r"command \d", job.out)) == ["command 0", "command 1"], job.all


@pytest.mark.seam
def test_two_ranks_raise_and_exit_handlers_hang(tmp_path):
    """The agent has to kill them, which says nothing of why they ended; or it ends the other one before that says why."""
    (tmp_path / "raises.py").write_text(
        "import atexit, fcntl, threading; atexit.register(threading.Event().wait); print('up', flush=True)\n"
        "fcntl.flock(open('gate'), fcntl.LOCK_SH); raise RuntimeError('a shard is corrupt')\n"
    )
    gate = Gate(tmp_path / "gate")
    conf = "--rdzv-conf=verdict_file=verdict"
    with Job([*AGENT, "--nproc-per-node=2", "--max-restarts=0", conf, "raises.py"], tmp_path) as job:
        job.wait_for("up", 2)
        gate.open()
        assert job.finish().returncode == 1
    reason = json.loads((tmp_path / "verdict").read_text())["decision"]["reason"]
    assert "raised RuntimeError: a shard is corrupt" in reason
    assert "signal" not in reason
    assert re.search(r"also ended: rank \d \((RuntimeError: a shard is corrupt|SIGTERM)\)", job.err)


@pytest.mark.full
def test_news_between_look_and_wait_is_kept(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import os, signal; os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' or signal.pause()")
    launcher = tmp_path / "api.py"
    launcher.write_text(
        "import sys\n"
        "from elastic_ext.rendezvous.contract import EndKind, RoundEnd\n"
        "from elastic_ext.embedded.one_machine import OneMachine, OneRound\n"
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "rendezvous, looks = OneMachine.next_rendezvous, []\n"
        "def next_rendezvous(self):\n"
        "    info = rendezvous(self); self.hooks.on_event(); return info\n"
        "def over(self):\n"
        "    looks.append(1)\n"
        "    if len(looks) == 1: self._job.hooks.on_event()  # they come in the moment after this look\n"
        "    return RoundEnd(EndKind.BROKEN, 'news') if len(looks) == 2 else None\n"
        "OneMachine.next_rendezvous, OneRound.over = next_rendezvous, over\n"
        "config = LaunchConfig(1, 1, 1, run_id='r', rdzv_backend='ext_c10d', rdzv_endpoint='localhost:0')\n"
        f"elastic_launch(config, sys.executable)('-u', {str(script)!r})\n"
    )
    job = run([sys.executable, str(launcher)], tmp_path)
    assert job.returncode == 0, job.all
    assert "round 1 is over: news" in job.err


@pytest.mark.full
def test_functions_through_the_api_return_their_values(tmp_path):
    (tmp_path / "api.py").write_text(
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "def fn(x):\n    import os; return x + int(os.environ['RANK'])\n"
        "def bad():\n    raise ValueError('from a function')\n"
        "if __name__ == '__main__':\n"
        "    import sys, threading\n"
        "    for method in ('spawn', 'fork', 'forkserver'):\n"
        "        config = lambda: LaunchConfig(1, 1, 2, run_id='r', rdzv_backend='ext_c10d', rdzv_endpoint='localhost:0',\n"
        "                                      max_restarts=0, start_method=method)\n"
        "        print(method, sorted(elastic_launch(config(), fn)(10).items()), flush=True)\n"
        "        try:\n            elastic_launch(config(), bad)()\n"
        "        except Exception as error:\n"
        "            print(type(error).__name__, 'from a function' in str(error), flush=True)\n"
    )
    job = run([sys.executable, "api.py"], tmp_path)
    assert job.returncode == 0, job.all
    for method in ("spawn", "fork", "forkserver"):
        assert f"{method} [(0, 10), (1, 11)]\nChildFailedError True\n" in job.out, job.all


@pytest.mark.seam
def test_a_function_that_dies_at_once(tmp_path):
    """multiprocessing reaps those that have ended while it starts the others: they are gone before they can be watched."""
    (tmp_path / "api.py").write_text(
        "import os\n"
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "from torch.distributed.elastic.multiprocessing.errors import ChildFailedError\n"
        "def fn(): os._exit(3)\n"
        "config = LaunchConfig(1, 1, 8, run_id='r', rdzv_backend='ext_c10d', rdzv_endpoint='localhost:0', max_restarts=0,\n"
        "                      start_method='fork')\n"
        "try: elastic_launch(config, fn)()\n"
        "except ChildFailedError as error: print('failed with', error.get_first_failure()[1].exitcode)\n"
    )
    job = run([sys.executable, "api.py"], tmp_path)
    assert "failed with 3" in job.out, job.all


@pytest.mark.full
def test_run_path(tmp_path):
    (tmp_path / "path.py").write_text("import os, sys; sys.stdout.write(f\"path {__name__} {sys.argv} {os.environ['RANK']}\\n\")")
    job = run([*EXT, "--nproc-per-node=2", "--run-path", "path.py", "x"], tmp_path)
    assert job.returncode == 0, job.all
    assert job.out.count("path __main__") == 2


@pytest.mark.seam
def test_the_newest_checkpoint_goes_to_every_worker(tmp_path):
    """What the agent says at its start, what each round gets, and that the first round's files are gone in the second."""
    checkpoints = tmp_path / "ckpt"
    checkpoints.mkdir()
    torch.save({}, checkpoints / "step_6.pt")
    (tmp_path / "resume.py").write_text(
        "import json, os, torch\n"
        "env, n = os.environ, int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "run_dir = os.path.join(os.path.dirname(json.loads(env['ELASTIC_EXT_WORKER'])['stderr']), '..', '..')\n"
        "print('kept', *(name for name in os.listdir(run_dir) if name.startswith('attempt_')), flush=True)\n"
        "print('resume', n, env.get('ELASTIC_EXT_RESUME_FROM'), env.get('ELASTIC_EXT_RESUME_STEP'), flush=True)\n"
        "if n == 0: torch.save({}, 'ckpt/step_7.pt'); open('ckpt/step_9.pt', 'wb').write(b'PK torn'); os._exit(9)\n"
    )
    options = ["--rdzv-id=job 1", f"--rdzv-conf=checkpoint_dir={checkpoints}", "--nproc-per-node=1", "--max-restarts=1"]
    job = run([*EXT, *options, "resume.py"], tmp_path)
    assert job.returncode == 0, job.all
    (line,) = [line for line in job.err.splitlines() if "supervises this run" in line]
    backend = rf"elastic_ext {re.escape(elastic_ext.__version__)} supervises this run: ext_c10d, run id job 1, "
    found = rf"metrics http://127\.0\.0\.1:\d+, resumes from {checkpoints}/step_6\.pt, step 6$"
    assert re.search(backend + found, line), line
    assert "supervises" not in job.out
    assert re.findall("resume .*", job.out) == [f"resume 0 {checkpoints}/step_6.pt 6", f"resume 1 {checkpoints}/step_7.pt 7"]
    assert re.findall("kept .*", job.out) == ["kept attempt_0", "kept attempt_1"]
    assert "step_9.pt" in job.err
    torch.load(checkpoints / "step_7.pt")
    assert sorted(os.listdir(checkpoints)) == [".elastic_ext", "step_6.pt", "step_7.pt", "step_9.pt"]


@pytest.fixture
def group():
    yield from memory_group(1 << 30)


@pytest.mark.seam
def test_a_kill_for_memory_differs_from_any_other(tmp_path, group):
    """Agent and workers are in one control group, as in a container."""
    (tmp_path / "eats.py").write_text(
        "import os\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if attempt == '0': os.kill(os.getpid(), 9)\nif attempt == '1': b'x' * (3 << 30)\n"
    )
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    job = run(["sh", "-c", enter, "sh", *AGENT, "--nproc-per-node=1", "--max-restarts=3", "eats.py"], tmp_path)
    assert job.returncode == 0, job.all
    rules = re.findall(r"restart: .*\((kind .*)\)", job.err)
    assert rules == ["kind unknown, rule killed", "kind host_memory, rule oom-killed"]


# Logging swallows what a handler raises, and torch's exception for a signal is raised wherever the main thread is just then.
DEAF = """
import logging, os, signal

class Deaf(logging.Handler):
    def emit(self, record):
        if "{told}" in record.getMessage():
            logging.getLogger("elastic_ext.agent.supervisor").removeHandler(self)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except Exception:
                os.write(2, b"swallowed\\n")

logging.getLogger("elastic_ext.agent.supervisor").addHandler(Deaf())
"""


@pytest.mark.full
@pytest.mark.parametrize("backoff_s", [1000, 0])
def test_a_signal_swallowed_by_logging_ends_the_agent(tmp_path, backoff_s):
    """It comes while the agent logs its decision, and is seen while the agent waits: for the restart, or for the workers."""
    (tmp_path / "sitecustomize.py").write_text(DEAF.format(told="; in " if backoff_s else "elastic_ext: restart"))
    (tmp_path / "again.py").write_text(
        "import os, signal\n"
        "count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        f"if {backoff_s} or count == 0: os._exit(20 + count)\n"
        "signal.pause()"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    wait = {"ELASTIC_EXT_BACKOFF": str(backoff_s)}
    command = [*AGENT, "--nproc-per-node=1", "--max-restarts=5", str(tmp_path / "again.py")]
    with Job(command, tmp_path, PYTHONPATH=path, **wait) as job:
        job.wait_for("swallowed")
        assert job.finish().returncode == 75, job.err
