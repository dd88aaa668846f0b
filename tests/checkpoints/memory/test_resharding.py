"""From pieces of a tensor to another box of it, byte range by byte range."""

import random
from itertools import product

import pytest
import torch

from elastic_ext.checkpoints.memory.loading import Piece, Read, overlap
from elastic_ext.checkpoints.memory.part import Box, Place


def cuts(draw: random.Random, size: int) -> list[tuple[int, int]]:
    """(begin, size) of consecutive ranges; some may be empty."""
    ends = sorted(draw.randrange(size + 1) for _ in range(draw.randrange(3)))
    return [(begin, end - begin) for begin, end in zip([0, *ends], [*ends, size], strict=True)]


@pytest.mark.parametrize("seed", range(60))
def test_every_box_from_any_pieces(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(4)))
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    whole = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    files: dict[str, bytes] = {}
    pieces = []
    for number, ranges in enumerate(product(*(cuts(draw, size) for size in shape))):
        box = Box(tuple(begin for begin, _ in ranges), tuple(size for _, size in ranges))
        held = whole[tuple(slice(begin, begin + size) for begin, size in ranges)].contiguous()
        offset = 64 * draw.randrange(3)
        files[f"{number}"] = b"\xff" * offset + held.flatten().view(torch.uint8).numpy().tobytes()
        pieces.append(Piece(f"{number}", box, Place(offset, dtype, tuple(held.shape))))
    begin = tuple(draw.randrange(size) for size in shape)
    target_box = Box(begin, tuple(draw.randrange(1, size - at + 1) for size, at in zip(shape, begin, strict=True)))
    target = torch.zeros(target_box.size, dtype=dtype)
    reads = [Read(target, target_box, each, shared) for each in pieces if (shared := overlap(target_box, each.box)) is not None]
    for read in reads:
        file, first, last = read.range
        assert last <= len(files[file])
        read.copy(torch.frombuffer(bytearray(files[file][first:last]), dtype=torch.uint8))
    expected = whole[tuple(slice(at, at + size) for at, size in zip(target_box.begin, target_box.size, strict=True))]
    assert torch.equal(target, expected)
    assert sum(torch.Size(read.box.size).numel() for read in reads) == target.numel()


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Box((), ()), Box((), ()), Box((), ())),
        (Box((0,), (4,)), Box((2,), (4,)), Box((2,), (2,))),
        (Box((0,), (2,)), Box((2,), (4,)), None),
        (Box((0, 0), (3, 3)), Box((1, 5), (1, 1)), None),
        (Box((0,), (0,)), Box((0,), (4,)), None),
    ],
)
def test_overlaps(one, other, both):
    assert overlap(one, other) == overlap(other, one) == both
