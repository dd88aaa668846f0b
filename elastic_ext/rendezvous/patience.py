"""How long a node waits: for a round, for lost nodes, for a store that is lost. From the settings, and where it runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.elastic import rendezvous

from elastic_ext.base.settings import Settings, torch_number
from elastic_ext.failures import judgement, slurm
from elastic_ext.rendezvous.contract import JOIN_TIMEOUT_S
from elastic_ext.rendezvous.rounds import Limits


@dataclass(frozen=True)
class Patience:
    """How long a node waits for a round (`join_timeout`), and for how many nodes."""

    timeout_s: float
    min_nodes: int
    max_nodes: int
    # For the job's own store, once the lease has expired without an answer; then it counts as lost, with its host.
    silent_s: float = math.inf

    @property
    def over(self) -> str:
        """What the node says when it leaves."""
        return (
            f"no round was formed in {self.timeout_s:g} s (join_timeout), --nnodes={self.min_nodes}:{self.max_nodes}: too few "
            "nodes came, so this one leaves; start it again when more are there, or raise join_timeout"
        )

    @property
    def store_lost(self) -> str:
        """What the node says when it leaves because the job's own store is lost."""
        return (
            f"the job's own store has not answered for {self.silent_s:g} s since this node's lease expired (rejoin_timeout): it "
            "is lost with its host, which cannot come back in a step of Slurm, or this node is cut off for longer than the job "
            "waits for it, so this node leaves; start the job again unless other nodes go on"
        )


# How long the first round waits for more nodes, up to the maximum, after the last one came, without torch's `last_call_timeout`.
# Half of torch's 30 s: nodes that a scheduler starts together come within some seconds, and later ones join the running job.
LAST_CALL_S = 15.0
REJOIN_MARGIN_S = 5.0  # for the agent of a node that was only cut off: to hear of it, and to register again


def rejoin_s(settings: Settings, environ: Mapping[str, str]) -> float | None:
    """Return how many seconds the job waits for lost nodes; None: as long as each node waits for a round (`join_timeout`).

    In a step of Slurm no agent is started again, so only a node that was cut off can come.
    """
    if settings.rejoin_timeout is None and slurm.in_step(environ):
        return settings.lease_ttl + REJOIN_MARGIN_S
    return settings.rejoin_timeout


def limits_of(params: rendezvous.RendezvousParameters, settings: Settings, environ: Mapping[str, str]) -> Limits:
    """Return this node's limits for the rounds of a job that it leads.

    Invariant: the last call is over before a node that waits for a round leaves.
    """
    last_call_s = torch_number(params.config, "last_call_timeout", LAST_CALL_S)
    last_call_s = min(last_call_s, torch_number(params.config, "join_timeout", JOIN_TIMEOUT_S) / 2)
    return Limits(params.min_nodes, params.max_nodes, last_call_s, judgement.SETTLE_S, rejoin_s(settings, environ))


def silent_s(settings: Settings, environ: Mapping[str, str], on_one_host: bool) -> float:
    """Return `Patience.silent_s`. on_one_host: the job has brought its store, on one of its hosts.

    Elsewhere than in a step of Slurm that may come back, and so may a store that is not the job's. One on several hosts outlives
    the loss of one: where it is silent this node is cut off, more likely, and the job goes on meanwhile.

    Invariant: a node that is only cut off does not leave while the others wait for it; they do so from the end of its lease on.
    """
    rejoin = rejoin_s(settings, environ)
    return rejoin if rejoin is not None and on_one_host and slurm.in_step(environ) else math.inf
