"""Where the agent uses private names of torch, and nothing else of this package does. `torch_names` has the table of them all.

launcher.api.LocalElasticAgent
    A module global that `launch_agent` calls. Replaced, because a torchrun plug-in can choose the rendezvous but not the agent.
_invoke_run, _rendezvous, _assign_worker_ranks, _start_workers, _stop_workers, _monitor_workers
    Overridden. The documented extension points of SimpleElasticAgent have underscores.
_initialize_workers, _restart_workers
    Called: torch's steps between two rounds.
_remaining_restarts, _pcontext, _shutdown_timeout
    The agent's state.
_check_uninterruptible_state_timeout, _uninterruptible_state_timeout (2.13 and newer)
    Torch checks it only inside `_monitor_workers`, which stops workers too.
MultiprocessContext._ret_vals
    The only event that shows that a function entrypoint has returned.
multiprocessing.api.get_subprocess_handler, SubprocessHandler._popen, _stdout, _stderr
    The only place where torch starts a command: a module global that SubprocessContext calls, and the method that creates the
    process. Replaced while the workers of a round start, for warm standbys.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from subprocess import Popen
from types import FrameType
from typing import Any

import torch.distributed.elastic.multiprocessing.api as multiprocessing
import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, PContext, SignalException, SubprocessContext

from elastic_ext.base import torch_names

try:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler
except ImportError:  # a newer torch: `torch_names.check` has warned of it
    SubprocessHandler, get_subprocess_handler = object, None

logger = logging.getLogger(__name__)

STOCK_SHUTDOWN_TIMEOUT_S = 30.0  # torch 2.8 to 2.11 have no --shutdown-timeout and wait this long

_swap = threading.Lock()
_expected: set[int] = set()  # ids of the handlers whose agent has not been constructed yet


class OneShot(ABCMeta):
    """The metaclass of our agent. It restores torch's name once the agent for which it was replaced is constructed."""

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


def install_agent(agent: OneShot, handler: Any) -> None:
    """Make torch's launcher construct `agent` for this rendezvous handler, once. Safe if several threads start jobs.

    Call `torch_names.check` first.
    """
    current = launcher.LocalElasticAgent
    if current is LocalElasticAgent or isinstance(current, OneShot):
        with _swap:
            _expected.add(id(handler))
            # An agent that is never constructed (torch refused the job) must not keep the replacement alive.
            weakref.finalize(handler, _expected.discard, id(handler))
            launcher.LocalElasticAgent = agent
    else:
        logger.warning("torch's agent has been replaced by %r, which runs instead of elastic_ext's agent", current)


Start = Callable[[Sequence[str], Mapping[str, str], Any, Any], "Popen[bytes] | None"]
"""From a command, its environment, and files for stdout and stderr to its process, or to None to let torch start it."""

_start: ContextVar[Start | None] = ContextVar("elastic_ext_start", default=None)
_hold: ContextVar[bool] = ContextVar("elastic_ext_hold", default=False)
_started: ContextVar[Callable[[int], None]] = ContextVar("elastic_ext_started", default=lambda pid: None)
_starting = threading.Lock()
_starts = 0  # number of agents of this process that are starting workers


def reraise_signals(signals: Iterable[int]) -> None:
    """Raise SignalException again for signals whose exception has been swallowed.

    Torch raises it from a signal handler, wherever the main thread happens to be: for instance in logging, which catches all that
    its handlers raise. Without this, the agent would continue as if there had been no signal.
    """
    for number in signals:
        handler = signal.getsignal(number)
        if callable(handler) and ends_agent(handler):
            handler(number, None)


def ends_agent(handler: object) -> bool:
    """Return whether this signal handler raises SignalException: torch's does, and that of `taken_for_sigterm`."""
    return getattr(handler, "__module__", None) in (SignalException.__module__, __name__)


