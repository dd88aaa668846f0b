"""State beside the model comes back as it was saved, from disk and from memory, whatever the object held that loads it."""

from __future__ import annotations

import copyreg
import pickle
import pickletools
import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from elastic_ext import Checkpointer
from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.agreement.messages import Offers, newest_whole
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.state import Objects, capture, extra_template, take_extra
from elastic_ext.checkpoints.storage import open_storage


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Box:
    content: Any


class Odd(Tensor):
    """Of a kind that only pickle knows."""


class Held:
    """An object of the user."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and all in them is of the same type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        kinds = [(each.dtype, each.shape, each.layout, each.requires_grad, each.device) for each in (one, other)]
        dense = [each.detach().to_dense() if each.layout is not torch.strided else each.detach() for each in (one, other)]
        return kinds[0] == kinds[1] and np.array_equal(bits(dense[0]), bits(dense[1]))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return (
            list(one) == list(other)
            and all(type(a) is type(b) for a, b in zip(one, other, strict=True))
            and same(list(one.values()), list(other.values()))
        )
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return same(one.content, other.content) if isinstance(one, Box) else bool(one == other)


def bits(value: Tensor) -> np.ndarray:
    return value.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()


NINE, ZERO = tensor(9.0), tensor(0.0)
TWICE = tensor([1.0, 2.0])

# What is saved, and what the object has that loads it; each beside a tensor.
STATES: dict[str, tuple[Any, Any]] = {
    "a tuple with a tensor": ((NINE, 2), (ZERO, 0)),
    "a named tuple with a tensor": (Pair(NINE, [1]), Pair(ZERO, [])),
    "a tuple without one": ((1, (2, 3)), (0, (0, 0))),
    "the state of a generator": (random.Random(3).getstate(), random.Random(4).getstate()),
    "the state of torch's generator": (torch.get_rng_state(), None),
    "keys that are no strings": ({5: "new", 6: NINE, (1, 2): None, None: 1, True: 0}, {5: "old"}),
    "keys of two types that read the same": ({5: tensor(5.0), "5": tensor(6.0)}, {5: ZERO, "5": ZERO}),
    "keys that joined by dots are the same": ({"a.b": tensor(1.0), "a": {"b": tensor(2.0)}}, {}),
    "keys that are gone": ({}, {"a": ZERO, "b": 1}),
    "keys that are new": ({"a": NINE, "b": 1}, {}),
    "a list that has grown": ([tensor(1.0), tensor(2.0), "three"], [ZERO]),
    "a list that has shrunk": ([tensor(1.0)], [ZERO, ZERO, 3]),
    "a list of numbers that has grown": ([1, 2, 3], [1]),
    "a list of lists that has grown": ([[1, 2], [3]], [[1]]),
    "a list of numbers that has become empty": ([], [1, 2]),
    "a key that is new in a mapping": ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}),
    "a tensor for a number": (NINE, 3),
    "a number for a tensor": (3, ZERO),
    "None": (None, 1),
    "a truth value": (True, 0),
    "text": ("text", ""),
    "bytes": (b"\0\xff", b""),
    "an array": (np.arange(6.0).reshape(2, 3), np.zeros(1)),
    "an array's number": (np.float32(1.5), 0.0),
    "empty containers": ({"a": {}, "b": [], "c": (), "d": {"e": {}}}, {}),
    "deeper ones": ({"a": [{"b": (tensor(1.0), {"c": [tensor(2.0), None]})}]}, {"a": []}),
    "other mappings": (OrderedDict(b=NINE, a=defaultdict(list, c=[tensor(1.0)])), {}),
    "tensors in a deque": (deque([tensor(1.0), TWICE], maxlen=4), deque()),
    "a tensor in an object": (Box([tensor(1.0), "text"]), None),
    "an expanded tensor": (NINE.expand(4), ZERO.expand(4)),
    "a transposed tensor": (torch.arange(6.0).reshape(2, 3).T, torch.zeros(2, 3).T),
    "every second element": (torch.arange(6.0)[::2], torch.zeros(6)[::2]),
    "a part of a larger tensor": (torch.arange(1000.0)[10:12], torch.zeros(2)),
    "another shape": (torch.arange(6.0).reshape(2, 3), torch.zeros(4)),
    "no elements": (torch.empty(0, 3), ZERO),
    "float64": (tensor(0.1, dtype=torch.float64), ZERO),
    "int64": (tensor(2**53 + 1), ZERO),
    "float32 for int64": (tensor(1.5), tensor(0)),
    "bool": (tensor([True, False]), torch.zeros(2)),
    "uint8": (tensor([1, 255], dtype=torch.uint8), torch.zeros(2)),
    "bfloat16": (tensor([1.5, float("nan")], dtype=torch.bfloat16), torch.zeros(2)),
    "float8": (tensor([1.5, 2.0]).to(torch.float8_e4m3fn), torch.zeros(2)),
    "complex": (tensor([1 + 2j, 3j]), torch.zeros(2)),
    "complex128, conjugated": (tensor([1 + 2j, 3j], dtype=torch.complex128).conj(), torch.zeros(2)),
    "a parameter": (nn.Parameter(tensor([1.0, 2.0])), torch.zeros(2)),
    "a frozen parameter": (nn.Parameter(tensor([1.0, 2.0]), requires_grad=False), nn.Parameter(torch.zeros(2))),
    "a tensor for a parameter": (tensor([1.0, 2.0]), nn.Parameter(torch.zeros(2))),
    "a tensor with a gradient to come": (tensor([1.0, 2.0], requires_grad=True), torch.zeros(2)),
    "a subclass of tensor": (torch.ones(2).as_subclass(Odd), None),
    "a sparse tensor": (torch.eye(3).to_sparse(), torch.zeros(3, 3)),
    "a quantized tensor's parts": (Pair(tensor([1, 2], dtype=torch.int8), tensor(0.5)), ()),
}  # fmt: skip


@pytest.fixture(params=["disk", "memory"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ELASTIC_EXT_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    if request.param == "memory":
        (tmp_path / "memory").mkdir()
        monkeypatch.setenv("ELASTIC_EXT_MEMORY_DIR", str(tmp_path / "memory"))
        monkeypatch.setenv("ELASTIC_EXT_MEMORY_LIMIT", str(1 << 24))
    return str(request.param)


def save(tier: str, **extra: Held) -> None:
    torch.manual_seed(1)
    with Checkpointer(model=nn.Linear(1, 1), extra=extra, memory_every=1) as checkpointer:
        checkpointer.load()
        if tier == "disk":
            checkpointer.save(2, wait=True)
            assert checkpointer.last_error is None
        else:
            for step in (1, 2):  # the first makes buffers
                checkpointer.snapshot(step)
                checkpointer._memory.wait()  # type: ignore[union-attr]


def load(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None, **extra: Held) -> None:
    if tier == "memory":
        offers = tuple(tiers.offers(open_storage(str(tmp_path / "memory"))))
        offer = newest_whole([Offers(memory=offers, has_memory=True)]).offer
        assert offer is not None, "nothing was copied to memory"
        monkeypatch.setenv("ELASTIC_EXT_RESUME_FROM", str(tmp_path / "memory" / offer.name))
    with Checkpointer(model=model or nn.Linear(1, 1), extra=extra, memory_every=1) as checkpointer:
        position = checkpointer.load()
        assert (position.step, checkpointer._loader.copy != "") == (2, tier == "memory")


def test_it_comes_back_as_it_was(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a tensor, and as the whole state."""
    saved, held = {}, {}
    for which, (value, there) in STATES.items():
        for number, each in enumerate(({"t": tensor(0.0), "value": there}, {"t": tensor(0.0)}, {}, {"value": {"t": 1}})):
            saved[f"{which} {number}"], held[f"{which} {number}"] = {"t": tensor(9.0), "value": value}, Held(each)
        for number, each in enumerate((there, {})):
            saved[f"{which}, whole {number}"], held[f"{which}, whole {number}"] = value, Held(each)
    save(tier, **{name: Held(each) for name, each in saved.items()})
    load(tier, tmp_path, monkeypatch, **held)
    assert {name: each.state for name, each in held.items() if not same(each.state, saved[name])} == {}


