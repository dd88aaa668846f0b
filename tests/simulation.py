"""Jobs in virtual time: real participants on the embedded store's keyspace, in this process, without threads, gRPC or waits.

One heap of events drives everything; a seed decides the delays, and nothing else what comes first. While a node is in a call, the
events of the others run (`World.pass_time`), so something may happen between any two calls of one task. Calls that run inside
one another this way end in the reverse order: an inner one that takes long holds up the outer ones, like a slow network.

    World     the clock, the heap, the store
    Lane      what one thread of a process does, one task after the other; the interface of `Dispatcher`
    Client    an EtcdClient whose calls go to the keyspace, and to which faults can be given
    Node      a process with a Participant
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from elastic_ext.base.settings import Settings
from elastic_ext.embedded.keyspace import Change, Keyspace, Refused
from elastic_ext.embedded.service import TICK_S, Watches
from elastic_ext.etcd import Batch, Compacted, EtcdError, Event, LeaseSession, Snapshot, SnapshotWatch, Unavailable, Watch, errors
from elastic_ext.etcd.errors import classify, short_text
from elastic_ext.etcd.lease import plan
from elastic_ext.etcd.messages import etcdrpc
from elastic_ext.etcd.values import Key
from elastic_ext.rendezvous.judging import AgentPolicy
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.place import Participant
from elastic_ext.rendezvous.round_part import EtcdRound
from elastic_ext.rendezvous.round_records import Header, RecordReader
from elastic_ext.rendezvous.round_records import Node as Record
from elastic_ext.rendezvous.rounds import Limits
from elastic_ext.rendezvous.tasks import NodeConfig, TaskRunner
from tests import etcd_client
from tests.participants import part_of

T = TypeVar("T")
Action = Callable[[], object]

KEYS = JobKeys("job")
READER = RecordReader(lambda fault: None)
BEGAN_AT = 1000.0  # nothing may take the first moments for "never"
DELAY_S = 0.005  # at most: until a thread gets its time, half of a call, news of a watch
SLOW_S = 0.3  # and a few take up to that long
SLOW_SHARE = 0.03
LIMIT_S = 120.0


class World:
    """The clock, the heap of events, and the store.

    Attributes:
        now: seconds.
        lane: the one whose task runs now; None between tasks.
        observers: called with each change of a key.
        clients: of processes that live.
    """

    def __init__(self, seed: int = 0, revision: int = 1) -> None:
        self.random = random.Random(seed)
        self.now = BEGAN_AT
        self.lane: Lane | None = None
        self.observers: list[Callable[[Change], object]] = []
        self.clients: list[Client] = []
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self.set_up_store(revision)
        self._end_leases()

    # The store.

    def set_up_store(self, revision: int = 1, store: Keyspace | None = None) -> None:
        """Begin with an empty store at this revision, or with this one, in place of the one before."""
        self.store = store or Keyspace()
        if store is None:
            self.store.revision = self.store.compacted = revision
        self._announced = self.store.revision
        for client in self.clients:
            client.watches.broke()

    def compact(self) -> None:
        """Forget all of the history; watches that have been cut off by now find it gone."""
        self.store.compact(self.store.revision)

    def _end_leases(self) -> None:
        self.store.expire(self.now)
        self.announce()
        self.at(self.now + TICK_S, self._end_leases)

    def announce(self) -> None:
        """Show what has changed to the observers, and send it to the watches."""
        if self.store.revision != self._announced:
            changes = list(self.store.since(self._announced + 1))
            self._announced = self.store.revision
            for observer in self.observers:
                for change in changes:
                    observer(change)
            for client in self.clients:
                client.watches.wake()

    @property
    def history(self) -> list[Event]:
        """All that was written since the last compaction."""
        return [Event.parse(change.event) for change in self.store.since(self.store.compacted + 1)]

    # The clock.

    def time(self) -> float:
        """Return the time; after a call without an answer it is later for the lane that has waited."""
        return max(self.now, self.lane.free_at) if self.lane is not None else self.now

    def delay(self) -> float:
        return self.random.random() * (SLOW_S if self.random.random() < SLOW_SHARE else DELAY_S)

    def at(self, at: float, action: Action) -> None:
        heapq.heappush(self._heap, (at, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def step(self) -> None:
        """Run the next event."""
        at, _, action = heapq.heappop(self._heap)
        self.now = max(self.now, at)
        lane, self.lane = self.lane, None
        try:
            action()
        finally:
            self.lane = lane

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap[0][0] <= end:
            self.step()
        self.now = max(self.now, end)

    def until(self, holds: Callable[[], T], limit_s: float = LIMIT_S) -> T:
        """Run until this is true, and return it."""
        end = self.now + limit_s
        while not (found := holds()):
            assert self.now < end, f"not within {limit_s:g} s of the simulation; there is:\n{self}"
            self.step()
        return found

    def pass_time(self, seconds: float) -> None:
        """Let the others go on while the present lane is in a call. Raises Killed."""
        lane = self.lane
        self.run(seconds)
        if lane is not None:
            while lane.process.frozen and not lane.process.dead:
                self.step()
            if lane.process.dead:
                raise Killed

    def __str__(self) -> str:
        everything = etcdrpc().RangeRequest(key=b"\0", range_end=b"\0")
        return "\n".join(f"{kv.key.decode()} {kv.value.decode()}" for kv in self.store.range(everything).kvs)


class Killed(BaseException):
    """Ends what a process was doing when it was killed."""


@dataclass(eq=False)
class Process:
    """frozen: it stands still. dead: it was killed."""

    frozen: bool = False
    dead: bool = False
    lanes: list[Lane] = field(default_factory=list)

    def thaw(self) -> None:
        self.frozen = False
        for lane in self.lanes:
            lane.go_on()


class Lane:
    """The tasks of one thread of a process, in order. For a participant it is the dispatcher.

    Attributes:
        free_at: it waits in vain for an answer until then.
    """

    def __init__(self, world: World, process: Process) -> None:
        self.process = process
        self.free_at = 0.0
        self._world = world
        self._tasks: deque[Action] = deque()
        self._busy = self._comes = False
        self._due: float | None = None
        process.lanes.append(self)

    def run(self, task: Action) -> None:
        """Run a task after those before it."""
        self._tasks.append(task)
        self.go_on()

    def go_on(self) -> None:
        if self._tasks and not self._busy and not self._comes:
            self._comes = True
            self._world.at(max(self._world.now + self._world.delay(), self.free_at), self._next)

    def _next(self) -> None:
        self._comes = False
        if self._busy or not self._tasks or self.process.frozen or self.process.dead:
            return
        if self.free_at <= self._world.now:
            task = self._tasks.popleft()
            self._busy, self._world.lane = True, self
            try:
                task()
            except Killed:
                pass
            finally:
                self._busy = False
        self.go_on()

    # The interface of `Dispatcher`.

    def now(self) -> float:
        return self._world.time()

    def post(self, runner: TaskRunner, task: Callable[[], None]) -> None:
        self.run(lambda: runner.run(task))

    def wake_at(self, runner: TaskRunner, at: float | None) -> None:
        if at is not None and at != self._due:
            self._world.at(at, lambda: self._wake(runner, at))
        self._due = at

    def _wake(self, runner: TaskRunner, at: float) -> None:
        if self._due == at:
            self._due = None
            self.post(runner, runner.on_timer)

    def run_at(self, runner: TaskRunner, at: float, task: Callable[[], None]) -> None:
        self._world.at(at, lambda: self.post(runner, task))

    def close(self, timeout_s: float = 0.0) -> None:
        pass


class Client(etcd_client.EtcdClient):
    """A client of the world's store.

    Attributes:
        reachable: the store, for this client. Watches stall meanwhile.
        lose_answers: of so many of its next writes.
    """

    def __init__(self, world: World, process: Process | None = None, timeout_s: float = 5.0) -> None:
        process = process or Process()  # not super().__init__: that makes gRPC's channels
        self._world, self.timeout_s = world, timeout_s
        self.reachable = True
        self.lose_answers = 0
        self._hooks: list[tuple[bool, str, Action]] = []
        self.renewer = Renewer(self, Lane(world, process), world)
        self.watches = Stream(self, Lane(world, process), world)
        world.clients.append(self)

    def now(self) -> float:
        return self._world.time()

    def before(self, part: str, action: Action) -> None:
        """Do this once, just before the next call whose name has this part is carried out. Its exceptions are the call's."""
        self._hooks.append((False, part, action))

    def after(self, part: str, action: Action) -> None:
        """Do this once, just after the next such call was carried out."""
        self._hooks.append((True, part, action))

    def _do(self, what: str, after: bool) -> None:
        for hook in [hook for hook in self._hooks if hook[0] is after and hook[1] in what]:
            self._hooks.remove(hook)
            hook[2]()
            self._world.pass_time(0.0)  # it may have killed or frozen this process

    def _send(self, what: str, send: Callable[[Any], T], writes: bool, timeout_s: float | None) -> T:
        world = self._world
        world.pass_time(world.delay())
        self._do(what, after=False)
        self._check_reachable(what, timeout_s)
        try:
            answer = send(Stubs(world))
        except Refused as refused:
            raise errors.fatal_error(classify(refused.code, str(refused), "the store"), what, None) from None
        world.announce()
        self._do(what, after=True)
        world.pass_time(world.delay())
        if writes and self.lose_answers:
            self.lose_answers -= 1
            self._no_answer(what, timeout_s, maybe_applied=True)
        self._check_reachable(what, timeout_s, maybe_applied=writes)
        return answer

    def _check_reachable(self, what: str, timeout_s: float | None, maybe_applied: bool = False) -> None:
        if not self.reachable:
            self._no_answer(what, timeout_s, maybe_applied)

    def _no_answer(self, what: str, timeout_s: float | None, maybe_applied: bool) -> None:
        """Let the call take all its time. The time passes for this lane only: what it does next comes later."""
        if (lane := self._world.lane) is not None:
            lane.free_at = self._world.time() + (timeout_s or self.timeout_s)
        raise Unavailable(f"{what}: no answer", maybe_applied, silent=True)

    def _ask(self, what: str, send: Callable[[Any], T], *, timeout_s: float | None, leader: bool = True) -> T:
        return self._send(what, send, False, timeout_s)

    def _race(self, what: str, send: Callable[[Any], T], *, timeout_s: float, beside_s: float) -> T:
        return self._send(what, send, False, timeout_s)

    def _write(self, what: str, send: Callable[[Any], T], *, timeout_s: float | None) -> T:
        return self._send(what, send, True, timeout_s)

    def watch_with_snapshot(self, prefix: Key, on_item: Callable[[], None] | None = None) -> SnapshotWatch:
        return SnapshotWatch(self, prefix, on_item, began_s=0.0)

    def close(self) -> None:
        self._world.clients.remove(self)


