"""The rendezvous alone, under an agent that is not ours: torch's LocalElasticAgent, a project's own, or a loop.

It forms rounds, and that is all: the next one starts when a node calls `next_rendezvous` again, is lost, or comes. There is one
warning, which is also how to see that torch's launcher has not built our agent: some day, or patched, it may not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch.distributed.elastic.rendezvous import RendezvousClosedError

from elastic_ext.base.printable import printable
from elastic_ext.failures.ledger import JobStopped

logger = logging.getLogger(__name__)


class Handler(Protocol):
    """attached: our agent has taken it. round: the last one; 0: there was none."""

    attached: bool
    round: int


def note(handler: Handler) -> None:
    """Before each round; warns before the first."""
    if not handler.attached and handler.round == 0:
        logger.warning(
            "elastic_ext: another agent than elastic_ext's uses this rendezvous: it forms rounds, but there are no verdicts, no "
            "job-wide budget, no choice of a checkpoint, no warm standbys, no hang detection, no metrics; if you use torchrun, "
            "its launcher is patched or newer than elastic_ext knows: `python -m elastic_ext.agent` takes the same options"
        )


@contextmanager
def closed_by_verdict(handler: Handler) -> Iterator[None]:
    """Another agent knows of no verdicts: to it a job that one has ended is closed."""
    try:
        yield
    except JobStopped as stopped:
        if handler.attached:
            raise
        raise RendezvousClosedError(f"the job is over: {printable(str(stopped))}") from stopped
