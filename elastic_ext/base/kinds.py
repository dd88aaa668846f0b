"""The words of a diagnosis: kinds of failure and what a rule may decide. Standard library only."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

CODE = "code"
DATA = "data"
NUMERIC = "numeric"
USER_STOP = "user_stop"
PREEMPTION = "preemption"
HOST_MEMORY = "host_memory"
DEVICE_MEMORY = "device_memory"
STORAGE = "storage"
NETWORK = "network"  # also what a cascade is when nothing else has failed
HARDWARE = "hardware"
HANG = "hang"
CRASH = "crash"
CASCADE = "cascade"  # this worker died of another one's death
UNKNOWN = "unknown"

KINDS = (
    CODE, DATA, NUMERIC, USER_STOP, PREEMPTION, HOST_MEMORY, DEVICE_MEMORY, STORAGE, NETWORK, HARDWARE, HANG, CRASH, CASCADE,
    UNKNOWN,
)  # fmt: skip

Kind = Annotated[str, KINDS.__contains__]


class Response(Enum):
    """What a rule decides. FOLLOW is for cascades only: whatever the root cause asks for."""

    STOP = "stop"
    CONFIRM = "confirm"  # one restart, then stop if it comes back with no progress
    RESTART = "restart"  # charged to the budget
    RESTART_FREE = "restart_free"
    REPLACE_NODE = "replace_node"  # this node leaves, the others re-form
    REQUEUE = "requeue"  # the allocation is going away: leave, and have the scheduler start the job again
    FOLLOW = "follow"
