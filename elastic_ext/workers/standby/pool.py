"""The warm standbys of one agent. A thread keeps them ready, new workers take them, and the thread replaces them.

If none is ready, or if a standby would differ from a newly started process, the worker starts cold, and the reason is counted and
logged once. A start waits for a standby only where another round has ended while the server still imports, and only until it has
torch, which all workers would have to import again. It imports the rest once they run.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from elastic_ext.base.printable import Block
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.workers import helper_processes, limits, reaper
from elastic_ext.workers.standby import import_checks, modules, rules
from elastic_ext.workers.standby.client import ServerProcess, Standby, WarmPopen
from elastic_ext.workers.standby.server import TOKEN_ENV

logger = logging.getLogger(__name__)

MEMORY_CHECK_S = 5.0  # not every kernel and cgroup reports memory pressure
REFILL_AFTER_S = 0.3  # for this long, newly started workers have the processors to themselves
MAX_SERVERS = 8  # per job: after this many failures, another server would fail too
TEMPORARY_ERRORS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)
RETRY_S = 5.0  # pause after a temporary shortage of descriptors, processes or memory; doubles each time
RETRY_MAX_S = 300.0  # the longest pause
NOT_READY = rules.Cold(rules.ColdReason.NOT_READY, "none was ready")
AWAIT_S = 30.0  # for standbys that are on their way; imports that take longer may be stuck, and are not waited for again


class Arrival:
    """Lets another thread wait while missing standbys are on their way. The pool's thread answers at the end of each step."""

    def __init__(self) -> None:
        self.asked = 0  # questions so far
        self.hurries = False  # the last one cannot wait for more than torch
        self._answered = 0  # those that a step has seen from its beginning
        self._coming = False  # the last answer
        self._changed = threading.Condition()

    def wait(self, wake: Callable[[], None], timeout_s: float, hurries: bool) -> bool:
        """Wait until a step that begins now says that none is coming; return False if that takes longer than timeout_s.

        wake: makes the thread begin a step.
        """
        with self._changed:
            self.asked = asked = self.asked + 1
            self.hurries = hurries
            wake()
            return self._changed.wait_for(lambda: self._answered >= asked and not self._coming, timeout_s)

    def answer(self, asked: int, coming: bool) -> None:
        """Answer the first `asked` questions."""
        with self._changed:
            self._answered, self._coming = asked, coming
            self._changed.notify_all()