class Operator(Client):
    """A client outside the job, whose waits let the job go on."""

    def __init__(self, world: World) -> None:
        super().__init__(world)

    def watch_with_snapshot(self, prefix: Key, on_item: Callable[[], None] | None = None) -> SnapshotWatch:
        return Waiting(self._world, SnapshotWatch(self, prefix, on_item, began_s=0.0))  # type: ignore[return-value]


class Waiting:
    """A `SnapshotWatch` whose `get` waits in virtual time; where nothing comes, the test has failed."""

    def __init__(self, world: World, watch: SnapshotWatch) -> None:
        self._world, self._watch = world, watch

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *exc: object) -> None:
        self._watch.close()

    def get(self, timeout_s: float | None = None) -> Snapshot | Batch:
        return self._world.until(lambda: self._watch.get(0))


class Stubs:
    """etcd3's client with its stubs, as far as `EtcdClient` uses them."""

    timeout = metadata = None

    def __init__(self, world: World) -> None:
        self._store, self._now = world.store, world.now
        self.kvstub = self.leasestub = self
        self.Range: Any = lambda request, *_, **__: self._store.range(request)
        self.Txn: Any = lambda request, *_, **__: self._store.txn(request)
        self.LeaseTimeToLive: Any = lambda request, *_, **__: self._store.time_to_live(request, self._now)
        self.LeaseKeepAlive: Any = lambda requests, *_, **__: (self._store.keep_alive(each, self._now) for each in requests)

    def lease(self, ttl_s: int) -> Any:
        granted = self._store.grant(etcdrpc().LeaseGrantRequest(TTL=ttl_s), self._now)
        return SimpleNamespace(id=granted.ID, ttl=granted.TTL)

    def revoke_lease(self, lease_id: int) -> None:
        self._store.revoke(etcdrpc().LeaseRevokeRequest(ID=lease_id))


