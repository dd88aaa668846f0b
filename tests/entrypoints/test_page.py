"""entrypoints/README.md and its Korean page: their commands are run as written, and the tests that they name are there."""

import os
import re
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs import ROOT, Finished, Job
from tests.networks import network

PAGE = ROOT / "entrypoints" / "README.md"
ENGLISH, KOREAN = (PAGE.with_name(name).read_text() for name in ("README.md", "README.ko.md"))
TEXT = ENGLISH + KOREAN
COMMANDS = list(dict.fromkeys(block.strip("\n") for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)))

# What a test changes: where the nodes and the shared storage are, and sizes.
FSDP = "--device cpu --dim 16 --layers 1 --heads 2 --seq-len 16 --data-mb 0.0011 --warmup-steps 2"
SMALLER = {
    "--nnodes=4": "--nnodes=2",
    "TRAINERS_PER_NODE=4": "TRAINERS_PER_NODE=1",
    "--nproc_per_node=4": "--nproc_per_node=1",
    "--nproc_per_node=8": "--nproc_per_node=1",
    "train_pytorch_fsdp_elastic.py": f"train_pytorch_fsdp_elastic.py {FSDP}",
    "train_fsdp.py": f"train_fsdp.py {FSDP}",
    "--epochs=10": "--epochs=2 --d_model=32 --layers=1 --examples=32",
}


# What a TrainJob sets in each of its pods, for the commands that read it.
TRAINER = {"PET_NNODES": "2", "PET_MASTER_ADDR": "master", "PET_MASTER_PORT": "29500"}

# Rows of what nobody could run here. Each says so in the place of a test.
NOT_RUN = ["오퍼레이터 설치; `kubectl apply`, `get`, `logs`, `delete`, `explain`, `get nodes`"]


def nodes_of(command: str) -> int:
    """How many nodes a command is for: each of them runs it."""
    if "PET_MASTER_ADDR" in command:
        return int(TRAINER["PET_NNODES"])
    return int(next(iter(re.findall(r"(?:NUM_NODES=|MIN_SIZE=|--nnodes=)(\d+)", command)), 1))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "entrypoints", tmp_path / "entrypoints", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def on_each_node(command: str, checkout: Path) -> list[Finished]:
    """Run a command to its end on as many hosts as it is for. They share the directory, as nodes share a file system."""
    with ExitStack() as stack:
        hosts = stack.enter_context(network(nodes_of(command))).hosts
        command = with_address(command, hosts[0].address)
        jobs = []
        for number, host in enumerate(hosts):
            pod = {name: with_address(value, hosts[0].address) for name, value in TRAINER.items()}
            more = pod if "PET_MASTER_ADDR" in command else {}
            job = Job([*host.inside, "sh", "-ec", command], checkout / "entrypoints", **variables(number), **more)
            jobs.append(stack.enter_context(job))
        return [job.finish() for job in jobs]


def with_address(text: str, address: str) -> str:
    """Of the first node, in the place of its name."""
    return re.sub(r"node1\.example\.com|\bmaster\b", address, text)


def variables(number: int) -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PET_RDZV_CONF": "last_call_timeout=1",  # for more nodes, up to MAX
        "ELASTIC_EXT_NODE_NAME": f"node{number}",
        "GLOO_SOCKET_IFNAME": "net0",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, checkout: Path) -> None:
    for written, here in {**SMALLER, "/mnt/shared": str(checkout / "shared")}.items():
        command = command.replace(written, here)
    done = on_each_node(command, checkout)
    assert [each.returncode for each in done] == [0] * nodes_of(command), "".join(each.all for each in done)
    starts = len(re.findall(r"\.py\b", re.sub(r"#.*", "", command)))
    out = "".join(each.out for each in done)
    assert len(re.findall(r"^done ", out, re.MULTILINE)) == starts >= 1
    assert re.findall(r"resum\w+ from \S*?(\w+)\.pt", out) == re.findall(r"# resumes from (\w+)\.pt", command)


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"\[`?(test_\w+)`?\]\(([^)#]+)\)", TEXT)
    assert len(named) > 40
    for test, path in named:
        file = PAGE.parent / path
        assert file.exists(), path
        assert re.search(rf"^(?:async )?def {test}\(", file.read_text(), re.MULTILINE), f"{path} has no {test}"


def test_every_row_has_a_test() -> None:
    """In the tables whose last column is that of the tests; but for what cannot be run here, and says so."""
    tables = re.findall(r"^\|[^\n]*\| (?:test|테스트) \|\n\|[-| ]+\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert len(tables) == 6
    rows = [row.strip("| ").split(" | ") for row in "".join(tables).splitlines()]
    without = [(first, last) for first, _, last in rows if not re.search(r"\[`?test_\w+", last)]
    assert [first for first, _ in without] == NOT_RUN
    assert all("실행하지 않음" in last for _, last in without)


def test_every_script_is_on_the_page() -> None:
    scripts = {path.name for path in PAGE.parent.iterdir() if path.suffix in (".py", ".sh")}
    assert scripts == set(re.findall(r"^\| \[`([\w.-]+)`\]\(\1\)", TEXT, re.MULTILINE))


def test_both_quick_starts_have_the_same_commands() -> None:
    english, korean = (
        re.findall(r"```sh\n(.*?)```", re.split(r"^## ", page.partition(f"## {title}\n")[2], flags=re.MULTILINE)[0], re.DOTALL)
        for page, title in ((ENGLISH, "Quick start"), (KOREAN, "빠른 시작"))
    )
    assert english == korean != []
