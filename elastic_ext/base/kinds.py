"""The vocabulary of a diagnosis: the kinds of failure, and the responses of a rule. Standard library only."""

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
NETWORK = "network"  # also the kind of a cascade if no other failure is known
HARDWARE = "hardware"
HANG = "hang"
CRASH = "crash"
CASCADE = "cascade"  # this worker failed because another one did
UNKNOWN = "unknown"

KINDS = (
    CODE, DATA, NUMERIC, USER_STOP, PREEMPTION, HOST_MEMORY, DEVICE_MEMORY, STORAGE, NETWORK, HARDWARE, HANG, CRASH, CASCADE,
    UNKNOWN,
)  # fmt: skip

Kind = Annotated[str, KINDS.__contains__]


class Response(Enum):
    """The answer of a rule. FOLLOW is for cascades only: the response of the root cause applies."""

    STOP = "stop"
    CONFIRM = "confirm"  # restart once; stop if it happens again without progress
    RESTART = "restart"  # charged to the budget
    RESTART_FREE = "restart_free"
    REPLACE_NODE = "replace_node"  # this node leaves, the others re-form
    REQUEUE = "requeue"  # the allocation ends: leave, so that the scheduler starts the job again
    FOLLOW = "follow"