class Renewer:
    """`LeaseRenewer` in virtual time."""

    def __init__(self, client: Client, lane: Lane, world: World) -> None:
        self._client, self._lane, self._world = client, lane, world
        self._sessions: dict[int, LeaseSession] = {}
        self._wakes_at = 0.0

    def add(self, session: LeaseSession) -> None:
        self._sessions[session.lease_id] = session
        self._plan()

    def remove(self, session: LeaseSession) -> None:
        self._sessions.pop(session.lease_id, None)

    def _plan(self) -> None:
        wait_s = plan([session.state for session in self._sessions.values()], self._world.time()).wait_s
        if wait_s is not None:
            self._wakes_at = at = self._world.time() + wait_s
            self._world.at(at, lambda: self._lane.run(self._turn) if self._wakes_at == at else None)

    def _turn(self) -> None:
        began = self._world.time()
        for lease_id in plan([session.state for session in self._sessions.values()], began).due:
            session = self._sessions[lease_id]
            try:
                kept = self._client.lease_keep_alive([lease_id], timeout_s=session.ttl_s / 3)
            except EtcdError:
                session.retry_at(began + min(0.5, session.ttl_s / 6))
                continue
            if (ttl_s := kept.ttl_s[lease_id]) > 0:
                session.renewed(kept.sent_at, ttl_s)
            elif self._sessions.pop(lease_id, None) is not None:
                session.end("it has expired or was revoked")
        self._plan()


