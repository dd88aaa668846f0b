"""What a job resumes from, what is torn and what is said, in directories as widespread tools write them."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from elastic_ext.checkpoints.choice.listing import newest_complete, newest_in
from elastic_ext.checkpoints.directory.catalogue import list_checkpoints
from elastic_ext.checkpoints.formats.candidates import files_by_rank
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.checkpoints.verifying import Mode
from tests.checkpoints.choice import scenes
from tests.checkpoints.choice.scenes import (
    OPTIMIZER,
    TRAINING,
    WEIGHTS,
    chosen,
    half,
    ranks,
    reasons,
    resume_in,
    saved,
    step_in,
    tensors,
    text,
)

Make = Callable[[Path, int], Path]

ZERO = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
UNET = "unet/diffusion_pytorch_model.safetensors"
TOOLS: dict[str, tuple[str, Make, str, str]] = {
    # By tool: the name of the directory, what makes it, the format, and a part of it.
    "trainer": ("checkpoint-{}", scenes.trainer, "Hugging Face Trainer", "optimizer.pt"),
    "trainer-deepspeed": ("checkpoint-{}", scenes.trainer_of_deepspeed, "Hugging Face Trainer", f"global_step200/{ZERO}"),
    "trainer-fsdp": ("checkpoint-{}", scenes.trainer_of_fsdp, "Hugging Face Trainer", "optimizer_0/.metadata"),
    "accelerate": ("checkpoint_{}", scenes.accelerate, "accelerate", "optimizer.bin"),
    "accelerate-deepspeed": ("step_{}", scenes.accelerate_of_deepspeed, "accelerate", "latest"),
    "diffusers": ("checkpoint-{}", partial(scenes.accelerate, weights=UNET), "accelerate", "random_states_0.pkl"),
    "kohya": ("lora-{:06}-state", scenes.kohya, "accelerate", "train_state.json"),
    "deepspeed": ("global_step{}", scenes.deepspeed, "DeepSpeed", ZERO),
    "lightning-deepspeed": ("epoch=0-step={}.ckpt", scenes.lightning_of_deepspeed, "DeepSpeed", "latest"),
    "megatron": ("iter_{:07}", scenes.megatron, "Megatron", "mp_rank_00_001/model_optim_rng.pt"),
    "nemo": ("gpt--val_loss=1.5-step={}-consumed_samples=800.0", scenes.nemo, "NeMo 2", "weights/__0_0.distcp"),
    "nanotron": ("{}", scenes.nanotron, "nanotron", "optimizer/optimizer_pp-1-of-2_dp-0-of-2_tp-0-of-1_exp-0-of-1.pt"),
    "torchtune": ("epoch_{}", scenes.torchtune, "torchtune", "model-00002-of-00002.safetensors"),
    "verl": ("global_step_{}", scenes.verl, "directory of files", "actor/optim_world_size_2_rank_1.pt"),
    "cosmos": ("iter_{:09}", scenes.cosmos, "directory of files", "optim/.metadata"),
    "own script": ("step_{}", lambda path, step: saved(path / "all.pt").parent, "directory of files", "all.pt"),
}


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest) -> tuple[str, Make, str, str]:
    return TOOLS[request.param]


def test_the_newest_of_each_tool(tmp_path: Path, tool) -> None:
    name, make, format, _ = tool
    for step in (9, 100, 200):
        make(tmp_path / name.format(step), step)
    resume = resume_in(tmp_path)
    assert (Path(resume.path).name, resume.step) == (name.format(200), 200)
    assert scenes.inspected(tmp_path, name.format(200)).format == format


@pytest.mark.parametrize("damage", [Path.unlink, half, lambda path: path.write_bytes(b"")], ids=["gone", "half", "empty"])
def test_a_torn_checkpoint_of_each_tool(tmp_path: Path, tool, damage) -> None:
    name, make, _, part = tool
    for step in (100, 200):
        make(tmp_path / name.format(step), step)
    path = tmp_path / name.format(200) / part
    if (path.name == "latest" and damage is not Path.unlink) or (path.suffix == ".json" and damage is Path.unlink):
        pytest.skip("only that it is there counts, or only what it holds")
    if (path.name, damage) == ("all.pt", Path.unlink):
        (path.parent / "note.txt").write_text("nothing else")
    damage(path)
    assert chosen(tmp_path) == (name.format(100), 100)
    assert name.format(200) in reasons(tmp_path)


def test_the_trainers_own_mark_of_torn_ones(tmp_path: Path, tool) -> None:
    """Its just-in-time save leaves it where it was killed, even if it came to write all the rest, over a whole checkpoint."""
    name, make, _, _ = tool
    for step in (100, 200):
        make(tmp_path / name.format(step), step)
    mark = tmp_path / name.format(200) / "checkpoint-is-incomplete.txt"
    mark.touch()
    said = {name.format(200): f"{mark.name} is there: the save did not finish"}
    for _ in ("all the rest", "nothing else"):
        assert (chosen(tmp_path), reasons(tmp_path)) == ((name.format(100), 100), said)
        assert chosen(tmp_path, pattern=f"{name.partition('{')[0]}*") == (name.format(100), 100)
        shutil.rmtree(mark.parent)
        text(mark, "in progress")


def test_what_is_said_of_torn_ones(tmp_path: Path) -> None:
    """Of what the tool itself writes last, never of another tool's file."""
    written_last = {"accelerate": "random_states_0.pkl", "nanotron": "checkpoint_metadata.json", "trainer": "trainer_state.json"}
    for tool, part in written_last.items():
        name, make, _, _ = TOOLS[tool]
        (make(tmp_path / tool / name.format(5), 5) / part).unlink()
        assert [*reasons(tmp_path / tool).values()] == [f"no {part}, the save did not finish"]
    for tool in ("accelerate", "diffusers", "kohya", "torchtune"):
        name, make, _, part = TOOLS[tool]
        half(make(tmp_path / "torn" / tool / name.format(5), 5) / part)
        (reason,) = reasons(tmp_path / "torn" / tool).values()
        assert "trainer_state" not in reason


