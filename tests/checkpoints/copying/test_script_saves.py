"""What a script saves in local_dir in its own way is copied by its record, over plain files: no training, no agent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.script_saves import ScriptSaves
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.record.stored import RecordBook, Trust, known_saves
from elastic_ext.checkpoints.storage import LocalStorage, Storage, open_storage
from tests.checkpoints.choice.scenes import saved
from tests.checkpoints.record.recording import Script


def torch_file(path: Path, step: int) -> None:
    saved(path, {"step": step, "optimizer": {"state": {}, "param_groups": []}, "model": {"w": step}})
    os.utime(path)


def nothing(size: int) -> None:
    """No limit."""


@pytest.fixture
def local(tmp_path: Path) -> Path:
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    (tmp_path / "remote").mkdir()
    return tmp_path / "remote"


def copier(local: Path, remote: Path | Storage, throttle: Callable[[int], None] = nothing, pattern: str = "") -> ScriptSaves:
    target = remote if isinstance(remote, Storage) else open_storage(str(remote))
    return ScriptSaves(LocalStorage(str(local)), target, pattern, throttle)


def save(local: Path, step: int, files: int = 3) -> str:
    """A directory as trainers write it, recorded as proved; the round that wrote it is over."""
    name = f"checkpoint-{step}"
    (local / name).mkdir()
    for number in range(files):
        torch_file(local / name / f"part_{number}.pt", step=step)
    Script(local).saves(step, name).steps(step + 1).record()
    return name


def chosen(directory: Path) -> str:
    found = listing.newest_complete(str(directory)).resume
    return "" if found is None else found.path.rpartition("/")[2]


def trust_in(directory: Path, name: str) -> Trust:
    storage = open_storage(str(directory))
    entry = storage.stat(name)
    assert entry is not None
    return RecordBook(storage).verdict(entry).trust


def content(directory: Path, name: str) -> dict[str, bytes]:
    return {str(each.relative_to(directory)): each.read_bytes() for each in (directory / name).rglob("*") if each.is_file()}


def removes(local: Path, name: str) -> None:
    """A worker was seen to remove an entry."""
    path = local / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    notes.note_removed(LocalStorage(str(local)), name, recorded=True)


def test_a_copy_is_as_proved_as_its_original(local: Path, remote: Path) -> None:
    name = save(local, 20)
    report = copier(local, remote).turn(finish=False)
    assert (report.waiting, report.arrived, report.failures) == ((), name, 0)
    assert content(remote, name) == content(local, name)
    assert (trust_in(remote, name), chosen(remote)) == (Trust.PROVED, name)
    assert not list((local / ".elastic_ext" / "held").iterdir())


def test_only_the_newest_of_each_kind(local: Path, remote: Path) -> None:
    """Saves come faster than copies."""
    for step in (20, 40):
        save(local, step)
    torch_file(local / "best.pt", step=20)
    Script(local).saves(41, "best.pt").steps(42).record()
    sent = copier(local, remote)
    assert sent.turn(finish=False).waiting == ("best.pt",)
    assert sent.turn(finish=False).waiting == ()
    assert sorted(each.name for each in remote.iterdir() if each.name != ".elastic_ext") == ["best.pt", "checkpoint-40"]


def test_not_what_is_not_proved(local: Path, remote: Path) -> None:
    torch_file(local / "model_20.pt", step=20)
    Script(local).saves(20, "model_20.pt").record()
    assert copier(local, remote).turn(finish=False).waiting == ()
    assert not (remote / "model_20.pt").exists()


class Killed(BaseException):
    """The process is gone."""


class Counted:
    """Is called before each step that changes something: before the last of them, the process is killed."""

    def __init__(self, last: int) -> None:
        self.left = last

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def before(self, act: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **options: object) -> object:
            self()
            return act(*args, **options)

        return counted


def held(local: Path) -> bool:
    return any((local / ".elastic_ext" / "held").glob("*/.record"))


@pytest.mark.parametrize("same_name", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_killed_at_each_point(local: Path, remote: Path, same_name: bool, removed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing torn is ever chosen, and the next process goes on, though the script has removed the original."""
    old = save(local, 20)
    copier(local, remote).turn(finish=False)
    if same_name:
        shutil.rmtree(local / old)
    new = save(local, 20 if same_name else 40)
    wanted, before = content(local, new), content(remote, old)
    for each in (local, remote):
        shutil.copytree(each, each.with_suffix(".before"))
    killed = True
    for point in range(100):
        for each in (local, remote):
            shutil.rmtree(each)
            shutil.copytree(each.with_suffix(".before"), each)
        counted = Counted(point)
        try:
            with monkeypatch.context() as patched:
                for name in ("put", "remove", "remove_tree"):
                    patched.setattr(LocalStorage, name, counted.before(getattr(LocalStorage, name)))
                patched.setattr(os, "link", counted.before(os.link))
                copier(local, remote, counted).turn(finish=False)
        except Killed:
            assert chosen(remote) in (("", new) if same_name else (old, new))
        else:
            killed = False
        if chosen(remote) == new:
            assert content(remote, new) in (wanted, before)
        if removed and held(local):
            shutil.rmtree(local / new)
        copier(local, remote).turn(finish=False)
        assert (chosen(remote), content(remote, new), trust_in(remote, new)) == (new, wanted, Trust.PROVED)
        if not killed:
            break
    assert 8 < point < 99