class Stream:
    """`WatchStream` in virtual time: it resumes each watch where it stood, on the store that is there then."""

    def __init__(self, client: Client, lane: Lane, world: World) -> None:
        self._client, self._lane, self._world = client, lane, world
        self._ids = itertools.count(1)
        self._watches: dict[int, Watch] = {}
        self._new: list[Watch] = []  # their creates are to be sent
        self._open: Watches | None = None
        self._comes = False

    def add(self, watch: Watch) -> None:
        watch.watch_id = next(self._ids)
        self._watches[watch.watch_id] = watch
        self._new.append(watch)
        self.wake()

    def remove(self, watch: Watch) -> None:
        if self._watches.pop(watch.watch_id, None) is not None and self._open is not None:
            rpc = etcdrpc()
            self._open.take(rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=watch.watch_id)))

    def broke(self) -> None:
        """Open the stream again."""
        self._open = None
        self.wake()

    def wake(self) -> None:
        """Deliver in a while what there is."""
        if not self._comes and self._watches and self._client.reachable:
            self._comes = True
            self._world.after(self._world.delay(), self._arrive)

    def _arrive(self) -> None:
        self._comes = False
        self._lane.run(self._deliver)

    def _deliver(self) -> None:
        if not self._client.reachable:
            return
        if self._open is None:
            self._open, self._new = Watches(self._world.store), list(self._watches.values())
        new, self._new = self._new, []
        for watch in new:
            if watch.watch_id in self._watches:
                self._open.take(watch.request())
        for response in self._open.due():
            if (watch := self._watches.get(response.watch_id)) is not None:
                self._take(watch, response)

    def _take(self, watch: Watch, response: Any) -> None:
        if response.canceled:
            self._end(watch, response.cancel_reason)
        elif not response.created:
            watch.take(response)
        elif response.header.revision < watch.next_revision - 1:
            self._end(watch, "the store was set up again")
        else:
            watch.began(response.header.revision)

    def _end(self, watch: Watch, reason: str) -> None:
        self.remove(watch)
        watch.end(Compacted(short_text(reason)))


