"""What names say: the step, the family, and the rank that wrote a part. Pure."""

from __future__ import annotations

import pytest

from elastic_ext.checkpoints.formats.candidates import (
    family_of,
    grouped,
    kinds_of,
    lacking,
    missing_rank,
    rank_name,
    says_step,
    step_of,
)
from elastic_ext.checkpoints.storage import Entry


@pytest.mark.parametrize(
    ("name", "step", "family"),
    [
        # The number after step, iter, ba, global_step, iteration, epoch.
        ("ep0-ba200-rank1.pt", 200, "ep#-ba#-rank1.pt"),
        ("global_step100", 100, "global_step#"),
        ("iter_0001000", 1000, "iter_#"),
        ("iteration-30.pt", 30, "iteration-#.pt"),
        ("checkpoint_epoch_5_lr_1.pt", 5, "checkpoint_epoch_#_lr_1.pt"),
        ("step_7_epoch_2.pt", 7, "step_#_epoch_#.pt"),
        ("model--val_loss=1.23-step=100-consumed_samples=800.0", 100, "model--val_loss=#.#-step=#-consumed_samples=#.#"),
        # No word says so.
        ("checkpoint_1_500.pt", 500, "checkpoint_#_#.pt"),
        ("model_0004999.pth", 4999, "model_#.pth"),
        ("ema_0.9999_000100.pt", 100, "ema_#.#_#.pt"),
        ("opt000100.pt", 100, "opt#.pt"),
        ("100", 100, "#"),
        ("model.7.pt", 7, "model.#.pt"),
        ("모델 3 ②.pt", 3, "모델 # ②.pt"),
        ("model_latest.pt", None, "model_latest.pt"),
        ("", None, ""),
        # Nor a value.
        ("step_5_loss_0.25.pt", 5, "step_#_loss_#.#.pt"),
        ("loss-1.5.pt", None, "loss-#.#.pt"),
        # Never the rank, the seed, tp, pp.
        ("step1000-seed42.pt", 1000, "step#-seed42.pt"),
        ("seed42.pt", None, "seed42.pt"),
        ("100-seed-7.pt", 100, "#-seed-7.pt"),
        ("optim_000100_rank3.pt", 100, "optim_#_rank3.pt"),
        ("rank3.pt", None, "rank3.pt"),
        ("iter_50_tp2_pp4.pt", 50, "iter_#_tp2_pp4.pt"),
        ("50_tp_2_pp_4.pt", 50, "#_tp_2_pp_4.pt"),
        ("mp_rank_00_001", None, "mp_rank_00_001"),
        ("world_size_8_rank_0.pt", None, "world_size_8_rank_0.pt"),
        ("300-lora_rank_16.pt", 300, "#-lora_rank_16.pt"),
        # Nor a size.
        ("llama-7b.pt", None, "llama-7b.pt"),
        ("llama-7b-step100.pt", 100, "llama-7b-step#.pt"),
        ("step100-llama-7B.pt", 100, "step#-llama-7B.pt"),
        ("mixtral-8x7b-300.pt", 300, "mixtral-8x7b-#.pt"),
        ("300-opt-350m", 300, "#-opt-350m"),
        ("100-bf16.pt", 100, "#-bf16.pt"),
        ("100-4bit.pt", 100, "#-4bit.pt"),
        ("2nodes_100", 100, "2nodes_#"),
        ("8gpu_100.pt", 100, "8gpu_#.pt"),
        ("batch32_epoch5", 5, "batch32_epoch#"),
        ("resnet50.pth", None, "resnet#.pth"),
        ("resnet50-300.pth", 300, "resnet#-#.pth"),
        ("yolov8n.pt", None, "yolov#n.pt"),
        # Thousands are none.
        ("model_90k.pt", 90_000, "model_#k.pt"),
        ("step-10K-seed3.pt", 10_000, "step-#K-seed3.pt"),
        # Nor a date.
        ("model-2024-05-01.pt", None, "model-#-#-#.pt"),
        ("2024-05-01_12-30-00.pt", None, "#-#-#_#-#-#.pt"),
        ("20240501_123000_step_300.pt", 300, "#_#_step_#.pt"),
        ("CKPT+2024-05-01+13-00-00+00", None, "CKPT+#-#-#+#-#-#+#"),
        ("300-20240501.pt", 300, "#-#.pt"),
        ("step_20240501.pt", 20240501, "step_#.pt"),
        # Progress is no rank.
        ("step-200-of-500.pt", 200, "step-#-of-500.pt"),
        ("epoch_3_of_10.pt", 3, "epoch_#_of_10.pt"),
    ],
)
def test_the_step_and_the_family(name: str, step: int | None, family: str) -> None:
    assert (step_of(name), family_of(name)) == (step, family)


