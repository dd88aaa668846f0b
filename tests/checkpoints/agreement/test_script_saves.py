"""What a round resumes from where a script saves in local_dir in its own way: one list of sources, the newest of all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from elastic_ext.base.contracts import Resumption, SavePlace
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement.nodes import NodeInRound
from elastic_ext.checkpoints.agreement.quarantine import quarantine, quarantine_newer
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.script_saves import ScriptSaves
from elastic_ext.checkpoints.directory import own_files, save_place
from elastic_ext.checkpoints.storage import LocalStorage, open_storage
from elastic_ext.features.record.keeping import keeping_of
from elastic_ext.features.resume.watch import ResumePoint
from elastic_ext.training.saves import note_used
from tests.checkpoints.choice.scenes import flip, resumed
from tests.checkpoints.copying.test_script_saves import save, torch_file
from tests.checkpoints.record.recording import Script


class Tiers:
    """local_dir and checkpoint_dir of one node."""

    def __init__(self, folder: Path) -> None:
        self.local, self.remote = folder / "local", folder / "remote"
        self.local.mkdir()
        self.remote.mkdir()

    @property
    def settings(self) -> Settings:
        return Settings(checkpoint_dir=str(self.remote), local_dir=str(self.local))

    def copy(self) -> None:
        ScriptSaves(LocalStorage(str(self.local)), open_storage(str(self.remote)), "", lambda size: None).turn(finish=False)

    def resumed(self, **options: object) -> str:
        found = resumed(self.remote, local_dir=str(self.local), **options)  # type: ignore[arg-type]
        return found.path.removeprefix(f"{self.remote.parent}/")

    def marked(self) -> list[str]:
        found = {each: own_files.quarantined_names(open_storage(str(each))) for each in (self.local, self.remote)}
        return sorted(f"{each.name}/{name}" for each, names in found.items() for name in names)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


def test_the_newest_of_both(tiers: Tiers) -> None:
    save(tiers.local, 20)
    assert tiers.resumed() == "local/checkpoint-20"  # none has arrived
    tiers.copy()
    assert tiers.resumed() == "local/checkpoint-20"  # as new as the copy
    save(tiers.local, 40)
    assert tiers.resumed() == "local/checkpoint-40"
    shutil.rmtree(tiers.local / "checkpoint-40")
    assert tiers.resumed() == "local/checkpoint-20"
    shutil.rmtree(tiers.local)
    assert tiers.resumed() == "remote/checkpoint-20"


def test_later_saves_in_checkpoint_dir(tiers: Tiers) -> None:
    """A round fell back to it. Its saves are later, by the number of the round, though their steps are fewer."""
    save(tiers.local, 20)
    save(tiers.local, 40)
    tiers.copy()
    keeping = keeping_of([open_storage(str(each)) for each in (tiers.remote, tiers.local)], 1)
    assert {each._attempt for each in keeping.attempts} == {3}
    save(tiers.remote, 30)
    assert tiers.resumed() == "remote/checkpoint-30"


def test_one_number_for_a_round_of_several_nodes(tiers: Tiers) -> None:
    """None of its copies has arrived. So the record in checkpoint_dir does not know of its round, and must not count it again."""
    for step in (20, 40):
        save(tiers.local, step)
    found = resumed(tiers.remote, local_dir=str(tiers.local), place=NodeInRound(nodes=2))
    assert found.rounds == 2
    keeping = keeping_of([open_storage(str(tiers.remote))], 2, found.rounds)
    assert keeping.attempts[0]._attempt == 3


@pytest.mark.parametrize("nodes", [1, 2])
def test_of_several_nodes_each_sees_its_own_only(tiers: Tiers, nodes: int) -> None:
    """So what is on one node's disk is taken where this is the only one."""
    save(tiers.local, 20)
    tiers.copy()
    save(tiers.local, 40)
    place = NodeInRound(nodes=nodes)
    assert tiers.resumed(place=place) == ("local/checkpoint-40" if nodes == 1 else "remote/checkpoint-20")


def test_a_damaged_one_is_passed_over(tiers: Tiers) -> None:
    save(tiers.local, 20)
    tiers.copy()
    torch_file(tiers.local / "model_40.pt", step=40)
    Script(tiers.local).saves(40, "model_40.pt").steps(41).record()
    flip(tiers.local / "model_40.pt", 40)
    assert tiers.resumed() == "local/checkpoint-20"


def unrecord(tiers: Tiers, name: str) -> None:
    for file in (tiers.local / ".elastic_ext" / "saves").glob(f"*.{name}"):
        file.unlink()


def test_the_agent_was_killed_before_it_recorded(tiers: Tiers) -> None:
    """And the script has removed the save before: what is there counts by its format."""
    save(tiers.local, 20)
    tiers.copy()
    save(tiers.local, 40)
    unrecord(tiers, "checkpoint-40")
    assert tiers.resumed() == "local/checkpoint-40"
    shutil.rmtree(tiers.local / "checkpoint-20")
    unrecord(tiers, "checkpoint-20")
    assert tiers.resumed() == "local/checkpoint-40"


@pytest.mark.parametrize("used", [False, True])
def test_without_any_record(tiers: Tiers, used: bool) -> None:
    """If a script has asked where to save, what is there may be its own."""
    save(tiers.local, 20)
    unrecord(tiers, "checkpoint-20")
    if used:
        note_used(str(tiers.local))
    assert tiers.resumed() == ("local/checkpoint-20" if used else "")


