"""docs/launchers.md: what it shows is run as written, with scripts of which one worker is killed once."""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs import ROOT, Finished, Job
from tests.networks import network

PAGE = (ROOT / "elastic_ext" / "docs" / "launchers.md").read_text()
SLOW_S = 400  # these libraries take long to import, the more so beside other tests
pytestmark = [pytest.mark.full, pytest.mark.timeout(3 * SLOW_S)]

KILL = """
import os, signal
if os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0": os.kill(os.getpid(), signal.SIGKILL)
"""
ACCELERATE = f"""{KILL}
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.wait_for_everyone()
print(f"trained {{accelerator.process_index}} {{accelerator.num_processes}}\\n", end="", flush=True)
accelerator.end_training()
"""
LIGHTNING = """
import os, signal
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader, TensorDataset

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0": os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

if __name__ == "__main__":
    devices, nodes = (int(os.environ.get(name, alone)) for name, alone in (("LOCAL_WORLD_SIZE", 2), ("GROUP_WORLD_SIZE", 1)))
    trainer = pl.Trainer(accelerator="cpu", devices=devices, num_nodes=nodes, strategy="ddp", max_steps=2, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2))
    print(f"trained {trainer.global_rank} {trainer.world_size}\\n", end="", flush=True)
"""
FABRIC = f"""{KILL}
import lightning
fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.barrier()
print(f"trained {{fabric.global_rank}} {{fabric.world_size}}\\n", end="", flush=True)
"""
SCRIPTS = {"train.py": ACCELERATE, "fit.py": LIGHTNING, "fabric_fit.py": FABRIC}
RESTARTED = r"elastic_ext: restart: rank 1 was killed by SIGKILL.*; restart 1 of 3"
BOTH = ["trained 0 2", "trained 1 2"]


def command_with(text: str) -> str:
    (found,) = [each for each in re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL) if text in each]
    return str(found)


def on_hosts(commands: list[str], folder: Path, **variables: str) -> Finished:
    """Run a command on each host of its own, in one folder, to their end; what all of them say."""
    for name, script in SCRIPTS.items():
        (folder / name).write_text(script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with ExitStack() as stack:
        hosts = stack.enter_context(network(len(commands))).hosts
        jobs = []
        for number, (host, command) in enumerate(zip(hosts, commands, strict=True)):
            words = [*host.inside, "sh", "-ec", command.replace("first-host", hosts[0].address)]
            own = {"PATH": path, "GLOO_SOCKET_IFNAME": "net0", "ELASTIC_EXT_NODE_NAME": f"node{number}"}
            jobs.append(stack.enter_context(Job(words, folder, **own, **variables)))
        done = [job.finish(SLOW_S) for job in jobs]
    return Finished(max(each.returncode for each in done), "".join(each.out for each in done), "".join(each.err for each in done))


def trained(done: Finished) -> list[str]:
    return sorted(re.findall(r"trained \d \d", done.out))


@pytest.mark.parametrize("text", ["accelerate launch --multi_gpu --num_processes", "fit.py", "fabric run"])
def test_a_killed_worker_is_restarted(text: str, tmp_path: Path) -> None:
    text = "--max-restarts=3 fit.py" if text == "fit.py" else text
    done = on_hosts([command_with(text)], tmp_path)
    assert (done.returncode, trained(done)) == (0, BOTH), done.all
    assert re.search(RESTARTED, done.err), done.all


def test_accelerate_on_two_machines(tmp_path: Path) -> None:
    command = command_with("--num_machines")
    done = on_hosts([command, command.replace("--machine_rank=0", "--machine_rank=1")], tmp_path)
    assert (done.returncode, trained(done)) == (0, BOTH), done.all
    assert re.search(RESTARTED, done.err), done.all


IN_A_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
main_process_port: 0
rdzv_backend: ext_c10d
"""


def test_what_does_not_lead_to_our_agent(tmp_path: Path) -> None:
    """The page says so of accelerate's config file, of a variable for accelerate, and of Lightning alone: all of them train."""
    (tmp_path / "config.yaml").write_text(IN_A_FILE)
    backend = {"PET_RDZV_BACKEND": "ext_c10d"}
    for command, variables in (
        ("accelerate launch --config_file=config.yaml quiet.py", {}),
        ("accelerate launch --multi_gpu --num_processes=2 --main_process_port=0 quiet.py", backend),
        (f"{sys.executable} fit.py", backend),
    ):
        (tmp_path / "quiet.py").write_text(ACCELERATE.removeprefix(KILL))
        done = on_hosts([command], tmp_path, **variables)
        assert (done.returncode, trained(done)) == (0, BOTH), done.all
        assert "supervises this run" not in done.all


def notebook(body: str) -> str:
    """The example, with this in the place of its dots."""
    (found,) = [each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "elastic_launch" in each]
    assert "    ...\n" in found
    return str(found.replace("    ...\n", body))


def test_a_function_is_restarted_and_returns(tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text(notebook("".join(f"    {line}\n" for line in KILL.splitlines())))
    done = on_hosts([f"{sys.executable} cell.py"], tmp_path)
    assert (done.returncode, done.out) == (0, "{0: 0.0, 1: 0.5}\n"), done.all
    assert re.search(RESTARTED, done.err), done.all
    assert "starts from nothing: no complete checkpoint in" in done.err  # checkpoint_dir came


def test_the_last_line_of_a_failed_function(tmp_path: Path) -> None:
    """It is the verdict, and no traceback before it shows a file of ours."""
    (tmp_path / "cell.py").write_text(notebook("    raise NameError('a bug in a cell')\n"))
    done = on_hosts([f"{sys.executable} cell.py"], tmp_path)
    assert done.returncode == 65, done.all
    assert re.fullmatch(r".* elastic_ext: stop: rank \d raised NameError: .*; exit code 65", done.err.splitlines()[-1])
    assert not re.search(r'File "[^"]*/elastic_ext/', done.err)
