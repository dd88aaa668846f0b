"""What breaks the promises of local_dir for scripts that save in their own way: each was found by a review."""

from __future__ import annotations

import contextlib
import errno
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from elastic_ext.base.errors import BadCheckpoints, UsageError
from elastic_ext.checkpoints.agreement.nodes import NodeInRound
from elastic_ext.checkpoints.agreement.quarantine import quarantine, quarantine_newer
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.copier import Copier
from elastic_ext.checkpoints.copying.replicate import Copies, Replicator
from elastic_ext.checkpoints.copying.script_saves import ScriptSaves
from elastic_ext.checkpoints.directory import own_files, save_place, upkeep
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.storage import LocalStorage, open_storage
from elastic_ext.features.record.keeping import keeping_of
from tests.checkpoints.agreement.test_script_saves import Tiers
from tests.checkpoints.copying.test_replicate import save as checkpoint
from tests.checkpoints.copying.test_script_saves import Counted, Killed, chosen, copier, removes, save, torch_file
from tests.checkpoints.record.recording import Script


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


def finish(tiers: Tiers) -> None:
    report = copier(tiers.local, tiers.remote).turn(finish=True)
    assert (report.waiting, report.reason) == ((), "")


def file(folder: Path, name: str, step: int, attempt: int) -> None:
    torch_file(folder / name, step=step)
    Script(folder).saves(step, name).steps(step + 1).record(least=attempt)


# Quarantine.


def test_a_quarantined_one_stays_so_at_the_end(tiers: Tiers) -> None:
    for step in (20, 40):
        save(tiers.local, step)
    quarantine_newer(tiers.settings, 20, "", "replicas differ")
    finish(tiers)
    assert tiers.resumed() == "local/checkpoint-20"


def test_a_blamed_one_stays_so_at_the_end(tiers: Tiers) -> None:
    for step in (20, 40):
        save(tiers.local, step)
    quarantine(tiers.settings, str(tiers.local / "checkpoint-40"), False, "it failed")
    finish(tiers)
    shutil.rmtree(tiers.local)
    assert tiers.resumed() == "remote/checkpoint-20"


@pytest.mark.parametrize("how", ["newer", "blamed"])
def test_quarantined_while_it_is_copied(tiers: Tiers, how: str) -> None:
    save(tiers.local, 20)
    tiers.copy()
    save(tiers.local, 40)
    calls = iter(range(2))

    def bad(size: int) -> None:
        if next(calls, None) == 1:
            if how == "newer":
                quarantine_newer(tiers.settings, 20, "", "replicas differ")
            else:
                quarantine(tiers.settings, str(tiers.local / "checkpoint-40"), False, "it failed")

    copier(tiers.local, tiers.remote, bad).turn(finish=False)
    copier(tiers.local, tiers.remote).turn(finish=False)
    assert tiers.resumed().endswith("checkpoint-20")


# What the remote directory has is overwritten.


def test_an_older_one_overwrites_no_newer(tiers: Tiers) -> None:
    """The save of round 1 in local_dir was not copied yet; round 2 fell back (full, or several nodes) and used the same name."""
    file(tiers.local, "last.pt", 20, 1)
    file(tiers.remote, "last.pt", 40, 2)
    newest = (tiers.remote / "last.pt").read_bytes()
    assert tiers.resumed() == "remote/last.pt"
    tiers.copy()
    assert (tiers.remote / "last.pt").read_bytes() == newest


