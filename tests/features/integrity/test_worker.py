"""What a worker hashes of its replicas, and for which steps it stays. Whole jobs are in test_watch.py."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic_ext.failures.joint_evidence import WorkerHashes, decode_hashes
from elastic_ext.features.integrity import worker
from elastic_ext.features.integrity.worker import COLUMNS, SPACINGS, ReplicaHashes, kept, weighted_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


@pytest.fixture
def hooks(monkeypatch):
    """The global hooks of torch, as they are without this test."""
    module = torch.nn.modules.module
    monkeypatch.setattr(module, "_global_module_registration_hooks", type(module._global_module_registration_hooks)())


def hashes_of(every: int = 10) -> tuple[ReplicaHashes, list[WorkerHashes]]:
    """Hashes, and what is in the file after each that was written."""
    written: list[WorkerHashes] = []
    return ReplicaHashes(every, lambda text: written.append(decode_hashes(text.encode(), "the file")), pytest.fail), written


@given(st.sampled_from(SPACINGS[:3]), st.integers(1, 3), st.integers(1, 50), st.data())
def test_looks_at_different_times_share_a_step(spacing, number, every, data):
    """Within any spacing, the last step of that spacing. The first and the last two are always there, and they are few."""

    def seen() -> set[int]:
        steps, checks = {1}, number * spacing + data.draw(st.integers(0, spacing - 1))
        for check in range(1, checks + 1):
            steps = kept({*steps, check * every}, every)
        assert {1, checks * every, max(1, (checks - 1) * every)} <= steps
        assert len(steps) <= 9
        return steps

    assert number * spacing * every in seen() & seen()


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (COLUMNS + 3,), (3, COLUMNS)])
def test_each_single_bit_counts(hooks, sums, dtype, shape):
    hashed, _ = hashes_of()
    hashed.sums = sums
    tensor = torch.ones(shape, dtype=dtype)
    before = hashed._value([("parameter", tensor)])
    assert hashed._value([("parameter", tensor.clone())]) == before
    data = tensor.view(torch.uint8).view(-1) if shape else tensor.view(1).view(torch.uint8)
    for byte in {0, len(data) // 2, len(data) - 1}:
        for bit in (1, 128):
            data[byte] ^= bit
            assert hashed._value([("parameter", tensor)]) != before
            data[byte] ^= bit
    assert hashed._value([("parameter", tensor)]) == before


def test_order_shape_and_name_count(hooks):
    hashed, _ = hashes_of()
    one, other = torch.arange(6.0), torch.arange(6.0) + 1
    values = {
        hashed._value(each)
        for each in (
            [("a", one), ("b", other)],
            [("a", other), ("b", one)],
            [("b", one), ("b", other)],
            [("a", one.view(2, 3)), ("b", other)],
            [("a", one), ("b", other), ("step", 1)],
            [("a", one), ("b", other), ("step", 2)],
        )
    }
    assert len(values) == 6


def test_the_fallback_depends_on_places():
    weights = torch.arange(1, 2 * COLUMNS, 2)
    words = torch.randint(-(2**31), 2**31, (3 * COLUMNS + 5,), dtype=torch.int32)
    swapped = words.clone()
    swapped[[7, 8]] = words[[8, 7]]
    assert weighted_sum(words, weights) != weighted_sum(swapped, weights)


@pytest.fixture
def rank_0_of_4(hooks) -> Iterator[None]:
    """Torch's process group that talks to nobody: what is a replica shows without the other ranks."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def hashes_of_replicas(every: int) -> tuple[ReplicaHashes, list[WorkerHashes], DistributedDataParallel]:
    return *hashes_of(every), DistributedDataParallel(torch.nn.Linear(8, 8))


def trained(hashed: ReplicaHashes, model: torch.nn.Module, steps: int, make=torch.optim.Adam) -> torch.optim.Optimizer:
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(steps):
        backward(model)
        optimizer.step()
        hashed.stepped(optimizer)
    return optimizer


def backward(model: torch.nn.Module) -> None:
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        model(torch.ones(1, 8)).sum().backward()


