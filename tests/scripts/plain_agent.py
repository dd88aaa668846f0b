"""Torch's own LocalElasticAgent with a rendezvous of ours, as a project with an agent of its own would use it. On one machine.

plain_agent.py BACKEND ENDPOINT NNODES SCRIPT [ARGUMENT ...]      conf: $CONF, as in --rdzv-conf; workers: $NPROC
"""

import os
import sys

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

backend, endpoint, nnodes, *command = sys.argv[1:]
least, _, most = nnodes.partition(":")
conf = dict(pair.split("=") for pair in os.environ.get("CONF", "").split(",") if pair)
params = RendezvousParameters(backend, endpoint, "job", int(least), int(most or least), "127.0.0.1", **conf)
handler = get_rendezvous_handler(params)
spec = WorkerSpec(
    role="default",
    local_world_size=int(os.environ.get("NPROC", "1")),
    entrypoint=sys.executable,
    args=tuple(command),
    rdzv_handler=handler,
    max_restarts=3,
    monitor_interval=0.1,
)
agent = LocalElasticAgent(spec, DefaultLogsSpecs(), start_method="spawn")
assert type(agent) is LocalElasticAgent
try:
    result = agent.run()
finally:
    handler.shutdown()
sys.exit(1 if result.is_failed() else 0)
