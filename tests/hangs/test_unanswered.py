"""Connections without an answer: for how long, of which worker, and real ones through a network that is cut."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.hangs import unanswered
from elastic_ext.hangs.detector import WorkerStatus
from elastic_ext.hangs.unanswered import Reachability, TcpConnection, Unanswered
from elastic_ext.hangs.watch import QuietWatch
from elastic_ext.workers import progress_layout as layout
from elastic_ext.workers.progress import ProgressTable
from tests.etcd_server import EtcdServer
from tests.hangs import rows
from tests.jobs import SCRIPTS, TIMEOUT_S, TORCHRUN, Finished, Job
from tests.networks import SERVER, Network, network
from tests.until import until

HERE, THERE = "10.0.0.1", "10.0.0.2"
SENT = TcpConnection(1, HERE, THERE, 99, False, 6, 6, 0, 13.056, 6.3, 19.6)  # as ss showed it 20 s after a cut


@pytest.mark.parametrize(
    ("connection", "for_s"),
    [
        (TcpConnection(1, HERE, THERE, 99), 0),
        (replace(SENT, acked_s=20.2), 12.852 + 6.756),
        (replace(SENT, acked_s=17.0), 17.0),  # never longer than since the last acknowledgement
        (replace(SENT, retransmissions=4, backoff=4, timeout_s=3.2), 0),  # loss
        (replace(SENT, retransmissions=5, backoff=5, timeout_s=6.4, left_s=5.8), 6.8),
        (replace(SENT, retransmissions=5, backoff=5, timeout_s=6.4, left_s=9.0), 6.2),
        # The first segment: after 1, 3, 7, 15 and 31 s; newer kernels send it four times a second apart, then double the timeout.
        (replace(SENT, connecting=True, retransmissions=4, backoff=4, timeout_s=16.0, left_s=12.0, acked_s=0.0), 0),
        (replace(SENT, connecting=True, retransmissions=5, backoff=5, timeout_s=32.0, left_s=31.5, acked_s=0.0), 31.5),
        (replace(SENT, connecting=True, retransmissions=5, backoff=1, timeout_s=2.0, left_s=0.5, acked_s=0.0), 6.5),
        # A full receiver answers each probe, as long as it lives.
        (replace(SENT, retransmissions=0, window_probes=4, acked_s=30.0), 0),
        (replace(SENT, retransmissions=0, window_probes=5, acked_s=30.0), 30.0),
    ],
)
def test_for_how_long(connection, for_s):
    assert connection.unanswered_s == pytest.approx(for_s)


def test_the_reach_of_a_node():
    """Its own addresses, and per silent address the longest wait of a worker; nothing of what is valid on this host only."""
    other = replace(SENT, peer="10.0.0.3", timeout_s=6.528, left_s=3.0, retransmissions=5, backoff=5)
    own = [replace(SENT, peer=address) for address in (HERE, "127.0.0.1", "::1", "fe80::1")]
    idle = [TcpConnection(2, address, "0.0.0.0", 0) for address in ("0.0.0.0", "127.0.0.1", "fd00::1")]
    reach = unanswered.reach_of({4: [other, *own, *idle], 5: [replace(other, left_s=1.0), SENT]})
    assert reach.addresses == (HERE, "fd00::1")
    assert [(each.rank, each.address) for each in reach.unanswered] == [(5, THERE), (5, "10.0.0.3")]
    assert reach.unanswered[0].text == "rank 5 gets no answer from 10.0.0.2 (port 99) for 19.6 s"
    assert unanswered.lasting(reach, 15.0) == Reachability(reach.addresses, reach.unanswered[:1])


@pytest.mark.parametrize(
    ("other", "silent_s"),
    [
        (TcpConnection(3, HERE, THERE, 80, acked_s=0.3), 0.3),  # the host answers on another port
        (TcpConnection(3, HERE, THERE, 80, acked_s=21.0), 19.6),
        (TcpConnection(3, HERE, THERE, 80, connecting=True, acked_s=0.0), 19.6),  # says nothing
        (TcpConnection(3, "10.1.0.1", THERE, 80, acked_s=0.3), 19.6),  # another way
        (TcpConnection(3, HERE, "10.0.0.3", 80, acked_s=0.3), 19.6),
    ],
)
def test_an_acknowledgement_ends_a_hosts_silence(other, silent_s):
    for ranks in ({4: [SENT, other]}, {4: [SENT], 5: [other]}):
        assert [each.for_s for each in unanswered.reach_of(ranks).unanswered] == [pytest.approx(silent_s, abs=0.1)]


@pytest.mark.parametrize(("fixed_s", "explains"), [(None, [10.5]), (600.0, [10.5]), (4.0, [10.5, 6.3])])
def test_what_explains_a_hang(fixed_s, explains):
    """Not the few tries of a moment of loss, when something else hangs."""
    reach = Reachability((HERE,), tuple(Unanswered(0, THERE, 99, for_s) for for_s in (10.5, 6.3, 1.4)))
    assert [each.for_s for each in unanswered.explaining(reach, fixed_s).unanswered] == explains


def worker(rank: int = 0, quiet_s: float = 16.0, **more) -> WorkerStatus:
    return WorkerStatus(rank, **{"steps": 10, "quiet_s": quiet_s, "working": False, "state": "S", **more})


@pytest.mark.parametrize(
    ("changes", "quiet"),
    [
        ({}, True),
        ({"steps": 0}, True),  # in init_process_group
        ({"quiet_s": 14.9}, False),
        ({"working": True}, False),
        ({"working": None}, False),
        ({"asleep_in_kernel": True}, False),
        ({"debugged": True}, False),
        ({"known": False}, False),
        ({"phase": "eval"}, False),
        ({"phase": "checkpoint"}, False),
        ({"phase": "data"}, True),
    ],
)
def test_who_is_quiet(changes, quiet):
    assert unanswered.is_quiet([worker(), worker(1, **changes)], 15.0) is quiet
    assert not unanswered.is_quiet([], 15.0)


@pytest.mark.parametrize(
    ("gaps", "fixed_s", "limit_s"),
    [
        ((), None, 17),
        ((0,) * 10 + (500,), None, 17),  # steps of up to 1 s
        ((0,) * 14 + (500,), None, 32.768),  # of 8 to 16 s
        ((0,) * 14 + (500,), 4.0, 4),
        ((), 600.0, 600),  # whoever sets a longer one, has a network that comes back
    ],
)
def test_the_limit(gaps, fixed_s, limit_s):
    assert unanswered.limit_s([worker(), worker(1, gaps=gaps)], fixed_s) == pytest.approx(limit_s)


def test_the_next_look_is_at_possible_news():
    reach = Reachability((HERE,), (Unanswered(0, THERE, 99, 12.5),))
    for quiet_s, known, next_s in (
        (1.0, None, 6.5),
        (7.5, None, 7.5),
        (16.0, None, 7.5),
        (16.0, reach, 2.5),
        (20.0, Reachability(), 3),
    ):
        assert unanswered.next_check_s([worker(quiet_s=quiet_s)], 15.0, known) == pytest.approx(next_s)
    assert unanswered.next_check_s([worker(quiet_s=16.0)], 4.0, Reachability()) == 2
    assert not unanswered.needs_stats([worker(quiet_s=6.0)], 15.0)
    assert unanswered.needs_stats([worker(quiet_s=7.5)], 15.0)


# Real ones.

ACCEPT = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
peers = [server.accept()[0] for _ in range(int(sys.argv[2]))]
time.sleep(1000)
"""
CONNECT = """
import os, socket, sys
from elastic_ext.hangs import process_stats, unanswered
from tests.hangs.test_unanswered import told
address = sys.argv[1], int(sys.argv[2])
unanswered.RETRANSMISSIONS = 3
late = socket.socket()
late.setblocking(False)
first = socket.create_connection(address)
print("connected", flush=True)
for line in sys.stdin:
    if line == "send\\n":
        first.sendall(b"x")
        late.connect_ex(address)
    own = process_stats.open_sockets([os.getpid()])[os.getpid()]
    print(told(unanswered.reach_of(process_stats.connections({7: own}))), flush=True)
"""
WATCH = """
import sys
from tests.hangs.test_unanswered import claim, told
print(told(claim(int(sys.argv[1]), sys.argv[2])))
"""


