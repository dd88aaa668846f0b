"""What is removed, what is copied, and the commands."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.choice.listing import newest_complete
from elastic_ext.checkpoints.directory import upkeep
from elastic_ext.checkpoints.directory.catalogue import list_checkpoints
from elastic_ext.checkpoints.directory.own_files import MANIFEST, quarantine
from elastic_ext.checkpoints.directory.upkeep import CopyError, PruneCandidate, copy, plan_prune
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.candidates import OWN, TORCH_SAVE, UNKNOWN, directory_name
from elastic_ext.checkpoints.storage import Entry, Storage, open_storage
from elastic_ext.checkpoints.verifying import verify
from elastic_ext.cli import main
from tests.checkpoints.choice import scenes
from tests.checkpoints.choice.scenes import OPTIMIZER, TRAINING, WEIGHTS, entry_of, flip, half, ranks, saved, tensors, text
from tests.checkpoints.formats.test_formats import save_own, save_trainer


def candidate(step: int, complete: bool = True, format: str = OWN, family: str = "f", **marks: Any) -> PruneCandidate:
    return PruneCandidate(f"{family}{step}", family, step, format, complete, **marks)


def removed(rows: list[PruneCandidate], keep_last: int = 2, keep_every: int = 0) -> list[str]:
    return [each.name for each in plan_prune(rows, keep_last, keep_every) if each.remove]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([candidate(3), candidate(2), candidate(1)], ["f1"]),
        ([candidate(3), candidate(2, pinned=True), candidate(1)], ["f1"]),  # a pinned one counts: two complete ones are newer
        ([candidate(3), candidate(2), candidate(1, pinned=True)], []),
        ([candidate(3, quarantined=True), candidate(2), candidate(1)], []),  # a quarantined one does not count
        ([candidate(4), candidate(3), candidate(2, quarantined=True), candidate(1)], ["f1"]),
        ([candidate(4, complete=False), candidate(3), candidate(2)], []),  # perhaps being written
        ([candidate(4), candidate(3, complete=False), candidate(2)], ["f3"]),
        ([candidate(4), candidate(3, complete=False, format=TORCH_SAVE), candidate(2, complete=False, format=UNKNOWN)], []),
        ([candidate(4), candidate(3, complete=False, pinned=True)], []),
        ([candidate(9, family="a"), candidate(8, family="a"), candidate(7, family="a"), candidate(1, family="b")], ["a7"]),
    ],
)
def test_what_is_pruned(rows: list[PruneCandidate], expected: list[str]) -> None:
    assert removed(rows) == expected
    assert all(each.reason for each in plan_prune(rows, 2))


def test_steps_that_stay_though_newer_ones_do() -> None:
    """One before a family began, each of so many, and the whole step that is resumed from, whatever else is known of it."""
    assert removed([candidate(step) for step in (50, 40, 30, 20, 10)], 1, 20) == ["f30", "f10"]
    begun = [candidate(step, family=name, together="a") for name, steps in (("a", (4, 3, 2, 1)), ("b", (4, 3))) for step in steps]
    assert removed(begun, 3) == ["a1"]
    plan = plan_prune([candidate(step, family=name) for name in "ab" for step in (3, 2, 1)], 1, resumed=("a2",))
    assert {each.name: each.reason for each in plan if not each.remove} == {
        "a3": "among the newest 1",
        "a2": "a job would resume from it",
        "b3": "among the newest 1",
        "b2": "of the step that a job would resume from",
    }


def test_the_last_copy_is_never_removed() -> None:
    chance = random.Random(4)
    for _ in range(2000):
        rows = [
            candidate(step, chance.random() < 0.5, chance.choice((OWN, TORCH_SAVE)), quarantined=chance.random() < 0.3)
            for step in range(chance.randrange(8), 0, -1)
        ]
        usable = [row.name for row in rows if row.complete and not row.quarantined]
        gone = removed(rows, chance.randrange(4), chance.choice((0, 3)))
        assert not usable or usable[0] not in gone
        assert not {row.name for row in rows if row.quarantined} & set(gone)


def test_an_interrupted_removal_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save_own(tmp_path, 1)
    monkeypatch.setattr("shutil.rmtree", lambda path: None)  # the process ends here
    upkeep.delete(open_storage(str(tmp_path)), name)
    assert newest_complete(str(tmp_path)).resume is None
    assert (tmp_path / name / "__0_0.distcp").exists()


@pytest.fixture
def target(where: str) -> Storage:
    return open_storage(where)


NAME = directory_name(5, 1)


@pytest.fixture
def source(tmp_path: Path) -> Storage:
    """It holds one of ours."""
    made = open_storage(str(tmp_path / "source"))
    save_own(made, 5)
    return made


@pytest.mark.full("s3")
def test_copies_are_whole(tmp_path: Path, source: Storage, target: Storage) -> None:
    """And sent once; of one that was damaged in the target what is damaged is sent again."""
    dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "source" / "step_1", no_dist=True)
    save_trainer(tmp_path / "source" / "checkpoint-5")
    torch.save({"step": 3}, tmp_path / "source" / "a.pt")
    for name in (NAME, "step_1", "checkpoint-5", "a.pt"):
        seen: list[tuple[int, int]] = []
        sent = copy(source, target, entry_of(source, name), lambda *counts: seen.append(counts))  # noqa: B023
        assert seen[-1] == (sent, sent)
        assert detect.check(target, entry_of(target, name)).complete
        assert verify(target, entry_of(target, name)).sound
        assert copy(source, target, entry_of(source, name)) == 0
    data = target.read(f"{NAME}/__0_0.distcp")
    target.put(f"{NAME}/__0_0.distcp", bytes([data[0] ^ 1]) + data[1:])
    assert copy(source, target, entry_of(source, NAME)) == len(data)
    copy(target, open_storage(str(tmp_path / "back")), entry_of(target, NAME))
    assert newest_complete(str(tmp_path / "back")).resume is not None


@pytest.mark.full("s3")
def test_an_interrupted_copy_is_torn_and_continues(tmp_path: Path, source: Storage, target: Storage) -> None:
    for most in range(3):  # then two files are there; what is left is one of them and the manifest
        blocks = iter(range(most))

        def throttle(count: int, blocks: Iterator[int] = blocks) -> None:
            if next(blocks, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            copy(source, target, entry_of(source, NAME), throttle=throttle)
        assert newest_complete(target.address).resume is None
    total = sum(file.stat().st_size for file in tmp_path.glob(f"source/{NAME}/**/*") if file.is_file())
    assert 0 < copy(source, target, entry_of(source, NAME)) < total - 1000
    assert verify(target, entry_of(target, NAME)).sound


@pytest.mark.seam("s3")
def test_a_damaged_one_is_not_copied(tmp_path: Path, source: Storage, target: Storage) -> None:
    path = flip(tmp_path / "source" / NAME / "__1_0.distcp")
    with pytest.raises(CopyError, match=r"__1_0\.distcp has checksum"):
        copy(source, target, entry_of(source, NAME))
    assert newest_complete(target.address).resume is None
    path.unlink()
    with pytest.raises(CopyError, match="is missing"):
        copy(source, target, entry_of(source, NAME))


@pytest.mark.full("s3")
def test_a_checkpoint_of_equal_name_is_not_overwritten(source: Storage, target: Storage) -> None:
    save_own(target, 5, run_id="another")
    with pytest.raises(UsageError, match="another checkpoint with the same name"):
        copy(source, target, entry_of(source, NAME))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.main(["checkpoints", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def directory(tmp_path: Path) -> str:
    for step in (10, 20, 30):
        save_own(tmp_path / "run", step, 2, epoch=step // 10)
    (tmp_path / "run" / directory_name(40, 2)).mkdir()
    return str(tmp_path / "run")


def test_a_mark_ends_as_its_checkpoint_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So judges the choice, too."""
    storage, path = open_storage(str(tmp_path)), tmp_path / "last.pt"
    torch.save({"model": {}, "optimizer": {}, "step": 5}, path)
    quarantine(storage, path.name, "it fails", written_at=path.stat().st_mtime)
    _, out, _ = run(capsys, "ls", str(tmp_path))
    assert "quarantined" in out.splitlines()[1]
    os.utime(path, (path.stat().st_mtime + 10,) * 2)
    _, out, _ = run(capsys, "ls", str(tmp_path))
    assert (out.splitlines()[1][0], "quarantined" in out.splitlines()[1]) == ("*", False)