def test_one_object_under_two_keys_is_one_again(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = [TWICE]
    state: dict[str, Any] = {"a": TWICE, "b": (TWICE, TWICE), "c": inner, "d": inner}
    state["self"] = state
    save(tier, x=Held(state))
    held = Held({"a": torch.zeros(2), "b": (torch.zeros(2), torch.zeros(2))})
    load(tier, tmp_path, monkeypatch, x=held)
    found = held.state
    assert found["a"] is found["b"][0] is found["b"][1] is found["c"][0]
    assert found["c"] is found["d"]
    assert found["self"] is found
    assert torch.equal(found["a"], TWICE)


def test_a_tensor_that_fits_is_loaded_in_place(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tier, x=Held({"t": torch.ones(1000)}))
    there = torch.zeros(1000)
    held = Held({"t": there})
    load(tier, tmp_path, monkeypatch, x=held)
    assert held.state["t"].data_ptr() == there.data_ptr()
    assert there.sum() == 1000


def test_memory_with_two_users_is_not_loaded_into(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An average begins as the parameters themselves; two objects begin with one tensor, or with parts of one."""
    average = {"weight": torch.full((1, 1), 7.0), "one": tensor([1.0]), "other": tensor([2.0])}
    save(tier, average=Held(average), beside=Held({"t": tensor([3.0])}))
    torch.manual_seed(1)
    saved = nn.Linear(1, 1).weight.item()
    model, room = nn.Linear(1, 1), torch.zeros(1)
    held = Held({"weight": model.weight.detach(), "one": room, "other": room[:]})
    beside = Held({"t": room})
    load(tier, tmp_path, monkeypatch, model, average=held, beside=beside)
    assert same(held.state, average)
    assert same(beside.state, {"t": tensor([3.0])})
    assert model.weight.item() == saved


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_another_mesh_sharded_is_loaded_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Unless the object has a place for it."""
    plane, line = init_device_mesh("cpu", (1, 1)), init_device_mesh("cpu", (1,))
    saved = distribute_tensor(torch.ones(4, 2), plane, [Replicate(), Shard(1)])
    taken = take_extra("x", {"w": saved})
    form = taken[1]
    model = nn.Linear(2, 4, bias=False)
    for mesh, there, kind, told in (
        (None, {}, Tensor, 0),
        (plane, {}, DTensor, 0),
        (line, {}, Tensor, 1),
        (line, {"w": torch.zeros(4, 2)}, Tensor, 0),
        (line, {"w": distribute_tensor(torch.zeros(4, 2), line, [Shard(0)])}, DTensor, 0),
        (line, {"w": DTensor.from_local(torch.zeros(4, 2), line, [Partial()])}, Tensor, 1),
    ):
        caplog.clear()
        if mesh is not None:
            model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()] * mesh.ndim))
        found = extra_template({"x": form}, {"x": there}, model)["x"]["['w']"]
        assert (type(found), tuple(found.shape), len(caplog.messages)) == (kind, (4, 2), told)
        if mesh is plane:
            assert found.placements == saved.placements
    assert caplog.messages[0].startswith("extra 'x': 1 tensors, such as ['w'], were sharded, and the model has no one mesh like")