@pytest.mark.parametrize(
    ("tracker", "names", "name", "make"),
    [
        ("latest", "{name}", "global_step{}", scenes.deepspeed),
        ("latest_checkpointed_iteration.txt", "{step}", "iter_{:07}", scenes.megatron),
        ("latest_checkpointed_iteration.txt", "{step}", "global_step_{}", scenes.verl),
        ("latest.txt", "{step}", "{}", scenes.nanotron),
        ("last_checkpoint", "/elsewhere/run/{name}", "epoch_{}", lambda path, step: saved(path / "a.pt")),
    ],
)
def test_what_is_newer_than_its_tracker_is_torn(tmp_path: Path, tracker: str, names: str, name: str, make: Make) -> None:
    for step in (100, 200, 300):
        make(tmp_path / name.format(step), step)
    text(tmp_path / tracker, names.format(name=name.format(200), step=200) + "\n")
    assert chosen(tmp_path) == (name.format(200), 200)
    assert reasons(tmp_path) == {name.format(300): f"{tracker} still names {name.format(200)}: the save did not finish"}
    shutil.rmtree(tmp_path / name.format(200))  # then it says nothing
    assert chosen(tmp_path) == (name.format(300), 300)


def test_an_unreadable_tracker_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenes.deepspeed(tmp_path / "global_step5", 5)
    for value in (b"", b"\xff\xfe", b"9" * 5000, b"no such", b"9" * 30):
        (tmp_path / "latest").write_bytes(value)
        assert chosen(tmp_path) == ("global_step5", 5)
    storage = open_storage(str(tmp_path))

    def refuse(name: str) -> bytes:
        raise PermissionError(name)

    monkeypatch.setattr(storage, "read", refuse)
    assert newest_in(storage).resume is not None