def test_the_script_removes_it_meanwhile(local: Path, remote: Path) -> None:
    old = save(local, 20)
    wanted = content(local, old)

    def rotate(size: int) -> None:
        shutil.rmtree(local / old, ignore_errors=True)

    assert copier(local, remote, rotate).turn(finish=False).arrived == old
    assert content(remote, old) == wanted


def test_the_script_writes_it_again_meanwhile(local: Path, remote: Path) -> None:
    """Into the same file, so the links do not help. What was sent is no proved save."""
    torch_file(local / "last.pt", step=20)
    Script(local).saves(20, "last.pt").steps(21).record()
    times = iter(range(1))

    def again(size: int) -> None:
        for _ in times:
            torch_file(local / "last.pt", step=40)

    sent = copier(local, remote, again)
    report = sent.turn(finish=False)
    assert (report.arrived, report.waiting) == ("", ("last.pt",)) or report.failures == 1
    Script(local).saves(40, "last.pt").steps(41).record()
    assert sent.turn(finish=False).arrived == "last.pt"
    assert trust_in(remote, "last.pt") is Trust.PROVED
    assert content(remote.parent, "remote")["remote/last.pt"] == (local / "last.pt").read_bytes()


@pytest.mark.parametrize("kept", ["pinned", "quarantined", "the last one", "written by others"])
def test_copies_that_stay(local: Path, remote: Path, kept: str) -> None:
    """Although the script has removed their originals."""
    old, storage = save(local, 20), open_storage(str(remote))
    sent = copier(local, remote)
    sent.turn(finish=False)
    if kept == "pinned":
        own_files.pin(storage, old)
    elif kept == "quarantined":
        own_files.quarantine(storage, old, "bad")
    elif kept == "written by others":
        torch_file(remote / old / "part_0.pt", step=99)
        Script(remote).saves(99, old).steps(100).record()
    removes(local, old)
    if kept != "the last one":
        save(local, 40)
    sent.turn(finish=False)
    assert (remote / old).exists()


def test_copies_follow_the_rotation(local: Path, remote: Path) -> None:
    sent = copier(local, remote)
    names = [save(local, step) for step in (20, 40)]
    for step in (60, 80, 100):
        names.append(save(local, step))
        sent.turn(finish=False)
        removes(local, names[-3])
        sent.turn(finish=False)
    assert sorted(each.name for each in remote.iterdir() if each.name != ".elastic_ext") == ["checkpoint-100", "checkpoint-80"]
    assert set(known_saves(open_storage(str(remote)))) == {"checkpoint-100", "checkpoint-80"}


def test_a_wiped_disk_removes_no_copy(local: Path, remote: Path) -> None:
    for step in (20, 40):
        save(local, step)
        copier(local, remote).turn(finish=False)
    shutil.rmtree(local)
    local.mkdir()
    save(local, 60)
    copier(local, remote).turn(finish=False)
    assert all((remote / f"checkpoint-{step}").exists() for step in (20, 40, 60))


def test_an_entry_with_its_name_again(local: Path, remote: Path) -> None:
    """Removed, and saved again before the copier looks."""
    sent = copier(local, remote)
    old = save(local, 20)
    sent.turn(finish=False)
    removes(local, old)
    save(local, 20, files=2)
    save(local, 40)
    sent.turn(finish=False)
    sent.turn(finish=False)
    assert content(remote, old).keys() >= content(local, old).keys()
    assert notes.removed_names(LocalStorage(str(local))) == []