def test_names_that_look_like_a_step() -> None:
    assert all(map(says_step, ("step_3", "epoch=1", "iter_0000007", "40", "checkpoint-5", "ckpt_9.pt")))
    assert not any(map(says_step, ("fold_3", "exp1", "run-600", "llama-7b", "version_1", "step", "latest", "2024-05-01")))


@pytest.mark.parametrize(
    ("name", "pattern", "ranks", "totals"),
    [
        ("s_5_rank3.pt", "s_5_rank*.pt", (3,), (None,)),
        ("rank_03_s_5.pt", "rank_*_s_5.pt", (3,), (None,)),
        ("s_5_rank_1_of_4.pt", "s_5_rank_*_of_4.pt", (1,), (4,)),
        ("s_5_shard-1-of-4.pt", "s_5_shard-*-of-4.pt", (1,), (4,)),
        ("w-00001-of-00002.bin", "w-*-of-00002.bin", (1,), (2,)),
        ("model_world_size_8_rank_0.pt", "model_world_size_8_rank_*.pt", (0,), (8,)),
        ("mp_rank_01_003/a.pt", "mp_rank_*_*/a.pt", (1, 3), (None, None)),
        ("zero_pp_rank_1_mp_rank_00_states.pt", "zero_pp_rank_*_mp_rank_*_states.pt", (1, 0), (None, None)),
        ("s_5_tp1_pp0.pt", "s_5_tp*_pp*.pt", (1, 0), (None, None)),
        ("random_states_2.pkl", "random_states_*.pkl", (2,), (None,)),
        ("a/__3.metadata", "a/__*.metadata", (3,), (None,)),
        ("step-5-00001-of-00002.bin", "step-5-*-of-00002.bin", (1,), (2,)),
        ("ep-0-of-2.pt", "ep-*-of-2.pt", (0,), (2,)),
    ],
)
def test_the_rank_in_a_name(name: str, pattern: str, ranks: tuple[int, ...], totals: tuple[int | None, ...]) -> None:
    found = rank_name(name)
    assert (found.pattern, found.ranks, found.totals) == (pattern, ranks, totals)


OF_NO_RANK = ("step_5.pt", "s5-seed3.pt", "lora_rank_8.pt", "adapter_rank8_step5.pt", "ranking_3.pt", "franks5.pt", "tensor_3.pt")
OF_NO_RANK += ("step-200-of-500.pt", "epoch_3_of_10.pt", "__0_0.distcp", ".metadata")