def test_copies_and_marks_beside_nemos_checkpoints(tmp_path: Path) -> None:
    """The last of NeMo is of the same step as another: either will do, and nobody is asked. A recipe's state is no checkpoint."""
    for step in (100, 200):
        scenes.nemo(tmp_path / f"gpt--step={step}")
    scenes.nemo(tmp_path / "gpt--step=200-last")
    assert step_in(tmp_path) == 200
    shutil.rmtree(tmp_path / "gpt--step=200-last")
    text(tmp_path / "gpt--step=200-unfinished", "")
    assert chosen(tmp_path) == ("gpt--step=100", 100)
    assert reasons(tmp_path) == {"gpt--step=200": "gpt--step=200-unfinished is there: the save did not finish"}
    for epoch in (0, 1):
        scenes.torchtune(tmp_path / "tune" / f"epoch_{epoch}")
    saved(tmp_path / "tune" / "recipe_state" / "recipe_state.pt", {"optimizer": {}, "epoch": 2}, 900)
    assert chosen(tmp_path / "tune") == ("epoch_1", 1)


def test_a_model_left_in_the_root_by_trainers(tmp_path: Path) -> None:
    scenes.trainer(tmp_path / "checkpoint-200", 200)
    for name in ("training_args.bin", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "adapter_model.bin"):
        saved(tmp_path / name, {}, 900)
    saved(tmp_path / "mm_projector.bin", [], 900)
    saved(tmp_path / "dataset.pt", [1, 2], 900)
    tensors(tmp_path / "model.safetensors", 900)
    tensors(tmp_path / "final" / "model.safetensors", 900)
    text(tmp_path / "trainer_state.json", {"global_step": 200}, 900)
    assert chosen(tmp_path) == ("checkpoint-200", 200)
    (tmp_path / "dataset.pt").unlink()
    shutil.rmtree(tmp_path / "checkpoint-200")
    assert chosen(tmp_path) is None


def test_safetensors_are_said_to_be_weights_only(tmp_path: Path) -> None:
    for step in (100, 200):
        tensors(tmp_path / f"step_{step}.safetensors", step)
    tensors(tmp_path / "model.safetensors", 900)  # gives no step: what a job begins with
    assert chosen(tmp_path) == ("step_200.safetensors", 200)
    assert "weights only: no optimizer is in it" in resume_in(tmp_path).reason
    half(tmp_path / "step_200.safetensors")
    assert chosen(tmp_path) == ("step_100.safetensors", 100)


# A file per rank.


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ep0-ba100-rank{}.pt", "ep0-ba200-rank{}.pt"),
        ("ckpt_step100_rank{:03}.pt", "ckpt_step200_rank{:03}.pt"),
        ("rank{}_100.pt", "rank{}_200.pt"),
        ("model-100-shard{}.pt", "model-200-shard{}.pt"),
        ("step_100_tp{}_pp0.pt", "step_200_tp{}_pp0.pt"),
        ("step_100_rank_{}_of_4.pt", "step_200_rank_{}_of_4.pt"),
        ("step_100/rank_{}.pt", "step_200/rank_{}.pt"),
        ("step_100/rank_{}/state.pt", "step_200/rank_{}/state.pt"),
    ],
)
def test_a_checkpoint_of_a_file_per_rank(tmp_path: Path, old: str, new: str) -> None:
    ranks(tmp_path, old, 4)
    for missing in (0, 2, 3):
        ranks(tmp_path, new, 4, 9)
        assert step_in(tmp_path) == 200, reasons(tmp_path)
        gone = tmp_path / new.format(missing)
        gone.unlink()
        if gone.parent.name == f"rank_{missing}":
            gone.parent.rmdir()
        assert step_in(tmp_path) == 100, missing
        half(saved(gone, TRAINING, 9))
        assert step_in(tmp_path) == 100, missing


def test_what_is_said_of_a_missing_rank(tmp_path: Path) -> None:
    ranks(tmp_path, "s_1_rank{}.pt", 4)
    ranks(tmp_path, "s_2_rank{}.pt", 3)
    ranks(tmp_path, "s_3_rank{}.pt", 4, start=1)
    assert reasons(tmp_path) == {
        "s_3_rank*.pt": "the file of rank 0 is missing: 3 are there",
        "s_2_rank*.pt": "it has fewer files than the one before it (s_#_rank#.pt: 3, not 4): "
        "the save did not finish, or the job has shrunk, and nothing in it says which",
    }


