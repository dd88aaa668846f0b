"""Which checkpoint a job resumes from: the order as pure functions, the rest on real files that torch has written."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints import storage
from elastic_ext.checkpoints.choice.decisions import Choice, Sight, choose
from elastic_ext.checkpoints.choice.listing import candidates_among, newest_complete
from elastic_ext.checkpoints.formats import detect, single_files
from elastic_ext.checkpoints.formats.candidates import DCP, TORCH_SAVE, TORCH_SAVE_SUFFIXES, Inspection
from elastic_ext.checkpoints.storage import Entry, open_storage
from tests.checkpoints.choice.scenes import TRAINING, chosen, inspected, reasons, resume_in, saved


def entry(name: str, mtime: float | None = 0.0, *, is_dir: bool = False, unusable: str = "") -> Entry:
    return Entry(name, f"/c/{name}", is_dir, 1, mtime, unusable)


def decide(entries: list[Entry], broken: Set[str] = frozenset(), looked: list[str] | None = None) -> Choice:
    """choose() where all but ``broken`` is complete; the names that it asked about go to ``looked``."""

    def inspect(item: Entry) -> Inspection:
        if looked is not None:
            looked.append(item.name)
        return Inspection(item.name not in broken, TORCH_SAVE, "said so", item.mtime)

    return choose(candidates_among(entries), Sight(inspect))


def decided(entries: list[Entry], broken: Set[str] = frozenset()) -> str | None:
    resume = decide(entries, broken).resume
    return resume and resume.path.removeprefix("/c/")


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry("s_9.pt", 9), entry("s_10.pt", 1)], "s_10.pt"),  # by number, neither as text nor by time
        ([entry("s_5.pt", 1), entry("s_05.pt", 2)], "s_05.pt"),  # the same step twice: the later
        ([entry("epoch_9.pt", 1), entry("step_2.pt", 2)], "step_2.pt"),  # 9 epochs do not compare with 2 steps
        ([entry("epoch_9.pt", 3), entry("step_2.pt", 2)], "epoch_9.pt"),
        ([entry("last.pt", 2), entry("s_1.pt", 2)], "s_1.pt"),  # at the same time: the one that tells the step
        ([entry("last.pt", 3), entry("s_1.pt", 2)], "last.pt"),
        ([entry("last.pt", None), entry("best.pt", None)], "last.pt"),  # the best is a copy of what the last was once
        ([entry("a.pt", None), entry("b.pt", None)], "a.pt"),  # no time at all: the same on every call
        ([entry("e_1_s_90.pt", 1), entry("e_2_s_95.pt", 1)], "e_2_s_95.pt"),
        ([entry("e_1_s_90.pt", 1), entry("e_2_s_5.pt", 2)], "e_2_s_5.pt"),  # the step begins again with each epoch
        ([entry("r_1_s_90.pt", 2), entry("r_2_s_5.pt", 1)], "r_1_s_90.pt"),  # two runs side by side
        ([entry("loss-0.5.pt", 2), entry("loss-0.9.pt", 1)], "loss-0.5.pt"),  # a value is no step
        ([entry("step_8.pt", 8), entry("step_2.pt", 2), entry("epoch_1.pt", 5)], "epoch_1.pt"),  # 8 is torn, 2 is older than this
    ],
)
def test_which_of_complete_ones(entries: list[Entry], expected: str) -> None:
    assert decided(entries, {"step_8.pt"}) == decided(entries[::-1], {"step_8.pt"}) == expected


def test_incomplete_ones_are_passed_over_with_a_reason() -> None:
    """Of what is unusable nothing is looked at."""
    looked: list[str] = []
    entries = [*(entry(f"step_{step}.pt", step) for step in range(5)), entry("step_5.pt", 5, unusable="a dangling link")]
    choice = decide(entries, {"step_4.pt", "step_3.pt"}, looked)
    assert (choice.resume.path, choice.resume.step) == ("/c/step_2.pt", 2)
    assert "newest complete of 5 named step_#.pt" in choice.resume.reason
    passed = [(passed.path, passed.reason) for passed in choice.passed_over]
    assert passed == [("/c/step_5.pt", "a dangling link"), ("/c/step_4.pt", "said so"), ("/c/step_3.pt", "said so")]
    assert looked == ["step_4.pt", "step_3.pt", "step_2.pt"]


def test_only_what_may_change_the_choice_is_read() -> None:
    looked: list[str] = []
    decide([entry(f"s_{step}.pt", step) for step in range(10_000)] + [entry("best.pt", 17)], set(), looked)
    assert looked == ["s_9999.pt"]


def test_names_that_are_never_looked_at() -> None:
    unfinished, others = ("s_1.pt.tmp", "s_1.pt.part"), (".s_1.pt", "README.md", "events.out.tfevents.1")
    files = (*unfinished, *others, "model.safetensors", "training_args.bin")
    entries = [*map(entry, files), entry(".git", is_dir=True), entry("step_5.tmp", is_dir=True)]
    looked: list[str] = []
    assert decide(entries, set(), looked) == Choice(None)
    assert looked == []


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    for path in filesystem.ls("/", detail=False):
        filesystem.rm(path, recursive=True)


def save_file(path: Path, value: float = 1.0) -> Path:
    torch.save({"model": torch.full((64,), value), "epoch": 3}, path)
    return path


def save_dcp(path: Path) -> Path:
    dcp.save({"model": torch.ones(64), "step": 3}, checkpoint_id=path, no_dist=True)
    return path


def at(path: Path, seconds: float) -> None:
    os.utime(path, (seconds, seconds))


@pytest.mark.parametrize(
    ("save", "name", "format"),
    [*((save_file, "step_{}" + suffix, TORCH_SAVE) for suffix in TORCH_SAVE_SUFFIXES), (save_dcp, "step_{:08}", DCP)],
)
def test_the_newest_of_each_format(tmp_path: Path, save: Callable[[Path], Path], name: str, format: str) -> None:
    for step in (2, 10, 9):
        save(tmp_path / name.format(step))
    choice = newest_complete(str(tmp_path))
    assert (choice.resume.path, choice.resume.step) == (str(tmp_path / name.format(10)), 10)
    assert inspected(tmp_path, name.format(10)).format == format
    assert choice.passed_over == ()


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_truncated_file_is_never_chosen(tmp_path: Path, where: str, memory: Any) -> None:
    storage = open_storage(str(tmp_path / "run") if where == "local" else "memory://bucket")
    data = save_file(tmp_path / "a.pt").read_bytes()
    size = len(data)
    storage.put("step_1.pt", data)
    for length in sorted({*range(0, size, size // 16), 1, 4, 21, 22, size - 66, size - 23, size - 22, size - 2, size - 1}):
        storage.put("step_2.pt", data[:length])
        assert chosen(storage.address) == ("step_1.pt", 1), length
        assert reasons(storage.address)["step_2.pt"], length
    storage.put("step_2.pt", data)
    assert chosen(storage.address) == ("step_2.pt", 2)


def test_what_is_said_of_damaged_files(tmp_path: Path) -> None:
    whole = save_file(tmp_path / "good.pth").read_bytes()
    (tmp_path / "a.pt").write_bytes(b"")
    (tmp_path / "b.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.pt").write_bytes(os.urandom(100) + b"\0" * 5000)
    torch.save({"a": torch.ones(9)}, tmp_path / "d.pt", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(tmp_path / "e.pt", "w") as archive:
        archive.writestr("data.txt", "x")
    os.mkfifo(tmp_path / "f.pt")
    (tmp_path / "g.pt").symlink_to("nowhere")
    at(tmp_path / "good.pth", 1)  # the rest is newer, so that each is looked at
    assert resume_in(tmp_path).path == str(tmp_path / "good.pth")
    assert reasons(tmp_path) == {
        "a.pt": "the file is empty",
        "b.pt": f"its zip directory, at the end of {len(whole) // 2} bytes, is missing or damaged",
        "c.pt": "not a zip archive: damaged, or not written by torch.save",
        "d.pt": "in the form before torch 1.6, which does not show its end: if it is whole, set resume_from to its name",
        "e.pt": "a zip archive of 1 entries without data.pkl: not written by torch.save",
        "f.pt": "neither a file nor a directory",
        "g.pt": "a dangling link (No such file or directory)",
    }


def test_only_the_tail_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    torch.save({"model": torch.zeros(4 << 20)}, path)  # 16 MiB

    class Counting(io.FileIO):
        count = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(-1 if size is None else size)
            assert data is not None
            Counting.count += len(data)
            return data

    with Counting(path) as file:
        assert single_files.check(entry("big.pt"), file).complete
    assert Counting.count < 64 << 10


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    torch.save(Touch(tmp_path / "ran"), tmp_path / "step_1.pt")
    assert resume_in(tmp_path).path == str(tmp_path / "step_1.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "step_1.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (Path.unlink, ".metadata", "no .metadata, the save did not finish"),
        (lambda path: path.rename(f"{path}.tmp"), ".metadata", "no .metadata, the save did not finish"),
        (lambda path: os.truncate(path, 0), ".metadata", ".metadata is empty, the save did not finish"),
        (Path.unlink, "__0_0.distcp", ".metadata without any non-empty .distcp file: the data is missing"),
        (lambda path: os.truncate(path, 0), "__0_0.distcp", ".metadata without any non-empty .distcp file: the data is missing"),
    ],
)
def test_an_unfinished_distributed_checkpoint_is_passed_over(tmp_path: Path, damage: Any, name: str, said: str) -> None:
    for step in (1, 2):
        save_dcp(tmp_path / f"step_{step}")
    damage(tmp_path / "step_2" / name)
    assert chosen(tmp_path) == ("step_1", 1)
    assert reasons(tmp_path) == {"step_2": said}


def test_directories_that_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("logs", "checkpoint-500", "run-600", "step_3"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-500" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "step_3" / ".metadata.tmp").write_bytes(b"x")
    assert reasons(tmp_path) == {
        "checkpoint-500": "no trainer_state.json, the save did not finish",
        "run-600": "not a checkpoint of a known format: if it is one, set checkpoint_pattern to its name",
        "step_3": "no .metadata, the save did not finish",
    }


def test_formats_compare_by_when_the_checkpoint_was_written(tmp_path: Path) -> None:
    at(save_file(tmp_path / "checkpoint_epoch_7.pt"), 2000)
    directory = save_dcp(tmp_path / "step_5")
    at(directory / ".metadata", 3000)
    assert resume_in(tmp_path).path == str(directory)
    at(directory / ".metadata", 1000)
    at(directory, 4000)  # somebody put a note into it
    assert resume_in(tmp_path).path == str(tmp_path / "checkpoint_epoch_7.pt")


def test_the_directory_above_is_meant(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step_1")
    choice = newest_complete(str(tmp_path / "step_1"))
    assert choice.resume is None
    assert choice.passed_over[0].path == str(tmp_path / "step_1")
    assert "checkpoint_dir must name the directory above it" in choice.passed_over[0].reason


def test_a_link_beside_its_target_gives_the_target(tmp_path: Path) -> None:
    """The target tells the step, and is still the same when the link is moved while workers load."""
    target = save_dcp(tmp_path / "step_7")
    for link in ("latest", "step_99"):
        (tmp_path / link).symlink_to("step_7")
    choice = newest_complete(str(tmp_path))
    assert (choice.resume.path, choice.resume.step, choice.passed_over) == (str(target), 7, ())


def test_a_link_to_elsewhere_is_a_candidate(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for link, target in (("latest", save_dcp(tmp_path / "elsewhere")), ("step_3.pt", save_file(tmp_path / "blob"))):
        (tmp_path / "here" / link).symlink_to(target)
    at(tmp_path / "blob", 5)
    assert resume_in(tmp_path / "here").path == str(tmp_path / "here" / "latest")
    (tmp_path / "here" / "latest").unlink()
    assert resume_in(tmp_path / "here").path == str(tmp_path / "here" / "step_3.pt")


def test_the_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "my run, 실험 = #1"
    odd.mkdir()
    save_file(odd / "체크 포인트 (12).pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for same in (odd.name, f"{odd}/", f"file://{odd}", f"~/{odd.name}"):
        assert resume_in(same).path == str(odd / "체크 포인트 (12).pt"), same


@pytest.mark.seam
def test_a_local_path_does_not_import_fsspec(tmp_path: Path) -> None:
    code = (
        "import sys; from elastic_ext.checkpoints.choice.listing import newest_complete; newest_complete(sys.argv[1])\n"
        "print({'torch', 'fsspec'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_directory_that_is_none(tmp_path: Path, memory: Any) -> None:
    """One that does not exist yet holds nothing; a file in its place is an error."""
    assert newest_complete(str(tmp_path / "not" / "yet")) == newest_complete(str(tmp_path)) == Choice(None)
    path = save_file(tmp_path / "checkpoint.pt")
    memory.pipe("/bucket/step_1.pt", b"x")
    for wrong in (path, f"file://{path}", path / "below", "memory://bucket/step_1.pt"):
        with pytest.raises(UsageError, match="is a file") as caught:
            newest_complete(str(wrong))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("wrong", "said"), [("", "is empty"), ("nosuch://bucket/x", "nosuch"), ("nosuch::memory://x", "nosuch")])
def test_what_names_no_storage(wrong: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        newest_complete(wrong)


@pytest.mark.seam
@pytest.mark.parametrize("mode", [0o000, 0o311, 0o644])
def test_a_directory_that_may_not_be_read(tmp_path: Path, mode: int) -> None:
    """Run as another user if need be: permission bits do not bind root. 0o644: the names can be listed, but not reached."""
    private = tmp_path / "private"
    private.mkdir()
    save_file(private / "step_1.pt")
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    private.chmod(mode)
    code = (
        "import os, sys\n"
        "from elastic_ext.checkpoints.choice import listing\n"  # before the change of user, who may not read this package
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: print(listing.newest_complete(sys.argv[1]))\n"
        "except listing.UsageError as error: print('usage:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(private)], capture_output=True, text=True, check=False)
    private.chmod(0o755)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"usage: checkpoint_dir {private} cannot be read (Permission denied): let this user read it, or set another\n"
    )


def test_each_call_lists_the_storage_again(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As filesystems of object stores do, this one keeps its listings."""
    kept, listed = {}, MemoryFileSystem.ls
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *args, **options: kept.setdefault(args[1:], listed(*args, **options)))
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda *args: kept.clear())
    for step in (1, 2):
        memory.pipe(f"/bucket/step_{step}.pt", save_file(tmp_path / "a.pt").read_bytes())
        assert chosen("memory://bucket") == (f"step_{step}.pt", step)