@pytest.mark.parametrize("name", OF_NO_RANK)
def test_names_without_a_rank(name: str) -> None:
    assert rank_name(name) is None


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["a_rank0", "a_rank1"], ""),
        (["a_rank0", "a_rank2"], "1"),
        (["a_rank1"], "0"),
        (["a_rank0_of_3", "a_rank1_of_3"], "2"),
        (["w-1-of-2", "w-2-of-2"], ""),
        (["w-2-of-2"], "1"),
        (["w-0-of-2", "w-1-of-2"], ""),
        (["shard-00001-model-00001-of-00001", "shard-00002-model-00001-of-00001"], ""),
        (["shard-00001-model-00001-of-00001", "shard-00003-model-00001-of-00001"], "2, 1"),
        (["shard_1", "shard_2"], "0"),
        (["__0.metadata", "__2.metadata"], "1"),
        (["x_tp0_pp0", "x_tp0_pp1", "x_tp1_pp0"], "1, 1"),
        (["x_pp-1-of-2_tp-0-of-1"], ""),  # a stage of a pipeline has names of its own
        (["x_dp-1-of-2_tp-0-of-1"], "0, 0"),
        (["a_rank999999", "a_rank0"], "1"),
        (["x_tp999999_dp999999"], ""),  # no grid
        (["zero_pp_rank_1"], "0"),
        (["node0_rank0", "node0_rank1", "node1_rank2"], ""),
        (["node3_rank0", "node4_rank0"], ""),
        (["node0_rank0", "node1_rank2"], "1"),
    ],
)
def test_which_rank_is_missing(names: list[str], missing: str) -> None:
    found = [each for each in map(rank_name, names) if each is not None]
    assert len(found) == len(names)
    assert missing_rank(found) == missing


@pytest.mark.parametrize(
    ("older", "newer", "said"),
    [
        ([[f"layer_{number}.pt" for number in range(8)]], [f"layer_{number}.pt" for number in range(7)], "layer_#.pt: 7, not 8"),
        ([[f"s_1/a_rank{rank}.pt" for rank in (0, 1)]], ["s_2/a_rank0.pt"], "s_#/a_rank#.pt: 1, not 2"),
        ([["__0.metadata", "__1.metadata"]], ["__0.metadata"], "__#.metadata: 1, not 2"),
        ([["a_rank0.pt", "a_rank1.pt"]], ["a_rank0.pt", "b.pt"], "a_rank#.pt: 1, not 2"),
        ([["a.pt", "b.pt"]], ["a.pt"], "no b.pt"),
        ([["a.pt"], ["a.pt", "b.pt"]], ["a.pt"], "no b.pt"),  # two saves were cut short at the same place
        ([["a.pt", "b.pt"]], ["a.pt", "c.pt"], ""),  # others instead
        ([[f"s_1/a_{number}.pt" for number in (0, 1)]], [f"s_2/a_{number}.pt" for number in (0, 1, 2)], ""),
        ([["a-1-of-2.pt", "a-2-of-2.pt"]], ["a-1-of-1.pt"], ""),
        ([["a_rank0", "a_rank1"], ["a_rank0", "a_rank1", "a_rank2"]], ["a_rank0", "a_rank1"], ""),  # since the one before it
        ([], ["a.pt"], ""),
    ],
)
def test_what_older_ones_have(older: list[list[str]], newer: list[str], said: str) -> None:
    found = lacking(kinds_of(newer), [*map(kinds_of, older)])
    assert said in found
    assert bool(found) is bool(said)


def test_files_of_all_ranks_are_one_entry() -> None:
    def entry(name: str, mtime: float | None = 0.0, unusable: str = "", is_dir: bool = False) -> Entry:
        return Entry(name, f"/c/{name}", is_dir, 10, mtime, unusable)

    names = ["b_2_rank1", "b_2_rank0", "b_1_rank0", "alone_rank0", "other"]
    listed = [entry(name, at) for at, name in enumerate(names)] + [entry("b_3_rank0", None), entry("rank_7", is_dir=True)]
    found = {each.name: each for each in grouped([*listed, entry("b_4_rank0", unusable="a pipe")])}
    assert set(found) == {"b_1_rank*", "b_2_rank*", "b_3_rank*", "alone_rank0", "other", "rank_7", "b_4_rank0"}
    two = found["b_2_rank*"]
    assert (two.path, two.size, two.mtime, two.torn) == ("/c/b_2_rank*", 20, 1, "")
    assert [part.name for part in two.parts] == ["b_2_rank0", "b_2_rank1"]
    assert found["b_3_rank*"].mtime is None
    assert found["alone_rank0"].parts == ()