def test_fewer_ranks_from_now_on(tmp_path: Path) -> None:
    """The job has shrunk: its first checkpoint looks torn, its second does not."""
    for step, count in ((1, 4), (2, 4), (3, 2)):
        ranks(tmp_path, f"s_{step}_rank{{}}.pt", count)
    assert chosen(tmp_path) == ("s_2_rank*.pt", 2)
    ranks(tmp_path, "s_4_rank{}.pt", 2)
    assert chosen(tmp_path) == ("s_4_rank*.pt", 4)
    ranks(tmp_path, "s_5_rank{}.pt", 8)
    assert chosen(tmp_path) == ("s_5_rank*.pt", 5)


@pytest.mark.parametrize("named", ["200", "s_200_rank*.pt", "s_200_rank1.pt"])
def test_one_that_is_asked_for(tmp_path: Path, named: str) -> None:
    for step in (200, 300):
        ranks(tmp_path, f"s_{step}_rank{{}}.pt", 2)
    assert step_in(tmp_path, resume_from=named) == 200


# Families that belong together.


BY_TIME = {"last.pt", "last.ckpt", "epoch_9.pt", "epoch=0-step=9.ckpt"}  # where the order of time counts


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model_9.pt": TRAINING, "ema_9.pt": WEIGHTS}, "model_9.pt"),
        ({"ema_9.pt": WEIGHTS, "model_9.pt": TRAINING, "optimizer_9.pt": OPTIMIZER}, "model_9.pt"),
        ({"model_latest.pt": TRAINING, "model_best.pt": WEIGHTS}, "model_latest.pt"),
        ({"model_latest.pt": WEIGHTS, "model_best.pt": TRAINING}, "model_best.pt"),
        ({"checkpoint_last.pt": TRAINING, "checkpoint_best.pt": TRAINING}, "checkpoint_last.pt"),
        ({"latest.pt": WEIGHTS, "best.pt": WEIGHTS}, "latest.pt"),
        # It is further.
        ({f"{name}.ckpt": {"global_step": at, **TRAINING} for name, at in (("last", 5), ("best", 9))}, "best.ckpt"),
        ({"step_9.pt": TRAINING, "final.pt": WEIGHTS}, "step_9.pt"),
        ({"step_9.pt": TRAINING, "last.pt": TRAINING}, "last.pt"),  # written last
        ({"step_9.pt": TRAINING, "step_9.safetensors": None}, "step_9.pt"),
        ({"epoch_9.pt": TRAINING, "step_9.pt": TRAINING}, "step_9.pt"),  # they do not compare
        ({"model_9.pt": OPTIMIZER, "model.pt": TRAINING}, "model.pt"),
        ({"epoch=0-step=9.ckpt": TRAINING, "epoch=0-step=9-v1.ckpt": TRAINING}, "epoch=0-step=9-v1.ckpt"),
        ({"step_9.pt": TRAINING, "step_9_backup.pt": TRAINING}, "step_9.pt"),
        ({"checkpoint.pth.tar": TRAINING, "model_best.pth.tar": TRAINING}, "checkpoint.pth.tar"),  # of image classifiers
        ({"ep0-ba100-rank0.pt": TRAINING, "ep0-ba200-rank0.pt": TRAINING}, "ep0-ba200-rank0.pt"),  # rank 0 writes for all
        # What is no checkpoint by its name gives way.
        *(({"ckpt_5.pt": WEIGHTS, aside: {"lr": 1}}, "ckpt_5.pt") for aside in ("args.pt", "config.pth", "resnet50.pth")),
        # What a tracker names needs no question; a single file that is newer than its tracker is whole.
        ({"g_9.pt": TRAINING, "d_9.pt": TRAINING, "last_checkpoint": "d_9.pt"}, "d_9.pt"),
        ({"model_04.pth": TRAINING, "model_09.pth": TRAINING, "last_checkpoint": "model_04.pth"}, "model_09.pth"),
        # It stays open.
        ({"model_9.pt": WEIGHTS, "ema_9.pt": WEIGHTS}, None),
        ({"model000009.pt": WEIGHTS, "ema_0.9999_000009.pt": WEIGHTS, "opt000009.pt": OPTIMIZER}, None),
        ({"model_9.pt": WEIGHTS, "optimizer_9.pt": OPTIMIZER}, None),
        ({"model.pt": WEIGHTS, "optimizer.pt": OPTIMIZER}, None),
        ({"g_9.pt": TRAINING, "d_9.pt": TRAINING}, None),
        ({"latest_net_G.pth": WEIGHTS, "latest_net_D.pth": WEIGHTS}, None),
        ({"step9-seed1.pt": TRAINING, "step9-seed2.pt": TRAINING}, None),
        ({f"step9-seed{seed}.ckpt": {"pytorch-lightning_version": "2.4", **TRAINING} for seed in (1, 2)}, None),
    ],
)
def test_families_that_belong_together(tmp_path: Path, files: dict[str, object], expected: str | None) -> None:
    for turn in range(2):  # in either order of time, where time does not count
        for at, (name, value) in enumerate(files.items()):
            path = tmp_path / str(turn) / name
            later = len(files) - at if turn and BY_TIME.isdisjoint(files) else at
            scenes.planted(path, value, later)
        choice = newest_complete(str(tmp_path / str(turn)))
        assert (choice.resume and Path(choice.resume.path).name) == expected
        assert bool(choice.question) is (expected is None)
        if expected is None:
            assert all(name in choice.question for name in files)
            assert "set checkpoint_pattern" in choice.question


