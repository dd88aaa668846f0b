"""Full rendezvous handlers of one job, many in a process: each has the connections and threads that an agent has for its rounds.

    python handlers.py '{"backend": "ext_etcd", "endpoint": "127.0.0.1:2379", "count": 64, "processes": 8, "timeout": 60}'

The processes are forked from this one, which has imported torch. agent_processes.py states the protocol. The command:

    {"do": "form"}   each handler calls next_rendezvous(); the second time, all join again
"""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

CONF = {
    "c10d": {"is_host": "0", "read_timeout": "600"},  # a busy store is slow, not gone
    "ext_etcd": {"lease_ttl": "60"},  # a busy machine must not lose a node
    "ext_c10d": {"lease_ttl": "60"},
}


def handler(job: dict[str, Any], number: int) -> Any:
    conf = CONF[job["backend"]] if job["backend"] == "c10d" else {**CONF[job["backend"]], "node_name": f"h{number}"}
    size = job["count"]
    params = RendezvousParameters(job["backend"], job["endpoint"], "benchmark", size, size, local_addr="127.0.0.1", **conf)
    made = get_rendezvous_handler(params)
    if job["backend"] != "c10d":
        made.attached = True  # there is no agent, and nothing fails
        made.prepare(SimpleNamespace(local_world_size=1, role="default"), 3)
    return made


def child(job: dict[str, Any], numbers: range, pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG (linux/prctl.h): nothing else ends it
    handlers = [handler(job, number) for number in numbers]
    threads = ThreadPoolExecutor(len(handlers))

    def join(each: Any) -> float:
        each.next_rendezvous()
        return time.monotonic()

    pipe.send({})
    while True:
        command, answer = pipe.recv(), {"cpu_s": time.process_time()}
        if command["do"] == "form":
            joining = [threads.submit(join, each) for each in handlers]
            done, late = wait(joining, job["timeout"])
            answer = {"at": max((each.result() for each in done), default=0.0), "late": len(late)}
        pipe.send({"cpu_s": time.process_time(), **answer})


def serve(job: dict[str, Any]) -> None:
    context = multiprocessing.get_context("fork")
    borders = [job["count"] * index // job["processes"] for index in range(job["processes"] + 1)]
    pipes = []
    for first, end in itertools.pairwise(borders):
        here, there = context.Pipe()
        context.Process(target=child, args=(job, range(first, end), there), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    print(json.dumps({"up": True}), flush=True)
    for line in sys.stdin:
        for pipe in pipes:
            pipe.send(json.loads(line))
        answers = [pipe.recv() for pipe in pipes]
        answer: dict[str, Any] = {"cpu_s": sum(each["cpu_s"] for each in answers)}
        if late := sum(each.get("late", 0) for each in answers):
            answer["error"] = f"{job['count'] - late} of {job['count']} joined in {job['timeout']:g} s"
        elif "at" in answers[0]:
            answer["at"] = max(each["at"] for each in answers)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