def test_what_only_began_to_arrive(tiers: Tiers) -> None:
    """The node with the original is gone. There is nothing else, so the job begins from nothing."""
    save(tiers.local, 20)

    def full(size: int) -> None:
        raise OSError(28, "No space left on device")

    ScriptSaves(LocalStorage(str(tiers.local)), open_storage(str(tiers.remote)), "", full).turn(finish=False)
    shutil.rmtree(tiers.local)
    assert tiers.resumed() == ""


def test_a_blamed_one_and_its_copy(tiers: Tiers) -> None:
    for step in (20, 40):
        save(tiers.local, step)
        tiers.copy()
    assert quarantine(tiers.settings, str(tiers.local / "checkpoint-40"), False, "it failed") == "checkpoint-40"
    assert tiers.marked() == ["local/checkpoint-40", "remote/checkpoint-40"]
    assert tiers.resumed() == "local/checkpoint-20"


def test_the_only_other_one_is_local(tiers: Tiers) -> None:
    save(tiers.local, 20)
    assert quarantine(tiers.settings, str(tiers.local / "checkpoint-20"), False, "it failed") is None
    save(tiers.local, 40)
    assert quarantine(tiers.settings, str(tiers.local / "checkpoint-40"), False, "it failed") == "checkpoint-40"
    assert tiers.resumed() == "local/checkpoint-20"


def test_the_last_saved_is_local(tiers: Tiers) -> None:
    """Numbers left their range."""
    save(tiers.local, 20)
    tiers.copy()
    save(tiers.local, 40)
    assert quarantine(tiers.settings, "", True, "NaN") == "checkpoint-40"
    assert tiers.marked() == ["local/checkpoint-40"]


def test_what_is_newer_than_the_last_comparison(tiers: Tiers) -> None:
    for step in (20, 40, 60):
        save(tiers.local, step)
    tiers.copy()
    quarantine_newer(tiers.settings, 20, "", "replicas differ")
    assert tiers.marked() == ["local/checkpoint-40", "local/checkpoint-60", "remote/checkpoint-60"]
    tiers.copy()
    assert tiers.resumed() == "local/checkpoint-20"


@pytest.mark.parametrize(
    ("free", "last", "expected"),
    [
        (1 << 30, 0, True),
        (64 << 20, 0, False),  # /dev/shm in a pod
        (1 << 30, 600 << 20, False),  # two of them do not fit
        (1 << 30, 500 << 20, True),
    ],
)
def test_where_to_save(free: int, last: int, expected: bool) -> None:
    found = save_place.decide(free, last)
    assert (found.local, bool(found.reason)) == (expected, not expected)


FULL = SavePlace(False, "it has 64 MB free", full=True)


@pytest.mark.parametrize(
    ("places", "nodes", "reason"),
    [
        ([SavePlace(True), SavePlace(True)], 2, ""),
        ([SavePlace(True), FULL], 2, "node 1: it has 64 MB free"),
        ([FULL], 1, "it has 64 MB free"),
        ([SavePlace(True), SavePlace()], 2, ""),
        ([], 2, "2 of 2 nodes have not said"),
    ],
)
def test_all_nodes_save_in_one_place(places: list[SavePlace], nodes: int, reason: str) -> None:
    """Else a save would be a whole nowhere."""
    found = save_place.of_all(places, nodes)
    assert found.local == (places == [SavePlace(True)] * nodes)
    assert found.reason.startswith(reason)


def test_what_scripts_are_told(tiers: Tiers) -> None:
    found = resumed(tiers.remote, local_dir=str(tiers.local))
    told = ResumePoint(tiers.settings, found).variables()
    assert told["ELASTIC_EXT_SAVE_DIR"] == str(tiers.local)
    (tiers.local / "blocked").touch()
    elsewhere = resumed(tiers.remote, local_dir=str(tiers.local / "blocked"))
    assert ResumePoint(tiers.settings, elsewhere).variables()["ELASTIC_EXT_SAVE_DIR"] == str(tiers.remote)
    named = resumed(tiers.remote, local_dir=str(tiers.local), resume_from="none")
    assert (named.place.local, named.place.full) == (False, False)
    without = Settings(checkpoint_dir="s3://bucket")
    assert ResumePoint(without, Resumption()).variables()["ELASTIC_EXT_SAVE_DIR"] == "s3://bucket"


def test_a_note_of_what_was_removed(tiers: Tiers) -> None:
    """Also of a save of an earlier round; not of what is there again, and not of temporary files."""
    local = LocalStorage(str(tiers.local))
    for step in (20, 40):
        save(tiers.local, step)
        tiers.copy()
    for name in ("checkpoint-20", "checkpoint-40"):
        shutil.rmtree(tiers.local / name)
    (tiers.local / "checkpoint-40").mkdir()
    script = Script(tiers.local)
    for name in ("checkpoint-20", "checkpoint-40", "tmp-1"):
        script._note(0, "d", 50, name)
    keeping = keeping_of([open_storage(str(tiers.remote)), local], 1)
    keeping.proof.take(script.journals(at=1), {0: 51})
    keeping.proof.release()
    keeping.list_proved(0, 0.0)
    assert notes.removed_names(local) == ["checkpoint-20"]
