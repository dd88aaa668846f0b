"""The seam to stock torchrun: entry points of the group `torchrun.handlers`.

Torch calls each entry point in every torchrun of the machine while it is importing its own rendezvous package, selected or not:
nothing here may import torch, or anything slow, before a creator is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_ext.base import log_records
from elastic_ext.base.errors import usage_errors_exit

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def ext_c10d() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point of `--rdzv-backend=ext_c10d`."""
    return create_c10d


def ext_etcd() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point of `--rdzv-backend=ext_etcd`."""
    return create_etcd


def create_etcd(params: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous on etcd and have torch's launcher construct our agent for it."""
    log_records.install()
    with usage_errors_exit():
        from elastic_ext.agent.supervisor import Supervisor
        from elastic_ext.base import settings, torch_private
        from elastic_ext.rendezvous.etcd.handler import EtcdRendezvous

        handler = EtcdRendezvous(params, settings.read(params.config, os.environ))
        torch_private.arm(Supervisor, handler)
        return handler


def create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    """Create the embedded rendezvous and have torch's launcher construct our agent for it."""
    log_records.install()
    with usage_errors_exit():
        from elastic_ext.agent.supervisor import Supervisor
        from elastic_ext.base import settings, torch_private
        from elastic_ext.rendezvous.c10d.handler import EmbeddedRendezvous

        handler = EmbeddedRendezvous(params, settings.read(params.config, os.environ))
        torch_private.arm(Supervisor, handler)
        return handler