def told(reach: Reachability) -> str:
    return " ".join([*reach.addresses, *(f"{each.rank}:{each.address}:{each.for_s:.2f}" for each in reach.unanswered)])


def claim(pid: int, path: str) -> Reachability:
    """Watch a worker that has done nothing since its third step, until the watch calls it quiet."""
    board = ProgressTable(path, 1)
    rows.write(path, 0, {layout.PID: pid, layout.STEPS: 3, layout.SIGN_NS: time.monotonic_ns()})
    unanswered.UNANSWERED_S, unanswered.RETRANSMISSIONS = 1.5, 3
    watch, pause = QuietWatch(board, {0: 7}, None), threading.Event()
    while watch.reach is None:
        pause.wait(watch.next_check_s())
        watch.check({0: pid})
    unanswered.EXPLAINS_S = 1000.0  # if the job hung for another reason now
    assert watch.examine({0: pid}) == Reachability(watch.reach.addresses)
    return watch.reach


as_root = pytest.mark.skipif(os.getuid() != 0, reason="makes namespaces, which only root may")


@pytest.mark.full
@as_root
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "peer-stopped"])
def test_only_a_peer_without_kernel_is_silent(tmp_path, cut):
    with network(2) as net, connected(net) as (server, client):
        one, other = net.hosts
        if cut:
            net.cut(one, other)
        else:
            os.kill(server.pid, signal.SIGSTOP)
        looks = until_told(client, cut)
        command = [*one.inside, sys.executable, "-c", WATCH, str(client.pid), str(tmp_path / "progress")]
        claimed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S).stdout.split()
    for found, least_s in ((looks, 1.0), (claimed, 1.5)):
        assert found[0] == one.address
        assert len(found) == 1 + cut
        if cut:
            rank, address, for_s = found[1].split(":")
            assert (rank, address) == ("7", other.address)
            assert float(for_s) > least_s


