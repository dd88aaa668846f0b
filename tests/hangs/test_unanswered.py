"""Connections without an answer: for how long, of which worker, and real ones through a network that is cut."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.hangs import unanswered
from elastic_ext.hangs.unanswered import TcpConnection, Unanswered
from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Finished, Job
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


def test_the_silent_hosts_of_a_node():
    """Per address the longest wait of a worker; nothing of what is valid on this host only, and not the tries of a moment."""
    other = replace(SENT, peer="10.0.0.3", left_s=8.0)
    own = [replace(SENT, peer=address) for address in (HERE, "127.0.0.1", "::1", "fe80::1")]
    brief = replace(SENT, peer="10.0.0.4", timeout_s=6.528, left_s=3.0, retransmissions=5, backoff=5)
    found = unanswered.silent_hosts({4: [other, *own, brief], 5: [replace(other, left_s=7.0), SENT]})
    assert [(each.rank, each.address) for each in found] == [(5, THERE), (5, "10.0.0.3")]
    assert found[0].text == "rank 5 gets no answer from 10.0.0.2 (port 99) for 19.6 s"


@pytest.mark.parametrize(
    ("other", "silent_s"),
    [
        (TcpConnection(3, HERE, THERE, 80, acked_s=0.3), None),  # the host answers on another port
        (TcpConnection(3, HERE, THERE, 80, acked_s=21.0), 19.6),
        (TcpConnection(3, HERE, THERE, 80, connecting=True, acked_s=0.0), 19.6),  # says nothing
        (TcpConnection(3, "10.1.0.1", THERE, 80, acked_s=0.3), 19.6),  # another way
        (TcpConnection(3, HERE, "10.0.0.3", 80, acked_s=0.3), 19.6),
    ],
)
def test_an_acknowledgement_ends_a_hosts_silence(other, silent_s):
    for ranks in ({4: [SENT, other]}, {4: [SENT], 5: [other]}):
        expected = [] if silent_s is None else [pytest.approx(silent_s, abs=0.1)]
        assert [each.for_s for each in unanswered.silent_hosts(ranks)] == expected


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
unanswered.EXPLAINS_S = 1.0
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
    print(told(unanswered.silent_hosts(process_stats.connections({7: own}))), flush=True)
"""


def told(silent: list[Unanswered]) -> str:
    return " ".join(f"{each.rank}:{each.address}:{each.for_s:.2f}" for each in silent)


as_root = pytest.mark.skipif(os.getuid() != 0, reason="makes namespaces, which only root may")


@pytest.mark.full
@as_root
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "peer-stopped"])
def test_only_a_peer_without_kernel_is_silent(cut):
    with network(2) as net, connected(net) as (server, client):
        one, other = net.hosts
        if cut:
            net.cut(one, other)
        else:
            os.kill(server.pid, signal.SIGSTOP)
        looks = until_told(client, cut)
    assert len(looks) == cut
    if cut:
        rank, address, for_s = looks[0].split(":")
        assert (rank, address) == ("7", other.address)
        assert float(for_s) > 1.0


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
        return len(looks[-1]) > 0 or (not cut and time.monotonic() > begun + 2)

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
            how = [f"--rdzv-backend={backend}", "--rdzv-conf=last_call_timeout=60", "--max-restarts=3"]
            command = [*host.inside, *TORCHRUN, *where, *how, script]
            env = {
                "STOP": str(tmp_path / "stop"),
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
@pytest.mark.parametrize("backend", ["ext_etcd", "ext_c10d"])
def test_two_mutually_unreachable_hosts_are_named(tmp_path, backend):
    """All three ranks wait in one collective of gloo, and only rank 0 and 2 reach all others. Once mended, the job trains on."""
    with job_of_three(tmp_path, backend) as (net, jobs):
        one, other = net.hosts[1:]
        net.cut(one, other)
        for job in jobs:
            job.wait_for("restart 1 of 3")
        net.mend(one, other)
        for job in jobs:
            job.wait_for('"world": 3', count=2)
        done = finished(tmp_path, jobs)
    assert [each.returncode for each in done] == [0, 0, 0], [each.err for each in done]
    pair = r"rank \d on (h1|h2) gets no answer from (h1|h2), the host of rank \d \(10.213.\d.2\), for \d+"
    for each in done:
        assert re.search(rf"restart: (on h\d: )?{pair}.*network-cut", each.err), each.err
        assert each.err.count("the workers get GLOO_SOCKET_IFNAME=net0, the interface of 10.213.") == 1, each.err


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
def test_a_host_missed_over_nccl_is_named(tmp_path, backend):
    script = tmp_path / "nccl.py"
    script.write_text(NCCL)
    with job_of_three(tmp_path, backend, script) as (_, jobs):
        done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 0, 0], "\n---\n".join(each.err for each in done)
    for each in done:
        assert re.search(r"restart: .*rank 0 on h0 gets no answer from h1\b.* \(10.213.2.2\).*restart 1 of 3", each.err), each.err
        assert re.search(r"restart: .*rank \d on h2 gets no answer from h1\b.* \(10.213.2.2\).*restart 2 of 3", each.err), (
            each.err
        )
