"""What the phases of a recovery take, in seconds. Pure.

Three sources: medians of this package's own benchmarks, on two cores without a GPU (`benchmarks/results`, a test compares them);
published figures for what only a cluster shows; and the limits that the product itself applies, asked of the code that applies
them. Each constant names its source. What has none is an argument.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from elastic_ext.checkpoints.memory import pace
from elastic_ext.hangs import detector
from elastic_ext.hangs.waits import WaitFor

# Of our benchmarks.
EXIT_S = 0.135  # restart.json, sigkill, warm: from the end of a worker until its agent starts the next one
LOST_S = 0.439  # node_loss.json, node: from the end of a node's processes until the others have stopped
SILENT_S = 7.987  # node_loss.json, link: the same for a node that no longer answers; lease_ttl is 10 s there
WARM_START_S = 0.32  # warm/node_loss.json, node: from the round to the first collective
REJOIN_S_NODE = 0.93e-3  # rendezvous.json, re-join at 4,096: seconds for each node, with its client and the server on two cores
VERDICT_S = 0.086  # verdict.json: until all nodes have the verdict, once the reports are there
SAVE_STALL_S_BYTE = 0.035 / 500e6  # checkpoint_stall.json: what a save stalls a worker
COPY_BYTES_S = 12.1e9  # memory_tier.json, rates, 1,000 MB: out of the state into the buffer, for each worker
PEER_BYTES_S = 1.57e9  # the same: from agent to agent, for each node
BACK_BYTES_S = 4.1e9  # the same: from the buffer back into the state, for each worker
REQUESTS_S_NODE = 38.5 / 128  # steady_state.json: what an idle node asks of etcd at lease_ttl 10 s

# (ranks, seconds) until all process groups of a job are connected: at least 1.4 s at 32 to 1,024 ranks (NeMo-RL#3186, groups that
# shrink), and what Meta has measured with NCCL at 16,000 to 98,000 GPUs (arXiv 2602.00277, figure 2).
CONNECTS = ((32, 1.4), (1024, 2.0), (16_000, 17.0), (22_000, 30.0), (64_000, 100.0), (98_000, 200.0))
CONNECT_SHARE_LAZY = 24 / 265  # with NCCLX, which connects lazily (arXiv 2510.20171, 96,000 GPUs)

# (GPUs, seconds) from a failure until a job runs again that the scheduler starts as a whole (arXiv 2602.00277, figure 2).
COLD_STARTS = ((16_000, 200.0), (22_000, 300.0), (64_000, 600.0), (98_000, 900.0))


def along(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at this place: a power law between two points and after the last one; the first value before them."""
    if at <= points[0][0]:
        return points[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in itertools.pairwise(points) if at <= pair[1][0]), points[-2:])
    return y0 * math.exp(math.log(y1 / y0) / math.log(x1 / x0) * math.log(at / x0))


def connect_s(ranks: int) -> float:
    """Return how long the first collectives take to connect all ranks."""
    return along(CONNECTS, ranks)


def cold_start_s(gpus: int) -> float:
    """Return how long it takes until a job that is started again as a whole trains."""
    return along(COLD_STARTS, gpus)


def round_s(nodes: int) -> float:
    """Return how long the nodes take to form the next round; by fit beyond 4,096."""
    return REJOIN_S_NODE * nodes


def verdict_s(nodes: int, settle_s: float) -> float:
    """Return how long it takes from the end of a round until all nodes have the verdict.

    Each node writes one record, as for a round, so the same fit holds for them.
    """
    return settle_s + VERDICT_S + REJOIN_S_NODE * nodes


def hang_limit_s(step_s: float, ranks: int) -> float:
    """Return for how long a steady job may stand in a collective before it counts as a hang: `hangs.detector` decides."""
    steps = max(detector.STEADY_GAPS, 100)
    bucket = max(0, math.ceil(math.log2(max(step_s, 1e-3) * 1000)))
    status = detector.WorkerStatus(0, steps, 0.0, gaps=(*(0,) * bucket, steps), wait=WaitFor.QUEUED, world=ranks)
    return detector.wait_limit_s(status)


def copies(state_bytes: float, nodes: int, per_node: int, step_s: float, age_s: float = 0.0) -> tuple[int, float, float]:
    """Return every how many steps the state is copied to memory, what a copy stalls, and how long until it is on two nodes.

    age_s: for how long the job has not failed. Without any, the agent copies most often.
    """
    stall_s, commit_s = state_bytes / (nodes * per_node) / COPY_BYTES_S, state_bytes / nodes / PEER_BYTES_S
    every, _ = pace.choose(None, [pace.Timing(step_s, stall_s, commit_s, age_s=age_s)])
    return every, stall_s, commit_s