def test_two_consecutive_runs_do_not_belong_together(tmp_path: Path) -> None:
    for at, name in enumerate(("a_1", "a_2", "b_1", "b_2")):
        saved(tmp_path / f"{name}.pt", TRAINING, at)
    assert chosen(tmp_path) == ("b_2.pt", 2)
    saved(tmp_path / "b_1.pt", TRAINING, 0.5)  # written between those of the other
    assert chosen(tmp_path) is None


def test_a_pattern_makes_directories_of_unknown_formats_count(tmp_path: Path) -> None:
    for step in (9, 10):
        text(tmp_path / f"state-{step}" / "deep" / "weights.npz", "data")
    (tmp_path / "state-11").mkdir()
    assert chosen(tmp_path) is None
    assert chosen(tmp_path, pattern="state-{step}") == ("state-10", 10)
    half(saved(tmp_path / "step_12" / "a.pt"))  # what is understood is held to its format
    assert chosen(tmp_path, pattern="st*") == ("state-10", 10)
    text(tmp_path / "b" / "step_5" / "brain.ckpt", "step: 1\n")  # of another program
    assert chosen(tmp_path / "b") is None
    assert chosen(tmp_path / "b", pattern="step_{step}") == ("step_5", 5)


@pytest.mark.parametrize("name", ["llama-7b", "data", "wandb", "run-20240501_120000", "version_1", "fold_3"])
def test_directories_that_are_none(tmp_path: Path, name: str) -> None:
    tensors(tmp_path / name / "model.safetensors")
    saved(tmp_path / name / "vocab.pt")
    assert chosen(tmp_path) is None


