"""The agent where torch, a build with NCCL, finds two GPUs at NUMA node 0, as far as torchrun's NUMA options ask: no machine here
has one."""

import sys

import torch.distributed
from patient_agent import main
from torch.numa import binding

torch.distributed.is_nccl_available = lambda: True
binding._get_gpu_count = lambda: 2
binding._get_numa_node_index_for_gpu_index = lambda *, gpu_index: 0

if __name__ == "__main__":
    sys.exit(main())
