"""The register of our keys in a round's store, and the connection to that store.

A round's store is a TCPStore in the agent of group rank 0. It lives for one round. Torch's process groups keep their own keys in
it, and torch's agent keeps its keys under `elastic_ext/torchelastic/`. All our keys begin with `elastic_ext/`:

    key                         value                                       written by              read by
    save/N/acks                 number of agents whose workers see the      agents                  agents
                                N-th save on demand
    save/N/go                   "1", once all agents have acknowledged it   the last agent          worker of rank 0
    save/N/at                   "BOUNDARY NUMBER": the step boundary of     worker of rank 0        workers
                                the save, and the last request it answers
    late/STEP/NODE              a stragglers.decide.NodeSample, after       each agent; deleted     agent of group rank 0
                                this step, by group rank of the node        by it two samples on
    clock/STEP/NODE/N           "": the N-th question what time it is       agent of group rank 0   that node's agent
                                there; "none": there will be no question
    clock/STEP/NODE/N/answer    the answer, as monotonic microseconds; both that node's agent       agent of group rank 0
                                are deleted by the asker
    health/RESTARTS/N/RANK      "", once RANK has reached its N-th barrier  that worker             workers
    health/RESTARTS/N/count     number of ranks that have reached it        workers                 workers
    health/RESTARTS/N/all       "", once all have                           the last worker         workers
    saves/asked                 number of the last question: read your      agent of group rank 0   agents
                                journals of saves again
    saves/orders/N              a record.orders.Orders that goes with the   agent of group rank 0   agents
                                N-th question, if nodes save apart
    saves/posted                how many posts there were                   agents                  agent of group rank 0
    saves/posts/N               a record.watch.SavePost; deleted by its     agents                  agent of group rank 0
                                reader
    trouble/RANK                whether the agent of this group rank        that agent              agents
                                reaches etcd: "0" well, "1" in trouble,
                                "2" back; absent: well (`rendezvous.fence`)

A TCPStore has no authentication: anyone who can reach its port can write to it. Readers must survive any value.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol, cast

from elastic_ext.base import name_lookup

ANSWER = timedelta(seconds=10)  # the store must answer within this time
PREFIX = "elastic_ext"

# The keys below are relative to PREFIX; `connect` adds it.


def save_acks(number: int) -> str:
    return f"save/{number}/acks"


def save_go(number: int) -> str:
    return f"save/{number}/go"


def save_at(number: int) -> str:
    return f"save/{number}/at"


def late(step: int, node: int) -> str:
    return f"late/{step}/{node}"


def clock(step: int, node: int, number: int) -> str:
    return f"clock/{step}/{node}/{number}"


def clock_answer(step: int, node: int, number: int) -> str:
    return f"{clock(step, node, number)}/answer"


SAVES_ASKED, SAVES_POSTED = "saves/asked", "saves/posted"


def saves_orders(question: int) -> str:
    return f"saves/orders/{question}"


def saves_post(number: int) -> str:
    return f"saves/posts/{number}"


def trouble(rank: int) -> str:
    return f"trouble/{rank}"


def health(restarts: str, number: int) -> str:
    """Return the prefix of a health barrier. restarts: TORCHELASTIC_RESTART_COUNT, since stock torchrun reuses one store."""
    return f"health/{restarts}/{number}"


class Store(Protocol):
    """The part of a torch Store that this package uses; torch's own types are not checked."""

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def connect(host: str, port: int) -> Store:
    """Open a new connection to the round's store. Raises RuntimeError or ValueError if the store does not answer."""
    from torch.distributed import PrefixStore, TCPStore  # not at the top: processes without torch import this module

    with name_lookup.connecting(host):
        tcp = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=ANSWER)
    return cast(Store, PrefixStore(PREFIX, tcp))
