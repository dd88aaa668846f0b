"""The seam to stock torchrun: entry points of the group `torchrun.handlers`.

Every torchrun on the machine calls each entry point, selected or not, while torch imports its own rendezvous package. So nothing
here may import torch, or anything slow, before a creator is called.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_ext.base import log_records
from elastic_ext.base.errors import UsageError, usage_errors_exit
from elastic_ext.workers import descriptors

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from elastic_ext.base.settings import Settings
    from elastic_ext.own_etcd.attachment import Attachment

    Handler = Callable[[RendezvousParameters, Settings], RendezvousHandler]


def ext_c10d() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator for `--rdzv-backend=ext_c10d`; this is its entry point."""
    return create_c10d


def ext_etcd() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator for `--rdzv-backend=ext_etcd`; this is its entry point."""
    return create_etcd


def create_etcd(params: RendezvousParameters) -> RendezvousHandler:
    """Create the etcd rendezvous, and make torch's launcher construct our agent for it."""

    begun: list[Attachment] = []

    def begin(settings: Settings) -> None:
        from elastic_ext.base.helper_process import HelperFailed
        from elastic_ext.own_etcd import bring, endpoint

        if not endpoint.is_job(params.endpoint):
            return
        try:
            begun.append(bring.begin(params.endpoint, params.run_id, params.local_addr, settings, os.environ))
        except HelperFailed as error:
            from elastic_ext.agent import own_etcd

            raise own_etcd.exit_for(error, settings) from error

    def handler_class() -> Handler:
        from elastic_ext.agent import own_etcd
        from elastic_ext.agent.resume import newest_checkpoint
        from elastic_ext.rendezvous.connect import NoAnswer
        from elastic_ext.rendezvous.handler import EtcdRendezvous

        def make(params: RendezvousParameters, settings: Settings) -> RendezvousHandler:
            # Passed here, not by our agent, because `grow_at=checkpoint` holds under any agent.
            def newest() -> str | None:
                return newest_checkpoint(settings)

            try:
                if not begun:
                    return EtcdRendezvous(params, settings, newest)
                with own_etcd.brought(begun[0], params, settings) as (theirs, with_tls):
                    return EtcdRendezvous(theirs, with_tls, newest, begun[0])
            except NoAnswer as error:
                raise own_etcd.exit_for(error, settings) from error

        return make

    return _create(params, handler_class, begin)


def create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous that needs no service, and make torch's launcher construct our agent for it."""

    def handler_class() -> Handler:
        from elastic_ext.agent import job_store

        return job_store.rendezvous

    return _create(params, handler_class)


def check_host() -> None:
    """Raise UsageError if this host lacks what every job needs: /proc, and a directory for temporary files."""
    nothing = "nothing was started"
    if not os.path.isdir("/proc/self/fd"):
        raise UsageError(
            "/proc/self/fd does not exist; expected /proc to be mounted, where the agent finds its workers; run "
            f"`mount -t proc proc /proc`, or start the container with it; {nothing}"
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UsageError(
            f"{error.strerror}; expected one with room that this user may write to; set TMPDIR; {nothing}"
        ) from error


def _create(
    params: RendezvousParameters, handler_class: Callable[[], Handler], begin: Callable[[Settings], None] = lambda settings: None
) -> RendezvousHandler:
    """begin: starts what takes its time while the rest is imported."""
    descriptors.open_standard()
    log_records.install()
    with usage_errors_exit():
        check_host()
        from elastic_ext.base import settings
        from elastic_ext.rendezvous import run_id

        known = settings.read(params.config, os.environ)
        log_records.set_node(run_id.host_name(known))
        begin(known)
        from elastic_ext.agent import serving
        from elastic_ext.agent.supervisor import Supervisor
        from elastic_ext.base import torch_private

        serving.check(known)
        handler = handler_class()(params, known)
        torch_private.install_agent(Supervisor, handler)
        return handler
