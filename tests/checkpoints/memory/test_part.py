"""The content of one buffer, and the buffers."""

import errno
import mmap
import pickle
import sys
import threading
import time

import pytest
import torch
from torch import nn

from elastic_ext.checkpoints.memory import part
from elastic_ext.checkpoints.memory.part import Buffers, PartError, create, open_mapped
from elastic_ext.checkpoints.state import Capture, Objects, capture
from elastic_ext.checkpoints.storage import open_storage
from tests.checkpoints.writing.test_extra_state import Held
from tests.until import LIMIT_S

COMMON = [(("model", name), size) for name, size in (("a", 100), ("b", 60), ("c", 50), ("d", 0), ("e", 1))]


def trained() -> Capture:
    torch.manual_seed(0)
    model = nn.Sequential(Noted(), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).to(torch.bfloat16).to(torch.float64))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    average = Held({"values": [torch.tensor(1.5, dtype=torch.float16), "text"], "empty": torch.empty(0, 3)})
    return capture(Objects(model, (optimizer,), extra={"average": average}), rank=1, accumulation=1)


class Noted(nn.Identity):
    """A module with state of its own, which has a value beside a tensor."""

    def get_extra_state(self) -> dict:
        return {"values": [torch.tensor(1.5, dtype=torch.float16), "text"]}


def write(memory: torch.Tensor, planned: part.Planned) -> None:
    for path, tensor in planned.tensors.items():
        part.view(memory, planned.places[path]).copy_(tensor)
    part.write_index(memoryview(memory.numpy()), planned)