class PoolThread:
    """Keeps standbys ready from construction to `close`, unless `cold` holds a reason not to.

    `round_started`, `await_standbys`, `wake` and `close` are for other threads. They share `_busy` and `_refill_at` with the
    thread, which are set by single assignments, and `waiting`, `modules` and `cold`, which are safe to share.
    """

    def __init__(
        self,
        modules: modules.PreloadedModules,
        waiting: WaitingStandbys,
        cold: ColdStarts,
        shown: Callable[[int, int], None],
    ) -> None:
        """Start the thread. shown: see `StandbyPool`."""
        self._servers = 0  # started so far
        self._modules = modules
        self._waiting = waiting
        self._cold = cold
        self._shown = shown
        self._server: ServerProcess | None = None
        self._busy = False  # workers run
        self._refill_at = 0.0  # monotonic
        self._closing = False
        self._arrival = Arrival()
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="elastic_ext_standbys", daemon=True)
        self._thread.start()

    # For other threads.

    def round_started(self) -> None:
        """Replace the standbys that a new round's workers have taken, after leaving them the processors for REFILL_AFTER_S."""
        self._refill_at = time.monotonic() + REFILL_AFTER_S
        self._busy = True
        self._cold.retry_within(REFILL_AFTER_S)
        self.wake()

    def await_standbys(self, timeout_s: float, hurries: bool = False) -> bool:
        """Wait while missing standbys are on their way; return False if they still are after timeout_s.

        hurries: those do that have torch and not yet all else.
        """
        self._busy, self._refill_at = False, 0.0
        return self._arrival.wait(self.wake, timeout_s, hurries)

    def wake(self) -> None:
        """Make the thread look at `modules` and `waiting` again."""
        self._wakeup.set()

    def close(self) -> None:
        """End the server, all waiting standbys and the thread."""
        self._closing = True
        self.wake()
        self._thread.join()
        self._wakeup.__exit__()

    # The thread.

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, reaper.BLOCKED_SIGNALS)  # the main thread waits for these
        try:
            while not self._closing:
                try:
                    self._step()
                except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                    if getattr(error, "errno", errno.EAGAIN) not in TEMPORARY_ERRORS:
                        raise
                    self._pause(error)
        except Exception:
            logger.exception("warm standbys are off: their thread has failed")
            self._give_up("the standbys' thread has failed")
        finally:
            try:
                self._end_all()
            finally:
                self._arrival.answer(self._arrival.asked, False)

    def _step(self) -> None:
        asked = self._arrival.asked
        retry_s = self._cold.retry()
        if self._waiting.take_stale():
            self._end_all()
        if self._server is not None:
            if not self._server.importing and (self._busy if self._server.hurried else self._modules.can_choose):
                if self._modules.can_choose and self._modules.choose():  # else the waiting ones are good until better ones come
                    self._waiting.end()
                self._server.preload(self._modules.write_request())
            if self._busy:
                self._server.yield_to_workers()
            elif self._arrival.hurries:
                self._server.hurry()
        if self._server is None and self._cold.off is None:
            self._start_server()
        refill_s = self._refill_due()
        if refill_s == 0:
            self._refill()
            refill_s = None
        if self._server is not None:
            helper_processes.resume(self._server.pid, "standby server")
            if (reason := rules.memory_shortage(limits.memory_left(), 0, server_runs=True)) is not None:
                self._give_up(reason, rules.ColdReason.MEMORY)  # the training needs it more
        coming = self._server is not None and self._server.importing and len(self._waiting) < self._modules.spec.workers
        self._arrival.answer(asked, coming and self._cold.off is None and self._cold.unfit is None)
        check_s = retry_s if self._server is None else MEMORY_CHECK_S
        self._wait(min((each for each in (refill_s, check_s) if each is not None), default=None))

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until the server answers, a standby ends, another thread wakes this one, or the timeout expires."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if self._server is not None:
            poll.register(self._server, select.POLLIN)
        # A standby that is taken in the meantime closes its descriptor: at worst this wakes for nothing.
        for standby in self._waiting.all():
            poll.register(standby.pidfd, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000 + 1)}
        self._wakeup.clear()
        if self._server is not None and self._server.fileno() in ready:
            self._receive_ready(self._server)
        dead = self._waiting.remove_dead()
        if dead:
            self._refill_at = time.monotonic() + REFILL_AFTER_S
        for standby in dead:
            logger.info("a standby (pid %s) was killed from outside", standby.pid)
            standby.end()

    def _start_server(self) -> None:
        reason = rules.memory_shortage(limits.memory_left(), self._modules.spec.workers, server_runs=False)
        if reason is not None:
            self._give_up(reason, rules.ColdReason.MEMORY)
            return
        if self._servers >= MAX_SERVERS:
            self._give_up(f"{MAX_SERVERS} standby servers have failed")
            return
        environ = {name: value for name, value in self._modules.spec.environ().items() if name not in import_checks.PER_WORKER}
        self._waiting.start_in(environ)
        try:
            environ = {**environ, TOKEN_ENV: self._modules.spec.token}
            self._server = ServerProcess(self._modules.spec.python, environ, self._modules.output)
        except OSError as error:
            if error.errno in TEMPORARY_ERRORS:
                raise
            self._give_up(f"{self._modules.spec.python[0]} cannot be started: {error}")
            return
        self._servers += 1
        self._server.preload(self._modules.write_request())

    def _receive_ready(self, server: ServerProcess) -> None:
        ready = server.receive_ready()
        if ready is None:
            self._server_ended(server)
            return
        outcome = self._modules.check(ready)
        if outcome.hopeless is not None:
            self._give_up(outcome.hopeless, rules.ColdReason.UNSAFE_IMPORT)
            return
        if outcome.unsafe:
            self._end_server()  # the next one leaves them out; the waiting standbys are as good as before
            return
        beside = rules.shadowing_file(modules.listed(self._modules.spec.folder), ready["names"])
        hides = f"{beside} beside the script would shadow a module that the standby server has imported"
        self._cold.unfit = rules.Cold(rules.ColdReason.HIDDEN_MODULE, hides) if beside else None
        self._refill_at = 0.0
        self._waiting.end()
        if self._cold.unfit:
            self._cold.log(self._cold.unfit)
        logger.info("warm standbys are ready after %.2g s of imports", ready["seconds"])

    def _server_ended(self, server: ServerProcess) -> None:
        ended = server.how_it_ended()
        reason = self._modules.masked(str(ended))
        logger.warning("the standby server (pid %s) has ended: %s", server.pid, Block(reason))
        self._end_all()
        if not ended.killed:  # another server would end the same way
            self._give_up(f"the standby server ended with {reason}")

    def _refill_due(self) -> float | None:
        """Return the seconds until standbys are due to be forked; None if none are missing or none can be forked."""
        missing = self._modules.spec.workers - len(self._waiting)
        if self._server is None or self._server.importing or self._cold.unfit or self._cold.off or missing <= 0:
            return None
        return max(0.0, self._refill_at - time.monotonic())

    def _refill(self) -> None:
        assert self._server is not None
        missing = self._modules.spec.workers - len(self._waiting)
        reason = rules.memory_shortage(limits.memory_left(), missing, server_runs=True)
        if reason is not None:
            self._give_up(reason, rules.ColdReason.MEMORY)
            return
        forked = self._server.park(missing)
        self._waiting.add(forked)
        if len(forked) < missing:
            self._refill_at = time.monotonic() + 10 * REFILL_AFTER_S
        standbys = self._waiting.all()
        used = limits.proportional_set_size([self._server.pid, *(each.pid for each in standbys)])
        self._shown(len(standbys), used)
        logger.info("%s warm standbys wait; with their server they use %s MB", len(standbys), used >> 20)
        if len(forked) == missing:
            self._cold.recovered()

    def _pause(self, error: Exception) -> None:
        """End everything for a while, because standbys lack a resource."""
        if self._server is not None:
            self._servers -= 1  # this server does not count as failed
        self._end_all()
        self._cold.pause(getattr(error, "strerror", None) or str(error))

    def _give_up(self, text: str, reason: rules.ColdReason = rules.ColdReason.SERVER_FAILED) -> None:
        self._cold.give_up(rules.Cold(reason, text))
        self._end_all()

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def _end_all(self) -> None:
        self._end_server()
        self._waiting.end()
        self._shown(0, 0)