SHRUNK = {  # jobs whose ranks have become fewer, with the tracker that is beside them
    "deepspeed": (lambda at, step, n: scenes.deepspeed(at / f"global_step{step}", step, n), "latest=global_step200"),
    "megatron": (lambda at, step, n: scenes.megatron(at / f"iter_{step:07}", step, n), "latest_checkpointed_iteration.txt=200"),
    "files": (lambda at, step, n: ranks(at, f"s_{step}_rank{{}}.pt", n), "latest=s_200_rank0.pt"),
    "trainer": (lambda at, step, n: (scenes.trainer_of_deepspeed(at / f"checkpoint-{step}", step, n) / "latest").unlink(), ""),
    "lightning": (lambda at, step, n: scenes.lightning_of_deepspeed(at / f"epoch=0-step={step}.ckpt", step, n), ""),
    "totals": (lambda at, step, n: scenes.verl(at / f"global_step_{step}", step, n), ""),
    "shards": (lambda at, step, n: ranks(scenes.shards(at / f"step_{step}", "optimizer"), f"rng_state_{{}}_of_{n}.pt", n), ""),
}


@pytest.mark.parametrize(("make", "tracker"), SHRUNK.values(), ids=SHRUNK)
def test_a_shrunk_job_resumes_from_its_newest(tmp_path: Path, make, tracker: str) -> None:
    """A tracker, the tool's own state, the `latest` within, or a total in each name says that there are fewer ranks."""
    for step, count in ((100, 8), (200, 4)):
        make(tmp_path, step, count)
    if tracker:
        text(tmp_path / tracker.partition("=")[0], tracker.partition("=")[2])
    assert step_in(tmp_path) == 200, reasons(tmp_path)
    rows = {row.step: row for row in list_checkpoints(open_storage(str(tmp_path)))}
    assert rows[200].complete, rows[200].state


TEMPORARY = ("tmp-checkpoint-{}", "step_{}_tmp.pt", "tmp_step_{}.pt", "step_{}.tmp.pt", "trash_{}.pt", "step_{}.incomplete.pt")


def test_temporary_names_are_no_checkpoints(tmp_path: Path) -> None:
    scenes.trainer(tmp_path / "checkpoint-500", 500)
    saved(tmp_path / "temp_0.7_step_400.pt", TRAINING)  # a temperature
    for number, name in enumerate(TEMPORARY):
        path = tmp_path / name.format(1000 + number)
        saved(path if path.suffix else path / "model.pt", TRAINING, 9000)
    assert chosen(tmp_path) == ("checkpoint-500", 500)
    assert reasons(tmp_path) == {}
    shutil.rmtree(tmp_path / "checkpoint-500")
    assert chosen(tmp_path) == ("temp_0.7_step_400.pt", 400)


def with_extra(path: Path) -> Path:
    """A checkpoint; return a part of it that only the one before it shows. So do the next three."""
    return saved(scenes.shards(path, "optimizer") / "extra_state.pt")


def in_parts(path: Path) -> Path:
    for name in ("model", "optimizer", "scheduler"):
        saved(path / f"{name}.pt", OPTIMIZER)
    return saved(path / "rng.pt")


def by_ranks(path: Path) -> Path:
    for part in ("model", "optim"):
        ranks(path, f"rank_{{}}/{part}.pt", 4)
    return path / "rank_3" / "optim.pt"


def zero_3(path: Path) -> Path:
    for part in ("model", "optim"):
        ranks(path, f"zero_pp_rank_{{}}_mp_rank_00_{part}_states.pt", 4)
    return path / "zero_pp_rank_3_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("make", [with_extra, in_parts, by_ranks, zero_3])
@pytest.mark.parametrize("damage", [Path.unlink, half], ids=["gone", "half"])
def test_a_part_that_only_the_previous_checkpoint_shows(tmp_path: Path, make, damage) -> None:
    for step in (100, 200):
        part = make(tmp_path / f"step_{step}")
    assert chosen(tmp_path) == ("step_200", 200)
    damage(part)
    assert chosen(tmp_path) == ("step_100", 100)
    (passed,) = reasons(tmp_path).values()
    assert "the save did not finish" in passed or part.name in passed
    if damage is Path.unlink:
        saved(tmp_path / "step_200" / "all.pt")  # it has others instead
        assert (chosen(tmp_path) == ("step_200", 200)) is (make in (with_extra, in_parts))