@pytest.mark.full
def test_the_first_step_and_then_every_few(rank_0_of_4):
    hashed, written, model = hashes_of_replicas(4)
    kept_alive = trained(hashed, model, 9)
    assert [len(each.hashed) for each in written] == [1, 2, 3]
    found = written[-1].hashed
    assert [(each.replicas, each.step, each.counted) for each in found] == [(4, 1, 1), (4, 4, 4), (4, 8, 8)]
    assert len({each.of for each in found}) == 1
    assert len({each.value for each in found}) == 3
    trained(hashed, model, 1)  # another optimizer
    assert len({each.of for each in written[-1].hashed}) == 2
    del kept_alive
    trained(hashed, model, 1)
    assert {each.of.partition(".")[0] for each in written[-1].hashed} == {"3"}
    assert (written[-1].off, written[-1].note) == ("", "")


@pytest.mark.full
def test_only_parameters_and_optimizer_state_count(rank_0_of_4):
    hashed, written = hashes_of(1)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.bias"])
    model = DistributedDataParallel(inner.eval())
    optimizer = trained(hashed, model, 1)

    def value() -> str:
        hashed._hash(optimizer, hashed._optimizers[optimizer])
        return written[-1].hashed[-1].value

    before = value()
    with torch.no_grad():
        inner[0].bias += 1  # DDP leaves it to each rank
        inner[1].running_mean += 1
    assert value() == before
    optimizer.state[inner[0].weight]["exp_avg"].view(torch.int32).view(-1)[0] ^= 1
    after = value()
    assert after != before
    inner[0].weight.detach().view(torch.int32).view(-1)[0] ^= 1
    assert value() not in (before, after)


def test_of_a_mesh_only_unsharded_replicas(rank_0_of_4):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    weights = torch.ones(4, 4)

    def ranks(*placements, of=mesh):
        return worker._ranks_of_mesh(distribute_tensor(weights, of, placements, src_data_rank=None))

    assert ranks(Replicate(), Shard(0)) == (0, 2)
    assert ranks(Shard(0), Shard(1)) == ()
    assert ranks(Shard(0), Replicate()) == ()  # of FSDP and tensor parallelism: a norm, say
    assert ranks(Replicate(), Replicate()) == ()
    assert ranks(Shard(0), of=mesh["shard"]) == ()
    assert worker._ranks_of_mesh(weights) == ()


@pytest.mark.full
@pytest.mark.parametrize(("shape", "replicated"), [((2, 2), True), ((4,), False)])
def test_fully_shard(rank_0_of_4, shape, replicated):
    hashed, written = hashes_of(1)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    trained(hashed, model, 2)
    assert [each.replicas for each in written[-1].hashed] == [2, 2] * replicated
    assert ("2 of 2 parameters of Adam are no replicas" in written[-1].uncompared) == (not replicated)


@pytest.mark.full
def test_with_sharded_optimizer_state_only_parameters_count(rank_0_of_4):
    hashed, written, model = hashes_of_replicas(1)
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: hashed.stepped(optimizer))
    try:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        backward(model)
        optimizer.step()
    finally:
        handle.remove()
    (found,) = written[-1].hashed
    parameters = [("parameter", each) for each in model.parameters()]
    assert (found.replicas, found.step, found.value) == (4, 1, hashed._value(parameters))
    assert len(written) == 1


def test_what_is_no_replica_is_not_hashed(hooks):
    """A plain tensor outside of DDP: it may be a shard, or a part of a pipeline."""
    hashed, written = hashes_of(1)
    trained(hashed, torch.nn.Linear(8, 8), 3)
    assert [each.hashed for each in written] == [()]
    assert "2 of 2 parameters of Adam are no replicas" in written[0].uncompared


@pytest.mark.full
def test_the_model_without_replicas_is_named(rank_0_of_4):
    hashed, written = hashes_of(1)
    model, more, alone = (torch.nn.Linear(8, 8) for _ in range(3))
    model, more = DistributedDataParallel(model), DistributedDataParallel(more)
    optimizer = torch.optim.Adam([*model.parameters(), *more.parameters(), *alone.parameters()], lr=0.1)
    backward(model)
    optimizer.step()
    hashed.stepped(optimizer)
    assert [each.replicas for each in written[-1].hashed] == [4]
    assert "2 of 6 parameters of Adam are no replicas" in written[-1].note
    assert written[-1].uncompared == ""
    before = written[-1].hashed[0].value
    more.module.bias.detach()[0] += 1
    hashed._hash(optimizer, hashed._optimizers[optimizer])
    assert written[-1].hashed[0].value != before


