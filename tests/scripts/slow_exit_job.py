"""The last rank exits with 3 in the first round. The kernel closes its connections long before it reports the exit."""

import os
import resource
import socket

import torch
import torch.distributed as dist

rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
sockets = [socket.socketpair() for _ in range(min(most, 20000) // 2 - 500)]  # to be closed after those of gloo
for _ in range(20):
    dist.all_reduce(torch.zeros(1))
if attempt == "0" and rank == dist.get_world_size() - 1:
    os._exit(3)
if attempt == "0":
    dist.barrier()
dist.destroy_process_group()
