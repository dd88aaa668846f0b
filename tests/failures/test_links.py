"""Which links of a host went down: from files as Linux has them, and a real job whose host loses a real one."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_ext.failures.host import LinkHistory, LinksDown, links, went_down
from tests.hangs.test_unanswered import as_root, job_of_three


class Host:
    """Its links, as sysfs shows them: an InfiniBand port, a RoCE port with its interface, and interfaces without a device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
            self.write(f"infiniband/{device}/ports/1/state", state)
            self.write(f"infiniband/{device}/ports/1/counters/link_downed", "3")
        self.write("infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0", "eth5")
        for interface in ("eth0", "eth5", "ib1", "docker0", "lo", "flannel"):
            self.write(f"net/{interface}/carrier", "1")
            self.write(f"net/{interface}/carrier_down_count", "1")
        self.write("net/eth0/device/vendor", "0x15b3")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(f"{text}\n")

    def links(self, own="", **environ):
        return links(environ, own, self.folder)


@pytest.mark.parametrize(
    ("own", "environ", "used"),
    [
        ("", {}, ""),
        ("flannel", {}, "flannel"),
        ("", {"NCCL_SOCKET_IFNAME": "ib"}, "ib1"),
        ("", {"NCCL_SOCKET_IFNAME": "=ib1,docker0"}, "docker0 ib1"),
        ("", {"NCCL_SOCKET_IFNAME": "^docker", "GLOO_SOCKET_IFNAME": "ib1"}, "ib1"),
        ("", {"NCCL_SOCKET_IFNAME": ","}, ""),
    ],
)
def test_links_that_workers_may_use(tmp_path, own, environ, used):
    found = Host(tmp_path).links(own, **environ)
    rdma = ["mlx5_0 port 1", "mlx5_1 port 1", "mlx5_2 port 1"]
    assert sorted(found) == sorted([*rdma, "eth0", *used.split()])
    assert [found[each].up for each in rdma] == [True, True, False]


@pytest.mark.parametrize(
    ("changes", "down"),
    [
        ({}, LinksDown()),
        ({"infiniband/mlx5_0/ports/1/counters/link_downed": "4"}, LinksDown(("mlx5_0 port 1",))),
        ({"infiniband/mlx5_0/ports/1/state": "1: DOWN"}, LinksDown(("mlx5_0 port 1",), away=True)),
        ({"infiniband/mlx5_0/ports/1/state": "2: INIT"}, LinksDown(("mlx5_0 port 1",), away=True)),
        ({"net/eth5/carrier_down_count": "2"}, LinksDown(("mlx5_1 port 1",))),  # RoCE's port may not count
        ({"infiniband/mlx5_2/ports/1/counters/link_downed": "4"}, LinksDown()),  # it was down before
        ({"infiniband/mlx5_2/ports/1/state": "4: ACTIVE"}, LinksDown()),
        ({"net/eth0/carrier": "0", "net/eth5/carrier_down_count": "2"}, LinksDown(("eth0", "mlx5_1 port 1"), away=True)),
        ({"net/eth0/carrier_down_count": ""}, LinksDown()),  # it cannot be read
        ({"net/docker0/carrier_down_count": "9"}, LinksDown()),
    ],
)
def test_links_that_went_down(tmp_path, changes, down):
    host = Host(tmp_path)
    before = host.links()
    for name, text in changes.items():
        host.write(name, text)
    assert went_down(before, host.links()) == down


def test_a_device_that_has_vanished_is_down(tmp_path):
    before = Host(tmp_path).links()
    assert went_down(before, {name: link for name, link in before.items() if name != "eth0"}) == LinksDown(("eth0",), away=True)
    assert went_down(before, before) == went_down({}, before) == LinksDown()


def test_what_happened_long_before_a_failure_is_forgotten(tmp_path):
    """A look leaves out what is too old: a link that went down 20 minutes ago did not cause this failure."""
    host = Host(tmp_path)
    history = LinkHistory({}, "", tmp_path)
    assert history.went_down(0.0) == LinksDown()
    began = time.monotonic()
    history.round_started()
    assert history.went_down(60.0) == LinksDown()
    host.write("net/eth0/carrier_down_count", "2")
    seen = []
    for after_s in (300, 600, 900, 901, 901, 1210, 1211):
        history.look(began + after_s)
        seen.append(history.went_down(60.0).names)
    assert seen == [("eth0",)] * 5 + [()] * 2, "two looks after a failure forget nothing"
    assert history.next_look_s() > 60
    host.write("net/eth0/carrier_down_count", "3")
    history.round_started()
    assert history.went_down(60.0) == LinksDown(), "it was in an earlier round"


NO_THREADS = """
import os, resource
from elastic_ext.failures.host import LinkHistory
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.geteuid() == 0:
    os.setuid(65534)  # the limit is not root's
history = LinkHistory({})
history.round_started()
print(history.went_down(0.0).names)
"""


@pytest.mark.seam
def test_a_host_without_spare_threads_goes_on():
    done = subprocess.run([sys.executable, "-c", NO_THREADS], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("()\n", "")


# Its workers have an interface of their own, which NCCL would use. Where it loses its carrier, another host is the first to fail.
NCCL = """
import json, os, signal, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print(json.dumps({"rank": dist.get_rank(), "world": dist.get_world_size()}), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["ELASTIC_EXT_NODE_NAME"] == "h0":
    open("down").close()
    raise dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:2021, remote process exited or there was a network error")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.pause()
"""


@pytest.mark.seam("ext_etcd")
@pytest.mark.full
@as_root
@pytest.mark.parametrize("backend", ["ext_etcd", "ext_c10d"])
def test_the_host_whose_link_is_down_leaves(tmp_path, backend):
    """Nothing failed there by itself, and the host that failed is well."""
    os.mkfifo(tmp_path / "down")
    (tmp_path / "nccl.py").write_text(NCCL)
    with job_of_three(tmp_path, backend, tmp_path / "nccl.py", link="data") as (net, jobs):
        net.pull(net.hosts[1], "data")
        (tmp_path / "down").write_text("")
        done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 69, 0], "\n---\n".join(each.err for each in done)
    for each in done:
        assert re.search("data of node h1 went down, and is still down: no link of another node .*; then rank 0", each.err)
