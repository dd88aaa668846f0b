"""Register of our keys and records in the job's store, which is the store of torch's c10d rendezvous.

`ext_c10d` uses this store over several nodes. The store lives as long as the process that hosts it, usually the first agent.
Torch keeps its own rendezvous state in it, under `torch.rendezvous.RUN_ID`, and gives each of its rounds a part of it.

In the part of each round:

    elastic_ext.round               a `PublishedRound`                          rank 0 -> all nodes

In the store itself:

    elastic_ext.round.RUN_ID        number of the last round                    counted by rank 0 of each round
    elastic_ext.launch.RUN_ID       name of this launch of the job              first rank 0 -> every rank 0

Under `elastic_ext/RUN_ID/`, where R is a rank and N a round number:

    first                           id of the node that came first              that node -> all; another id: another store
    host                            id of the node that hosts the store         that node -> who judges; absent: none does
    agents                          number of agents that have come             counted by each agent
    gone/A                          "", once the A-th agent has left            that agent -> the host
    orders                          number of reports so far                    counted by each node that reports
    ledger                          the job's ledger                            who judges -> all
    ledger.before                   ledger of an earlier agent's `ledger_file`  the first node that has one -> all
    stopped                         the verdict that ended the job              who judges -> all
    refused/HOST                    why HOST may not come back yet              who judges -> HOST
    late_joins                      a `LateJoins`                               who joins late, all who keep time -> who comes
    N/report/R                      a `NodeReport`                              rank R -> who judges
    N/judge                         id of the node that judges round N          the node that claims it -> all
    N/verdict/R                     the verdict on round N                      who judges -> rank R
    N/offer/R                       what rank R could load from its own disk    rank R -> rank 0 (`checkpoints.choice`)
    N/choice                        what all nodes resume from                  rank 0 -> all (`checkpoints.choice`)

A wait that ends without an answer leaves "-" in the unset keys (`store_calls.NOTHING`). Ledgers, verdicts and the report within
a `NodeReport` are records of `failures.ledger`, with their own schema. The store has no authentication: readers must survive any
value.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ext.base.records import Count, Name, Port

SCHEMA = 1  # of the records below

ROUND = "elastic_ext.round"
FIRST = "first"
HOST = "host"
AGENTS = "agents"
ORDERS = "orders"
LEDGER = "ledger"
LEDGER_BEFORE = "ledger.before"
STOPPED = "stopped"
LATE_JOINS = "late_joins"


@dataclass(frozen=True)
class PublishedRound:
    """The address of a round's store, the number of the round, and the name of this launch of the job."""

    addr: Name
    port: Port
    round: Count
    launch: str


@dataclass(frozen=True)
class NodeReport:
    """A node's report on a round. order: the store counts reports as it receives them.

    report: a record of `failures.ledger`; "" if nothing has failed on this node.
    """

    node: Name
    order: int
    report: str


@dataclass(frozen=True)
class LateJoin:
    """With this round, this host joined a job that was under way."""

    host: Name
    round: Count


@dataclass(frozen=True)
class LateRefusal:
    """This host may not come back yet, because of its join with this round. reason: for people."""

    host: Name
    round: Count
    reason: str


@dataclass(frozen=True)
class LateJoins:
    """The late joins of the last hour, and the refusals that they led to, of all hosts: a store cannot list keys."""

    joins: tuple[LateJoin, ...] = ()
    refused: tuple[LateRefusal, ...] = ()


def round_number(run_id: str) -> str:
    return f"elastic_ext.round.{run_id}"


def launch(run_id: str) -> str:
    return f"elastic_ext.launch.{run_id}"


def folder(run_id: str) -> str:
    """Return the prefix of all the keys below."""
    return f"elastic_ext/{run_id}/"


def gone(agent: int) -> str:
    return f"gone/{agent}"


def refused(host: str) -> str:
    return f"refused/{host}"


def report(round_: int, rank: int) -> str:
    return f"{round_}/report/{rank}"


def judge(round_: int) -> str:
    return f"{round_}/judge"


def verdict(round_: int, rank: int) -> str:
    return f"{round_}/verdict/{rank}"


def offer(round_: int, rank: int) -> str:
    return f"{round_}/offer/{rank}"


def choice(round_: int) -> str:
    return f"{round_}/choice"