@pytest.mark.usefixtures("alone")
def test_of_two_meshes_none_is_the_saved_one(caplog: pytest.LogCaptureFixture) -> None:
    here = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    taken = take_extra("x", {name: distribute_tensor(torch.ones(4), here, [Shard(0)]) for name in "ab"})
    model = nn.ParameterList([distribute_tensor(torch.zeros(4), mesh, [Shard(0)]) for mesh in (here, other)])
    found = extra_template({"x": taken[1]}, {"x": {}}, model)["x"]
    assert [type(each) for each in found.values()] == [Tensor, Tensor]
    [message] = caplog.messages
    assert "2 tensors, such as ['a'], were sharded" in message


class Sharded(Tensor):
    def local_shards(self) -> list[Tensor]:
        return [self]


@pytest.mark.parametrize(
    ("value", "raises", "told"),
    [
        # Perhaps on this rank alone, so it stops no training.
        (lambda: 0, False, "the state of extra 'x' cannot be pickled: "),
        (
            torch.zeros(2).as_subclass(Sharded),
            True,
            "extra.x['value'] is a Sharded: only DTensors can be saved sharded, make it one",
        ),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, value: object, raises: bool, told: str) -> None:
    held = Held({"t": tensor(1.0), "value": value})
    with Checkpointer(tmp_path, model=nn.Linear(1, 1), extra={"x": held}) as checkpointer:
        with pytest.raises(UsageError) if raises else nullcontext():
            checkpointer.save(1)
        checkpointer.wait()
        assert told in str(checkpointer.last_error)
        held.state = {"t": tensor(1.0)}
        checkpointer.save(2, wait=True)
        assert checkpointer.last_saved == 2


class Handle:
    """What only `copyreg` makes picklable."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_type_with_later_registered_pickling_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, model=nn.Linear(1, 1), extra={"x": Held({"t": tensor(1.0), "handle": Handle()})}) as checkpointer:
        monkeypatch.setitem(copyreg.dispatch_table, Handle, lambda handle: (Handle, ()))
        checkpointer.save(1, wait=True)
        assert checkpointer.last_error is None


def test_pickles_name_one_module_of_ours() -> None:
    """Its name is in checkpoints, so it must not change."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    shared = capture(Objects(model, (optimizer,)), 0, 0).shared
    names = {text for op, text, _ in pickletools.genops(pickle.dumps(shared)) if isinstance(text, str)}
    assert {name for name in names if name.startswith("elastic_ext")} == {"elastic_ext.checkpoints.state"}
