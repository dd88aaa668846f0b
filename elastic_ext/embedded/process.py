"""The process of an embedded store, beside the first agent of its host.

    python -m elastic_ext.embedded.process < plan    (see `plan`; it writes a line once agents can connect)

It listens where `--rdzv-endpoint` says, and for the agents of its host on a Unix socket of an abstract name, which is also the
lock: one store for each port of a network namespace. `decide` says when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass

import grpc  # type: ignore[import-untyped, unused-ignore]
import grpc.aio  # type: ignore[import-untyped, unused-ignore]

from elastic_ext.base import open_files
from elastic_ext.base.helper_process import ACCEPT_AGAIN_S, BACKLOG, BUSY, UP, Agents
from elastic_ext.base.records import RecordError
from elastic_ext.embedded.keyspace import Keyspace
from elastic_ext.embedded.plan import StorePlan, socket_of
from elastic_ext.embedded.service import OPTIONS, Service
from elastic_ext.embedded.snapshot import SnapshotFile
from elastic_ext.embedded.strangers import LOOK_S, Strangers
from elastic_ext.own_etcd.decisions import Lifetime
from elastic_ext.rendezvous.keys import ROOT, JobKeys
from elastic_ext.rendezvous.round_records import Header, decode

FIRST_AGENT_S = 30.0  # an agent that has started a store connects as soon as that listens
OVER_S = 1.0  # after the last node has left a job that is over: for one whose connection has just broken
LONELY_S = 60.0  # without a node: an agent that was killed may be started again, and finds its job
SIGNALLED_S = 10.0  # after a signal, as a container or a step of Slurm is: for agents of other hosts, which end at the same time


@dataclass(frozen=True)
class StoreSituation:
    """What a store knows. Times are monotonic seconds."""

    started: float  # since when it runs
    streams: int  # number of agents, on any host, that watch keys: those in a job do
    nodes: int  # number of nodes with a record. One that has left does not count; one that is cut off does
    agents: int  # number of agents of this host that are connected
    had_agents: bool  # there has been one
    orderly: bool  # the last agent of this host has left on its own, and was not killed
    over: bool  # there is a job, and all jobs here have ended
    quiet: float | None  # since when there is no stream; None: there is one
    signalled: float | None = None  # since when a signal has asked it to end; None: it has not


def decide(seen: StoreSituation, now: float) -> Lifetime:
    """Return whether the store ends. While a node is in a job it never does, unless a signal ends it."""
    limits: list[tuple[float, str]] = []
    if seen.signalled is not None:
        limits.append((seen.signalled + SIGNALLED_S, "a signal"))
    if seen.quiet is not None and not seen.agents:
        if not seen.had_agents:
            limits.append((seen.started + FIRST_AGENT_S, "no agent has come"))
        elif seen.over or (not seen.nodes and (seen.orderly or seen.signalled is not None)):
            limits.append((seen.quiet + OVER_S, "the job is over" if seen.over else "all have left"))
        else:
            limits.append((seen.quiet + LONELY_S, "all agents are gone"))
    return Lifetime.until_first(limits, now, "nodes are in the job")


STOP_S = 0.2  # at the end, for answers on their way
START_S = 30  # until it serves: a disk that hangs must not keep the port


class Process:
    def __init__(self, plan: StorePlan, listener: socket.socket) -> None:
        """listener: for the agents of this host."""
        self._plan = plan
        self._keyspace = Keyspace()
        self._changed = asyncio.Event()
        self._agents = Agents(listener, "the embedded store", plan.job)
        self._polled = set[int]()  # descriptors of the agents' connections
        self._warnings: list[str] = []  # for the first agent
        self._snapshot: SnapshotFile | None = None
        if plan.ledger_file:
            self._snapshot = SnapshotFile(self._keyspace, plan.run_id, plan.ledger_file, self._warn)
            self._snapshot.restore(time.monotonic())
        self._strangers = Strangers(open_files.raised())
        self._service = Service(self._keyspace, self._changed.set, self._on_change, self._strangers.has_called)
        self._started = time.monotonic()
        self._quiet: float | None = self._started
        self._signalled: float | None = None

    async def run(self) -> None:
        """Serve until the end. Raises RuntimeError: the port is taken."""
        # Older gRPC does not know this bound: there strangers have the last descriptors, too, until the next look at them.
        bound = ("grpc.max_allowed_incoming_connections", self._strangers.bounds.total)
        server = grpc.aio.server(options=[*OPTIONS, bound])
        server.add_generic_rpc_handlers(tuple(self._service.handlers()))
        self._listen(server)
        await server.start()
        loop = asyncio.get_running_loop()
        self._poll(loop)
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(each, self._signal)
        for each in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's --signal goes to every process of a step
            signal.signal(each, signal.SIG_IGN)
        tasks = [asyncio.ensure_future(each) for each in (self._service.look_after_leases(), self._end_strangers())]
        if self._snapshot is not None:
            tasks.append(asyncio.ensure_future(self._snapshot.keep()))
        for task in tasks:
            task.add_done_callback(_end_with)
        signal.alarm(0)
        os.write(1, UP)
        _forget_output()
        try:
            while not (life := self._look()).ends:
                await self._wait(life)
        finally:
            for task in tasks:
                task.cancel()
            await server.stop(STOP_S)
            if self._snapshot is not None:
                await self._snapshot.end()

    def _listen(self, server: grpc.aio.Server) -> None:
        """Raises RuntimeError, OSError: the port is taken."""
        plan = self._plan
        family = socket.AF_INET6 if ":" in plan.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:  # gRPC does not say what is wrong
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((plan.host, plan.port))
            probe.listen(1)
        if plan.ca:
            pair = (plan.key.encode(), plan.cert.encode())
            credentials = grpc.ssl_server_credentials([pair], plan.ca.encode(), require_client_auth=True)
            bound = server.add_secure_port(plan.address, credentials)
        else:
            bound = server.add_insecure_port(plan.address)
        if not bound:  # gRPC before 1.60
            raise RuntimeError(f"cannot listen on {plan.address}")

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have what the agents of this host send taken in."""

        def serve(descriptor: int) -> None:
            self._agents.serve(descriptor)
            self._poll(loop)
            self._changed.set()

        now = set(self._agents.descriptors)
        for descriptor in self._polled - now:
            loop.remove_reader(descriptor)
        for descriptor in now - self._polled:
            loop.add_reader(descriptor, serve, descriptor)
        self._polled = now
        if self._agents.resting:
            loop.call_later(ACCEPT_AGAIN_S, self._poll, loop)

    def _on_change(self) -> None:
        if self._snapshot is not None:
            self._snapshot.look()
        if not self._service.streams:  # the last node's lease may have ended
            self._changed.set()

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        self._changed.set()

    async def _end_strangers(self) -> None:
        """End the connections of strangers, for as long as the store runs. Warn when they become too many."""
        crowded = False
        while True:
            await asyncio.sleep(LOOK_S)
            crowd = self._strangers.look(time.monotonic())
            if crowd and not crowded:
                self._warn(f"the job's store ends connections to port {self._plan.port}, members stay: {crowd}")
                crowded = True

    def _signal(self) -> None:
        self._signalled = self._signalled or time.monotonic()
        self._changed.set()

    def _look(self) -> Lifetime:
        now = time.monotonic()
        streams = self._service.streams
        self._quiet = None if streams else self._quiet or now
        agents = self._agents
        nodes, over = self._jobs()
        seen = StoreSituation(
            self._started, streams, nodes, agents.number, agents.had_agents, agents.orderly, over, self._quiet, self._signalled
        )
        life = decide(seen, now)
        if agents.rivals and not streams and not agents.number:
            return Lifetime(True, "another job needs the port")
        agents.refuse_rivals("the port of --rdzv-endpoint serves another job on this host: use another port, or wait")
        if agents.leaving and self._snapshot is not None:
            self._snapshot.write_now()  # their container may end with them
        if agents.number or (streams and not over):
            agents.stay("others are in the job")
        if agents.introduced:
            for text in self._warnings:
                agents.say({"say": "warning", "text": text})
            self._warnings.clear()
        return life

    def _jobs(self) -> tuple[int, bool]:
        """Return the number of nodes in all jobs here, and whether there is a job and all have ended."""
        found = self._keyspace.under(ROOT)
        headers = [kv.value for kv in found if kv.key.endswith(_HEADER)]
        return sum(_NODES in kv.key for kv in found), bool(headers) and all(map(_has_ended, headers))

    async def _wait(self, life: Lifetime) -> None:
        limit = None if life.look_again is None else max(0.0, life.look_again - time.monotonic())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), limit)
        self._changed.clear()


