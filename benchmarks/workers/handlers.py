"""Full rendezvous handlers of one job, many in a process: each has the connections and threads that an agent has for its rounds.

    python handlers.py '{"backend": "ext_etcd", "endpoint": "127.0.0.1:2379", "groups": [8, 8], "least": 8, "timeout": 60}'

groups: the handlers of each process; least: as few may form a round. The processes are forked from this one, which has imported
torch. agent_processes.py states the protocol. Commands; "at" is when the last handler was done:

    {"do": "form"}                  each handler calls next_rendezvous(); the second time, all join again. With "first": 1, the
                                    handlers of this group begin, and the others once one of them is in etcd: it leads the job
    {"do": "lose", "group": 1}      the process gets SIGKILL at "began"; the others wait for the end of the round, which the last
                                    of them sees at "seen", and join the next one
    {"do": "fail", "group": 1}      the workers of these fail at "began": they end the round and report; the last of them has the
                                    verdict at "verdict". Then all join the next round
    {"do": "share", "seconds": 60}  all write their status and share goodput as often as agents do

An answer also has "cpu_s_of", by group: CPU seconds of each process so far.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

CONF = {
    "c10d": {"is_host": "0", "read_timeout": "600"},  # a busy store is slow, not gone
    "ext_etcd": {"lease_ttl": "60"},  # a busy machine must not lose a node
    "ext_c10d": {"lease_ttl": "60"},
}
MAX_RESTARTS = 3


def handler(job: dict[str, Any], number: int) -> Any:
    conf = CONF[job["backend"]] if job["backend"] == "c10d" else {**CONF[job["backend"]], "node_name": f"h{number}"}
    size = sum(job["groups"])
    params = RendezvousParameters(
        job["backend"], job["endpoint"], "benchmark", job["least"], size, local_addr="127.0.0.1", **conf
    )
    made = get_rendezvous_handler(params)
    if job["backend"] != "c10d":
        from elastic_ext.rendezvous.configuration import WorkerProgram
        from elastic_ext.rendezvous.contract import AgentHooks

        # There is no agent, nor workers that could outlive one.
        made.prepare(WorkerProgram("train.py", "default", 1, MAX_RESTARTS, {}), AgentHooks(reaper_runs=lambda: True))
    return made


def await_node(endpoint: str) -> None:
    """Wait until a node of the job is in etcd."""
    from elastic_ext.etcd import EtcdClient, Snapshot
    from elastic_ext.rendezvous.keys import JobKeys

    with EtcdClient(endpoint) as client, client.watch_with_snapshot(JobKeys("benchmark").nodes) as watch:
        item = watch.get()
        while isinstance(item, Snapshot) and not item.kvs:
            item = watch.get()


def join(each: Any) -> float:
    each.next_rendezvous()
    return time.monotonic()


class Waiting:
    """Waits for the end of a handler's round, which its events announce."""

    def __init__(self, of: Any) -> None:
        self._of, self._event = of, threading.Event()
        of.hooks.on_event = self._event.set

    def over(self) -> float:
        while self._of.part.over() is None:
            self._event.wait()
            self._event.clear()
        return time.monotonic()


def after_loss(each: Any) -> dict[str, float]:
    return {"seen": Waiting(each).over(), "at": join(each)}


def after_failure(each: Any, fails: bool) -> dict[str, float]:
    if not fails:
        return after_loss(each)
    from elastic_ext.failures.classify import classify
    from elastic_ext.failures.evidence import Evidence
    from elastic_ext.failures.ledger import Report

    rank = each.part.workers()[0].global_rank
    diagnosis = classify(Evidence(rank=rank, first_step_done=True, node=each.node.host, signal="SIGKILL"))
    each.part.break_off(f"{each.node.host}: its workers have failed")
    verdict = each.part.conclude(Report(each.node.host, replace(diagnosis, order=1)))
    assert not verdict.ends_job, verdict
    return {"verdict": time.monotonic(), "at": join(each)}


