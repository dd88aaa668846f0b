"""Every command in the README and in docs is run as written, what they show is what comes, and no link of any page is dead."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_ext
from tests import reference
from tests.etcd_server import EtcdServer
from tests.jobs import ROOT, TORCHRUN, Job, environment
from tests.networks import network

README = (ROOT / "README.md").read_text()
START = reference.DOCS / "README.md"
PAGES = {START: START.read_text()} | {path: path.read_text() for path in sorted(reference.DOCS.glob("*.md"))}
DOCS = "\n".join(PAGES.values())
MOST_LINES, MOST_WORDS = 200, 900  # of a page; of the README


def blocks(language: str) -> list[str]:
    """The blocks of code in all pages, each once."""
    return list(dict.fromkeys(block.strip("\n") for block in re.findall(rf"```{language}\n(.*?)```", README + DOCS, re.DOTALL)))


COMMANDS = blocks("sh")
TRAINING = [command for command in COMMANDS if "train_fsdp" in command]


def shell() -> dict[str, str]:
    """The environment of somebody who has activated the virtual environment, and has other agents on this machine."""
    env = environment()
    return {**env, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}


def typed(command: str | list[str], cwd: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    words = ["sh", "-c", command] if isinstance(command, str) else command
    return subprocess.run(words, cwd=cwd, env=shell(), capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture
def checkout(tmp_path):
    """What the commands need, in a directory that they may fill."""
    shutil.copytree(ROOT / "entrypoints", tmp_path / "entrypoints", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("command", TRAINING, ids=[f"command{number}" for number in range(len(TRAINING))])
def test_training_commands(checkout, command):
    with EtcdServer(checkout / "etcd") as server:  # the one command that names a server names this one
        done = typed(command.replace("localhost:2379", server.endpoint), checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"done at step \d+", done.stdout)


@pytest.mark.seam
@pytest.mark.timeout(660)
def test_make_demo():
    """The first command after the installation. The environment that runs this test is the one that it would make.

    Which checkpoint is the last one before the kill, and the figures of losses, are those of a machine. But the README says that
    steps that were done twice, before the kill and after it, have the same losses to the bit.
    """
    assert COMMANDS[:2] == ["pip install .", "make demo"]
    done = typed(["make", "demo", f"VENV={Path(sys.executable).parent.parent}"], ROOT, 600)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = next(block for block in blocks("text") if ">>> kill" in block)
    assert len(shown.splitlines()) == 6
    came = {varying(line) for line in (done.stdout + done.stderr).splitlines()}
    assert not [line for line in shown.splitlines() if varying(line) not in came], done.stdout + done.stderr
    before, resumed, after = re.split(r"step_0*(\d+)\.g0001 at step \1\n", done.stdout)
    first, again = (dict(re.findall(r"step (\d+) loss \S+ \((\S+)\)", part)) for part in (before, after))
    assert (list(first), list(again)) == ([*steps(1, int(list(first)[-1]))], [*steps(int(resumed) + 1, 60)])
    assert all(first[step] == again[step] for step in first.keys() & again.keys())


def steps(first: int, last: int) -> list[str]:
    return [str(step) for step in range(first, last + 1)]


def varying(line: str) -> str:
    """A line of the demo's output without what differs from run to run, from machine to machine, and with the speed."""
    line = re.sub(r"loss \d+\.\d+ \(0x1\.\w+p[+-]\d+\)|\d{4}-\d\d-\d\d [\d:,]+ \S+(?= [A-Z])|\d+\.\d+ s\b", "#", line.strip())
    line = re.sub(r"\S+/step_\d{8}(?=\.g0001 at)|(?<=\bstep )\d+|(?<=lr )\S+|(?<=tokens/s )\d+", "#", line)
    return re.sub(r"\b\d+(?= +\(the worker)|(?<=by SIGKILL: ).*(?=; restart)", "#", line)  # what a kernel says of a kill, too


