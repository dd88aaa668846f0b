"""The random generators of this process: python, numpy if it is loaded, torch on the CPU and on this rank's CUDA device.

One private name of torch is used: DataLoader._get_iterator, which torchdata has too, in `restore_after_iter`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

Generators = Mapping[str, Any]


def take() -> Generators:
    """Return the state of all generators that training may draw from."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Generators) -> None:
    """Put a saved state in place."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def restore_after_iter(loader: Any, state: Generators) -> None:
    """Restore it again when the loader's next iterator is made: that draws a seed, which was drawn before the save already."""
    make = getattr(loader, "_get_iterator", None)
    if make is None:
        return

    def once() -> object:
        del loader._get_iterator  # uncovers the class's own
        iterator: object = make()
        restore(state)
        return iterator

    loader._get_iterator = once


def seed(*parts: object) -> None:
    """Seed all generators, for a rank without a saved state: differently for different parts, and the same on every machine."""
    number = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")  # numpy takes 32 bits
    random.seed(number)
    torch.manual_seed(number)  # CUDA too
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
