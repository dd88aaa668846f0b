"""The random generators of this process: python, numpy if loaded, torch on the CPU and on this rank's CUDA device."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

Generators = Mapping[str, Any]


def take() -> Generators:
    """Return the state of all generators that training may draw from."""
    state: Generators = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state = {**state, "numpy": sys.modules["numpy"].random.get_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state = {**state, "cuda": torch.cuda.get_rng_state()}
    return state


def restore(state: Generators) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def restore_after_iter(loader: DataLoader, state: Generators) -> None:
    """Restore the state again after the loader makes its next iterator, whose seed was already drawn before the save.

    This uses one private name of torch, DataLoader._get_iterator, which torchdata also has.
    """
    make = getattr(loader, "_get_iterator", None)
    if make is None:
        return

    def once() -> object:
        del loader._get_iterator  # exposes the class's method again
        iterator: object = make()
        restore(state)
        return iterator

    loader._get_iterator = once


def seed(*parts: object) -> None:
    """Seed all generators of a rank without a saved state. The seed depends only on `parts`, not on the machine."""
    number = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")  # numpy takes 32 bits
    random.seed(number)
    torch.manual_seed(number)  # also seeds CUDA
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