@pytest.mark.seam
def test_what_is_installed_has_its_data(tmp_path):
    """The dependencies are there, and no index is asked. The pages are not installed."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "elastic_ext", source / "elastic_ext", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    command = f"{COMMANDS[0]} --no-deps --no-build-isolation --no-index --target={tmp_path / 'site'}"
    done = typed(f"{Path(sys.executable).name} -m {command}", source)
    assert done.returncode == 0, done.stdout + done.stderr
    package, site = ROOT / "elastic_ext", tmp_path / "site" / "elastic_ext"
    data = {path.relative_to(package) for suffix in ("html", "json", "typed") for path in package.rglob(f"*.{suffix}")}
    assert {path for path in data if not (site / path).is_file()} == set()
    assert not (site / "docs").exists()


@pytest.mark.seam
def test_curl(tmp_path):
    """In a network of its own: the default port of this machine may be another agent's."""
    (command,) = [command for command in COMMANDS if command.startswith("curl")]
    script = tmp_path / "wait.py"
    script.write_text("import signal; print('up', flush=True); signal.pause()")
    with network(1) as net:
        inside = net.hosts[0].inside
        agent = [*inside, sys.executable, "-m", "elastic_ext.agent", script]
        with Job(agent, tmp_path, ELASTIC_EXT_METRICS_PORT="9401") as job:
            job.wait_for("(?m)^up$")
            if shutil.which("curl"):
                done = typed([*inside, "sh", "-c", command], tmp_path)
            else:
                fetch = "from urllib import request; print(request.urlopen('http://localhost:9401/metrics').read().decode())"
                done = typed([*inside, sys.executable, "-c", fetch], tmp_path)
    assert done.returncode == 0, done.stderr
    named = set(re.findall(r"^\| `(elastic_ext_\w+)`", DOCS, re.MULTILINE))
    assert len(named) > 20
    assert {name for name in named if name not in done.stdout} == {name for name in named if name.startswith("elastic_ext_etcd_")}