class _TakenForSigterm(SignalException):  # type: ignore[misc, unused-ignore]
    """A signal that means what SIGTERM means; torch ends the workers with `sigval`."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"Process {os.getpid()} got signal: {received.name}", sigval=signal.SIGTERM)
        self.received = received


def received(error: SignalException) -> signal.Signals:
    """Return the signal that this process got; torch may take it for another one."""
    return error.received if isinstance(error, _TakenForSigterm) else signal.Signals(error.sigval)


def _take_for_sigterm(number: int, frame: FrameType | None) -> None:
    raise _TakenForSigterm(signal.Signals(number))


@contextmanager
def taken_for_sigterm(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Inside this context, these signals mean what SIGTERM means to the agent, unless they have a handler.

    Torch's own way (--signals-to-handle) would send them on to the workers, which may have no handler. Does nothing outside the
    main thread, where Python has no signal handlers.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        free = [each for each in signals if signal.getsignal(each) in (signal.SIG_DFL, signal.SIG_IGN)]
        before = {each: signal.signal(each, _take_for_sigterm) for each in free}
    try:
        yield
    finally:
        for each, handler in before.items():
            if signal.getsignal(each) is _take_for_sigterm:
                signal.signal(each, handler)


@contextmanager
def hangup_ignored() -> Iterator[None]:
    """Keep SIGHUP ignored if it is, as under nohup: torch takes it for the end each time that it starts workers."""
    ignored = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT in this thread; what it starts inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _StandbyHandler(SubprocessHandler):  # type: ignore[misc, unused-ignore]
    """Torch's handler of one command; the process may already exist."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        start = _start.get()
        found = start(args, env, self._stdout, self._stderr) if start is not None else None
        if found is None:
            with _interrupts_held() if _hold.get() else nullcontext():
                found = super()._popen(args, env)
            _started.get()(found.pid)
        return found


def starts_commands() -> bool:
    """Return whether this torch lets `started_by` give it the process of a command."""
    return not (torch_names.missing(torch_names.COMMANDS) or torch_names.missing(torch_names.HANDLER))


@contextmanager
def started_by(start: Start | None, started: Callable[[int], None], hold_interrupts: bool) -> Iterator[None]:
    """Inside this context, ask `start` for the process of each command that torch starts in this thread.

    start: see `Start`; None lets torch start all commands. started: called with the pid of each process that torch itself starts,
    at once. hold_interrupts: start commands with SIGINT blocked; they unblock it when they can end by it.
    """
    global _starts
    current = getattr(multiprocessing, "get_subprocess_handler", None)
    if not starts_commands() or current not in (get_subprocess_handler, _StandbyHandler):  # the latter: another package's
        if start is not None:
            logger.warning("workers are started without warm standbys: torch's get_subprocess_handler is %r", current)
        yield
        return
    with _starting:
        _starts += 1
        multiprocessing.get_subprocess_handler = _StandbyHandler
    tokens = _start.set(start), _started.set(started), _hold.set(hold_interrupts)
    try:
        yield
    finally:
        _start.reset(tokens[0])
        _started.reset(tokens[1])
        _hold.reset(tokens[2])
        with _starting:
            _starts -= 1
            if not _starts:
                multiprocessing.get_subprocess_handler = current if current is not _StandbyHandler else get_subprocess_handler


