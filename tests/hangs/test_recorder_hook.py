"""What torch's hook records of a backend that does not record itself, as nccl2 does on GPUs: read from a backend in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from elastic_ext.workers.bootstrap import recorder

pytestmark = pytest.mark.skipif(
    not hasattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks"),
    reason=f"torch {torch.__version__} attaches no hook to backends; expected 2.15 or newer",
)


class Done(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True


class InPython(Backend):  # type: ignore[misc]  # torch declares no base class for Python
    """Calls `issue` in each all_reduce, and does nothing else."""

    def __init__(self, name: str, knows_ends: bool, issue: Callable[[], object]) -> None:
        super().__init__(0, 2)
        self._name, self._knows_ends, self._issue = name, knows_ends, issue
        self._options = Backend.Options(name, timeout=timedelta(minutes=1))

    @property
    def supports_completion_hooks(self) -> bool:
        """Only our reader asks this: to torch, no backend in Python knows when a collective ends."""
        return self._knows_ends

    def getBackendName(self) -> str:
        return self._name

    @property
    def options(self) -> Backend.Options:
        """Without it torch's hook asks the base class, which asks this object, without an end."""
        return self._options

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> Done:
        self._issue()
        return Done()


@pytest.fixture
def joined() -> Iterator[Callable[[str, bool, Callable[[], object]], None]]:
    """Make this process rank 0 of two, with such a backend."""

    def join(name: str, knows_ends: bool, issue: Callable[[], object]) -> None:
        dist.Backend.register_backend("in_python", lambda *_: InPython(name, knows_ends, issue), devices=["cpu"])
        dist.init_process_group("in_python", store=dist.HashStore(), rank=0, world_size=2)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def test_issued_collectives_of_a_hooked_backend(joined):
    joined("issues", False, lambda: None)
    for _ in range(3):
        dist.all_reduce(torch.ones(4), async_op=True)
    (times,) = (times for group, times in recorder.issued(with_nccl=False).items() if group == "issues 0 0 2")
    assert list(times) == [1, 2, 3]
    assert sorted(times.values()) == list(times.values())


@pytest.mark.parametrize("knows_ends", [True, False])
def test_an_outstanding_collective_of_a_hooked_backend(joined, knows_ends):
    """The hook cannot know that it has ended before it is issued."""
    said = []
    joined(f"waits {knows_ends}", knows_ends, lambda: said.append((recorder.read(), recorder.oldest())))
    dist.all_reduce(torch.ones(4, 2), async_op=True)
    ((counts, (found, has_begun)),) = said
    assert [count for group, count in counts.items() if group.startswith("waits")] == [(0, -1)] * knows_ends
    expected = {"operation": "all_reduce", "number": 1, "group": "default_pg", "first": 0, "size": 2, "shapes": "[[4, 2]]"}
    assert (found, has_begun) == ((expected, True) if knows_ends else recorder.NONE_OUTSTANDING)
    assert recorder.oldest() == recorder.NONE_OUTSTANDING


def test_a_group_that_is_gone_is_not_read(joined):
    joined("gone", True, lambda: None)
    dist.all_reduce(torch.ones(4), async_op=True)
    assert any(group.startswith("gone") for group in recorder.read())
    dist.destroy_process_group()
    assert not any(group.startswith("gone") for group in recorder.read())
