"""The seam to stock torchrun: entry points of the group `torchrun.handlers`.

Every torchrun on the machine calls each entry point, selected or not, while torch imports its own rendezvous package. So nothing
here may import torch, or anything slow, before a creator is called.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from elastic_ext.base import errors, log_records
from elastic_ext.workers import limits

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from elastic_ext.base.settings import Settings
    from elastic_ext.own_etcd.launch import Attachment


BACKENDS = frozenset({"ext_c10d", "ext_etcd"})
NOT_PARSED = "The rendezvous configuration "  # begins torch's message, before it calls a creator


def ext_c10d() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator for `--rdzv-backend=ext_c10d`; this is its entry point."""
    _explain_if_ours()
    return create_c10d


def ext_etcd() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator for `--rdzv-backend=ext_etcd`; this is its entry point."""
    _explain_if_ours()
    return create_etcd


def _explain_if_ours() -> None:
    words = (*sys.argv[1:], os.environ.get("PET_RDZV_BACKEND", ""))
    if not BACKENDS.isdisjoint(word.rpartition("=")[2] for word in words):
        explain_early_ends()


@functools.cache
def explain_early_ends() -> None:
    """Have this command end with one line, not with a traceback, by Ctrl-C and where torch cannot parse --rdzv-conf.

    This holds until a creator is called and installs the hook of `exits`, which imports torch.
    """

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if kind is KeyboardInterrupt:
            why, code = "stopped by the user: SIGINT", errors.EX_USER
        elif kind is ValueError and str(error).startswith(NOT_PARSED):
            said = str(error).rstrip(".")
            why, code = f"--rdzv-conf: {said}; expected KEY=VALUE[,KEY=VALUE...]; nothing was started", errors.EX_CONFIG
        else:
            before(kind, error, traceback)
            return
        errors.say_end(why, code)
        raise SystemExit(code)

    before, sys.excepthook = sys.excepthook, hook


def create_etcd(params: RendezvousParameters) -> RendezvousHandler:
    """Create the etcd rendezvous, and make torch's launcher construct our agent for it."""
    begun: list[Attachment] = []

    def begin(settings: Settings) -> None:
        from elastic_ext.base.helper_process import HelperFailed
        from elastic_ext.own_etcd import endpoint, launch

        if endpoint.is_job(params.endpoint):
            with _exits_to_try_again(settings, HelperFailed):
                begun.append(launch.begin(params.endpoint, params.run_id, params.local_addr, settings, os.environ))

    def rendezvous(settings: Settings) -> RendezvousHandler:
        from elastic_ext.base.helper_process import HelperFailed
        from elastic_ext.own_etcd import launch
        from elastic_ext.rendezvous.contract import JOIN_TIMEOUT_S
        from elastic_ext.rendezvous.handler import EtcdRendezvous
        from elastic_ext.rendezvous.running_job import NoAnswer

        newest = newest_of(settings)
        with _exits_to_try_again(settings, HelperFailed, NoAnswer), ExitStack() as undo:
            if not begun:
                return EtcdRendezvous(params, settings, newest)
            (own,) = begun
            undo.callback(own.close)
            access = own.await_access(float(params.config.get("join_timeout", JOIN_TIMEOUT_S)))
            theirs = copy.copy(params)
            theirs.endpoint, theirs.local_addr = access.endpoints, params.local_addr or own.own_address
            made = EtcdRendezvous(theirs, launch.with_access(settings, access), newest, own)
            undo.pop_all()
            return made

    return _create(params, rendezvous, begin)


def create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous that needs no service, and make torch's launcher construct our agent for it."""
    return _create(params, lambda settings: c10d_rendezvous(params, settings))


def c10d_rendezvous(params: RendezvousParameters, settings: Settings) -> RendezvousHandler:
    """Return a rendezvous: on one machine without a store, on several through the store that one of them hosts.

    Raises:
        UsageError: the endpoint or a setting cannot be used.
        SystemExit: the store does not answer: the exit code says that it may be tried again.
    """
    if params.max_nodes == 1:
        from elastic_ext.embedded.one_machine import OneMachine

        return OneMachine(params, settings)
    from elastic_ext.base.helper_process import HelperFailed
    from elastic_ext.embedded.hosting import EmbeddedStore
    from elastic_ext.rendezvous.handler import EtcdRendezvous
    from elastic_ext.rendezvous.running_job import NoAnswer

    with _exits_to_try_again(settings, HelperFailed), ExitStack() as undo:
        store = EmbeddedStore(params, settings, os.environ)
        undo.callback(store.close)
        theirs, known = store.access()
        try:
            made = EtcdRendezvous(theirs, known, newest_of(known), store)
        except NoAnswer as error:
            raise HelperFailed(store.trouble(str(error))) from error
        undo.pop_all()
        return made


def newest_of(settings: Settings) -> Callable[[], str | None]:
    """Return what finds the newest checkpoint. Passed here, not by our agent: `grow_at=checkpoint` holds under any agent."""
    if settings.checkpoint_dir is None:
        return lambda: None
    from elastic_ext.checkpoints.choice.listing import newest_checkpoint

    return lambda: newest_checkpoint(settings)


@contextmanager
def _exits_to_try_again(settings: Settings, *failures: type[Exception]) -> Iterator[None]:
    """Report these failures of the store and end the command; its exit code says that it may be tried again."""
    try:
        yield
    except failures as error:
        from elastic_ext.base.errors import EX_TRY_AGAIN
        from elastic_ext.failures.policy import exit_code_for

        code = exit_code_for(EX_TRY_AGAIN, settings.exit_codes)
        errors.say_end(str(error), code)
        raise SystemExit(code) from error


def check_host() -> None:
    """Raise UsageError if this host lacks what every job needs: /proc, and a directory for temporary files."""
    nothing = "nothing was started"
    if not os.path.isdir("/proc/self/fd"):
        raise errors.UsageError(
            "/proc/self/fd does not exist; expected /proc to be mounted, where the agent finds its workers; run "
            f"`mount -t proc proc /proc`, or start the container with it; {nothing}"
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise errors.UsageError(
            f"{error.strerror}; expected one with room that this user may write to; set TMPDIR; {nothing}"
        ) from error


def _create(
    params: RendezvousParameters,
    rendezvous: Callable[[Settings], RendezvousHandler],
    begin: Callable[[Settings], None] = lambda settings: None,
) -> RendezvousHandler:
    """begin: starts what takes its time while the rest is imported."""
    limits.mend_start()
    log_records.install()
    with errors.usage_errors_exit():
        check_host()
        from elastic_ext.base import settings
        from elastic_ext.rendezvous.address import own_name

        known = settings.read(params.config, os.environ)
        if "SLURM_TOPOLOGY_ADDR" in os.environ:
            from elastic_ext.failures import slurm

            known = slurm.with_location(known, os.environ)
        log_records.set_node(own_name(known))
        begin(known)
        from elastic_ext.base import torch_names

        torch_names.check()
        from elastic_ext.agent import exits
        from elastic_ext.agent.supervisor import Supervisor
        from elastic_ext.base import torch_private
        from elastic_ext.http import tls

        exits.install(known.exit_codes)

        if known.metrics_port is not None:
            tls.of_settings(known)  # it raises UsageError
        handler = rendezvous(known)
        torch_private.install_agent(Supervisor, handler)
        return handler