class WaitingStandbys:
    """The waiting standbys. Any thread may call this. A standby outlives its server, so standbys of several servers may wait.

    Invariant: all of them were started in the same surroundings.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standbys: list[Standby] = []
        self._surroundings: dict[str, object] = {}
        self._stale = False

    def __len__(self) -> int:
        return len(self._standbys)

    def all(self) -> list[Standby]:
        with self._lock:
            return list(self._standbys)

    def take(self) -> Standby | None:
        """Remove and return one; None if there is none."""
        with self._lock:
            return self._standbys.pop(0) if self._standbys else None

    def add(self, standbys: Iterable[Standby]) -> None:
        with self._lock:
            self._standbys += standbys

    def remove_dead(self) -> list[Standby]:
        """Remove and return the standbys whose process has ended."""
        with self._lock:
            dead = [each for each in self._standbys if not each.alive]
            self._standbys = [each for each in self._standbys if each not in dead]
        return dead

    def end(self) -> None:
        """Kill all of them."""
        with self._lock:
            standbys, self._standbys = self._standbys, []
        for each in standbys:
            each.end()

    def start_in(self, environ: Mapping[str, str]) -> None:
        """Record that a server starts with this environment; end standbys that were started in other surroundings."""
        surroundings = modules.surroundings(environ)
        with self._lock:
            changed, self._surroundings = surroundings != self._surroundings, surroundings
        if changed:
            self.end()

    def differs(self, environ: Mapping[str, str]) -> str | None:
        """Return in words what a worker that starts now would inherit differently; None if nothing. See `take_stale`."""
        now = modules.surroundings(environ)
        with self._lock:
            changed = rules.differs(now, self._surroundings)
            self._stale = self._stale or changed is not None
        return changed

    def take_stale(self) -> bool:
        """Return whether `differs` has found a difference since the last call."""
        with self._lock:
            stale, self._stale = self._stale, False
        return stale


class ColdStarts:
    """The reasons for the cold starts of one pool. Any thread may call this."""

    def __init__(self, started: Callable[[str, str], None]) -> None:
        """Start without reasons. started: called for each worker start with "warm" or "cold", and the reason."""
        self.off: rules.Cold | None = None  # why there are no standbys until `retry` clears this; None: there may be some
        self.unfit: rules.Cold | None = None  # why the waiting standbys cannot be used
        self.next_round: rules.Cold | None = None  # why the next round starts cold
        self.started = started
        self._lock = threading.Lock()  # guards the attributes below
        self._logged: set[str] = set()
        self._retry_at: float | None = None  # monotonic; set only while `off` is a temporary shortage
        self._pause_s = RETRY_S

    @property
    def reason(self) -> rules.Cold | None:
        """Return why a start would be cold now even if standbys wait, or None."""
        return self.off or self.unfit or self.next_round

    def count_cold(self, cold: rules.Cold) -> None:
        self.started("cold", cold.reason.value)
        self.log(cold)

    def log(self, cold: rules.Cold) -> None:
        """Log a reason, once."""
        with self._lock:
            logged = cold.text in self._logged
            self._logged.add(cold.text)
        if not logged:
            level = logging.INFO if cold.reason is rules.ColdReason.NOT_READY else logging.WARNING
            logger.log(level, "workers are started without a warm standby: %s", cold.text)

    def give_up(self, cold: rules.Cold) -> None:
        """Do without standbys for good."""
        self.off = cold
        self.log(cold)

    # A temporary shortage: the pool tries again after a pause.

    def pause(self, lacking: str) -> None:
        """Do without standbys for a while, at most until the next round has started."""
        with self._lock:
            self.off = rules.Cold(rules.ColdReason.LACKING, f"a resource has run out: {lacking}")
            self._retry_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)
        self.log(self.off)

    def retry_within(self, seconds: float) -> None:
        """If there is a pause, let it end after this time."""
        with self._lock:
            if self._retry_at is not None:
                self._retry_at = time.monotonic() + seconds

    def retry(self) -> float | None:
        """End the pause if its time is over; return how many seconds are left, None if there is no pause."""
        with self._lock:
            if self._retry_at is None:
                return None
            left_s = self._retry_at - time.monotonic()
            if left_s > 0:
                return left_s
            self.off = self._retry_at = None
        logger.info("trying warm standbys again")
        return None

    def recovered(self) -> None:
        """Reset the pause, because all standbys wait."""
        with self._lock:
            paused, self._pause_s = self._pause_s > RETRY_S, RETRY_S
        if paused:
            logger.warning("warm standbys are ready again")


class StandbyPool:
    """The pool, for the supervisor's thread. It shares its `_cold`, `_modules` and `_waiting` with the pool's thread."""

    def __init__(
        self,
        spec: modules.StandbySpec,
        run_dir: str,
        started: Callable[[str, str], None],
        shown: Callable[[int, int], None],
    ) -> None:
        """Begin to make standbys.

        run_dir: a directory for small files. started: called for each worker start with "warm" or "cold", and the reason. shown:
        called with the number of waiting standbys and the bytes that they and their server use.

        Raises OSError, RuntimeError: no descriptor or thread is available.
        """
        self._spec = spec
        self._cold = ColdStarts(started)
        self._modules = modules.PreloadedModules(spec, run_dir)
        self._waiting = WaitingStandbys()
        self._thread = PoolThread(self._modules, self._waiting, self._cold, shown)
        self._released: list[int] = []  # pids, since the last round was started
        self._patient = True  # no wait for standbys has been too long
        self.workers_import_torch = False  # workers of an earlier round did, so a cold start takes at least as long as that

    def start(self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any) -> subprocess.Popen[bytes] | None:
        """Release a standby to run this command; log why and return None if the command needs a cold start."""
        args, processors = rules.split_numactl(args)
        cold = self._why_cold(args, env, processors)
        if cold is NOT_READY and self._await():
            cold = self._why_cold(args, env, processors)
        while cold is None:
            standby = self._waiting.take()
            if standby is None:
                cold = NOT_READY
                break
            program = list(args[len(self._spec.python) + 1 :])
            try:
                process = WarmPopen(standby, args, program, env, processors, stdout=stdout, stderr=stderr)
            except OSError as error:
                logger.warning("cannot release a standby (pid %s): %s", standby.pid, error)
                continue
            self._cold.started("warm", "")
            self._released.append(process.pid)
            return process
        self._cold.count_cold(cold)
        return None

    def _await(self) -> bool:
        """Wait for standbys if they come sooner than a cold worker would. Return whether any has come."""
        if self.workers_import_torch and self._patient:
            # What the workers import themselves beyond torch takes no longer, where each has a processor.
            hurries = self._spec.workers <= len(os.sched_getaffinity(0))
            self._patient = self._thread.await_standbys(AWAIT_S, hurries)
        return bool(len(self._waiting))

    def await_first(self) -> None:
        """Wait for the first standbys; no workers run yet."""
        self._patient = self._thread.await_standbys(AWAIT_S)

    def _why_cold(self, args: Sequence[str], env: Mapping[str, str], processors: frozenset[int] | None) -> rules.Cold | None:
        command = [*self._spec.python, self._spec.bootstrap]
        if list(args[: len(command)]) != command:
            return rules.Cold(rules.ColdReason.WRAPPED, f"another command wraps the worker's: {args[0]}")
        if (reason := self._cold.reason) is not None:
            return reason
        unbindable = rules.why_unbindable(processors, os.sched_getaffinity(0), env)
        if unbindable is not None:
            return rules.Cold(rules.ColdReason.PROCESSORS, unbindable)
        if not len(self._waiting):
            return NOT_READY
        if (changed := self._waiting.differs(env)) is not None:
            self._thread.wake()
            return rules.Cold(rules.ColdReason.CHANGED, f"{changed} has changed since the standbys were started")
        return None

    def skip_next_round(self, reason: str) -> None:
        """Make the next round start cold."""
        self._cold.next_round = rules.Cold(rules.ColdReason.AFTER_A_FAILURE, reason)

    def round_started(self) -> list[int]:
        """Replace the standbys that a round's workers have taken, once all have started; return the pids of those taken."""
        self._cold.next_round = None
        self._thread.round_started()
        released, self._released = self._released, []
        return released

    def learn(self, path: str) -> None:
        """Learn which modules a worker has imported, if it has written a report to `path`. Only the first report counts."""
        if self._modules.learn(path):
            self._thread.wake()

    def close(self) -> None:
        """End the server and all waiting standbys."""
        self._thread.close()