_JOB = JobKeys("")
_HEADER, _NODES = (key.removeprefix(_JOB.prefix[:-1]).encode() for key in (_JOB.header, _JOB.nodes))


def _has_ended(value: bytes) -> bool:
    try:
        return decode(Header, value, "the job's state").ended
    except RecordError:
        return False


def _end_with(task: asyncio.Task[None]) -> None:
    """End the process if a task of its own has failed: an agent starts another one. Leases that never expire would be worse."""
    if not task.cancelled():
        os._exit(1)


def _forget_output() -> None:
    """The agent's output is not this process's to keep open."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def main() -> int:
    """Run one store; 0 unless it cannot."""
    plan = StorePlan(**json.loads(sys.stdin.buffer.read()))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    signal.alarm(START_S)
    try:
        listener.bind(socket_of(plan.port))
        listener.listen(BACKLOG)  # at once: an agent that comes meanwhile waits, and starts no other store
    except OSError:
        os.write(1, BUSY)
        return 0
    try:
        asyncio.run(Process(plan, listener).run())
    except OSError as error:
        taken = "; another program of this host has the port" if error.errno == errno.EADDRINUSE else ""
        os.write(1, f"port {plan.port}: {error.strerror}{taken}\n".encode())
        return 1
    except RuntimeError as error:
        os.write(1, f"{plan.address}: {' '.join(str(error).split())[:300]}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # nothing is left to do, and no thread of gRPC may hold it up
