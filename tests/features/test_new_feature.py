"""A new feature is a folder and one name in the table: written by elastic_ext/README.md alone, it ends a round."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

import elastic_ext
from tests.embedded_server import EmbeddedServer
from tests.jobs import AGENT, Job, run

FOLDER = Path(__file__).parent / "new_feature"
# Attempt 0 makes the file and waits for its end. An agent that does not know of the file lets the alarm end it, which is charged.
SCRIPT = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        open("END_ROUND", "w").close()
    signal.alarm(60)
    while True:
        signal.pause()
print("ends in round 2", flush=True)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The directory of a copy of the package that has the feature."""
    copy = tmp_path / "elastic_ext"
    shutil.copytree(Path(elastic_ext.__file__).parent, copy, ignore=shutil.ignore_patterns("docs", "__pycache__"))
    shutil.copytree(FOLDER, copy / "features" / FOLDER.name)
    table = copy / "features" / "table.py"
    text = table.read_text()
    table.write_text(text.replace('FOLDERS = ("', f'FOLDERS = ("{FOLDER.name}", "'))
    assert len(set(table.read_text().splitlines()) - set(text.splitlines())) == 1
    (tmp_path / "job.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.full
def test_a_new_feature_ends_a_round(package: Path) -> None:
    done = run([*AGENT, "--nproc-per-node=2", "--max-restarts=0", "job.py"], package, PYTHONPATH=str(package))
    assert done.returncode == 0, done.all
    assert len(re.findall("round 1 is over: END_ROUND has appeared", done.err)) == 1, done.all
    assert done.out.count("ends in round 2") == 2, done.all


@pytest.mark.full
def test_it_ends_the_round_of_other_nodes(package: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=2", "--nproc-per-node=1"]
        command = [*AGENT, *server.options, *where, "--max-restarts=0", "job.py"]
        jobs = [
            stack.enter_context(Job(command, package, PYTHONPATH=str(package), ELASTIC_EXT_NODE_NAME=name)) for name in ("a", "b")
        ]
        done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 0], [each.all for each in done]
    assert all("round 1 is over: END_ROUND has appeared" in each.err for each in done), [each.all for each in done]