def test_ls(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "pin", directory, directory_name(10, 2), "--reason", "for the paper")
    run(capsys, "quarantine", directory, directory_name(30, 2))
    code, out, _ = run(capsys, "ls", directory)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[1] == [
        directory_name(40, 2),
        "40",
        "-",
        "2",
        "-",
        "-",
        OWN,
        "content",
        "-",
        *f"no {MANIFEST}, the save did not finish".split(),
    ]
    assert lines[2] == [directory_name(30, 2), "30", "3", "2", "-", "3.0", "KiB", OWN, "content", "quarantined", "complete"]
    assert lines[3][:2] == ["*", directory_name(20, 2)]
    assert lines[4][-2:] == ["pinned", "complete"]
    assert "* a job would resume from this one: newest complete of 4" in out
    _, out, _ = run(capsys, "ls", directory, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["resume"] for record in records] == [False, False, True, False]
    assert records[2]["path"] == os.path.join(directory, directory_name(20, 2))
    os.mkdir(f"{directory}/none")
    code, out, _ = run(capsys, "ls", f"{directory}/none")
    assert (code, out.splitlines()[-1]) == (0, "nothing to resume from")


@pytest.mark.parametrize(
    "words",
    [("ls",), ("ls", "--json"), ("verify",), ("prune", "--yes"), ("pin", "a.pt"), ("unpin", "a.pt"), ("cp", "a.pt", "--to=x")],
)
def test_a_directory_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], words) -> None:
    for typo in (str(tmp_path / "typo"), "memory://typo/run"):
        code, out, err = run(capsys, words[0], typo, *words[1:])
        what = f"elastic-ext: {typo} does not exist, expected a directory of checkpoints: check its name\n"
        assert (code, out, err) == (78, "", what)


