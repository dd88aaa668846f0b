"""The rendezvous under an agent that is not ours: torch's LocalElasticAgent, a project's own, or a loop.

It only forms rounds: the next one starts when a node calls `next_rendezvous` again, is lost, or joins. One warning says so. It
also appears when torch's launcher does not build our agent because it is patched or newer than this package.
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
    """attached: our agent uses it. round: number of the last round; 0 before the first."""

    attached: bool
    round: int


def warn_once(handler: Handler) -> None:
    """Warn before the first round. The handler calls it before each round."""
    if not handler.attached and handler.round == 0:
        logger.warning(
            "elastic_ext: this rendezvous is used by an agent other than elastic_ext's: it forms rounds, but there are no "
            "verdicts, no job-wide budget, no choice of a checkpoint, no warm standbys, no hang detection and no metrics; if you "
            "use torchrun, its launcher is patched or newer than elastic_ext supports: run `python -m elastic_ext.agent`, which "
            "takes the same options"
        )


@contextmanager
def closed_by_verdict(handler: Handler) -> Iterator[None]:
    """Present a job ended by a verdict as closed: another agent does not know verdicts."""
    try:
        yield
    except JobStopped as stopped:
        if handler.attached:
            raise
        raise RendezvousClosedError(f"the job is over: {printable(str(stopped))}") from stopped
