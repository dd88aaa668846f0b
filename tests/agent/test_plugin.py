"""The seam to stock torchrun: found, used once, restored; nothing else of torch is changed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import AGENT, EXT, STOCK, TORCHRUN, Finished, environment, run

pytestmark = pytest.mark.seam


def python(code: str, tmp_path: Path) -> Finished:
    (tmp_path / "case.py").write_text(code)
    return run([sys.executable, "case.py"], tmp_path, forks=False)


LAUNCH = """
import torch.distributed.launcher.api as api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
def launch(backend, command=("true",), **more):
    config = api.LaunchConfig(1, 1, more.pop("nproc", 1), run_id="r", rdzv_backend=backend, rdzv_endpoint="localhost:0", **more)
    return api.elastic_launch(config, command[0])(*command[1:])
ran = []
genuine_run = LocalElasticAgent.run
def spy(self, *args, **kwargs):
    ran.append(type(self).__name__)
    return genuine_run(self, *args, **kwargs)
"""


def test_an_ext_job_then_stock_in_one_process(tmp_path):
    """nproc 0 fails after the rendezvous was made and before the agent is: the next, stock, job must get the stock agent."""
    done = python(
        LAUNCH + "LocalElasticAgent.run = spy\n"
        "before = dict(vars(api))\n"
        "launch('ext_c10d'); assert api.LocalElasticAgent is LocalElasticAgent\n"
        "launch('c10d'); launch('ext_c10d')\n"
        "try: launch('ext_c10d', nproc=0)\nexcept AssertionError: ran.append('refused')\n"
        "launch('c10d')\n"
        "assert {k: v for k, v in vars(api).items()} == before\n"
        "print(ran)",
        tmp_path,
    )
    assert done.out == "['Supervisor', 'LocalElasticAgent', 'Supervisor', 'refused', 'LocalElasticAgent']\n", done.err


@pytest.mark.full
def test_two_jobs_of_two_threads_get_the_agent(tmp_path):
    """Both rendezvous are made before the first agent is: the swap must last until the second one has its agent, too."""
    done = python(
        LAUNCH + "import threading\n"
        "LocalElasticAgent.run = spy\n"
        "from elastic_ext.base import torch_private\n"
        "both, arm = threading.Barrier(2), torch_private.install_agent\n"
        "def arm_and_wait(*args): arm(*args); both.wait()\n"
        "torch_private.install_agent = arm_and_wait\n"
        "threads = [threading.Thread(target=launch, args=('ext_c10d',)) for _ in range(2)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "launch('c10d'); print(ran, api.LocalElasticAgent is LocalElasticAgent)",
        tmp_path,
    )
    assert done.out == "['Supervisor', 'Supervisor', 'LocalElasticAgent'] True\n", done.err


def test_patches_of_the_agent_stay_alive(tmp_path):
    done = python(
        LAUNCH + "from unittest import mock\n"
        "with mock.patch('torch.distributed.launcher.api.LocalElasticAgent.run', side_effect=RuntimeError('patched')) as run:\n"
        "    try: launch('ext_c10d')\n    except RuntimeError as error: print(error, run.call_count)\n"
        "with mock.patch('torch.distributed.launcher.api.LocalElasticAgent') as agent:\n"
        "    agent.return_value.run.return_value.is_failed.return_value = False\n"
        "    launch('ext_c10d'); print('mock', agent.call_count)\n"
        "assert api.LocalElasticAgent is LocalElasticAgent\n"
        "starts = 'torch.distributed.elastic.agent.server.local_elastic_agent.start_processes'\n"
        "with mock.patch(starts, side_effect=OSError('cold')):\n"
        "    try: launch('ext_c10d')\n    except OSError as error: print(error)\n",
        tmp_path,
    )
    assert done.out == "patched 1\nmock 1\ncold\n", done.err


@pytest.mark.full
def test_a_torch_without_the_seam_fails_clearly(tmp_path):
    done = python(LAUNCH + "del api.LocalElasticAgent\nlaunch('ext_c10d')", tmp_path)
    assert done.returncode == 78
    (line,) = [line for line in done.err.splitlines() if "elastic_ext" in line]
    assert "has no torch.distributed.launcher.api.LocalElasticAgent" in line
    assert "Traceback" not in done.err


@pytest.mark.full
def test_a_launcher_that_builds_another_agent_is_told(tmp_path):
    """A future torch could keep the name and not use it: the job must not run, silently, without what the user asked for.

    It does run: under torch's own agent, which may use the rendezvous alone.
    """
    done = python(
        LAUNCH + "import types\n"
        "theirs = api.launch_agent\n"
        "api.launch_agent = types.FunctionType(theirs.__code__, dict(vars(api)), 'launch_agent', theirs.__defaults__)\n"
        "launch('ext_c10d')",
        tmp_path,
    )
    assert done.returncode == 0, done.err
    (line,) = [line for line in done.err.splitlines() if "elastic_ext" in line]
    assert "used by an agent other than elastic_ext's" in line
    assert "no verdicts" in line


def test_pet_variables_choose_the_backend(tmp_path):
    (tmp_path / "ok.py").write_text("import os; os.write(1, b'told\\n' if 'ELASTIC_EXT_WORKER' in os.environ else b'stock\\n')")
    chosen = {"PET_RDZV_BACKEND": "ext_c10d", "PET_RDZV_ENDPOINT": "localhost:0", "PET_NPROC_PER_NODE": "2"}
    assert run([*TORCHRUN, "ok.py"], tmp_path, forks=False, **chosen).out == "told\ntold\n"
    assert run([*STOCK, "ok.py"], tmp_path, forks=False).out == "stock\n"


def test_loading_the_entry_point_imports_no_torch():
    """Every torchrun of the machine loads it, selected or not. What it costs is in benchmarks/entry_point.py."""
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "(point,) = [p for p in entry_points(group='torchrun.handlers') if p.name == 'ext_c10d']\n"
        "before = set(sys.modules); creator = point.load()()\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()).stdout
    loaded = {name.split(".")[0] for name in out.split()}
    assert "elastic_ext" in loaded
    assert not loaded & {"torch", "numpy", "grpc", "etcd3", "fsspec", "prometheus_client", "asyncio", "socket"}


@pytest.mark.parametrize("launcher", [EXT, AGENT], ids=["torchrun", "agent"])
def test_a_setting_without_a_value_is_one_line(tmp_path, launcher):
    (tmp_path / "ok.py").write_text("print('started')")
    job = run([*launcher, "--rdzv-conf=lease_ttl", "ok.py"], tmp_path, forks=False)
    assert (job.returncode, job.out) == (78, ""), job.all
    line = job.err.splitlines()[-1]
    assert " ERROR elastic_ext: --rdzv-conf: " in line
    assert "'lease_ttl' must have a value specified; expected KEY=VALUE[,KEY=VALUE...]; nothing was started" in line
    assert "Traceback" not in job.err


def test_wrong_usage_under_torchrun(tmp_path):
    (tmp_path / "ok.py").write_text("print('started')")
    job = run([*EXT, "--rdzv-conf=platform_grace=20", "ok.py"], tmp_path)
    assert job.returncode == 78, job.all
    (line,) = [line for line in job.err.splitlines() if " ERROR elastic_ext: " in line]
    assert "--shutdown-timeout=30 must not be more than platform_grace=20" in line
    assert "started" not in job.out
    assert "Traceback" not in job.err