def test_what_a_storage_says_of_time() -> None:
    stamps = [{"LastModified": "2024-05-01T00:00:00Z"}, {"mtime": 1714521600.0}, {"updated": "2024-05-01T02:00:00+02:00"}]
    assert [storage._mtime(info) for info in stamps] == [1714521600.0] * 3
    assert storage._mtime({"mtime": None, "updated": "yesterday"}) is None


def test_a_checkpoint_that_vanishes_while_being_read(tmp_path: Path) -> None:
    """Retention removes old ones at any time: listed, then gone."""
    save_file(tmp_path / "step_1.pt")
    save_dcp(tmp_path / "step_2")
    directory = open_storage(str(tmp_path))
    listed = list(directory.entries())
    shutil.rmtree(tmp_path / "step_2")
    (tmp_path / "step_1.pt").unlink()
    choice = choose(candidates_among(listed), Sight(partial(detect.check, directory)))
    assert choice.resume is None
    assert {passed.reason for passed in choice.passed_over} == {"it disappeared after it was listed"}


def numbered(step: int | None, at: float = 0.0) -> Inspection:
    return Inspection(True, TORCH_SAVE, "whole", at, step)


def test_content_goes_before_numbers_without_a_word() -> None:
    """Two slots in turn. But where all say the same step, they are no checkpoints of one run."""
    entries = [entry("ckpt_0.pt", 300), entry("ckpt_1.pt", 200)]
    found = {"ckpt_0.pt": numbered(300), "ckpt_1.pt": numbered(200)}
    assert choose(entries, Sight(lambda each: found[each.name])).resume.path == "/c/ckpt_0.pt"
    alike = choose(entries, Sight(lambda each: numbered(7)))
    assert alike.resume is None
    assert "all of step 7" in alike.question
    assert choose(entries, Sight(lambda each: numbered(None))).resume.path == "/c/ckpt_1.pt"


def test_a_copy_is_no_newer(tmp_path: Path) -> None:
    """It has the bytes of one that the job has saved. A checkpoint of another run does not."""
    for step in (100, 200, 300):
        saved(tmp_path / f"step_{step}.pt", {**TRAINING, "step": step}, step)
    shutil.copy(tmp_path / "step_200.pt", tmp_path / "before_lr_change.pt")
    assert chosen(tmp_path) == ("step_300.pt", 300)
    saved(tmp_path / "other.pt", {**TRAINING, "step": 150}, 10**6)
    assert chosen(tmp_path) == ("other.pt", 150)