@contextmanager
def connected(net: Network) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """A process on the second host, and one on the first that is connected to it."""
    one, other = net.hosts
    command = [*other.inside, sys.executable, "-c", ACCEPT, other.address, "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        command = [*one.inside, sys.executable, "-c", CONNECT, other.address, port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            try:
                assert told_by(client, "") == "connected"
                yield server, client
            finally:
                client.kill()
                server.kill()


def told_by(client: subprocess.Popen[str], order: str) -> str:
    assert client.stdin is not None
    assert client.stdout is not None
    if order:
        client.stdin.write(f"{order}\n")
        client.stdin.flush()
    return client.stdout.readline().removesuffix("\n")


def until_told(client: subprocess.Popen[str], cut: bool) -> list[str]:
    """Have the client send, then look until it misses an answer, or for longer than that takes."""
    begun, looks = time.monotonic(), [told_by(client, "send").split()]

    def enough() -> bool:
        looks.append(told_by(client, "look").split())
        return len(looks[-1]) > 1 or (not cut and time.monotonic() > begun + 2)

    until(enough)
    return looks[-1]


# Whole jobs.


@contextmanager
def job_of_three(
    tmp_path: Path, backend: str, script: Path = SCRIPTS / "hang_job.py", link: str = ""
) -> Iterator[tuple[Network, list[Job]]]:
    """A job with one worker on each of three hosts, after its first steps; the agents by rank, which is the host's number.

    link: another interface that each host has, which NCCL would use.
    """
    with ExitStack() as stack:
        net = stack.enter_context(network(3))
        if backend == "ext_etcd":
            endpoint = stack.enter_context(EtcdServer(tmp_path / "etcd", address=SERVER, inside=net.inside)).endpoint
        else:
            endpoint = f"{net.hosts[0].address}:29400"
        jobs = []
        for number, host in enumerate(net.hosts):
            if link:
                net.add_link(host, link)
            where = [f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", f"--local-addr={host.address}", "--nnodes=2:3"]
            how = [f"--rdzv-backend={backend}", "--rdzv-conf=last_call=60", "--max-restarts=3"]
            command = [*host.inside, *TORCHRUN, *where, *how, script]
            env = {
                "STOP": str(tmp_path / "stop"),
                "ELASTIC_EXT_HANG": "on",
                "ELASTIC_EXT_NODE_NAME": f"h{number}",
                "ELASTIC_EXT_TOPOLOGY": f"h{number}",  # the order of the ranks
                "ELASTIC_EXT_VERDICT_FILE": str(tmp_path / f"verdict-{number}"),
                **({"NCCL_SOCKET_IFNAME": link} if link else {}),
            }
            jobs.append(stack.enter_context(Job(command, tmp_path, **env)))
        for rank, job in enumerate(jobs):
            job.wait_for(f'"rank": {rank}, "world": 3')
        yield net, jobs


def finished(tmp_path: Path, jobs: list[Job]) -> list[Finished]:
    (tmp_path / "stop").touch()
    return [job.finish() for job in jobs]


@as_root
@pytest.mark.full
@pytest.mark.parametrize(("backend", "cut"), [("ext_etcd", (0, 2)), ("ext_c10d", (1, 2))], ids=["etcd", "c10d"])
def test_two_mutually_unreachable_hosts_are_named_one_leaves(tmp_path, backend, cut):
    """With the limits that users have: the first hang would take a minute, the second one, before any step, half an hour.

    cut: by rank. Rank 0 serves the store of the round; on etcd another one takes its place before the second hang. On ext_c10d it
    has the store of the job, too: who does not reach that is not in the job.
    """
    with job_of_three(tmp_path, backend) as (net, jobs):
        one, other = cut
        net.cut(net.hosts[one], net.hosts[other])
        left = jobs[other].finish()
        stay = jobs[:2]
        for job in stay:
            job.wait_for(r'"world": 2')
        done = finished(tmp_path, stay)
    pair = rf"rank \d on (h{one}|h{other}) gets no answer from (h{one}|h{other}), the host of rank \d"
    for each in (left, *done):
        assert each.err.count("the workers get GLOO_SOCKET_IFNAME=net0, the interface of 10.213.") == 1, each.err
        assert len(re.findall(r"is over: .* gets no answer from node h\d", each.err)) == 2, each.err
        assert re.search(rf"restart: (on h\d: )?{pair}.*restart 1 of 3", each.err), each.err
        assert re.search(f"{pair}.*; h{other} leaves", each.err), each.err
    assert left.returncode == 69
    assert [each.returncode for each in done] == [0, 0], [each.err for each in done]
    verdict = json.loads((tmp_path / f"verdict-{other}").read_text())
    assert (verdict["host"], sorted(verdict["cut"])) == (f"h{other}", sorted((f"h{one}", f"h{other}")))


# What NCCL raises where a host no longer acknowledges over InfiniBand: on another one in each round.
NCCL = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
optimizer.step()
dist.barrier()
print(json.dumps({"rank": dist.get_rank(), "world": dist.get_world_size()}), flush=True)
dist.barrier()  # the test waits for what each has printed
if os.environ["ELASTIC_EXT_NODE_NAME"] == ("h0", "h2", "")[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]:
    raise dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:2021, remote process exited or there was a network error\\nLast error:\\n"
        "NET/IB : Got completion from peer 10.213.2.2<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv)"
    )
dist.barrier()
"""


@as_root
@pytest.mark.full
@pytest.mark.parametrize("backend", ["ext_etcd", "ext_c10d"])
def test_a_host_missed_over_nccl_leaves_second_time(tmp_path, backend):
    script = tmp_path / "nccl.py"
    script.write_text(NCCL)
    with job_of_three(tmp_path, backend, script) as (_, jobs):
        done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 69, 0], "\n---\n".join(each.err for each in done)
    for each in done:
        assert re.search(r"restart: .*rank 0 on h0 gets no answer from h1\b.* \(10.213.2.2\).*restart 1 of 3", each.err), each.err
        assert re.search(r"rank \d on h2 gets no answer from h1\b.*; h1 was cut off like this before; h1 leaves", each.err), (
            each.err
        )