def test_what_is_written_is_read():
    captured = trained()
    planned = part.plan(captured, 0, 1)
    memory = torch.empty(planned.capacity, dtype=torch.uint8)
    write(memory, planned)
    index = part.read_index(memoryview(memory.numpy()))
    tensors = dict(part.leaves(captured.tensors))
    assert index.tensors.keys() == tensors.keys()
    for path, tensor in tensors.items():
        found = part.view(memory, index.tensors[path])
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor.detach())
        assert index.tensors[path].offset % part.ALIGNMENT == 0
    assert index.values == {("model", "0._extra_state", "values", 1): "text"}
    assert index.shared["optimizers"] == captured.shared["optimizers"]
    assert index.own["generators"]["python"] == captured.own["generators"]["python"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_of_a_node_share_what_all_have(ranks):
    owners = list(part.shares(COMMON, ranks))
    assert len(owners) == len(COMMON)
    loads = [sum(size for (_, size), owner in zip(COMMON, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert max(loads) <= max(100, sum(loads) / ranks + 60)


def test_a_node_keeps_one_copy_ranks_their_gradients():
    captured = trained()
    parts = [part.plan(captured, rank, 2).tensors.keys() for rank in range(2)]
    both = parts[0] & parts[1]
    assert both
    assert {path[0] for path in both} == {"rank_gradients"}
    assert parts[0] | parts[1] == dict(part.leaves(captured.tensors)).keys()


@pytest.mark.parametrize("damage", ["short", "magic", "index", "kind"])
def test_what_is_no_part_is_refused(damage):
    planned = part.plan(trained(), 0, 1)
    memory = torch.zeros(planned.capacity, dtype=torch.uint8)
    write(memory, planned)
    data = bytearray(memory.numpy().tobytes())
    if damage == "short":
        del data[10:]
    elif damage == "magic":
        data[7] = 9
    elif damage == "index":
        data[8:16] = len(data).to_bytes(8, "little")
    else:
        other = pickle.dumps({"no": "index"})
        data[planned.end : planned.end + len(other)] = other
    with pytest.raises(PartError):
        part.read_index(memoryview(data))


def test_a_sparse_tensor_is_refused():
    state = Capture({"model": {"w": torch.eye(2).to_sparse()}}, {}, {})
    with pytest.raises(TypeError, match=r"model\.w is a torch.sparse_coo tensor; only strided ones can be copied to memory"):
        part.plan(state, 0, 1)


def test_a_buffer_leaves_its_old_copy_before_writing(tmp_path):
    storage = open_storage(str(tmp_path))
    buffers = Buffers(storage, 3, limit=1 << 20)
    assert buffers.spare_size < 1
    buffers.allocate(8192)
    assert buffers.spare_size >= 8192
    assert buffers.spare_size < 8193
    held = []
    for name in ("one", "two", "three"):
        buffer = buffers.begin(name)
        held.append(buffer.tensor.data_ptr())
        assert buffer.name == f"{name}/rank_00003.mem"
        buffers.committed(name)
        assert buffers.kept == name
    assert held[0] == held[2] != held[1]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.mem")) == [
        "three/rank_00003.mem",
        "two/rank_00003.mem",
    ]


def test_the_kept_copy_is_not_the_next_buffer(tmp_path):
    """As after a restart: the buffer of the loaded copy is kept, and only one more is made."""
    storage = open_storage(str(tmp_path))
    create(storage, "loaded/rank_00000.mem", 4096).bytes[:4] = b"kept"
    buffers = Buffers(storage, 0, limit=1 << 20)
    buffers.keep("loaded")
    buffers.allocate(4096)
    buffers.begin("next").bytes[:4] = b"next"
    assert bytes(open_mapped(storage, "loaded/rank_00000.mem").bytes[:4]) == b"kept"
    buffers.committed("next")
    buffers.begin("after").bytes[:4] = b"last"
    assert not (tmp_path / "loaded" / "rank_00000.mem").exists()
    assert bytes(open_mapped(storage, "next/rank_00000.mem").bytes[:4]) == b"next"


def test_both_buffers_must_be_within_the_limit(tmp_path):
    buffers = Buffers(open_storage(str(tmp_path)), 0, limit=2 * 4096)
    buffers.allocate(4096)
    with pytest.raises(OSError, match="two copies of its state need 16384 bytes, its share of memory_limit is 8192") as raised:
        buffers.allocate(8192)
    assert raised.value.errno == errno.ENOMEM
    assert not list(tmp_path.rglob("*.mem"))
    assert buffers.spare_size < 1


def test_a_copy_of_other_ranks_replaces_a_buffer(tmp_path):
    storage = open_storage(str(tmp_path))
    create(storage, "loaded/rank_00001.mem", 4096)
    buffers = Buffers(storage, 0, limit=2 * 4096)
    buffers.keep("loaded", reuse=False)
    buffers.allocate(4096)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.mem")) == 2 * 4096
    buffers.begin("next")
    assert buffers.keeps_others
    buffers.committed("next")
    assert not buffers.keeps_others
    assert buffers.spare_size < 4096
    storage.remove_tree("loaded")
    buffers.allocate(4096)
    assert buffers.spare_size >= 4096
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.mem")) == 2 * 4096


@pytest.mark.seam
def test_other_threads_run_while_a_buffer_is_made(tmp_path, monkeypatch):
    """Python changes threads only where a call lets go of its lock: that is while memory is populated, and never in mmap."""
    done, touches, steps = threading.Event(), False, 0
    populate, zero, mapped = part.populate, torch.Tensor.zero_, mmap.mmap

    def touched(memory):
        nonlocal touches
        touches = True
        zero(memory)
        touches = False

    def again(memory):
        """On a busy core the other thread may not have its turn at once."""
        deadline = time.monotonic() + LIMIT_S
        while not steps and time.monotonic() < deadline:
            populate(memory)

    def without_populating(*args, flags):
        assert not flags & mmap.MAP_POPULATE
        return mapped(*args, flags=flags)

    def make():
        try:
            create(open_storage(str(tmp_path)), "a/rank_00000.mem", 64 << 20)
        finally:
            done.set()

    monkeypatch.setattr(torch.Tensor, "zero_", touched)
    monkeypatch.setattr(part, "populate", again)
    monkeypatch.setattr(part, "SLICE", 1 << 20)
    monkeypatch.setattr(mmap, "mmap", without_populating)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=make)
        thread.start()
        while not done.is_set():
            steps += touches
            time.sleep(0)  # lets go of the lock
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert steps > 0


def test_a_private_mapping_leaves_the_file_unchanged(tmp_path):
    storage = open_storage(str(tmp_path))
    create(storage, "a/rank_00000.mem", 4096)
    open_mapped(storage, "a/rank_00000.mem", private=True).tensor.fill_(7)
    assert not any(open_mapped(storage, "a/rank_00000.mem").bytes)