class Node:
    """A process with a participant, and the faults that may befall it.

    Attributes:
        agent: the lane of its agent's thread.
        headers: all that it has known, in order.
    """

    def __init__(
        self, world: World, name: str, limits: Limits, ttl_s: int = 10, policy: AgentPolicy | None = None, **more: Any
    ) -> None:
        """more: of its NodeConfig."""
        self.world, self.name = world, name
        self.process = Process()
        self.client = Client(world, self.process)
        self.agent = Lane(world, self.process)
        self.lane = Lane(world, self.process)
        config = NodeConfig("job", name, limits, ttl_s, **{"host": name, **more})
        policy = policy or AgentPolicy(Settings(), lambda: None)
        self.participant = Participant(self.client, self.lane, config, self._changed, policy)  # type: ignore[arg-type]
        self.headers: list[Header] = []

    def _changed(self) -> None:
        if not self.headers or self.headers[-1] is not self.participant.header:
            self.headers.append(self.participant.header)
        self.agent.run(self.on_change)

    def on_change(self) -> None:
        """Act, as an agent does, on what the participant knows now."""

    @property
    def lives(self) -> bool:
        return not self.process.dead

    @property
    def part(self) -> EtcdRound:
        """Its part in the round that it is in."""
        return part_of(self.participant)

    @property
    def failure(self) -> Exception | None:
        return self.participant.failure

    @property
    def round(self) -> int:
        """The round that it is in; 0 while it waits."""
        return self.participant.joined[0].round if self.participant.joined is not None else 0

    def ready(self, after: int, **more: Any) -> None:
        """Wait for the next round after this one."""
        self.participant.ready(Record(after=after, workers=1, role="", address=self.name, port=1, **more))

    def join(self, after: int = 0) -> None:
        """Wait for the next round and be in it."""
        self.ready(after)
        self.world.until(lambda: self.round > after)

    def leave(self) -> None:
        self.participant.leave(-1.0)  # it would wait for another thread: not at all

    def kill(self) -> None:
        self.process.dead = True
        if self.client in self.world.clients:
            self.client.close()

    def freeze(self, seconds: float) -> None:
        """Let it stand still, from the next event on."""
        self.process.frozen = True
        self.world.after(seconds, self.process.thaw)

    def cut(self, seconds: float) -> None:
        """Take its way to the store."""
        self.client.reachable = False
        self.world.after(seconds, self.restore)

    def restore(self) -> None:
        self.client.reachable = True
        self.client.watches.broke()


def header_in(kv: Any) -> Header | None:
    """Return the header in a record of this key; None: it is none, or unreadable."""
    return READER.header(kv) if kv.key == KEYS.header.encode() else None


def stored(world: World) -> Header | None:
    """Return the header in the store; None: there is none."""
    kvs = world.store.range(etcdrpc().RangeRequest(key=KEYS.header.encode())).kvs
    return header_in(Event.parse(SimpleNamespace(type=0, kv=kvs[0])).kv) if kvs else None