def test_files_of_other_programs_make_nothing_torn(tmp_path: Path) -> None:
    for step in (1, 2):
        path = tmp_path / f"CKPT_{step}"
        for name in ("model.ckpt", "optimizer.ckpt"):
            saved(path / name)
        text(path / "brain.ckpt", f"step: {step}\n")
        scenes.put(path / "args.pt", pickle.dumps({"lr": 1}))
        with zipfile.ZipFile(path / "tokens.bin", "w") as archive:
            archive.writestr("a.npy", b"data")
    assert step_in(tmp_path, verify=Mode.FULL) == 2
    for data in (bytes(100), b"", b"PK\x03", b"PK\x03\x04 cut"):  # cut short, or never written
        (tmp_path / "CKPT_2" / "args.pt").write_bytes(data)
        assert chosen(tmp_path) == ("CKPT_1", 1), data


@pytest.mark.parametrize("name", ["rl_model_2000_steps.zip", "ck_2000.npz"])
def test_a_pattern_makes_other_archives_count(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("policy.bin", b"data")
    pattern = name.replace("2000", "{step}")
    assert chosen(tmp_path) is None
    assert step_in(tmp_path, pattern=pattern, verify=Mode.FULL) == 2000
    half(tmp_path / name)
    assert chosen(tmp_path, pattern=pattern) is None


def test_lightnings_files_of_two_callbacks_need_no_question(tmp_path: Path) -> None:
    for at, name in enumerate(("epoch=1-step=200.ckpt", "step=200-val_loss=0.31.ckpt")):
        saved(tmp_path / name, {"global_step": 200, "pytorch-lightning_version": "2.4", **TRAINING}, at)
    assert chosen(tmp_path) == ("step=200-val_loss=0.31.ckpt", 200)


def test_what_is_asked_for_counts_whatever_its_format(tmp_path: Path) -> None:
    text(tmp_path / "a" / "200" / "_METADATA", "{}")
    text(tmp_path / "a" / "5.nemo", "data")
    text(tmp_path / "b" / "other", "data")
    for directory, named, step in (("b", "a/200", 200), ("a", "200", 200), ("b", "a/5.nemo", 5), ("a", "5.nemo", 5)):
        resume_from = str(tmp_path / named) if "/" in named else named
        found = chosen(tmp_path / directory, resume_from=resume_from, pattern="x*" if directory == "b" else "")
        assert found == (Path(named).name, step)


@pytest.mark.parametrize("name", ["s_5_tp_rank_{}.pt", "s_5_mp_rank_{:02}.pt", "s_5_local_rank{}.pt", "s_5_dp_rank{}.pt"])
def test_a_rank_within_a_group_is_not_global(tmp_path: Path, name: str) -> None:
    ranks(tmp_path, name, 2)
    name, _ = chosen(tmp_path)
    assert files_by_rank(open_storage(str(tmp_path)), name) == {}


@pytest.mark.parametrize("second", [0, 2])
def test_files_of_the_ranks_of_each_node(tmp_path: Path, second: int) -> None:
    for step in (100, 200):
        for node, first in ((0, 0), (1, second)):
            ranks(tmp_path, f"s_{step}_node{node}_local_rank{{}}.pt", first + 2, start=first)
    name = "s_200_node*_local_rank*.pt"
    assert chosen(tmp_path) == (name, 200)
    (tmp_path / f"s_200_node1_local_rank{second + 1}.pt").unlink()
    assert chosen(tmp_path) == (name.replace("200", "100"), 100)


@pytest.mark.parametrize(
    ("files", "asked"),
    [
        # Step and rank.
        ({"ckpt_100_0.pt": 0, "ckpt_100_1.pt": 1, "ckpt_200_0.pt": 900, "ckpt_200_1.pt": 901}, True),
        ({"ckpt_step100_r0.pt": 0, "ckpt_step100_r1.pt": 1, "ckpt_step200_r0.pt": 900, "ckpt_step200_r1.pt": 901}, True),
        ({"m0_100.pt": 0, "m1_100.pt": 1, "m0_200.pt": 900, "m1_200.pt": 901}, True),
        ({"ckpt_100_0.pt": 0, "ckpt_100_1.pt": 1, "ckpt_200_0.pt": 900}, True),  # rank 1 was killed
        ({"ckpt_200_0.pt": 0, "ckpt_200_1.pt": 1}, True),  # one save is left
        ({"ckpt_100_0.pt": 5, "ckpt_100_1.pt": 5, "ckpt_200_0.pt": 5, "ckpt_200_1.pt": 5}, True),  # a copy without the times
        # Each is a save.
        ({"ckpt_0_100.pt": 0, "ckpt_0_200.pt": 450, "ckpt_1_100.pt": 900, "ckpt_1_200.pt": 1350}, False),  # epoch, iteration
        ({"epoch_0_100.pt": 0, "epoch_1_200.pt": 900}, False),
        ({"run7_100.pt": 0, "run7_200.pt": 5}, False),
        ({"exp1_100.pt": 0, "exp1_200.pt": 300, "exp2_100.pt": 9000, "exp2_200.pt": 9300}, False),  # two runs
        ({"m2_0.pt": 0, "m2_1.pt": 30}, False),
        ({"loss_0.5_step_100.pt": 0, "loss_0.4_step_200.pt": 1}, False),
        ({"step_1.pt": 0, "step_2.pt": 1}, False),
    ],
)
def test_a_number_that_no_word_explains(tmp_path: Path, files: dict[str, int], asked: bool) -> None:
    """Of one moment, and the same ones for each step: each rank has written its own file, and one is not for all."""
    for name, at in files.items():
        saved(tmp_path / name, TRAINING, at)
    choice = newest_complete(str(tmp_path))
    assert ("each rank has saved a file of its own" in choice.question) is asked, choice
    assert (choice.resume is None) is asked


def test_results_that_were_added_later(tmp_path: Path) -> None:
    """By an evaluation: not the newest lacks them, but the older one has got them since."""
    for step in (100, 200):
        text(saved(tmp_path / f"step_{step}" / "model.pt", TRAINING, step).with_name("state.json"), {}, step)
    text(tmp_path / "step_100" / "eval.json", {"accuracy": 0.9}, 100 + 60)
    assert chosen(tmp_path) == ("step_200", 200)
    text(tmp_path / "step_100" / "eval.json", {"accuracy": 0.9}, 101)
    assert chosen(tmp_path) == ("step_100", 100)


@pytest.mark.parametrize("name", ["optimizer.pt", "data/data.pt"])
def test_saves_cut_short_twice_at_one_place(tmp_path: Path, name: str) -> None:
    for step in (100, 200, 300):
        saved(tmp_path / f"step_{step}" / "model.pt", WEIGHTS, step)
        if step == 100:
            text(tmp_path / "step_100" / name, "done", step)
    if name.endswith(".pt"):
        saved(tmp_path / "step_100" / name, OPTIMIZER, 100)
    assert chosen(tmp_path) == ("step_100", 100)


def test_a_pattern_for_one_file_of_saves(tmp_path: Path) -> None:
    """The others of the same step belong to it. The best, and what is saved more rarely, do not."""
    pattern = "model{step}.pt"
    for step in (100, 200, 300):
        for name in ("model", "ema", "opt") if step < 300 else ("model", "ema"):
            saved(tmp_path / f"{name}{step}.pt", WEIGHTS, step)
    assert chosen(tmp_path, pattern=pattern) == ("model200.pt", 200)
    assert "no opt#.pt of its step" in reasons(tmp_path, pattern=pattern)["model300.pt"]
    rows = {row.name: row.complete for row in list_checkpoints(open_storage(str(tmp_path)), pattern)}
    assert rows == {"model300.pt": False, "model200.pt": True, "model100.pt": True}, "as the choice"
    for name in ("opt100.pt", "opt200.pt"):
        (tmp_path / name).unlink()
    for name in ("rare100.pt", "best100.pt", "best200.pt"):
        saved(tmp_path / name, WEIGHTS)
    assert chosen(tmp_path, pattern=pattern) == ("model300.pt", 300)
