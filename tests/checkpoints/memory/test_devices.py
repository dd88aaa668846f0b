"""Copies beside training: on a simulated device, and on a GPU where there is one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from elastic_ext.base.contracts import MemoryRoom
from elastic_ext.checkpoints.directory.own_files import Manifest
from elastic_ext.checkpoints.directory.tiers import manifest_of
from elastic_ext.checkpoints.formats.candidates import directory_name
from elastic_ext.checkpoints.memory import part
from elastic_ext.checkpoints.memory.devices import Copying, Lane, Marks, by_device
from elastic_ext.checkpoints.memory.pace import StepsSeen
from elastic_ext.checkpoints.memory.part import MemoryCopy
from elastic_ext.checkpoints.memory.saver import MemorySaver
from elastic_ext.checkpoints.ranks import LocalTier, Parts, Ranks
from elastic_ext.checkpoints.state import Objects, capture, template
from elastic_ext.checkpoints.storage import open_storage
from tests.checkpoints.memory.simulated_cuda import Cuda, InBuffer, OnDevice, install

GPUS = ("cuda:0", "cuda:1")


def stepping(make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return make([parameter], lr=0.1)


def pairs(targets: list[InBuffer], sources: list[OnDevice]) -> list[tuple[InBuffer, OnDevice]]:
    return list(zip(targets, sources, strict=True))


class Training:
    """Weights on two simulated devices, whose steps are announced by a real optimizer's hook."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.optimizer = cuda, stepping()
        self.weights = [OnDevice(cuda, gpu, 0) for gpu in GPUS]
        self.statistics = [OnDevice(cuda, gpu, 0) for gpu in GPUS]
        self.copying = Copying([self.optimizer])
        self.buffer: list[InBuffer] = []
        self.step_number = 0

    def step(self, announced: bool = True) -> None:
        """announced: as an eager step is, and no replay of a CUDA graph. The forward pass comes first."""
        for each in self.statistics:
            each.add(1)
        if announced:
            self.optimizer.step()
        for each in self.weights:
            each.add(1)
        self.step_number += 1

    def capture(self) -> None:
        """Capture a step, which does nothing yet."""
        self.cuda.capturing = True
        self.optimizer.step()
        self.cuda.capturing = False

    def copy(self) -> list[int]:
        """Begin a copy, and return what it is to hold."""
        self.buffer = [InBuffer() for _ in (*self.weights, *self.statistics)]
        resting, moving = self.buffer[: len(GPUS)], self.buffer[len(GPUS) :]
        self.copying.start(self.step_number, pairs(resting, self.weights), pairs(moving, self.statistics))
        return [self.step_number] * len(self.buffer)

    def copied(self) -> list[int | None]:
        self.copying.finish()
        return [each.value for each in self.buffer]

    def beside(self) -> bool:
        """Whether the copy that has just begun goes on beside training."""
        return any(each.value is None for each in self.buffer)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    made = Training(install(monkeypatch, training_late=False))
    yield made
    made.copying.pin(())  # while the simulation stands


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_real_optimizers_steps_are_seen(training: Training, make: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = stepping(make)
    copying = Copying([optimizer])
    told = []
    copying._steps.step = told.append
    training.optimizer.step()
    for _ in range(3):
        optimizer.step()
    assert told == [training.optimizer, *[optimizer] * 3]


def test_steps_are_seen_only_if_all_were() -> None:
    first, second = object(), object()
    steps = StepsSeen([first, second])

    def next_copy(step: int, *seen: object) -> bool:
        for each in seen:
            steps.step(each)
        return steps.all_since_last(step)

    assert not next_copy(0), "nothing is known at first"
    assert next_copy(1, first, second)
    assert not next_copy(2, first, object()), "the other optimizer's step was not seen"
    assert next_copy(3, first, second)
    assert not next_copy(5, first, second), "one of two steps was not"
    assert next_copy(7, first, second, first, second)
    assert not next_copy(7), "not even of the same step"
    steps.captured = True
    assert not next_copy(8, first, second)
    nobody = StepsSeen([])
    assert not any(nobody.all_since_last(step) for step in range(3))


def test_compiled_steps_are_not_seen() -> None:
    optimizer = stepping()
    copying = Copying([optimizer])
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(3):
        assert not copying._steps.all_since_last(step)
        compiled()
    optimizer.step()
    assert copying._steps.all_since_last(3), "the optimizer itself is still watched"


def test_copies_that_are_gone_watch_no_steps() -> None:
    optimizer = stepping()
    copying = weakref.ref(Copying([optimizer]))
    assert copying() is None
    optimizer.step()


def test_a_copy_beside_training_holds_its_steps_state(training: Training) -> None:
    beside = []
    for _ in range(4):
        training.step()
        expected = training.copy()
        beside.append(training.beside())
        training.step()
        assert training.copied() == expected
        training.copying.pin(())
    assert beside == [False, True, True, True]


def test_a_copy_waits_until_training_has_come_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is ahead of the device."""
    training = Training(install(monkeypatch, training_late=True))
    for _ in range(4):
        training.step()
        expected = training.copy()
        training.step()
        assert training.copied() == expected


def test_the_next_step_has_to_wait(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation tells whether it does: without the wait, the copy holds the next step's weights."""
    monkeypatch.setattr(Lane, "hold_step", lambda self: None)
    training.copy()
    training.step()
    expected = training.copy()
    training.step()
    assert training.copied() == [each + (number < len(GPUS)) for number, each in enumerate(expected)]


@pytest.mark.parametrize("seen_before", [0, 1])
def test_replayed_steps_do_not_overtake(training: Training, seen_before: int) -> None:
    """No hook tells of them; those before were eager, or not."""
    for _ in range(seen_before):
        training.copy()
        training.step()
    training.copy()
    training.step(announced=False)
    for _ in range(3):
        expected = training.copy()
        assert not training.beside()
        training.step(announced=False)
        assert training.copied() == expected


def test_a_step_is_captured_during_a_copy(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """That copy is given up, and later ones hold up training, with eager steps too: a replay may come at any time."""
    training.copy()
    training.step()
    training.copy()
    assert training.beside()
    training.capture()
    training.step(announced=False)
    with pytest.raises(RuntimeError, match="captured in a CUDA graph while"):
        training.copied()
    training.capture()
    for announced in (False, True, True, False):
        expected = training.copy()
        assert not training.beside()
        training.step(announced)
        assert training.copied() == expected
    assert caplog.text.count("hold up training") == 1


def test_a_capture_after_the_copy_is_harmless(training: Training) -> None:
    training.copy()
    training.step()
    expected = training.copy()
    assert training.copied() == expected
    training.capture()
    assert training.copied() == expected


def test_a_capture_waits_for_nothing(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.copy()
    training.step()
    training.copy()
    monkeypatch.setattr(Lane, "hold_step", lambda self: pytest.fail("an event from outside of the capture"))
    training.capture()


def test_a_new_copy_waits_for_an_unfinished_one(training: Training) -> None:
    training.copy()
    training.step()
    expected, before = training.copy(), training.buffer
    assert training.beside()
    training.copy()
    assert [each.value for each in before] == expected


def test_each_device_has_its_own_pairs() -> None:
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    both = [(torch.zeros(2), here), (torch.zeros(2), there)]
    found = by_device(both, both[1:])
    assert {device.type: (len(resting), len(moving)) for device, (resting, moving) in found.items()} == {
        "cpu": (1, 0),
        "meta": (1, 1),
    }


def test_released_buffers_are_unmapped_after_their_copy(training: Training) -> None:
    copying = training.copying
    old = torch.zeros(8)
    copying.pin([old])
    assert not training.cuda.calls, "before a GPU is known"
    training.copy()
    copying.pin([old])
    training.step()
    training.copy()
    assert training.beside()
    address, gone = old.data_ptr(), weakref.ref(old.untyped_storage())
    del old
    copying.pin(())
    assert not training.beside(), "the device may still have written to it"
    assert training.cuda.calls == [("pin", address), ("unpin", address)]
    assert not copying._pinned
    assert gone() is None
    new = torch.zeros(8)
    copying.pin([new])
    copying.pin([new])
    assert training.cuda.calls[2:] == [("pin", new.data_ptr())]


def test_pinned_buffers_are_released_before_they_are_remapped(training: Training) -> None:
    buffer = torch.zeros(8)
    training.copy()
    training.copying.pin([buffer])
    training.copying = Copying([])
    gc.collect()
    assert training.cuda.calls == [("pin", buffer.data_ptr()), ("unpin", buffer.data_ptr())]


class At:
    """An event that the device comes to at a time in milliseconds; None: it has not yet."""

    def __init__(self, ms: float | None) -> None:
        self.ms = ms

    def query(self) -> bool:
        return self.ms is not None

    def elapsed_time(self, end: At) -> float:
        return end.ms - self.ms


def marks(began: float, ended: float | None, copied: float | None, *reached: float | None) -> Marks:
    return Marks(At(began), At(ended), At(copied), At(*reached) if reached else None)


@pytest.mark.parametrize(
    ("made", "stall_s"),
    [
        pytest.param(marks(100, 103, 150, 190), 0.003, id="copied before the step"),
        pytest.param(marks(100, 103, 150, 120), 0.033, id="the step waits"),
        pytest.param(marks(100, 103, None), 0.003, id="no step is seen"),
        pytest.param(marks(100, None, None), None, id="not gone on"),
        pytest.param(marks(100, 103, None, 120), None, id="still waiting"),
        pytest.param(marks(100, 103, 150, None), None, id="the step is not reached"),
    ],
)
def test_what_a_copy_stalls_on_the_device(made: Marks, stall_s: float | None) -> None:
    assert made.stall_s() == (None if stall_s is None else pytest.approx(stall_s))


def test_copies_on_the_cpu_stall_no_device() -> None:
    copying = Copying([])
    target = torch.zeros(2)
    copying.start(1, [(target, torch.ones(2))], [])
    assert target.tolist() == [1, 1]
    copying.finish()
    assert copying.device_stall_s() is None


class Saved:
    """A model that trains on a device, and copies of it."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        torch.manual_seed(0)
        self.objects = self.fresh()
        self.batch = torch.randn(64, 256, device=device)
        self.tier = LocalTier(open_storage(str(folder)), (1,), 0, True)
        self.ranks = Ranks(timedelta(seconds=60))
        self.saver = MemorySaver(self.tier, MemoryRoom("", 1 << 30), 1, self.objects, self.ranks, None)
        self.saver.begin(1)

    def fresh(self) -> Objects:
        """8 MB on a GPU. There the optimizer's step can be captured."""
        width = 1024 if self.device == "cuda" else 16
        layers = (nn.Linear(256, width), nn.BatchNorm1d(width), nn.Linear(width, 256))
        model = nn.Sequential(*layers).to(self.device)
        return Objects(model, (torch.optim.AdamW(model.parameters(), lr=0.01, capturable=self.device == "cuda"),))

    def train(self) -> None:
        (optimizer,) = self.objects.optimizers
        optimizer.zero_grad(set_to_none=False)
        (self.objects.model(self.batch) - self.batch).square().mean().backward()
        optimizer.step()

    def snapshot(self, step: int) -> dict[part.Path, torch.Tensor]:
        """Begin a copy, and return what it is to hold: copied in the order of training."""
        self.saver.step(step, 0, lambda: Manifest(step, 0, (), nodes=(1,)))
        return {path: tensor.clone() for path, tensor in part.leaves(capture(self.objects, 0, 0).tensors)}

    def loaded(self, step: int) -> dict[part.Path, torch.Tensor] | None:
        """Return what a new process gets of the copy of this step; None if there is no such copy."""
        self.saver.wait()
        name = directory_name(step, 1)
        if self.saver._buffers.kept != name:
            return None
        found = manifest_of(self.tier.storage, name)
        copy = MemoryCopy(Parts(self.tier, name, found[0], {}), self.ranks)
        return dict(part.leaves(copy.fill(template(self.fresh(), copy.saved([0])))))


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, as the product's is: Linux lets a device have no page of a file on a disk."""
    with TemporaryDirectory(prefix="elastic_ext_test_", dir="/dev/shm") as name:
        yield Path(name)


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA and a torch built for it")


@pytest.mark.parametrize(
    ("device", "captured"),
    [
        pytest.param("cpu", False, id="CPU"),
        pytest.param("cuda", False, marks=on_a_gpu, id="GPU"),
        pytest.param("cuda", True, marks=on_a_gpu, id="GPU, steps captured after some copies"),
    ],
)
def test_what_is_loaded_is_exact_to_the_bit(memory: Path, monkeypatch: pytest.MonkeyPatch, device: str, captured: bool) -> None:
    """Steps go on while each copy is made."""
    beside: list[bool] = []
    genuine = Lane.copy
    monkeypatch.setattr(Lane, "copy", lambda self, *args: beside.append(args[-1]) or genuine(self, *args))
    saved = Saved(memory, device)
    with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
        for _ in range(3):  # also makes the gradients that a captured step uses
            saved.train()
    if device == "cuda":
        torch.cuda.synchronize()
    train, there = saved.train, []
    for step in range(1, 31):
        expected = saved.snapshot(step)
        if captured and step == 20:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                saved.train()
            train = graph.replay
        train()
        found = saved.loaded(step)
        if found is not None:
            there.append(step)
            assert found.keys() == expected.keys()
            assert [path for path in found if not torch.equal(found[path].cpu(), expected[path].cpu())] == []
    missing = set(range(2, 31)) - set(there)
    assert missing <= ({20, 22} if captured else set()), (
        "the copy before the capture may be given up; the next but one is put off"
    )
    assert saved.saver._copying._steps.captured == captured
    if device == "cuda":
        assert beside[:19] == [False, *[True] * 18]
        assert set(beside[19:]) == {not captured}
