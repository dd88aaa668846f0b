"""The agent where torch, a build with NCCL, finds two GPUs at NUMA node 0, as far as torchrun's NUMA options ask: no machine here
has one."""

import sys

import torch.distributed
from patient_agent import main
from torch.numa import binding

torch.distributed.is_nccl_available = lambda: True
for what in ("gpu", "device"):  # the second from torch 2.14 on
    setattr(binding, f"_get_{what}_count", lambda: 2)
    setattr(binding, f"_get_numa_node_index_for_{what}_index", lambda **_: 0)

if __name__ == "__main__":
    sys.exit(main())
