"""Every private name of torch that this package touches, in one place. Verified on torch 2.8 to 2.15.

launcher.api.LocalElasticAgent
    A module global that `launch_agent` calls: torchrun lets a plug-in choose the rendezvous, not the agent.
_invoke_run, _rendezvous, _assign_worker_ranks, _start_workers, _stop_workers, _monitor_workers
    Overridden: the documented extension points of SimpleElasticAgent are underscored.
_initialize_workers, _restart_workers, _exit_barrier
    Called: torch's own steps between two rounds.
_worker_group, _remaining_restarts, _pcontext, _shutdown_timeout
    The agent's state.
_check_uninterruptible_state_timeout, _uninterruptible_state_timeout (2.13 and newer)
    Torch checks it only inside `_monitor_workers`, which stops workers too.
MultiprocessContext._ret_vals
    The only event that says that a function entrypoint has returned.
multiprocessing.api.get_subprocess_handler, SubprocessHandler._popen, _stdout, _stderr
    The one place where torch starts a command, for warm standbys: a module global that SubprocessContext calls, and the method
    that makes the process of a Popen. Swapped only while the workers of a round are started.
DynamicRendezvousHandler._stop_heartbeats, _op_executor; _RendezvousExitOp
    Torch's step out of a round at the start of next_rendezvous(), for a node that does not come back.
_RendezvousState, _NodeDesc
    What the pickled state of its rendezvous is made of: nothing else may be in it.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from subprocess import Popen
from typing import Any

import torch
import torch.distributed.elastic.multiprocessing.api as multiprocessing
import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SignalException
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _RendezvousExitOp

from elastic_ext.base.errors import SeamError

logger = logging.getLogger(__name__)

# What the pickled state of torch's c10d rendezvous is made of.
STATE_CLASSES = frozenset(
    {
        *((DynamicRendezvousHandler.__module__, name) for name in ("_RendezvousState", "_NodeDesc")),
        *(("datetime", name) for name in ("datetime", "timezone", "timedelta")),
    }
)
STOCK_SHUTDOWN_TIMEOUT_S = 30  # torch 2.8 to 2.11 have no --shutdown-timeout; this is what their code waits


_swap = threading.Lock()
_expected: set[int] = set()  # ids of the handlers whose agent has not been constructed yet


class OneShot(ABCMeta):
    """Metaclass of our agent: the swap of torch's name ends with the construction that it was made for."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        spec: Any = kwargs.get("spec", args[0] if args else None)
        handler = spec.rdzv_handler
        with _swap:
            _expected.discard(id(handler))
            if not _expected and getattr(launcher, "LocalElasticAgent", None) is cls:
                launcher.LocalElasticAgent = LocalElasticAgent
        if not getattr(handler, "is_elastic_ext", False):
            return LocalElasticAgent(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def arm(agent: OneShot, handler: Any) -> None:
    """Make torch's launcher construct `agent` for this rendezvous handler, once. Two threads may each start a job.

    Raises:
        SeamError: this torch has no such name.
    """
    current = getattr(launcher, "LocalElasticAgent", None)
    if current is None:
        raise SeamError(
            f"torch {torch.__version__} has no torch.distributed.launcher.api.LocalElasticAgent, which elastic_ext stands on; "
            "expected torch 2.8 or newer; use --rdzv-backend=c10d, or a newer elastic_ext"
        )
    if current is LocalElasticAgent or isinstance(current, OneShot):
        with _swap:
            _expected.add(id(handler))
            # One that is never constructed (torch refused the job after all) must not keep the swap alive.
            weakref.finalize(handler, _expected.discard, id(handler))
            launcher.LocalElasticAgent = agent
    else:
        logger.warning("torch's agent has been replaced by %r; it runs instead of elastic_ext's agent", current)


def step_out(handler: RendezvousHandler, timeout_s: float) -> None:
    """Take this node out of torch's c10d rendezvous without closing it, so that the others need not wait for it to be dead.

    Raises what torch raises where the store does not answer.
    """
    if isinstance(handler, DynamicRendezvousHandler):
        handler._stop_heartbeats()
        handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + timeout_s)


Start = Callable[[Sequence[str], Mapping[str, str], Any, Any], "Popen[bytes] | None"]
"""Of a command, its environment and files for stdout and stderr: the process, or None where torch is to start it."""

_start: ContextVar[Start | None] = ContextVar("elastic_ext_start", default=None)
_started: ContextVar[Callable[[int], None]] = ContextVar("elastic_ext_started", default=lambda pid: None)
_starting = threading.Lock()
_starts = 0  # how many agents of this process start workers at this moment


def raise_again(signals: Iterable[int]) -> None:
    """Raise SignalException for signals that have come and whose exception somebody has swallowed.

    Torch raises it from a signal handler, wherever the main thread is just then: inside of logging, say, which catches what a
    handler of its raises. Without this the agent would go on as if nothing had been.
    """
    for number in signals:
        handler = signal.getsignal(number)
        if callable(handler) and getattr(handler, "__module__", None) == SignalException.__module__:
            handler(number, None)


