"""Files with names that another user can guess, in a directory that all may write to: no planted link is followed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ext.workers.hangs.flight_recorder import DUMP_FILES, FlightRecorder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the planted links must be another user's, which takes root")

NOBODY = 65534
TEXT = "what must not be lost"

WRITERS = {
    "exits": """
from elastic_ext.agent import exits
exits.publish({"exit_code": 65}, sys.argv[1])
""",
    "ledger": """
from elastic_ext.failures.ledger import Ledger
from elastic_ext.rendezvous.judging import LedgerFile
LedgerFile(sys.argv[1], "job").write(Ledger())
""",
    "error_file": """
from elastic_ext.workers.bootstrap.error_file import replace
replace(sys.argv[1], "{}")
""",
}
# The names that were used once, of this process: whoever watches can plant links to them while the job runs.
ATTACKED = """
import os, sys
print(os.getpid(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /tmp is; pytest's own directories let nobody else in."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder.stat().st_mode & 0o007 == 0:
            folder.chmod(0o711)
    made = tmp_path / "shared"
    made.mkdir()
    made.chmod(0o1777)
    return made


def as_nobody(*command: object) -> None:
    subprocess.run([str(each) for each in command], check=True, user=NOBODY, group=NOBODY, extra_groups=[], timeout=60)


@pytest.mark.full
@pytest.mark.parametrize("writer", WRITERS)
def test_no_planted_link_is_followed(shared: Path, tmp_path: Path, writer: str) -> None:
    victim, path = tmp_path / "victim", shared / "told"
    victim.write_text(TEXT)
    command = [sys.executable, "-c", ATTACKED + WRITERS[writer], path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid = process.stdout.readline().strip()
        for name in ("told", f"told.{pid}.part", f"told.{pid}.tmp"):
            as_nobody("ln", "-s", victim, shared / name)
        process.stdin.write("\n")
        process.stdin.close()
    assert process.returncode == 0
    assert victim.read_text() == TEXT
    assert isinstance(json.loads(path.read_text()), dict)
    assert not path.is_symlink()
    assert (path.owner(), path.stat().st_mode & 0o777) == ("root", 0o644)
    assert [entry.name for entry in shared.iterdir() if not entry.is_symlink()] == ["told"]


@pytest.mark.full
def test_the_mode_of_a_file_is_by_the_umask(shared: Path) -> None:
    code = f"import os, sys\nos.umask(0o077)\n{WRITERS['exits']}"
    subprocess.run([sys.executable, "-c", code, shared / "told"], check=True, timeout=60)
    assert (shared / "told").stat().st_mode & 0o777 == 0o600


@pytest.mark.full
def test_who_may_not_replace_a_planted_link_writes_nowhere(shared: Path, tmp_path: Path) -> None:
    """In a sticky directory only its owner may; the agent is nobody's here, the link root's."""
    victim = tmp_path / "victim"
    victim.write_text(TEXT)
    victim.chmod(0o666)
    (shared / "told").symlink_to(victim)
    code = f"""
import logging, sys
from elastic_ext.agent import exits
import os
os.setgid({NOBODY}), os.setuid({NOBODY})
exits.publish({{"exit_code": 65}}, sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", code, shared / "told"], check=True, capture_output=True, text=True, timeout=60)
    assert "could not be written" in done.stderr
    assert victim.read_text() == TEXT
    assert os.listdir(shared) == ["told"]


def test_the_dumps_of_the_flight_recorder_lie_where_nobody_else_can_plant_anything(tmp_path: Path) -> None:
    recorder = FlightRecorder(str(tmp_path), {})
    (dumps,) = {recorder.variables[name] for name in DUMP_FILES}
    folder = Path(dumps).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "rank_0").touch()
    recorder.close()
    (folder / "rank_0").unlink()
    recorder.close()
    recorder.close()
    assert not folder.exists()
    assert not set(DUMP_FILES) & FlightRecorder(str(tmp_path), {DUMP_FILES[0]: "mine", DUMP_FILES[1]: "mine"}).variables.keys()
