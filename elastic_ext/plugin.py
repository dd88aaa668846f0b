"""The seam to stock torchrun: entry points of the group `torchrun.handlers`.

Torch calls each entry point in every torchrun of the machine while it is importing its own rendezvous package, selected or not:
nothing here may import torch, or anything slow, before a creator is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elastic_ext.errors import EX_CONFIG, SeamError, UsageError
from elastic_ext.observe import log_records
from elastic_ext.printable import shown

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
        from elastic_ext import settings, torch_seam
        from elastic_ext.rendezvous.etcd import EtcdRendezvous
        from elastic_ext.supervisor import Supervisor

        handler = EtcdRendezvous(params, settings.read(params.config, os.environ))
        torch_seam.arm(Supervisor, handler)
        return handler


def create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    """Create the embedded rendezvous and have torch's launcher construct our agent for it."""
    log_records.install()
    with usage_errors_exit():
        from elastic_ext import settings, torch_seam
        from elastic_ext.rendezvous.c10d import EmbeddedRendezvous
        from elastic_ext.supervisor import Supervisor

        handler = EmbeddedRendezvous(params, settings.read(params.config, os.environ))
        torch_seam.arm(Supervisor, handler)
        return handler


@contextmanager
def usage_errors_exit() -> Iterator[None]:
    """End the command with one line and EX_CONFIG, as argparse does with 2: nothing has been started yet."""
    try:
        yield
    except (UsageError, SeamError) as error:
        print(shown(f"elastic_ext: {error}"), file=sys.stderr)  # print takes a closed stderr, too
        raise SystemExit(EX_CONFIG) from error