@pytest.mark.seam
def test_doctor(tmp_path):
    assert "elastic-ext doctor" in COMMANDS
    done = typed("elastic-ext doctor", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(?m)^ok +torch ", done.stdout)


@pytest.mark.full
def test_timeline(tmp_path):
    (commands,) = [command for command in COMMANDS if command.startswith("elastic-ext timeline")]
    shutil.copy(ROOT / "tests" / "data" / "timeline_events.jsonl", tmp_path / "n0.jsonl")
    for command in commands.splitlines()[:2]:
        done = typed(command.replace("/shared/events", str(tmp_path)), tmp_path)
        assert done.returncode == 0, done.stderr
    assert all("was killed by SIGKILL" in (tmp_path / name).read_text() for name in ("job.json", "job.svg"))


@pytest.mark.full
def test_a_save_is_asked_for(server, tmp_path):
    (command,) = [command for command in COMMANDS if command.startswith("elastic-ext checkpoints save")]
    where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job1", "--rdzv-backend=ext_etcd"]
    script = ROOT / "tests" / "scripts" / "saving_job.py"
    with Job([*TORCHRUN, *where, "--nproc-per-node=2", script, tmp_path], tmp_path, STOP=str(tmp_path / "stop")) as job:
        job.wait_for("steps", 2)
        done = typed(command.replace("localhost:2379", server.endpoint), tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "saved.0.0").read_text() == (tmp_path / "saved.0.1").read_text() == done.stdout
        (tmp_path / "stop").touch()
        assert job.finish().returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_the_example_of_the_checkpointer(tmp_path, sharded):
    """As shown, and with the line for FSDP2."""
    (shown,) = [block for block in blocks("python") if "Checkpointer(" in block]
    script = re.sub(r"model = Distributed.*\n# FSDP2: ", "", shown) if sharded else shown
    assert ("\nmodel = fully_shard" in script) == sharded
    (tmp_path / "train.py").write_text(f"{script}\nprint('ended at', step)")
    conf = "--rdzv-conf=checkpoint_dir=checkpoints,memory_every=7,standby=off"
    job = typed(
        [*map(str, TORCHRUN), "--rdzv-backend=ext_c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2", conf, "train.py"],
        tmp_path,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("ended at 100") == 2
    listed = typed("elastic-ext checkpoints ls checkpoints", tmp_path).stdout
    assert re.findall(r"step_0*(\d+)\.g\S* +\1", listed) == ["100", "80", "60"], listed


def test_recipes_of_trainers_are_those_that_ran():
    job = (ROOT / "tests" / "scripts" / "resilient_job.py").read_text()
    page = (reference.DOCS / "trainers.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("from ") and line not in job] == []
    for call in ("output_dir=elastic_ext.save_dir()", "ckpt_path=elastic_ext.resume_from()", "saves.step_ended(step)"):
        assert call in page
        assert call in job
    assert all("Not run: " in each or "(not run)" in each or "dcp" in each[:10] for each in page.split("\n## ")[2:])


def test_what_scripts_may_call_is_there():
    named = set(re.findall(r"\belastic_ext\.([a-zA-Z]\w+)", README + DOCS))
    groups = {"agent", "rules", "formats", "training", "run_id", "node"}  # packages, entry-point groups, attributes of spans
    assert named - groups
    assert all(hasattr(elastic_ext, name) for name in named - groups)


def test_links_and_anchors_lead_somewhere():
    folders = (".github", "benchmarks", "elastic_ext", "entrypoints", "tests")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    assert len(pages) > 20
    dead = [f"{page.relative_to(ROOT)}: {link}" for page in pages for link in links(page) if not leads_somewhere(page, link)]
    assert dead == []


def links(page: Path) -> list[str]:
    """The relative links of a page, those within it included."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"\w+:", link)]


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if target.is_dir() and anchor:
        target /= "README.md"
    return target.exists() and (not anchor or anchor in anchors(target.read_text()))


def anchors(text: str) -> list[str]:
    """What GitHub makes of the headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# An etcd that the job brings\n## `ext_c10d`, on nodes", ["an-etcd-that-the-job-brings", "ext_c10d-on-nodes"]),
        ("## 빠른 시작\n```sh\n# no heading\n```\n", ["빠른-시작"]),
    ],
)
def test_anchors_are_those_of_headings(text, expected):
    assert anchors(text) == expected


def test_a_dead_link_or_anchor_is_found():
    broken = ("failures.md#no-such-heading", "no_such_page.md", "#no-such-heading", "../../tests#no-such-heading")
    assert not [link for link in broken if leads_somewhere(START, link)]
    assert all(leads_somewhere(START, link) for link in ("failures.md#exit-codes", "#what-a-worker-finds", "../../entrypoints"))


def test_pages_are_short_and_linked_from_start():
    assert {path.name: len(text.splitlines()) for path, text in PAGES.items() if len(text.splitlines()) > MOST_LINES} == {}
    linked = {link.partition("#")[0] for link in links(START)}
    assert {path.name for path in PAGES} - {START.name} - linked == set()


def test_every_command_is_covered():
    commands = ("checkpoints save", "doctor", "drain", "plan", "status", "timeline")
    on_slurm = "CHECKPOINT_DIR="  # tests/slurm/test_train_sbatch.py runs it
    launchers = ("accelerate ", "PET_RDZV_", "torchrun --rdzv-backend=ext_c10d")  # tests/entrypoints/test_other_launchers.py
    covered = (on_slurm, *launchers, "pip install .", "make demo", "curl ", *(f"elastic-ext {each}" for each in commands))
    assert all("train_fsdp" in command or command.startswith(covered) for command in COMMANDS)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert len(README.split()) <= MOST_WORDS


def measured(result: str, row: str, side: str) -> float:
    """The median in seconds of a benchmark's row."""
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{result}.json").read_text())["rows"]
    found: float = next(each[side]["median_s"] for each in rows if each["row"] == row)
    return found


def test_figures_in_the_readme_are_the_published_results():
    spares = json.loads((ROOT / "benchmarks/results/memory_tier.json").read_text())["failure"]
    spare = next(each for each in spares if (each["nodes"], each["mb"], each["fault"]) == (3, 100, "spare"))
    heads = ("| SIGKILL of one of 2 workers: ", "| one of 3 nodes ", "| mismatched collectives ")
    sigkill, node, hang = (next(line for line in README.splitlines() if line.startswith(head)) for head in heads)
    assert f"| {measured('restart', 'sigkill', 'warm'):.2f} s | {measured('restart', 'sigkill', 'stock'):.2f} s," in sigkill
    cold, warm, stock = (measured("warm/node_loss", "node", side) for side in ("ours", "warm", "stock"))
    assert f"| {cold:.1f} s ({warm:.2f} s with warm standbys) | {stock:.0f} s |" in node
    assert f"| {spare['memory_s']:.1f} s; " in README
    assert f"| {measured('hangs', 'spin', 'ours'):.0f} s | {measured('hangs', 'spin', 'stock'):.0f} s with" in hang
    clean = json.loads((ROOT / "benchmarks/results/restart_reliability.json").read_text())
    assert "| {clean} of {tries} |".format(**clean["ours"]) + " {clean} of {tries} |".format(**clean["stock"]) in README
