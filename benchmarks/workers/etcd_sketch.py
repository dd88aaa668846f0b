"""A sketch of DESIGN.md's rendezvous, for rendezvous.py: the same messages as ours and nothing else.

    python etcd_sketch.py '{"endpoint": "127.0.0.1:2379", "run_id": "s", "first": 0, "count": 64, "size": 128, "ttl": 60, ...}'

agent_processes.py states the protocol. The command {"do": "form"}: all agents register, the leader numbers them, each gets its
rank.

It shows what plain gRPC in Python needs for "leased member keys, a leader that watches them, own-key watches, transactions of
128". That is the floor for ours, on the same machine in the same run:

- A process has one connection and one watch stream with all its watches. Calls are futures, at most `WINDOW` at once, which costs
  gRPC less than blocking threads.
- An agent has a watch on its own assignment key, its own lease, and its key under that lease. Its rank arrives on the watch.
- The leader is the process of agent 0, as if an election by create order had found it. It has one watch on the prefix of all
  members. Once all `size` are there, it sends one transaction after another with 128 assignments each.
- Values are as long as ours (a node, an assignment). The members' values are not parsed.

Ours does more: election and predecessor; the job's record and its settings; the header that everybody watches beside its own key
(with the state, the seal and the address of the round); transactions that compare; keep-alives, retries, deadlines, several
endpoints, tokens; losses and every later round.

`grouped` is the other way to read the sketch: one lease per process, whose members' keys go into transactions of 128. An agent
then costs one watch and two operations in transactions, and no call of its own.
"""

from __future__ import annotations

import functools
import json
import queue
import sys
import threading
import time
from typing import Any

import grpc

from elastic_ext.etcd.messages import etcdrpc
from elastic_ext.etcd.values import range_of_prefix
from elastic_ext.rendezvous.round_records import Assignment, Node, encode

WINDOW = 64  # calls at once; measured: each costs less CPU than with 8 or with all at once
OPS_PER_TXN = 128  # etcd's default limit
MEMBERS = 1 << 30  # ID of the leader's watch


class Sketch:
    """The agents of one process.

    It has more attributes than other classes: as a floor for the time it must be one flat object without layers.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._rpc = rpc = etcdrpc()
        self._prefix = f"/sketch/{job['run_id']}/"
        channel = grpc.insecure_channel(job["endpoint"], [("grpc.use_local_subchannel_pool", 1)])
        self._kv, self._lease, self._stream = rpc.KVStub(channel), rpc.LeaseStub(channel), rpc.WatchStub(channel)
        rpc.MaintenanceStub(channel).Status(rpc.StatusRequest())  # connect before the clock starts
        self._numbers = range(job["first"], job["first"] + job["count"])
        self._window = threading.Semaphore(WINDOW)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ready: dict[int, int] = {}  # agents that have only one of two: their lease, or 0 for their watch
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._done = threading.Event()
        self._at = 0.0

    def form(self) -> dict[str, Any]:
        call = self._stream.Watch(iter(self._requests.get, None))
        threading.Thread(target=self._follow, args=(call,), daemon=True).start()
        if 0 in self._numbers:
            start, end = range_of_prefix(self._prefix + "nodes/")
            self._watch(key=start, range_end=end, watch_id=MEMBERS)
        for number in self._numbers:
            self._watch(key=f"{self._prefix}assign/{number:05d}".encode(), watch_id=number + 1)
        if not self._job["grouped"]:
            for number in self._numbers:
                self._window.acquire()
                grant = self._lease.LeaseGrant.future(self._rpc.LeaseGrantRequest(TTL=self._job["ttl"]))
                grant.add_done_callback(functools.partial(self._granted, number))
        if not self._done.wait(self._job["timeout"]):
            return {"error": f"the sketch did not form in {self._job['timeout']:g} s"}
        return {"error": self._failure} if self._failure else {"at": self._at}

    def _watch(self, **create: Any) -> None:
        self._requests.put(self._rpc.WatchRequest(create_request=self._rpc.WatchCreateRequest(**create)))

    # An agent: it puts its key once it has its lease and its watch.

    def _granted(self, number: int, grant: Any) -> None:
        self._window.release()
        if self._succeeded(grant):
            self._has(number, grant.result().ID)

    def _has(self, number: int, lease_id: int) -> None:
        with self._lock:
            other = self._ready.pop(number, None)
            if other is None:
                self._ready[number] = lease_id
                return
        self._kv.Put.future(self._member(number, lease_id or other)).add_done_callback(self._succeeded)

    def _succeeded(self, call: Any) -> bool:
        error = call.exception()
        if error is not None:
            self._failure = str(error)
            self._done.set()
        return error is None

    def _member(self, number: int, lease_id: int) -> Any:
        node = Node(after=0, workers=8, role="default", address=f"host-{number:05d}", port=40000)
        return self._rpc.PutRequest(key=f"{self._prefix}nodes/{number:05d}".encode(), value=encode(node), lease=lease_id)

    def _put_all(self) -> None:
        lease_id = self._lease.LeaseGrant(self._rpc.LeaseGrantRequest(TTL=self._job["ttl"])).ID
        self._txns([self._member(number, lease_id) for number in self._numbers])

    # The leader.

    def _txns(self, puts: list[Any]) -> None:
        for at in range(0, len(puts), OPS_PER_TXN):
            ops = [self._rpc.RequestOp(request_put=put) for put in puts[at : at + OPS_PER_TXN]]
            self._kv.Txn(self._rpc.TxnRequest(success=ops))

    def _assign_all(self) -> None:
        self._txns([self._part(number) for number in range(self._job["size"])])

    def _part(self, number: int) -> Any:
        part = Assignment(1, number, 8 * number, 8 * number, 8 * self._job["size"], "00000000")
        return self._rpc.PutRequest(key=f"{self._prefix}assign/{number:05d}".encode(), value=encode(part))

    def _present(self) -> set[bytes]:
        """The members that registered before the leader's watch was there."""
        start, end = range_of_prefix(self._prefix + "nodes/")
        return {kv.key for kv in self._kv.Range(self._rpc.RangeRequest(key=start, range_end=end, keys_only=True)).kvs}

    # The thread of the watch stream.

    def _follow(self, call: Any) -> None:
        created = parts = 0
        members: set[bytes] = set()
        for response in call:
            if response.watch_id == MEMBERS:
                members |= self._present() if response.created else {event.kv.key for event in response.events}
                if len(members) == self._job["size"]:
                    threading.Thread(target=self._assign_all, daemon=True).start()
            elif response.created:
                created += 1
                if not self._job["grouped"]:
                    self._has(response.watch_id - 1, 0)
                elif created == len(self._numbers):
                    threading.Thread(target=self._put_all, daemon=True).start()
            else:
                json.loads(response.events[0].kv.value)
                parts += 1
                if parts == len(self._numbers):
                    self._at = time.monotonic()
                    self._done.set()


def main() -> None:
    sketch = Sketch(json.loads(sys.argv[1]))
    print(json.dumps({"up": True}), flush=True)
    for line in sys.stdin:
        answer = sketch.form() if json.loads(line)["do"] == "form" else {}
        print(json.dumps({**answer, "cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    main()
