"""Files with names that another user can guess, in a directory that all may write to: no planted link is followed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ext.agent import exits
from elastic_ext.embedded.one_machine import JobFile
from elastic_ext.failures.ledger import Ledger
from elastic_ext.features.hangs.flight_recorder import DUMP_FILES, FlightRecorder
from elastic_ext.workers.bootstrap import error_file

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the planted links must be another user's, which takes root")

NOBODY = 65534
TEXT = "what must not be lost"

WRITERS: dict[str, Callable[[str], object]] = {
    "exits": lambda path: exits.publish({"exit_code": 65}, path),
    "ledger": lambda path: JobFile(path, "job", "h").judged(Ledger(), 0, refunded=False),
    "error_file": lambda path: error_file.replace(path, "{}"),
}


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


@pytest.mark.parametrize("writer", WRITERS)
def test_no_planted_link_is_followed(shared: Path, tmp_path: Path, writer: str) -> None:
    """Nor one of the names that were used once, of this process: whoever watches could plant links to them."""
    victim, path = tmp_path / "victim", shared / "told"
    victim.write_text(TEXT)
    for name in ("told", f"told.{os.getpid()}.part", f"told.{os.getpid()}.tmp"):
        (shared / name).symlink_to(victim)
        os.chown(shared / name, NOBODY, NOBODY, follow_symlinks=False)
    WRITERS[writer](str(path))
    assert victim.read_text() == TEXT
    assert isinstance(json.loads(path.read_text()), dict)
    assert not path.is_symlink()
    assert (path.owner(), path.stat().st_mode & 0o777) == ("root", 0o644)
    assert [entry.name for entry in shared.iterdir() if not entry.is_symlink()] == ["told"]


def test_a_files_mode_follows_the_umask(shared: Path) -> None:
    before = os.umask(0o077)
    try:
        WRITERS["exits"](str(shared / "told"))
    finally:
        os.umask(before)
    assert (shared / "told").stat().st_mode & 0o777 == 0o600


def test_a_planted_link_that_stays_is_never_written(shared: Path, tmp_path: Path, caplog) -> None:
    """In a sticky directory only its owner may; the agent is nobody's here, the link root's."""
    victim = tmp_path / "victim"
    victim.write_text(TEXT)
    victim.chmod(0o666)
    (shared / "told").symlink_to(victim)
    os.seteuid(NOBODY)
    try:
        WRITERS["exits"](str(shared / "told"))
    finally:
        os.seteuid(0)
    assert "could not be written" in caplog.text
    assert victim.read_text() == TEXT
    assert os.listdir(shared) == ["told"]


def test_flight_recorder_dumps_lie_where_others_cannot_plant(tmp_path: Path) -> None:
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