def test_a_torn_one_overwrites_no_proved_copy(tiers: Tiers) -> None:
    """The script always saves under one name, and is killed within its last save; then the job ends."""
    file(tiers.local, "last.pt", 20, 1)
    tiers.copy()
    whole = (tiers.remote / "last.pt").read_bytes()
    (tiers.local / "last.pt").write_bytes(whole[: len(whole) // 2])
    Script(tiers.local).saves(40, "last.pt").record(least=2)
    assert tiers.resumed() == "remote/last.pt"
    copier(tiers.local, tiers.remote).turn(finish=True)
    assert tiers.resumed() == "remote/last.pt"


def test_files_of_others_are_not_overwritten(tiers: Tiers) -> None:
    """At the end, by what is no save."""
    (tiers.remote / "config.json").write_text("the user's")
    (tiers.local / "config.json").write_text("something else")
    copier(tiers.local, tiers.remote).turn(finish=True)
    assert (tiers.remote / "config.json").read_text() == "the user's"


# Torn or mixed.


def large_file(path: Path, step: int) -> bytes:
    """A file of torch.save with many tensors; its length is the same for each step."""
    with zipfile.ZipFile(path, "w") as archive:
        content = {"optimizer": {"state": {}, "param_groups": []}, "model": {}}  # all numbers are in tensors
        archive.writestr("archive/data.pkl", pickle.dumps(content, 2))
        archive.writestr("archive/version", "3\n")
        for number in range(400):
            archive.writestr(f"archive/data/{number}", bytes([step]) * 5000)
        for info in archive.infolist():
            info.external_attr = 0
    return path.read_bytes()


@pytest.mark.parametrize("first", [True, False])
def test_a_file_written_again_while_it_is_copied(tiers: Tiers, monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """Under the same name, in place: the links lead to the same file. Then the disk is lost.

    With verify=off, or as torch.serialization.set_crc32_options(False) writes it, nothing else shows that it is mixed.
    """
    monkeypatch.setattr(upkeep, "BLOCK", 1 << 12)
    new, blocks = large_file(tiers.local.parent / "next.pt", 60), iter(range(12))
    known = [new]
    for attempt, step in ((1, 20), (2, 40))[first:]:
        tiers.copy()
        known.append(large_file(tiers.local / "last.pt", step))
        Script(tiers.local).saves(step, "last.pt").steps(step + 1).record(least=attempt)

    def again(size: int) -> None:
        if next(blocks, None) == 10:
            with open(tiers.local / "last.pt", "r+b") as opened:
                opened.truncate(0)
                opened.write(new)

    copier(tiers.local, tiers.remote, again).turn(finish=False)
    shutil.rmtree(tiers.local)
    found = tiers.resumed(verify="off")
    assert found == "" or (tiers.remote / "last.pt").read_bytes() in known


def test_files_of_ranks_arrive_together(tiers: Tiers) -> None:
    """One of two has arrived when the disk is lost."""
    for rank in range(2):
        torch_file(tiers.local / f"step_20_rank_{rank}.pt", step=20)
    script = Script(tiers.local, world=2)
    for rank in range(2):
        script.saves(20, f"step_20_rank_{rank}.pt", rank=rank)
    script.steps(21).record()
    with contextlib.suppress(Killed):
        copier(tiers.local, tiers.remote, Counted(1)).turn(finish=False)
    assert len(list(tiers.remote.glob("step_20_rank_*.pt"))) == 1
    shutil.rmtree(tiers.local)
    assert tiers.resumed() == ""


# Removal.


def test_a_file_of_a_user_in_a_copy(tiers: Tiers) -> None:
    save(tiers.local, 20)
    tiers.copy()
    (tiers.remote / "checkpoint-20" / "notes.txt").write_text("the best one")
    removes(tiers.local, "checkpoint-20")
    save(tiers.local, 40)
    tiers.copy()
    assert (tiers.remote / "checkpoint-20" / "notes.txt").exists()


@pytest.mark.parametrize("how", ["gone", "quarantined", "torn"])
def test_the_newer_copy_cannot_be_used(tiers: Tiers, how: str) -> None:
    """So the older copy stays, although the script has removed its original."""
    save(tiers.local, 20)
    tiers.copy()
    save(tiers.local, 40)
    tiers.copy()
    if how == "gone":
        shutil.rmtree(tiers.remote / "checkpoint-40")
    elif how == "torn":
        torch_file(tiers.remote / "checkpoint-40" / "part_1.pt", step=99)
    else:
        own_files.quarantine(open_storage(str(tiers.remote)), "checkpoint-40", "bad")
    removes(tiers.local, "checkpoint-20")
    tiers.copy()
    assert (tiers.remote / "checkpoint-20").exists()


# At the end.


@pytest.mark.seam
def test_a_copier_that_cannot_run(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies at each start, so it reports nothing. The saves are on this node only."""
    save(tiers.local, 20)

    class Metrics:
        def copied(self, *_: object) -> None: ...
        def copy_took(self, *_: object) -> None: ...
        def copy_failed(self) -> None: ...

    monkeypatch.setattr("elastic_ext.base.isolated.command", lambda name: ["/bin/false"])
    monkeypatch.setattr("elastic_ext.checkpoints.copying.copier.MAX_DEATHS_AT_END", 1)
    started = Copier(str(tiers.local), str(tiers.remote), [], "token", Metrics(), 60.0)
    assert started.close(10.0) != ()


def test_a_copy_that_takes_long(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a heartbeat of the process."""
    monkeypatch.setattr("elastic_ext.checkpoints.copying.replicate.HEARTBEAT_S", 0.0)
    save(tiers.local, 20)
    local, remote = LocalStorage(str(tiers.local)), open_storage(str(tiers.remote))
    replicator = Replicator(local, remote, upkeep.TokenBucket(0.0))
    script = ScriptSaves(local, remote, "", replicator.throttle.wait_to_send)
    report = Copies(replicator, script).turn(finish=False)
    assert (report.reason, report.arrived) == ("", "checkpoint-20")


def test_one_save_does_not_stop_the_others(tiers: Tiers) -> None:
    """The oldest one cannot be copied."""
    file(tiers.local, "best.pt", 20, 1)
    save(tiers.local, 40)
    (tiers.remote / "best.pt").mkdir()  # as if its disk refused it
    (tiers.remote / "best.pt" / "in the way").touch()
    sent = copier(tiers.local, tiers.remote)
    for _ in range(3):
        sent.turn(finish=False)
    assert chosen(tiers.remote) == "checkpoint-40"


def test_nothing_of_others_with_a_checkpointer(tiers: Tiers) -> None:
    """A job with a Checkpointer: what else is in local_dir was never copied before."""
    (tiers.local / "dataset_cache").mkdir()
    (tiers.local / "dataset_cache" / "data.bin").write_bytes(b"x" * 1000)
    checkpoint([tiers.local], 20)
    local, remote = LocalStorage(str(tiers.local)), open_storage(str(tiers.remote))
    replicator = Replicator(local, remote, upkeep.TokenBucket(0.0))
    Copies(replicator, ScriptSaves(local, remote, "", replicator.throttle.wait_to_send)).turn(finish=True)
    assert not (tiers.remote / "dataset_cache").exists()


def test_a_lost_and_found(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """local_dir is the root of a file system, and the user may not read lost+found."""
    (tiers.local / "lost+found").mkdir()
    save(tiers.local, 20)
    entries = LocalStorage.entries

    def refused(self: LocalStorage, folder: str = "") -> object:
        if folder.startswith("lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return entries(self, folder)

    monkeypatch.setattr(LocalStorage, "entries", refused)
    report = copier(tiers.local, tiers.remote).turn(finish=True)
    assert (report.waiting, report.reason) == ((), "")


def test_a_remote_directory_that_was_emptied(tiers: Tiers) -> None:
    """The notes say that it was copied, but nothing is there."""
    save(tiers.local, 20)
    tiers.copy()
    shutil.rmtree(tiers.remote)
    tiers.remote.mkdir()
    copier(tiers.local, tiers.remote).turn(finish=True)
    assert chosen(tiers.remote) == "checkpoint-20"


# Cost.


def test_a_full_local_disk_sends_once(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note that it was copied cannot be written."""
    save(tiers.local, 20)
    put = LocalStorage.put

    def full(self: LocalStorage, name: str, data: bytes) -> None:
        if self.address.startswith(str(tiers.local)):
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, name, data)

    monkeypatch.setattr(LocalStorage, "put", full)
    sizes: list[int] = []
    sent = copier(tiers.local, tiers.remote, sizes.append)
    for _ in range(3):
        sent.turn(finish=False)
    assert len(sizes) == 3  # files


def test_removed_kinds_cost_no_requests(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name is a kind of its own, so no newer one of its kind arrives."""
    for at, letter in enumerate("abcdefgh"):
        name = f"run-{letter}"
        (tiers.local / name).mkdir()
        torch_file(tiers.local / name / "model.pt", step=at)
        Script(tiers.local).saves(at + 1, name).steps(at + 2).record(least=at + 1)
        tiers.copy()
        if at:
            removes(tiers.local, f"run-{'abcdefgh'[at - 1]}")
    asked: list[str] = []
    listed = LocalStorage.listed

    def counted(self: LocalStorage, folder: str = "") -> object:
        if self.address == str(tiers.remote):
            asked.append(folder)
        return listed(self, folder)

    monkeypatch.setattr(LocalStorage, "listed", counted)
    tiers.copy()
    assert len(asked) <= 4


# The choice.


@pytest.mark.parametrize("where", ["local", "remote"])
def test_two_kinds_of_one_moment_are_asked_for(tiers: Tiers, where: str) -> None:
    """As they are where they are in checkpoint_dir: the job does not begin from nothing without a word."""
    folder = tiers.local if where == "local" else tiers.remote
    for name in ("generator_20.pt", "discriminator_20.pt"):
        torch_file(folder / name, step=20)
    Script(folder).saves(20, "generator_20.pt", "discriminator_20.pt").steps(21).record()
    with pytest.raises(UsageError):
        print(tiers.resumed(place=NodeInRound(restarts=True, resumes=True)))


@pytest.mark.parametrize("where", ["local", "remote"])
def test_all_local_ones_are_bad(tiers: Tiers, where: str) -> None:
    """As where they are in checkpoint_dir: the job does not begin from nothing."""
    folder = tiers.local if where == "local" else tiers.remote
    save(folder, 40)
    own_files.quarantine(open_storage(str(folder)), "checkpoint-40", "bad")
    with pytest.raises(BadCheckpoints):
        print(tiers.resumed())


@pytest.mark.parametrize("where", ["local", "remote"])
def test_newer_than_what_a_checkpointer_saved_before(tiers: Tiers, where: str) -> None:
    """Its last checkpoint is in checkpoint_dir. Where both are in one directory, the later save is taken."""
    checkpoint([tiers.remote], 10)
    save(tiers.local if where == "local" else tiers.remote, 20)
    assert tiers.resumed() == f"{where}/checkpoint-20"


def test_an_earlier_checkpointer_hides_nothing(tiers: Tiers) -> None:
    """The job used a Checkpointer before, and its last checkpoint is still in local_dir."""
    checkpoint([tiers.local], 10)
    save(tiers.local, 20)
    assert tiers.resumed() == "local/checkpoint-20"


def test_resume_from_is_not_undone_by_a_copy(tiers: Tiers) -> None:
    """The user goes back to 20, and the copy of 60, of the run before, arrives afterwards."""
    save(tiers.local, 20)
    tiers.copy()
    save(tiers.local, 60)
    assert tiers.resumed(resume_from="checkpoint-20") == "remote/checkpoint-20"
    notes.note_round(LocalStorage(str(tiers.local)), saves_here=False)  # as the agent does
    tiers.copy()
    assert tiers.resumed(resume_from="checkpoint-20") == "remote/checkpoint-20"


# Second part.


def test_the_one_before_a_quarantined_one_is_copied(tiers: Tiers) -> None:
    """It is what the job resumes from now, and its only place is this node."""
    for step in (20, 40):
        save(tiers.local, step)
    quarantine_newer(tiers.settings, 20, "", "replicas differ")
    tiers.copy()
    assert chosen(tiers.remote) == "checkpoint-20"


@pytest.mark.parametrize("point", range(12))
def test_killed_while_a_copy_is_removed(tiers: Tiers, point: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name comes again, and that copy counts."""
    save(tiers.local, 20)
    tiers.copy()
    save(tiers.local, 40)
    tiers.copy()
    removes(tiers.local, "checkpoint-20")
    counted = Counted(point)
    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        for name in ("put", "remove", "remove_tree"):
            patched.setattr(LocalStorage, name, counted.before(getattr(LocalStorage, name)))
        tiers.copy()
    shutil.rmtree(tiers.local)  # with the note
    tiers.local.mkdir()
    save(tiers.remote, 60)
    save(tiers.local, 20)
    folder = tiers.local / "checkpoint-20"
    Script(tiers.local).saves(20, "checkpoint-20").steps(21).record(least=9)
    for part in folder.iterdir():
        torch_file(part, step=20)
    Script(tiers.local).saves(20, "checkpoint-20").steps(21).record(least=10)
    tiers.copy()
    assert tiers.resumed() == "local/checkpoint-20"
    shutil.rmtree(tiers.local)
    assert tiers.resumed() == "remote/checkpoint-20"


def test_a_storage_that_refuses_removals(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy without deletions: all else is copied at the end."""
    for step in (20, 40):
        save(tiers.local, step)
        tiers.copy()
    removes(tiers.local, "checkpoint-20")
    (tiers.local / "final.bin").write_bytes(b"final")
    remove_tree = LocalStorage.remove_tree

    def refused(self: LocalStorage, name: str, first: tuple[str, ...] = ()) -> None:
        if self.address == str(tiers.remote):
            raise PermissionError(errno.EACCES, "Access Denied")
        remove_tree(self, name, first)

    monkeypatch.setattr(LocalStorage, "remove_tree", refused)
    copier(tiers.local, tiers.remote).turn(finish=True)
    assert (tiers.remote / "final.bin").exists()


def test_no_room_for_a_known_save(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has saved there before, or its copies are there; local_dir is new, and smaller than one save."""
    save(tiers.remote, 20)
    usage = shutil.disk_usage(tiers.local)
    monkeypatch.setattr(save_place, "LEAST_FREE", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert not save_place.find(LocalStorage(str(tiers.local)), LocalStorage(str(tiers.remote))).local


def test_a_link_to_a_save_in_place(tiers: Tiers) -> None:
    """`last` leads to the newest one, and a file of that name that people made stays."""
    save(tiers.local, 20)
    (tiers.local / "last").symlink_to("checkpoint-20")
    finish(tiers)
    save(tiers.local, 40)
    (tiers.local / "last").unlink()
    (tiers.local / "last").symlink_to("checkpoint-40")
    finish(tiers)
    assert (tiers.remote / "last").readlink() == Path("checkpoint-40")
    assert tiers.resumed() == "local/checkpoint-40"
    shutil.rmtree(tiers.local)
    assert tiers.resumed() == "remote/checkpoint-40"


def test_a_record_of_what_arrives_stays(tiers: Tiers) -> None:
    """Rounds begin and end while the first, large file of a copy is on its way; then the process is killed."""
    save(tiers.local, 20)
    tiers.copy()
    save(tiers.local, 40)
    calls = iter(range(9))

    def rounds(size: int) -> None:
        at = next(calls)
        if at == 0:
            torch_file(tiers.local / "other.pt", step=1)
            for least in (5, 9):
                keeping = keeping_of([open_storage(str(each)) for each in (tiers.remote, tiers.local)], 1, least)
                assert keeping
        if at == 2:
            raise Killed

    with contextlib.suppress(Killed):
        copier(tiers.local, tiers.remote, rounds).turn(finish=False)
    record = stored.known_saves(open_storage(str(tiers.remote)))
    assert "checkpoint-40" in record


def test_the_same_in_an_object_store(tiers: Tiers) -> None:
    """There, no folder shows before its first file is done. Without the announcement, a part of it has no record."""
    remote = open_storage("memory://review-arriving")
    save(tiers.local, 20)

    def rounds(size: int) -> None:
        for least in (5, 9):
            assert keeping_of([remote, open_storage(str(tiers.local))], 1, least)
        raise Killed

    with contextlib.suppress(Killed):
        copier(tiers.local, remote, rounds).turn(finish=False)
    assert "checkpoint-20" in stored.known_saves(remote)