class TorchAgent(LocalElasticAgent, metaclass=OneShot):  # type: ignore[misc, unused-ignore]
    """Torch's agent, with our own names for its private ones. The supervisor overrides and calls only these."""

    # Torch calls these and the supervisor overrides them. By default, each does what torch would do.

    def supervise(self) -> RunResult:
        """Run the job from the first round to its end."""
        return super()._invoke_run()

    def join_round(self) -> None:
        """Rendezvous."""
        super()._rendezvous(self.group)

    def known_workers(self) -> list[Worker] | None:
        """Return this node's workers with their ranks if the rendezvous knows them; None lets torch compute them."""
        return None

    def start_workers(self) -> dict[int, int]:
        """Start the workers of this round; return their pids by local rank."""
        pids: dict[int, int] = super()._start_workers(self.group)
        return pids

    def stop_workers(self) -> None:
        """End the workers and close their logs."""
        super()._stop_workers(self.group)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        return self.supervise()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.join_round()

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
        # If the rendezvous knows the ranks, torch need not compute them again through the store.
        known = self.known_workers()
        return known if known is not None else super()._assign_worker_ranks(store, group_rank, group_world_size, spec)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        return self.start_workers()

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self.stop_workers()

    # The supervisor calls these.

    def first_round(self) -> None:
        """Rendezvous and start the workers."""
        self._initialize_workers(self.group)

    def next_round(self) -> None:
        """Stop the workers, rendezvous, start the workers."""
        self._restart_workers(self.group)

    def reap(self) -> RunResult:
        """Let torch look at the workers: it reaps those that ended and, if one failed, stops all others at its own pace."""
        return super()._monitor_workers(self.group)

    def close_failed(self) -> RunResult:
        """Reap workers that have all ended, at least one with a failure, and close their logs."""
        if not self.leads_groups:
            return self.reap()  # torch knows more about function entrypoints than we do
        # Not reap(): that would log the first worker it finds as the one that failed.
        self._pcontext.close()
        return RunResult(WorkerState.FAILED)

    def asleep_in_kernel(self) -> RunResult | None:
        """Run torch's check for workers in uninterruptible sleep (2.13+, off by default); return UNHEALTHY or None."""
        if not self.watches_kernel_sleep:
            return None
        return self._check_uninterruptible_state_timeout(self.group, self._uninterruptible_state_timeout)

    @property
    def watches_kernel_sleep(self) -> bool:
        """Whether the user turned on the check of `asleep_in_kernel`."""
        return float(getattr(self, "_uninterruptible_state_timeout", 0.0)) > 0 and not torch_names.missing(
            torch_names.KERNEL_SLEEP
        )

    @property
    def group(self) -> WorkerGroup:
        """Torch's record of this node's workers in this round."""
        return self.get_worker_group()

    @property
    def spec(self) -> WorkerSpec:
        """The spec of the workers, as `launch.prepare` returned it."""
        return self.group.spec

    @property
    def shutdown_timeout_s(self) -> float:
        """The seconds that a stop after a signal may take."""
        return float(getattr(self, "_shutdown_timeout", STOCK_SHUTDOWN_TIMEOUT_S))

    def charge_restart(self) -> None:
        """Update torch's own count, which its metrics and events show."""
        if not torch_names.missing(torch_names.RESTARTS):
            self._remaining_restarts -= 1

    @property
    def remaining_restarts(self) -> int:
        """The restarts that are left by torch's count."""
        return int(getattr(self, "_remaining_restarts", self.spec.max_restarts))

    def shorten_shutdown(self, seconds: float) -> None:
        """Limit the time that a stop after a signal may take; torch 2.12 and newer."""
        self._shutdown_timeout: int = min(int(self.shutdown_timeout_s), max(1, int(seconds)))

    @property
    def leads_groups(self) -> bool:
        """Whether each worker leads its own process group: commands do, functions do not."""
        return isinstance(self._pcontext, SubprocessContext)

    @property
    def result_readers(self) -> list[Any]:
        """Readers that are ready when a function entrypoint has returned; its process ends only after its result is read."""
        context: PContext | None = self._pcontext
        if not isinstance(context, MultiprocessContext) or self.polls_results:
            return []
        return [queue._reader for queue in context._ret_vals.values()]

    @property
    def polls_results(self) -> bool:
        """Whether only `reap` shows that a function entrypoint has returned: this torch has no `result_readers`."""
        return isinstance(self._pcontext, MultiprocessContext) and bool(torch_names.missing(torch_names.RESULTS))