def share(each: Any, seconds: float) -> dict[str, float]:
    """Write as often as an agent does: REPORT_S, share_every_s."""
    from elastic_ext.agent.observation import REPORT_S
    from elastic_ext.base.goodput import Spent, StateSeconds
    from elastic_ext.status.job_status import NodeReport, encode_report
    from elastic_ext.telemetry.accounting import share_every_s

    nodes, rank = each.part.header.nodes, each.part.assignment.rank
    report = NodeReport(
        each.node.host, "running", 1.0, rank, 8 * rank, 8, each.part.round, 1000, 0.25, 1.0, 900, 400.0, 8, at="12:00:00"
    )
    parts: dict[Callable[[], Any], float] = {
        lambda: each.show(encode_report(report), False): REPORT_S,
        lambda: each.share_goodput(Spent((StateSeconds("productive", 1.0),))): share_every_s(nodes),
    }
    end = time.monotonic() + seconds
    due = [(time.monotonic() + random.uniform(0.0, every_s), part, every_s) for part, every_s in parts.items()]
    while (first := min(due, key=lambda each: each[0]))[0] < end:
        at, part, every_s = first
        time.sleep(max(0.0, at - time.monotonic()))  # the interval is what is measured
        part()
        due = [each for each in due if each is not first] + [(at + every_s, part, every_s)]
    return {"at": time.monotonic()}


def child(job: dict[str, Any], group: int, first: int, pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG (linux/prctl.h): nothing else ends it
    handlers = [handler(job, number) for number in range(first, first + job["groups"][group])]
    threads = ThreadPoolExecutor(len(handlers))
    work: dict[str, Callable[[dict[str, Any], Any], Any]] = {
        "form": lambda command, each: {"at": join(each)},
        "lose": lambda command, each: after_loss(each),
        "fail": lambda command, each: after_failure(each, command["group"] == group),
        "share": lambda command, each: share(each, command["seconds"]),
    }
    pipe.send({})
    while True:
        command, answer = pipe.recv(), dict[str, Any]()
        if command["do"] in work:
            working = [threads.submit(work[command["do"]], command, each) for each in handlers]
            done, late = wait(working, job["timeout"] + command.get("seconds", 0))
            found = [each.result() for each in done]
            answer = {name: max(each[name] for each in found if name in each) for name in set().union(*found)}
            answer["late"] = len(late)
        pipe.send({"cpu_s": time.process_time(), **answer})


def serve(job: dict[str, Any]) -> None:
    context = multiprocessing.get_context("fork")
    children = []
    for group, count in enumerate(job["groups"]):
        here, there = context.Pipe()
        process = context.Process(target=child, args=(job, group, sum(job["groups"][:group]), there), daemon=True)
        process.start()
        children.append((process, here, count))
    for _, pipe, _ in children:
        pipe.recv()
    print(json.dumps({"up": True}), flush=True)
    lost: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "lose":
            lost.add(command["group"])
        alive = {group: each for group, each in enumerate(children) if group not in lost}
        if "first" in command:
            alive[command["first"]][1].send(command)
            await_node(job["endpoint"])
        for group, (_, pipe, _) in alive.items():
            if group != command.get("first"):
                pipe.send(command)
        began = time.monotonic()
        if command["do"] == "lose":
            children[command["group"]][0].kill()
        by_group = {group: pipe.recv() for group, (_, pipe, _) in alive.items()}
        answers = list(by_group.values())
        names = set().union(*answers) - {"cpu_s", "late"}
        answer = {"began": began, **{name: max(each[name] for each in answers if name in each) for name in names}}
        answer["cpu_s_of"] = {group: each["cpu_s"] for group, each in by_group.items()}
        answer["cpu_s"] = sum(answer["cpu_s_of"].values())
        if late := sum(each.get("late", 0) for each in answers):
            total = sum(count for _, _, count in alive.values())
            answer["error"] = f"{total - late} of {total} joined in {job['timeout']:g} s"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
