"""One job on three hosts behind a router, for the row `cut` of hangs.py. The hosts are network namespaces, which need root."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import EtcdServer
from tests.networks import SERVER, network

HOSTS = 3
PORT = 29400  # torch's own; only these namespaces see it
ETCD = ("--heartbeat-interval=100", "--election-timeout=1000")  # etcd's own defaults, because the tests run it faster


@dataclass(frozen=True)
class Agents:
    """Command lines of torchrun, without the script, one for each agent of a job; and what its environment needs."""

    commands: list[list[str]]
    variables: dict[str, str]


@contextmanager
def three_hosts(side: str, folder: Path) -> Iterator[Agents]:
    """Make the hosts, and the store of the side: etcd on the router, or stock's store with its agent on the first host.

    The variable ROUTER holds the start of a command line that runs on the router.
    """
    with network(HOSTS) as net:
        variables = {"GLOO_SOCKET_IFNAME": "net0", "ROUTER": shlex.join(net.inside)}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-id=job", "--nnodes=2:3", "--nproc-per-node=1"]
        if side == "ours":
            with EtcdServer(folder / "etcd", address=SERVER, inside=net.inside, args=ETCD) as etcd:
                where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={etcd.endpoint}"]
                yield Agents([[*h.inside, *torchrun, *where, f"--local-addr={h.address}"] for h in net.hosts], variables)
            return
        first = net.hosts[0]
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:{PORT}"]
        # All hosts share this machine's name, so stock cannot know which of them is to have the store.
        own = [[f"--local-addr={h.address}", f"--rdzv-conf=is_host={int(h is first)}"] for h in net.hosts]
        yield Agents([[*h.inside, *torchrun, *where, *each] for h, each in zip(net.hosts, own, strict=True)], variables)
