"""Many agents of one job on etcd in one process.

    python etcd_agents.py '{"endpoint": "127.0.0.1:2379", "run_id": "r", "first": 0, "count": 64, "min": 127, "max": 128, ...}'

agent_processes.py states the protocol. The commands:

    {"do": "form"}                          all join round 1
    {"do": "lose", "node": 7, "round": 2}   node 7 leaves; the others learn it from etcd and join round 2. The process that has
                                            node 7 adds `began`: when it started to leave

Each agent is a real `Participant`. No agent has workers, so stopping them costs no time.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any

from elastic_ext.base.settings import Settings
from elastic_ext.etcd import EtcdClient, endpoints
from elastic_ext.rendezvous.judging import AgentPolicy
from elastic_ext.rendezvous.place import Participant
from elastic_ext.rendezvous.round_records import Node, State
from elastic_ext.rendezvous.rounds import Limits
from elastic_ext.rendezvous.tasks import Dispatcher, NodeConfig

CALL_TIMEOUT_S = 60.0  # thousands of agents share two cores, so a slow call is not a lost one


class Agent:
    """Stands for the supervisor: joins a round, and the next one when that round breaks."""

    def __init__(self, agents: Agents, client: EtcdClient, dispatcher: Dispatcher, number: int) -> None:
        job = agents.job
        limits = Limits(job["min"], job["max"], last_call_s=5.0)
        self._agents = agents
        self._number = number
        self._after = -1
        self.round = 0
        config = NodeConfig(job["run_id"], f"node-{number:05d}", limits, job["ttl"])
        policy = AgentPolicy(Settings(), lambda: None)
        self.participant = Participant(client, dispatcher, config, self._changed, policy)

    def ready(self, after: int) -> None:
        if after > self._after:
            self._after = after
            self.participant.ready(Node(after, workers=8, role="default", address=f"host-{self._number:05d}", port=40000))

    def _changed(self) -> None:
        joined, header = self.participant.joined, self.participant.header
        if self.participant.failure is not None:
            self._agents.fail(self.participant.failure)
        elif joined is not None and joined[0].round > self.round:
            self.round = joined[0].round
            self._agents.joined(self.round)
        elif header.state is State.BROKEN and header.round == self.round:
            self.ready(header.round)


class Agents:
    """The agents of this process, and which of them have joined."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self._condition = threading.Condition()
        self._joined: dict[int, int] = {}  # agents here that have joined a round, by its number
        self._at = 0.0
        self._failure: str | None = None
        if job["own_connections"]:
            # By default gRPC shares one connection among all channels of a process to one server.
            endpoints.CHANNEL_OPTIONS += (("grpc.use_local_subchannel_pool", 1),)
        clients = [EtcdClient(job["endpoint"], timeout_s=CALL_TIMEOUT_S) for _ in range(min(job["clients"], job["count"]))]
        dispatchers = [Dispatcher() for _ in range(min(job["loops"], job["count"]))]
        for client in clients:
            client.status()  # connect before the clock starts, as an agent does when it checks its settings
        numbers = range(job["first"], job["first"] + job["count"])
        self.agents = {n: Agent(self, clients[n % len(clients)], dispatchers[n % len(dispatchers)], n) for n in numbers}

    def joined(self, round_: int) -> None:
        with self._condition:
            self._joined[round_] = self._joined.get(round_, 0) + 1
            self._at = time.monotonic()
            self._condition.notify()

    def fail(self, failure: Exception) -> None:
        with self._condition:
            self._failure = str(failure)
            self._condition.notify()

    def form(self) -> dict[str, Any]:
        for agent in self.agents.values():
            agent.ready(0)
        return self._await(1, len(self.agents))

    def lose(self, node: int, round_: int) -> dict[str, Any]:
        """Have a node leave and await the others; the answer holds `began` if the node was here."""
        began = time.monotonic()
        lost = self.agents.pop(node, None)
        if lost is not None:
            lost.participant.leave(self.job["timeout"])
        answer = self._await(round_, len(self.agents))
        return {**answer, "began": began} if lost is not None else answer

    def _await(self, round_: int, count: int) -> dict[str, Any]:
        with self._condition:
            self._condition.wait_for(lambda: self._failure or self._joined.get(round_, 0) == count, self.job["timeout"])
            if self._failure is not None:
                return {"error": self._failure}
            found = self._joined.get(round_, 0)
            if found != count:
                return {"error": f"{found} of {count} agents joined round {round_} in {self.job['timeout']:g} s"}
            return {"at": self._at}


def main() -> None:
    logging.basicConfig(level=logging.ERROR)  # thousands of agents log; the answers report failures
    agents = Agents(json.loads(sys.argv[1]))
    print(json.dumps({"up": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "form":
            answer = agents.form()
        elif command["do"] == "lose":
            answer = agents.lose(command["node"], command["round"])
        print(json.dumps({**answer, "cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    main()