def test_everything_at_the_end(local: Path, remote: Path) -> None:
    names = [save(local, step) for step in (20, 40)]
    (local / "model.safetensors").write_bytes(b"final")
    (local / "runs").mkdir()
    (local / "runs" / "log").write_text("lines")
    os.symlink(names[-1], local / "last")
    report = copier(local, remote).turn(finish=True)
    assert (report.waiting, report.failures) == ((), 0)
    for name in (*names, "runs"):
        assert content(remote, name) == content(local, name)
    assert (remote / "model.safetensors").read_bytes() == b"final"
    assert os.readlink(remote / "last") == names[-1]
    assert chosen(remote) == names[-1]


def test_a_quarantined_one_is_not_copied(local: Path, remote: Path) -> None:
    name = save(local, 20)
    own_files.quarantine(LocalStorage(str(local)), name, "bad", written_at=(local / name / "part_0.pt").stat().st_mtime + 1)
    copier(local, remote).turn(finish=False)
    assert not (remote / name).exists()


def test_each_rank_its_own_file(local: Path, remote: Path) -> None:
    for rank in range(2):
        torch_file(local / f"step_20_rank_{rank}.pt", step=20)
    script = Script(local, world=2)
    for rank in range(2):
        script.saves(20, f"step_20_rank_{rank}.pt", rank=rank)
    script.steps(21).record()
    sent = copier(local, remote)
    for _ in range(2):
        report = sent.turn(finish=False)
    assert report.waiting == ()
    assert chosen(remote) == "step_20_rank_*.pt"


class Requests:
    """Counts what is asked of a directory."""

    def __init__(self, directory: Path, patched: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        for name in ("entries", "stat", "open", "write", "remove", "remove_tree"):
            patched.setattr(LocalStorage, name, self.noting(getattr(LocalStorage, name), str(directory)))

    def noting(self, act: Callable[..., object], address: str) -> Callable[..., object]:
        def noted(storage: LocalStorage, name: str = "", *args: object) -> object:
            if storage.address == address:
                self.asked.append(f"{act.__name__} {name}")
            return act(storage, name, *args)

        return noted


def test_files_of_ranks_list_the_record_rarely(local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are."""
    names = [f"step_20_rank_{rank}.pt" for rank in range(16)]
    script = Script(local, world=16)
    for rank, name in enumerate(names):
        torch_file(local / name, step=20)
        script.saves(20, name, rank=rank)
    script.steps(21).record()
    requests = Requests(remote, monkeypatch)
    assert copier(local, remote).turn(finish=False).arrived
    assert requests.asked.count("entries .elastic_ext/saves") <= 2


def test_nothing_new_costs_no_request(local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(local, 20)
    sent = copier(local, remote)
    sent.turn(finish=False)
    requests = Requests(remote, monkeypatch)
    sent.turn(finish=False)
    assert requests.asked == []


def test_what_has_not_changed_is_read_once(local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (20, 40):
        save(local, step)
    for record in (local / ".elastic_ext" / "saves").iterdir():
        os.utime(record, (1e9, 1e9))  # a file that is new may change without a change of its time
    sent = copier(local, remote)
    sent.turn(finish=False)
    requests = Requests(local, monkeypatch)
    sent.turn(finish=False)
    assert not [each for each in requests.asked if each.startswith(("open .elastic_ext/saves", "open checkpoint"))]


def test_a_record_that_is_new_is_read_again(local: Path, remote: Path) -> None:
    """It may be written again without a change of its size and time."""
    name, sent = save(local, 20), copier(local, remote)
    own_files.quarantine(LocalStorage(str(local)), name, "bad")
    sent.turn(finish=False)
    (record,) = (local / ".elastic_ext" / "saves").iterdir()
    before, text = record.stat(), record.read_text()
    record.write_text(text.replace("true", "null", 1))
    os.utime(record, ns=(before.st_atime_ns, before.st_mtime_ns))
    own_files.lift_quarantine(LocalStorage(str(local)), name)
    assert (record.stat().st_size, sent.turn(finish=False).arrived) == (before.st_size, "")


def test_a_storage_without_times(local: Path) -> None:
    name = save(local, 20)
    remote = open_storage("memory://script-saves")
    assert copier(local, remote).turn(finish=False).failures == 0
    assert listing.newest_in(remote).resume is not None
    assert remote.stat(f"{name}/part_0.pt") is not None


def test_what_storage_refuses_is_tried_again(local: Path, remote: Path) -> None:
    name = save(local, 20)

    def full(size: int) -> None:
        raise OSError(28, "No space left on device")

    report = copier(local, remote, full).turn(finish=False)
    assert (report.failures, report.waiting, chosen(remote)) == (1, (name,), "")
    assert copier(local, remote).turn(finish=False).arrived == name
