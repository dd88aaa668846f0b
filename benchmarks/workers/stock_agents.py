"""Many agents of one job on stock's c10d rendezvous in one process, with a thread each; or the host of its store.

    python stock_agents.py '{"host": true}'
    python stock_agents.py '{"host": false, "port": 29400, "run_id": "r", "count": 32, "min": 127, "max": 128, "timeout": 60}'

agent_processes.py states the protocol. The commands:

    {"do": "form"}                 each agent calls next_rendezvous(); the second time, all join again
    {"do": "poll", "interval": s}  from now on each agent calls num_nodes_waiting(), as torchrun's monitor loop does
    {"do": "count"}                adds what the agents have asked of the store since their start: gets, sets, conflicts, and the
                                   bytes of the states in these
"""

from __future__ import annotations

import collections
import json
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

STORE_TIMEOUT = timedelta(seconds=600)  # a busy store is slow, not gone


class CountingBackend(C10dRendezvousBackend):
    """Stock's backend; it counts the requests."""

    def __init__(self, store: TCPStore, run_id: str, counts: collections.Counter[str], lock: threading.Lock) -> None:
        super().__init__(store, run_id)
        self._counts, self._lock = counts, lock

    def get_state(self) -> Any:
        found = super().get_state()
        with self._lock:
            self._counts["gets"] += 1
            self._counts["bytes"] += _size(found)
        return found

    def set_state(self, state: bytes, token: Any = None) -> Any:
        found = super().set_state(state, token)
        with self._lock:
            self._counts["sets" if found is not None and found[2] else "conflicts"] += 1
            # The request holds the new and the expected state, the answer the current one; all in base64.
            self._counts["bytes"] += len(state) * 4 // 3 + len(token or b"") + _size(found)
        return found


def _size(found: Any) -> int:
    """Bytes of the store's answer: its token is the state as it was sent, in base64."""
    return len(found[1]) if found is not None else 0


class Agents:
    """The agents of this process."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.counts: collections.Counter[str] = collections.Counter(gets=0, sets=0, conflicts=0, bytes=0)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(job["count"])
        self._handlers = [self._handler() for _ in range(job["count"])]
        self._poller: threading.Thread | None = None
        self._stop = threading.Event()

    def _handler(self) -> Any:
        job = self.job
        store = TCPStore("127.0.0.1", job["port"], is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        params = RendezvousParameters(
            "c10d", f"127.0.0.1:{job['port']}", job["run_id"], job["min"], job["max"], local_addr="127.0.0.1"
        )
        return create_handler(store, CountingBackend(store, job["run_id"], self.counts, self._lock), params)

    def form(self) -> dict[str, Any]:
        def join(handler: Any) -> float:
            handler.next_rendezvous()
            return time.monotonic()

        joining: list[Future[float]] = [self._threads.submit(join, handler) for handler in self._handlers]
        done, late = wait(joining, self.job["timeout"])
        if late:
            return {"error": f"{len(done)} of {len(joining)} agents joined in {self.job['timeout']:g} s"}
        return {"at": max(each.result() for each in joining)}

    def poll(self, interval_s: float) -> None:
        def run() -> None:
            while not self._stop.wait(interval_s):
                for handler in self._handlers:
                    handler.num_nodes_waiting()

        self._poller = threading.Thread(target=run, daemon=True)
        self._poller.start()


def serve(job: dict[str, Any]) -> None:
    store = agents = None
    if job["host"]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    else:
        agents = Agents(job)
    print(json.dumps({"up": True, "port": store.port if store is not None else job["port"]}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if agents is not None and command["do"] == "form":
            answer = agents.form()
        elif agents is not None and command["do"] == "poll":
            agents.poll(command["interval"])
        elif agents is not None and command["do"] == "count":
            answer = dict(agents.counts)
        print(json.dumps({**answer, "cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