def test_a_checkpoint_that_disappears_is_no_wrong_name(directory: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(storage: Storage, entry: Entry) -> None:
        raise FileNotFoundError(2, "No such file or directory", entry.path)

    monkeypatch.setattr(upkeep, "delete_entry", gone)
    code, _, err = run(capsys, "prune", directory, "--keep-last=1", "--yes")
    assert (code, "the storage has failed" in err) == (78, True)


def test_verify_tells_damage_by_its_exit_code(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = directory_name(30, 2)
    assert run(capsys, "verify", directory) == (0, f"{name}: sound, 3 files, 3.0 KiB read\n", "")
    flip(Path(directory, name, "__0_0.distcp"))
    code, out, _ = run(capsys, "verify", directory, "--all")
    assert (code, out.count("sound"), out.count("DAMAGED __0_0.distcp")) == (1, 2, 1)
    code, out, _ = run(capsys, "verify", directory, name, "--json")
    record = json.loads(out)
    assert (code, record["sound"], record["faults"][0]["file"]) == (1, False, "__0_0.distcp")
    assert run(capsys, "verify", directory, directory_name(40, 2))[0] == 1  # not complete


def test_prune_removes_only_when_told(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(directory))
    code, out, _ = run(capsys, "prune", directory, "--keep-last=1")
    assert code == 0
    assert out.endswith("\nnothing was removed; --yes removes 2 of 4, 5.9 KiB\n")
    assert sorted(os.listdir(directory)) == before
    run(capsys, "pin", directory, directory_name(10, 2))
    code, out, _ = run(capsys, "prune", directory, "--keep-last=1", "--yes")
    assert (code, out.splitlines()[-1]) == (0, "removed 1 of 4, 3.0 KiB")
    left = [name for name in sorted(os.listdir(directory)) if name.startswith("step")]
    assert left == [directory_name(step, 2) for step in (10, 30, 40)]


def test_marks_come_and_go(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = directory_name(30, 2)
    for words in (("pin",), ("unpin",), ("quarantine", "--reason=bad"), ("quarantine", "--lift")):
        assert run(capsys, words[0], directory, name, *words[1:])[0] == 0
    assert run(capsys, "quarantine", directory, name, "--lift")[0] == 78
    code, _, err = run(capsys, "pin", directory, "step_9")
    assert code == 78
    assert "no checkpoint step_9 in" in err


@pytest.mark.full
def test_cp_to_an_object_store(directory: str, s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = directory_name(20, 2)
    code, out = run(capsys, "cp", directory, name, "--to", f"{s3}/kept")[:2]
    assert code == 0
    assert re.fullmatch(re.escape(f"{s3}/kept/{name}: ") + r"\d\.\d KiB sent\n", out)
    assert run(capsys, "verify", f"{s3}/kept")[0] == 0
    code, _, err = run(capsys, "cp", directory, directory_name(40, 2), "--to", f"{s3}/kept")
    assert code == 78
    assert "is not complete" in err


@pytest.mark.seam
@pytest.mark.parametrize(
    "words", [("ls",), ("ls", ""), ("ls", "nosuch://x"), ("prune", ".", "--keep-last=-1"), ("nothing", "."), ("verify", ".")]
)
def test_wrong_usage_is_78(tmp_path: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "elastic_ext.cli", "checkpoints", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_a_bar_on_a_terminal_only(directory: str) -> None:
    command = [sys.executable, "-m", "elastic_ext.cli", "checkpoints", "verify", directory]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
    ours, theirs = os.openpty()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    assert b"[####" in os.read(ours, 10_000)
    os.close(ours)
    assert b"sound" in done.stdout


def pruned(directory: Path, *options: str) -> list[str]:
    """What is left, where the user names all."""
    pattern = next((each.partition("=")[2] for each in options if each.startswith("--pattern=")), "")
    names = [row.name for row in list_checkpoints(open_storage(str(directory)), pattern)]
    assert main.main(["checkpoints", "prune", str(directory), *names, "--yes", *options]) == 0
    return sorted(os.listdir(directory))


def test_prune_keeps_what_is_pinned_of_all_ranks(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ranks(tmp_path, f"s_{step}_rank{{}}.pt", 2)
    assert main.main(["checkpoints", "pin", str(tmp_path), "s_1_rank1.pt"]) == 0  # by the name of one of its files
    left = pruned(tmp_path, "--keep-last=1")
    assert [name for name in left if name.startswith("s_")] == [f"s_{step}_rank{rank}.pt" for step in (1, 3) for rank in (0, 1)]


def test_prune_never_takes_what_is_not_understood(tmp_path: Path) -> None:
    for step in range(5):
        text(tmp_path / f"state-{step}" / "weights.npz", "data")
        text(tmp_path / f"state-{step}.dat", "data")
        tensors(tmp_path / f"checkpoint-{step}" / "model.safetensors")  # torn, or another tool's
    scenes.trainer(tmp_path / "checkpoint-9", 9)
    for name in ("model.safetensors", "training_args.bin", "pytorch_model.bin"):
        saved(tmp_path / name)
    before = sorted(os.listdir(tmp_path))
    assert pruned(tmp_path, "--keep-last=1") == before
    assert pruned(tmp_path, "--keep-last=1", "--pattern=state-*") == before


@pytest.mark.parametrize("make", [lambda path: scenes.verl(path / "step_1"), lambda path: ranks(path, "s_1_rank{}.pt", 3)])
def test_an_interrupted_removal_of_files_leaves_no_checkpoint(tmp_path: Path, monkeypatch, make) -> None:
    make(tmp_path)
    storage = open_storage(str(tmp_path))
    (row,) = list_checkpoints(storage)
    removed: list[str] = []

    def remove(path: str) -> None:
        removed.append(path)
        if len(removed) > 1 or os.path.isdir(path):
            raise KeyboardInterrupt
        os.unlink(path)

    monkeypatch.setattr(storage, "remove_tree", lambda name, first=(): remove(storage.path(name)))
    with pytest.raises(KeyboardInterrupt):
        upkeep.delete_entry(storage, row.entry)
    assert newest_complete(str(tmp_path)).resume is None
    monkeypatch.undo()
    upkeep.delete_entry(storage, row.entry) if row.entry.is_dir else None
    assert not row.entry.is_dir or os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["s_1_rank*.pt", "step_1"])
def test_a_copy_counts_once_it_is_whole(tmp_path: Path, name: str) -> None:
    source, target = open_storage(str(tmp_path / "a")), open_storage(str(tmp_path / "b"))
    ranks(tmp_path / "a", "s_1_rank{}.pt", 3)
    scenes.verl(tmp_path / "a" / "step_1")
    entry = next(row.entry for row in list_checkpoints(source) if row.name == name)

    def stop(count: int) -> None:
        if (tmp_path / "b").exists() and sum(path.suffix == ".pt" for path in (tmp_path / "b").rglob("*")) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upkeep.copy(source, target, entry, throttle=stop)
    assert newest_complete(target.address).resume is None
    assert upkeep.copy(source, target, entry) > 0
    assert scenes.resume_in(target.address).path == target.path(name)
    assert not any(path.name.endswith("-unfinished") for path in (tmp_path / "b").iterdir())


def test_verify_reads_the_files_of_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(tmp_path, "s_1_rank{}.pt", 3)
    code, out, _ = run(capsys, "verify", str(tmp_path))
    assert (code, "s_1_rank*.pt: sound, 3 files" in out) == (0, True)
    path = tmp_path / "s_1_rank1.pt"
    flip(path, path.read_bytes().index(b"optimizer"))
    code, out, _ = run(capsys, "verify", str(tmp_path), "s_1_rank*.pt")
    assert (code, "DAMAGED s_1_rank1.pt" in out) == (1, True)


def test_ls_of_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(tmp_path, "s_1_rank{}.pt", 2)
    tensors(tmp_path / "step_200.safetensors", 9)
    scenes.accelerate(tmp_path / "checkpoint_7")
    assert main.main(["checkpoints", "ls", str(tmp_path), "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name: (row["step"], row["format"], row["state"]) for name, row in rows.items()} == {
        "s_1_rank*.pt": (1, "torch.save", "complete"),
        "step_200.safetensors": (200, "safetensors", "complete, no optimizer is in it"),
        "checkpoint_7": (7, "accelerate", "complete"),
    }
    assert all(row["complete"] for row in rows.values())
    assert rows["s_1_rank*.pt"]["path"] == str(tmp_path / "s_1_rank*.pt")
    assert "together" not in rows["checkpoint_7"]


def steps(directory: Path, name: str, value: object, *numbers: int, content: int = 0) -> None:
    """Files of these steps. content: their steps by their content are so many times larger; 0: it says none."""
    for step in numbers:
        saved(directory / name.format(step), {**value, "step": step * content} if content else value, step)  # type: ignore[dict-item]


def of_ranks(*rows: tuple[str, int]) -> Callable[[Path], None]:
    """Makes files of so many ranks with these names, one after the other."""
    return lambda path: [ranks(path, name, count, at) for at, (name, count) in enumerate(rows)]


def names(*rows: tuple[str, int]) -> list[str]:
    return [name.format(rank) for name, count in rows for rank in range(count)]


def one_torn(path: Path) -> None:
    for name, value in (("model", WEIGHTS), ("ema", WEIGHTS), ("optimizer", OPTIMIZER)):
        steps(path, f"{name}_{{}}.pt", value, *range(1, 6))
    half(path / "optimizer_5.pt")


def runs(path: Path) -> None:
    for at, name in enumerate(("run_1_100.pt", "run_2_100.pt", "run_1_300.pt")):
        saved(path / name, TRAINING, at)


def state_without_newest(path: Path) -> None:
    for step in (500, 1000, 1500):
        tensors(path / f"my-step{step:08}.safetensors", step)
        if step < 1500:
            scenes.accelerate(path / f"my-step{step:08}-state")


def files(*rows: tuple[str, object, Iterable[int]]) -> Callable[[Path], None]:
    """Makes those of these names, contents and steps."""

    def make(path: Path) -> None:
        for name, value, numbers in rows:
            steps(path, name, value, *numbers)

    return make


LACKS_A_RANK = ("s_2_rank{}.pt", 4), ("s_3_rank{}.pt", 3)
LACKS_A_NODE = ("s_1_node0_rank{}.pt", 2), ("s_1_node1_rank{}.pt", 2), ("s_2_node0_rank{}.pt", 2)
PARTS = ("ema", "model", "opt")
ONE_AHEAD = files(("ema_{}.pt", WEIGHTS, (500, 1000, 1500)), ("checkpoint_{}.pt", TRAINING, (500, 1000)))
THREE = files(*((f"{name}_{{}}.pt", value, (100, 200)) for name, value in zip(PARTS, (WEIGHTS, WEIGHTS, OPTIMIZER), strict=True)))
MODELS = ("model_{}.pt", WEIGHTS, (100, 200, 300))
ONE_BEGUN_LATER = files(("opt_{}.pt", OPTIMIZER, (100, 200)), MODELS, ("ema_{}.pt", WEIGHTS, (200, 300)))
SEEDS = files(*((f"step{{}}-seed{seed}.pt", TRAINING, (10, 20)) for seed in (1, 2)))
EPOCHS = ("epoch_{}.pth", TRAINING, range(15, 21))
AHEAD = ["checkpoint_1000.pt", "ema_1000.pt", "ema_1500.pt"]
BEST = "best_coco_bbox_mAP_epoch_{}.pth"


@pytest.mark.parametrize(
    ("make", "options", "left"),
    [
        (of_ranks(("s_1_rank{}.pt", 8), ("s_2_rank{}.pt", 8)), "", names(("s_2_rank{}.pt", 8))),  # all files of a step, or none
        # A step without all its ranks or nodes counts for none, and may still be written.
        (of_ranks(("s_1_rank{}.pt", 4), *LACKS_A_RANK), "", names(*LACKS_A_RANK)),
        (of_ranks(*LACKS_A_NODE), "", names(*LACKS_A_NODE)),
        (one_torn, "--keep-last=2", [f"{name}_{step}.pt" for name in ("model", "ema", "optimizer") for step in (3, 4, 5)]),
        # What a job resumes from, although it has no part in the newest step; and a pattern cuts no step apart.
        (ONE_AHEAD, "", AHEAD),
        (ONE_AHEAD, "--pattern=ema_{step}.pt", [*AHEAD, "checkpoint_500.pt", "ema_500.pt"]),
        (THREE, "--pattern=model_{step}.pt", [f"{name}_{step}.pt" for name in PARTS for step in (100, 200)]),
        (THREE, "--pattern=*_{step}.pt", [f"{name}_200.pt" for name in PARTS]),
        (runs, "--pattern=run_{step}_*.pt", ["run_1_300.pt", "run_2_100.pt"]),
        # A step that lacks a family counts for none.
        (ONE_BEGUN_LATER, "", ["ema_200.pt", "ema_300.pt", "model_200.pt", "model_300.pt", "opt_200.pt"]),
        (ONE_BEGUN_LATER, "--pattern=*_{step}.pt", ["ema_200.pt", "ema_300.pt", "model_200.pt", "model_300.pt", "opt_200.pt"]),
        (state_without_newest, "", [f"my-step0000{name}" for name in ("1000-state", "1000.safetensors", "1500.safetensors")]),
        (SEEDS, "", ["step20-seed1.pt", "step20-seed2.pt"]),
        (files(EPOCHS, ("best_epoch_{}.pth", TRAINING, (17,))), "", ["best_epoch_17.pth", "epoch_20.pth"]),
        (files(EPOCHS, (BEST, TRAINING, (17,))), "", [BEST.format(17), "epoch_20.pth"]),
    ],
)
def test_what_prune_leaves(tmp_path: Path, make: Callable[[Path], None], options: str, left: list[str], capsys) -> None:
    make(tmp_path)
    found = pruned(tmp_path, *(["--keep-last=1"] if "keep" not in options else []), *options.split())
    assert [name for name in found if name != ".elastic_ext"] == sorted(left)
    assert ("which the pattern leaves out" in capsys.readouterr().out) == ("model_{step}" in options or "ema_{step}" in options)


def test_prune_counts_families_by_numbers_in_names(tmp_path: Path) -> None:
    """Though one says by its content that it is of step 3000, it is of epoch 3. A pin is of all of a step."""
    steps(tmp_path, "model_epoch_{}.pt", WEIGHTS, 1, 2, 3)
    steps(tmp_path, "trainer_epoch_{}.pt", OPTIMIZER, 1, 2, 3, content=1000)
    assert main.main(["checkpoints", "pin", str(tmp_path), "trainer_epoch_1.pt"]) == 0
    left = [name for name in pruned(tmp_path, "--keep-last=1") if name.endswith(".pt")]
    assert left == [f"{name}_epoch_{epoch}.pt" for name in ("model", "trainer") for epoch in (1, 3)]


def test_prune_keeps_what_only_looks_torn_beside_others(tmp_path: Path) -> None:
    for step, key in ((100, "optimizer"), (200, "model"), (300, "optimizer")):
        scenes.shards(tmp_path / f"step_{step}", key)
    assert pruned(tmp_path, "--keep-last=5") == ["step_100", "step_200", "step_300"]
    text(tmp_path / "step_100-unfinished", "")  # the directory is whole
    assert pruned(tmp_path, "--keep-last=5") == ["step_100", "step_100-unfinished", "step_200", "step_300"]
    (tmp_path / "step_100-unfinished").unlink()
    (tmp_path / "step_200" / "__0_0.distcp").unlink()  # torn by itself
    assert pruned(tmp_path, "--keep-last=5") == ["step_100", "step_300"]