class _Handler(SubprocessHandler):
    """Torch's handler of one command, whose process may be there already."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        start = _start.get()
        found = start(args, env, self._stdout, self._stderr) if start is not None else None
        if found is None:
            found = super()._popen(args, env)
            _started.get()(found.pid)
        return found


@contextmanager
def started_by(start: Start | None, started: Callable[[int], None]) -> Iterator[None]:
    """Inside, `start` is asked for the process of each command that this thread has torch start.

    started: told the pid of each that torch itself has started, at once.
    """
    global _starts
    current = getattr(multiprocessing, "get_subprocess_handler", None)
    if current not in (get_subprocess_handler, _Handler):  # None, or somebody else's
        if start is not None:
            logger.warning("workers are started without warm standbys: torch's get_subprocess_handler is %r", current)
        yield
        return
    with _starting:
        _starts += 1
        multiprocessing.get_subprocess_handler = _Handler
    tokens = _start.set(start), _started.set(started)
    try:
        yield
    finally:
        _start.reset(tokens[0])
        _started.reset(tokens[1])
        with _starting:
            _starts -= 1
            if not _starts:
                multiprocessing.get_subprocess_handler = current if current is not _Handler else get_subprocess_handler


class TorchAgent(LocalElasticAgent, metaclass=OneShot):
    """Torch's agent with its private names under names of ours. The supervisor overrides and calls these only."""

    # What torch calls, for the supervisor to override. Each default is torch's own way.

    def supervise(self) -> RunResult:
        return super()._invoke_run()

    def join_round(self) -> None:
        super()._rendezvous(self.group)

    def known_workers(self) -> list[Worker] | None:
        return None

    def start_workers(self) -> dict[int, Any]:
        return super()._start_workers(self.group)

    def stop_workers(self) -> None:
        super()._stop_workers(self.group)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        return self.supervise()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.join_round()

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
        """A rendezvous of ours that knows the ranks already is not made to work them out again through the store."""
        known = self.known_workers()
        return known if known is not None else super()._assign_worker_ranks(store, group_rank, group_world_size, spec)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers()

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self.stop_workers()

    # What the supervisor calls.

    def first_round(self) -> None:
        """Rendezvous and start the workers."""
        self._initialize_workers(self.group)

    def next_round(self) -> None:
        """Stop the workers, rendezvous, start the workers."""
        self._restart_workers(self.group)

    def reap(self) -> RunResult:
        """Torch's look at the workers. It reaps those that ended; if one failed it stops all others, in its own time."""
        return super()._monitor_workers(self.group)

    def close_failed(self) -> RunResult:
        """Reap workers that have all ended, one of them badly, and close their logs."""
        if not self.leads_groups:
            return self.reap()  # torch knows more of function entrypoints than we do
        # Not reap(): it would log whichever worker comes first as the one that failed.
        self._pcontext.close()
        return RunResult(WorkerState.FAILED)

    def all_nodes_finished(self) -> bool:
        """This node's workers have finished: wait for the others. False if the round is over otherwise, and all start again."""
        self._exit_barrier()
        return True

    def asleep_in_kernel(self) -> RunResult | None:
        """Torch's check for workers in uninterruptible sleep (2.13+, off by default): UNHEALTHY, or None."""
        if not self.watches_kernel_sleep:
            return None
        return self._check_uninterruptible_state_timeout(self.group, self._uninterruptible_state_timeout)

    @property
    def watches_kernel_sleep(self) -> bool:
        return getattr(self, "_uninterruptible_state_timeout", 0.0) > 0

    @property
    def group(self) -> WorkerGroup:
        return self._worker_group

    @property
    def spec(self) -> WorkerSpec:
        return self._worker_group.spec

    @property
    def shutdown_timeout_s(self) -> float:
        return getattr(self, "_shutdown_timeout", STOCK_SHUTDOWN_TIMEOUT_S)

    def charge_restart(self) -> None:
        """Keep torch's own count right: its metrics and events show it."""
        self._remaining_restarts -= 1

    @property
    def remaining_restarts(self) -> int:
        return self._remaining_restarts

    def shorten_shutdown(self, seconds: float) -> None:
        """What a stop after a signal may take at most; torch 2.12 and newer."""
        self._shutdown_timeout: int = min(int(self.shutdown_timeout_s), max(1, int(seconds)))

    @property
    def leads_groups(self) -> bool:
        """Whether each worker leads a process group of its own: commands do, functions do not."""
        return isinstance(self._pcontext, SubprocessContext)

    @property
    def result_readers(self) -> list[Any]:
        """What becomes readable when a function entrypoint has returned: its process waits to be read before it ends."""
        context: PContext | None = self._pcontext
        return [queue._reader for queue in context._ret_vals.values()] if isinstance(context, MultiprocessContext) else []