@pytest.mark.full
def test_one_ranks_own_optimizer_changes_no_name(rank_0_of_4):
    names = []
    for local in (False, True):
        hashed, written = hashes_of(1)
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        own = trained(hashed, torch.nn.Linear(8, 8), 1) if local else None
        kept_alive = [trained(hashed, model, 1) for _ in range(2)]
        names.append([each.of for each in written[-1].hashed])
        del own, kept_alive
    assert names[0] == names[1]
    assert len(set(names[0])) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("per_round", "expected"),
    [
        ("ab", [(1, 1), (10, 10), (1, 1), (10, 10)]),
        ("aaaaab", [(1, 1), (40, 7), (50, 9), (1, 1), (10, 10)]),  # a's fiftieth comes before b's tenth
        ("abbbbb", [(1, 1), (10, 10), (1, 1), (40, 8), (50, 10)]),
    ],
)
def test_steps_are_those_of_the_slowest_optimizer(rank_0_of_4, per_round, expected):
    """No checkpoint that is numbered by either may be newer than what was compared."""
    hashed, written, model = hashes_of_replicas(10)
    backward(model)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name in "ab"}
    for name in per_round * 10:
        optimizers[name].step()
        hashed.stepped(optimizers[name])
    assert [(each.step, each.counted) for each in written[-1].hashed] == expected
    assert written[-1].note == ("" if per_round == "ab" else worker.UNEQUAL)


@pytest.mark.full
def test_of_many_optimizers_the_first_are_compared(rank_0_of_4):
    hashed, written, model = hashes_of_replicas(1)
    kept_alive = [trained(hashed, model, 1) for _ in range(worker.MAX_OPTIMIZERS)]
    assert written[-1].note == ""
    kept_alive.append(trained(hashed, model, 2))
    assert written[-1].note == worker.TOO_MANY
    assert len(written[-1].hashed) == worker.MAX_OPTIMIZERS
    assert written[-1].uncompared == ""


@pytest.mark.full
def test_an_error_of_torch_turns_it_off(rank_0_of_4):
    hashed, written, model = hashes_of_replicas(1)
    optimizer = trained(hashed, model, 1)
    optimizer.param_groups[0]["params"].append(torch.ones(1).to("meta"))
    del model.process_group
    for _ in range(3):
        hashed.stepped(optimizer)
    assert [len(each.hashed) for each in written] == [1, 1]
    assert "replicas are no longer hashed in this round: AttributeError" in written[-1].uncompared


@pytest.mark.full
def test_an_unwritable_file_turns_it_off(rank_0_of_4):
    def refuse(text: str) -> None:
        raise OSError(errno.ENOSPC, "no room")

    warned: list[str] = []
    hashed = ReplicaHashes(1, refuse, warned.append)
    trained(hashed, DistributedDataParallel(torch.nn.Linear(8, 8)), 3)
    assert len(warned) == 1
    assert "no room" in warned[0]


@pytest.mark.full
def test_ranks_of_unequal_steps_are_not_compared(rank_0_of_4):
    """The state of their optimizers differs from then on, by no fault of the hardware."""
    hashed, written, model = hashes_of_replicas(1)
    trained(hashed, model, 2)
    with model.join():
        trained(hashed, model, 2)
    trained(hashed, model, 2)
    assert [bool(each.off) for each in written] == [False, False, True]
    assert "DistributedDataParallel.join" in written[-1].off


class Refusing(torch.Tensor):
    """Its code runs as it is hashed, and asserts, or looks up, what it does not know."""

    def __new__(cls, error: type[Exception]) -> Refusing:
        made = torch.ones(2).as_subclass(cls)
        made.error = error
        return made

    def is_complex(self) -> bool:
        raise self.error("not known here")


@pytest.mark.full
@pytest.mark.parametrize("error", [AssertionError, IndexError, OverflowError])
def test_a_tensor_classs_error_does_not_end_scripts(rank_0_of_4, error):
    hashed, written, model = hashes_of_replicas(1)
    optimizer = trained(hashed, model, 1)
    optimizer.state[model.module.weight]["exp_avg"] = Refusing(error)
    hashed.stepped(optimizer)
    assert [bool(each.off) for each in written] == [False, True]
