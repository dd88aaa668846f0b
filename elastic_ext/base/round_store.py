"""Where the agents and workers of a round tell each other what torch's own keys do not: a part of the round's store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

ANSWER = timedelta(seconds=10)  # that the store has to answer
PREFIX = "elastic_ext"


def connect(host: str, port: int) -> Any:
    """A torch Store. Raises RuntimeError or ValueError when the round's store does not answer."""
    from torch.distributed import PrefixStore, TCPStore  # not before a worker asks: this is imported by what needs no torch

    return PrefixStore(PREFIX, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=ANSWER))
