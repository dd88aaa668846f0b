"""Without a record: what files say and when they were written goes before their names. Where they do not agree, you are asked."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from elastic_ext.checkpoints.choice.listing import newest_complete
from tests.checkpoints.choice.scenes import OPTIMIZER, TRAINING, WEIGHTS, half, planted, put

MINUTE, HOUR = 60, 3600


def at(step: int) -> dict[str, object]:
    """What a script saves in one file."""
    return {**TRAINING, "step": step}


# By name: files with what is in them and when they were written; and what is chosen, None: nothing, "?": you are asked.
Scene = dict[str, tuple[object, float]]
SCENES: dict[str, tuple[Scene, str | None]] = {
    "a directory written over in place, half": (
        {"ep3/all.pt": (TRAINING, 0), "last/optim.pt": (OPTIMIZER, 20 * MINUTE), "last/model.pt": (WEIGHTS, 30 * MINUTE)},
        "ep3",
    ),
    "files of ranks written over in place, half": (
        {f"latest_rank{rank}.pt": (at(300 if rank < 2 else 200), (30 if rank < 2 else 20) * MINUTE) for rank in range(4)},
        None,
    ),
    "files that say different steps": (
        {"step_100/a.pt": (at(100), 0), "step_200/a.pt": (at(200), 900), "step_200/b.pt": (at(150), 900)},
        "step_100",
    ),
    "the newer one of two parts in two files": ({"model.pt": (WEIGHTS, 30 * MINUTE), "optim.pt": (OPTIMIZER, 20 * MINUTE)}, "?"),
    "ranks from 1": (
        {f"ckpt_{step}_{rank}.pt": (TRAINING, step * 9 + rank) for step in (100, 200) for rank in (1, 2)},
        "?",
    ),
    "ranks that say their step": (
        {f"ckpt_{step}_{rank}.pt": (at(step), step * 9) for step in (100, 200) for rank in (0, 8)},
        "?",
    ),
    "ranks of an older run beside a newer one": (
        {**{f"ckpt_100_{rank}.pt": (TRAINING, rank) for rank in (0, 1)}, "step_300.pt": (TRAINING, HOUR)},
        "step_300.pt",
    ),
    "ranks in place": ({f"state{rank}.pt": (TRAINING, rank / 10) for rank in range(4)}, "?"),
    "the first save, of which rank 0 wrote nothing": ({"s_100_rank1.pt": (TRAINING, 0)}, None),
    "parts that say different steps": ({f"ckpt_5_{number}.pt": (at(10 * number), number) for number in range(4)}, "ckpt_5_3.pt"),
    "a temporary file is left": (
        {
            **{f"step_{step}/{name}.pt": (WEIGHTS, step) for step in (100, 200) for name in ("model", "optim")},
            "step_100/rng.pt": (WEIGHTS, 100),
            "step_200/rng.pt.tmp": (WEIGHTS, 200),
        },
        "step_100",
    ),
    "a note beside a torn one": (
        {
            **{f"step_{step}/model.pt": (TRAINING, step) for step in (100, 200)},
            "step_100/rng.pt": (WEIGHTS, 100),
            "step_200/NOTE.txt": ("mine", 200),
        },
        "step_100",
    ),
    "results in an older one, added later": (
        {**{f"step_{step}/model.pt": (TRAINING, step) for step in (100, 200)}, "step_100/merged.pt": (WEIGHTS, HOUR)},
        "step_200",
    ),
    "what only the first one has": (
        {**{f"step_{step}/model.pt": (TRAINING, step) for step in (100, 200, 300)}, "step_100/args.json": ("{}", 100)},
        "step_300",
    ),
    "another run with lower numbers, later": (
        {
            f"ckpt_{step}.pt": (TRAINING, step + later)
            for step, later in ((900, 0), (1000, 0), (100, 72 * HOUR), (200, 72 * HOUR))
        },
        "?",
    ),
    "a tracker names the later one": (
        {
            "ckpt_400.pt": (TRAINING, 100 * MINUTE),
            "ckpt_500.pt": (TRAINING, 50 * MINUTE),
            "latest": ("ckpt_400.pt", 101 * MINUTE),
        },
        "ckpt_400.pt",
    ),
    "ten slots in turn": (
        {
            f"slot_{number}.pt": (at(100 + number if number > 4 else 110 + number), number * 9 + (number < 5) * 90)
            for number in range(10)
        },
        "slot_4.pt",
    ),
    "epochs beside numbers of another kind": (
        {f"loss_{loss}.pt": ({**TRAINING, "epoch": epoch}, epoch * 60) for epoch, loss in ((1, 231), (2, 198), (3, 205))},
        "loss_205.pt",
    ),
    "weights with the settings of an optimizer": (
        {"step_900.pt": (TRAINING, 0), "final.pt": ({"model": {}, "config": {"optim": {"lr": 1}}}, 900)},
        "step_900.pt",
    ),
    "the name of an optimizer": (
        {"step_900.pt": (TRAINING, 0), "last.pt": ({"model": {}, "optimizer_name": "x"}, 9)},
        "step_900.pt",
    ),
    "one before another, 30 s apart": ({"checkpoint.pt": (TRAINING, 60), "checkpoint_prev.pt": (TRAINING, 30)}, "checkpoint.pt"),
}


@pytest.mark.parametrize(("files", "expected"), SCENES.values(), ids=SCENES)
def test_what_is_chosen(tmp_path: Path, files: Scene, expected: str | None) -> None:
    for name, (value, mtime) in files.items():
        planted(tmp_path / name, value, mtime)
    choice = newest_complete(str(tmp_path))
    found = Path(choice.resume.path).name if choice.resume else "?" if choice.question else None
    assert found == expected, choice


def test_a_copy_under_a_greater_number(tmp_path: Path) -> None:
    for step in range(100, 1100, 100):
        planted(tmp_path / f"ckpt_{step}.pt", at(step), step)
    shutil.copy(tmp_path / "ckpt_100.pt", tmp_path / "ckpt_9999.pt")
    assert newest_complete(str(tmp_path)).resume.step == 1000


@pytest.mark.parametrize("name", ["sampler.pkl", "buffer.npz"])
def test_files_beside_it_that_were_cut(tmp_path: Path, name: str) -> None:
    for step in (100, 200):
        planted(tmp_path / f"step_{step}" / "all.pt", TRAINING, step)
        data = pickle.dumps({"x": [*range(100)]}) if name.endswith("pkl") else None
        path = tmp_path / f"step_{step}" / name
        put(path, data, step) if data else planted(path, WEIGHTS, step)
    assert newest_complete(str(tmp_path)).resume.step == 200
    half(path)
    assert newest_complete(str(tmp_path)).resume.step == 100


def test_the_digits_of_a_hash_are_no_step(tmp_path: Path) -> None:
    planted(tmp_path / "resnet50-19c8e357.pth", WEIGHTS)
    assert newest_complete(str(tmp_path)).resume.step is None
