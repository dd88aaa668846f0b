"""Where the ranks of a job compute: on the CPU with gloo or, if JOB_DEVICE is "cuda", on GPUs with NCCL.

Ranks may share a GPU. NCCL refuses two ranks of one host on one GPU, so each gets a host id of its own; they talk over loopback.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

DEVICE = os.environ.get("JOB_DEVICE", "cpu")


def join(cpu_backend: str = "gloo", timeout: timedelta | None = None, both: bool = False) -> None:
    """Form the process group. cpu_backend: where there is no GPU. both: beside NCCL, gloo for tensors on the CPU."""
    if DEVICE == "cpu":
        dist.init_process_group(cpu_backend, timeout=timeout)
        return
    os.environ.update(NCCL_HOSTID=f"rank-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    own = torch.device(DEVICE, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl" if both else "nccl", timeout=timeout, device_id=own)


def finish() -> None:
    """Wait for all that the device has been asked for."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
