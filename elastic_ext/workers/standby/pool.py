"""The warm standbys of one agent: kept ready by a thread, given to the workers that start, replaced by others afterwards.

Nobody ever waits for a standby. Where none is ready, or where a standby could be told from a process that has just been started,
the worker is started the usual way, and the reason is said once and counted.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

from elastic_ext.base.printable import Block, masked
from elastic_ext.base.wakeup import Wakeup
from elastic_ext.workers import pidfds
from elastic_ext.workers.reaper import reaper
from elastic_ext.workers.standby import memory, rules
from elastic_ext.workers.standby.client import ServerState, Standby, StandbyServer, WarmPopen
from elastic_ext.workers.standby.import_checks import PER_WORKER
from elastic_ext.workers.standby.rules import DEFAULT_MODULES, Cold, ColdReason, Learned
from elastic_ext.workers.standby.server import MARK

logger = logging.getLogger(__name__)

MEMORY_LOOK_S = 5.0  # nothing tells of memory that gets short, not in all kernels and groups
REFILL_AFTER_S = 0.3  # what has just been started has the processors to itself for so long
MOST_SERVERS = 8  # of one job: what cannot be made to work by then never will
AGAIN_S = 5.0  # after a passing lack of descriptors, processes or memory; doubles with each, up to
AGAIN_MOST_S = 300.0
PASSING = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)
NOT_READY = Cold(ColdReason.NOT_READY, "none was ready")


@dataclass(frozen=True)
class StandbySpec:
    """What standbys are to stand by for.

    Attributes:
        python: the interpreter and its options.
        bootstrap: the file that a cold start runs with it.
        program: [SCRIPT, ...] or ["-m", MODULE, ...].
        workers: how many of this agent.
        preload, exclude: modules that the user names.
        environ: of the workers, but for what differs between them.
        token: of the agent; the reaper finds by it what the agent has started.
    """

    python: tuple[str, ...]
    bootstrap: str
    program: tuple[str, ...]
    workers: int
    preload: tuple[str, ...]
    exclude: tuple[str, ...]
    environ: Callable[[], dict[str, str]]
    token: str

    @property
    def folder(self) -> str:
        """What the interpreter puts first on sys.path."""
        if self.program[0] == "-m":
            return os.getcwd()
        path = os.path.realpath(self.program[0])
        return path if os.path.isdir(path) else os.path.dirname(path)


class StandbyPool:
    """Keeps a server and `workers` standbys from construction to close(), unless there is a reason not to."""

    def __init__(
        self,
        wanted: StandbySpec,
        run_dir: str,
        started: Callable[[str, str], None],
        shown: Callable[[int, int], None],
    ) -> None:
        """run_dir: for small files. started: told of each worker, "warm" or "cold", and why. shown: standbys, their bytes."""
        self._wanted = wanted
        self._run_dir = run_dir
        self._started = started
        self._shown = shown
        self._said: set[str] = set()
        self._lock = threading.Lock()  # guards what follows
        self._parked: list[Standby] = []
        self._surroundings: dict[str, object] = {}
        self._off: Cold | None = None  # why there are none and will be none, but for
        self._again_at: float | None = None  # when it is tried again after a passing lack
        self._unfit: Cold | None = None  # why those that there are do not fit
        self._stale = False
        self._refill_at = 0.0
        self._learned: Learned | None = None
        self._busy = False  # workers run
        self._rests: Cold | None = None  # why the next start is a cold one
        self._released: list[int] = []  # pids, since the last round was started
        # Of the thread only:
        self._server: StandbyServer | None = None
        self._importing = self._lowered = False
        self._pause_s = AGAIN_S
        self._servers = 0
        self._excluded = set(wanted.exclude)
        self._modules: list[str] = []
        self._wakeup = Wakeup()
        self._closing = False
        self._keeper = threading.Thread(target=self._keep, name="elastic_ext_standbys", daemon=True)
        self._keeper.start()

    # What the supervisor calls.

    def start(self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any) -> subprocess.Popen[bytes] | None:
        """Release a standby to run this command; None, with the reason logged, where it must be started the usual way."""
        args, processors = rules.unbound(args)
        reason = self._why_cold(args, env)
        if reason is None and (why := rules.unbindable(processors, os.sched_getaffinity(0), env)) is not None:
            reason = Cold(ColdReason.PROCESSORS, why)
        while reason is None:
            parked = self._take()
            if parked is None:
                reason = NOT_READY
                break
            program = list(args[len(self._wanted.python) + 1 :])
            try:
                process = WarmPopen(parked, args, program, env, processors, stdout=stdout, stderr=stderr)
            except OSError as error:
                logger.warning("a standby (pid %s) was lost: %s", parked.pid, error)
                continue
            self._started("warm", "")
            self._released.append(process.pid)
            return process
        self._say_cold(reason or NOT_READY)
        return None

    def rest(self, reason: str) -> None:
        """The next round is to be started the usual way."""
        with self._lock:
            self._rests = Cold(ColdReason.AFTER_A_FAILURE, reason)

    def round_started(self) -> list[int]:
        """All workers of a round have been started: what they have taken is to be replaced. Return the pids of the warm ones."""
        with self._lock:
            self._refill_at = time.monotonic() + REFILL_AFTER_S
            self._busy = True
            self._rests = None
            if self._again_at is not None:
                self._again_at = time.monotonic() + REFILL_AFTER_S
        self._wakeup.set()
        released, self._released = self._released, []
        return released

    def learn(self, path: str) -> None:
        """A worker may have written there what it has imported; the first that has is believed."""
        if self._learned is not None or not os.path.exists(path):
            return
        try:
            with open(path, encoding="utf-8") as file:
                told = json.load(file)
            modules = tuple((str(name), origin) for name, origin in told["modules"])
            learned = Learned(modules, frozenset(told["changed"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("what a worker has imported cannot be read: %s", error)
            learned = Learned()
        with self._lock:
            self._learned = learned
        self._wakeup.set()

    def close(self) -> None:
        """End the server and all that wait."""
        self._closing = True
        self._wakeup.set()
        self._keeper.join()
        self._wakeup.__exit__()

    # Decisions.

    def _why_cold(self, args: Sequence[str], env: Mapping[str, str]) -> Cold | None:
        command = [*self._wanted.python, self._wanted.bootstrap]
        if list(args[: len(command)]) != command:
            return Cold(ColdReason.WRAPPED, f"the command is put behind {args[0]}")
        with self._lock:
            if self._off or self._unfit or self._rests:
                return self._off or self._unfit or self._rests
            if not self._parked:
                return NOT_READY
            changed = rules.differs(_surroundings(env), self._surroundings)
            if changed is None:
                return None
            self._stale = True
        self._wakeup.set()
        return Cold(ColdReason.CHANGED, f"{changed} is not what it was when the standbys were started")

    def _say_cold(self, cold: Cold) -> None:
        self._started("cold", cold.reason.value)
        self._say(cold.text)

    def _say(self, reason: str) -> None:
        """Once."""
        with self._lock:
            said = reason in self._said
            self._said.add(reason)
        if not said:
            usual = reason == NOT_READY.text
            logger.log(logging.INFO if usual else logging.WARNING, "workers are started without a warm standby: %s", reason)

    def _take(self) -> Standby | None:
        with self._lock:
            return self._parked.pop(0) if self._parked else None

    # The thread.

    def _keep(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, reaper.BLOCKED_SIGNALS)  # the main thread waits for those
        try:
            while not self._closing:
                try:
                    self._step()
                except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                    if getattr(error, "errno", errno.EAGAIN) not in PASSING:
                        raise
                    self._rest_of(error)
        except Exception:
            logger.exception("warm standbys are off: their keeper failed")
            self._give_up("their keeper failed")
        finally:
            self._end_all()

    def _rest_of(self, error: Exception) -> None:
        """What standbys need is lacking now: none for a while, at most until the next round has started."""
        if self._server is not None:
            self._servers -= 1  # it was not in vain
        self._end_all()
        cold = Cold(ColdReason.LACKING, f"what they need was lacking: {getattr(error, 'strerror', None) or error}")
        with self._lock:
            self._off = cold
            self._again_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, AGAIN_MOST_S)
        self._say(cold.text)

    def _try_again(self) -> None:
        with self._lock:
            if self._again_at is None or self._again_at > time.monotonic():
                return
            self._off = self._again_at = None
        logger.info("warm standbys are tried again")

    def _step(self) -> None:
        self._try_again()
        self._look_at_news()
        if self._server is None and self._off is None:
            self._start_server()
        timeout_s = self._refill_due()
        if timeout_s == 0:
            self._refill()
            timeout_s = None
        if self._server is not None:
            pidfds.go_on(self._server.pid, "server of the warm standbys")
        if self._server is not None and (reason := rules.room(memory.available(), 0, server_runs=True)) is not None:
            self._give_up(reason, ColdReason.MEMORY)  # the training needs it more
        with self._lock:
            again_s = None if self._again_at is None else max(0.0, self._again_at - time.monotonic())
        looks = again_s if self._server is None else MEMORY_LOOK_S
        self._wait(looks if timeout_s is None or looks is None else min(timeout_s, looks))

    def _wait(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if self._server is not None:
            poll.register(self._server, select.POLLIN)
        with self._lock:
            parked = {each.pidfd: each for each in self._parked}
        # One that is taken meanwhile closes its descriptor: at worst this wakes for nothing.
        for pidfd in parked:
            poll.register(pidfd, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000 + 1)}
        self._wakeup.clear()
        if self._server is not None and self._server.fileno() in ready:
            self._hear(self._server)
        with self._lock:
            dead = [each for each in self._parked if not each.alive]
            self._parked = [each for each in self._parked if each not in dead]
            if dead:
                self._refill_at = time.monotonic() + REFILL_AFTER_S
        for each in dead:
            logger.info("a standby (pid %s) was killed from outside", each.pid)
            each.end()

    def _look_at_news(self) -> None:
        with self._lock:
            stale, self._stale = self._stale, False
            learned = self._learned
            busy = self._busy
        if stale:
            self._end_all()
        if self._importing and busy and not self._lowered and self._server is not None:
            self._lowered = True
            self._server.lower_priority(True)
        if learned is not None and not self._modules and self._server is not None and not self._importing:
            folders = [self._wanted.folder, os.getcwd()]
            self._modules = rules.worth_preloading(learned, folders, self._excluded) or list(DEFAULT_MODULES)
            if learned.changed:  # those that wait may have read one of them; else they are good until better ones are there
                self._end_parked()
            self._preload(self._server)

    def _start_server(self) -> None:
        reason = rules.room(memory.available(), self._wanted.workers, server_runs=False)
        if reason is not None:
            self._give_up(reason, ColdReason.MEMORY)
            return
        if self._servers >= MOST_SERVERS:
            self._give_up(f"{MOST_SERVERS} servers were started in vain")
            return
        self._servers += 1
        environ = {name: value for name, value in self._wanted.environ().items() if name not in PER_WORKER}
        surroundings = _surroundings(environ)
        with self._lock:
            changed, self._surroundings = surroundings != self._surroundings, surroundings
        if changed:  # those of an earlier server that wait do not know of it
            self._end_parked()
        output = os.path.join(self._run_dir, "standby.out")
        try:
            self._server = StandbyServer(self._wanted.python, {**environ, MARK: self._wanted.token}, output)
        except OSError as error:
            if error.errno in PASSING:
                self._servers -= 1
                raise
            self._give_up(f"{self._wanted.python[0]} cannot be started: {error}")
            return
        self._preload(self._server)

    def _preload(self, server: StandbyServer) -> None:
        path = os.path.join(self._run_dir, "standby.modules")
        modules = [name for name in (*DEFAULT_MODULES, *self._modules) if not rules.covered(name, self._excluded)]
        with self._lock:
            learned = self._learned.modules if self._learned is not None else ()
        told = {
            "modules": modules,
            "program": self._wanted.program,
            "origins": {name: origin for name, origin in learned if origin is not None and not name.startswith("__")},
            "wanted": [name for name in self._wanted.preload if not rules.covered(name, self._excluded)],
            "excluded": sorted(self._excluded),
            "script_dir": self._wanted.folder,
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(told, file)
        self._importing, self._lowered = True, False
        try:
            server.preload(path)
        except OSError:
            pass  # it is gone: hear() says so

    def _hear(self, server: StandbyServer) -> None:
        state = server.hear()
        if state is None:
            reason = masked(server.last_words(), self._wanted.environ())
            logger.warning("the server of the warm standbys (pid %s) has ended: %s", server.pid, Block(reason))
            self._end_all()
            if "exit code -" not in reason:  # not killed from outside: it would end again
                self._give_up(f"their server ended with {reason}")
            return
        self._importing = False
        if self._lowered:
            server.lower_priority(False)
        unsafe = {rules.blamed(name): why for name, why in {**state.unsafe, **self._read_too_early(state)}.items()}
        absent = {name: why for name, why in state.absent.items() if rules.blamed(name) not in unsafe}
        for name, why in {**absent, **unsafe}.items():
            level = logging.WARNING if name in unsafe and name in self._wanted.preload else logging.INFO
            why = masked(why, self._wanted.environ())
            logger.log(level, "%s is not imported before workers start: %s", name or "a library", why)
        if (hopeless := self._why_hopeless(state, unsafe)) is not None:
            self._give_up(hopeless, ColdReason.UNSAFE_IMPORT)
            return
        if unsafe:
            self._excluded |= unsafe.keys()
            self._end_server()  # and the next one without them; those that wait are as good as they were
            return
        beside = rules.hidden(_listed(self._wanted.folder), state.names)
        with self._lock:
            hides = f"{beside} beside the script hides a module that is imported already"
            self._unfit = Cold(ColdReason.HIDDEN_MODULE, hides) if beside else None
            self._refill_at = 0.0
        self._end_parked()
        if self._unfit:
            self._say(self._unfit.text)
        logger.info("warm standbys are ready after %.2g s of imports", state.seconds)

    def _why_hopeless(self, state: ServerState, unsafe: Mapping[str, str]) -> str | None:
        """Why another server would not do better, or None."""
        failed = rules.must_fail(state.absent, self._modules, unsafe)
        if failed is not None:
            why = masked(state.absent[failed], self._wanted.environ())
            return f"{failed}, which the workers import, cannot be imported after torch: {why}"
        for name in ("", "torch"):  # libraries, or what all others import
            if name in unsafe:
                return f"{name or 'a library'}: {unsafe[name]}"
        return f"their server has {state.threads} threads" if state.threads > 1 and not unsafe else None

    def _read_too_early(self, state: ServerState) -> dict[str, str]:
        with self._lock:
            changed = self._learned.changed if self._learned is not None else frozenset()
        changed |= rules.variables_set(_source(self._wanted.program, self._wanted.folder))
        found = rules.read_too_early(changed, state.read, state.changed)
        return {module: f"the script sets {name}, which is read when it is imported" for module, name in found.items()}

    def _refill_due(self) -> float | None:
        """Seconds until standbys are to be forked; None: none are."""
        with self._lock:
            missing = self._wanted.workers - len(self._parked)
            if self._server is None or self._importing or self._unfit or self._off or missing <= 0:
                return None
            return max(0.0, self._refill_at - time.monotonic())

    def _refill(self) -> None:
        assert self._server is not None
        with self._lock:
            missing = self._wanted.workers - len(self._parked)
        reason = rules.room(memory.available(), missing, server_runs=True)
        if reason is not None:
            self._give_up(reason, ColdReason.MEMORY)
            return
        forked = self._server.park(missing)
        with self._lock:
            self._parked += forked
            parked = list(self._parked)
            if len(forked) < missing:
                self._refill_at = time.monotonic() + 10 * REFILL_AFTER_S
        used = memory.proportional([self._server.pid, *(each.pid for each in parked)])
        self._shown(len(parked), used)
        logger.info("%s warm standbys wait; with their server they use %s MB", len(parked), used >> 20)
        if self._pause_s > AGAIN_S and len(forked) == missing:
            self._pause_s = AGAIN_S
            logger.warning("warm standbys are ready again")

    def _give_up(self, text: str, reason: ColdReason = ColdReason.SERVER_FAILED) -> None:
        with self._lock:
            self._off = Cold(reason, text)
        self._say(text)
        self._end_all()

    def _end_parked(self) -> None:
        with self._lock:
            parked, self._parked = self._parked, []
        for each in parked:
            each.end()

    def _end_server(self) -> None:
        server, self._server = self._server, None
        self._importing = False
        if server is not None:
            server.end()

    def _end_all(self) -> None:
        self._end_server()
        self._end_parked()
        self._shown(0, 0)


def _surroundings(environ: Mapping[str, str]) -> dict[str, object]:
    """What a process inherits and a standby has from the time when its server was started, by what it is called in a message."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        umask = next((line.split()[1] for line in lines if line.startswith("Umask:")), None)
    return {
        **{f"the variable {name}": value for name, value in environ.items() if name not in PER_WORKER},
        "the current directory": os.getcwd(),
        "the umask": umask,
        "the processors that may be used": tuple(sorted(os.sched_getaffinity(0))),
        "the priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        **{f"the limit {name}": _limit(number) for name, number in _LIMITS.items()},
    }


_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


def _limit(number: int) -> tuple[int, int] | None:
    try:
        return resource.getrlimit(number)
    except OSError:  # refused
        return None


def _listed(folder: str) -> list[tuple[str, bool]]:
    """Names in a folder, each with whether it is a package."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.is_dir()) for entry in entries]
    except OSError:
        return []
    return [(name, _is_package(os.path.join(folder, name)) if is_folder else False) for name, is_folder in found]


def _file_of(module: str, folder: str) -> str:
    """What `python -m module` runs; found without importing anything. "": it is not there, or no file."""
    search: Sequence[str] | None = [folder, *sys.path]
    spec = None
    for part in (*module.split("."), "__main__"):
        if search is None:
            break
        found = PathFinder.find_spec(part if spec is None else f"{spec.name}.{part}", search)
        if found is None:
            return ""
        spec, search = found, found.submodule_search_locations
    return spec.origin or "" if spec is not None else ""


def _is_package(folder: str) -> bool:
    try:
        return any(name.startswith("__init__.") for name in os.listdir(folder))
    except OSError:
        return False


def _source(program: Sequence[str], folder: str) -> str:
    """The text of the script; nothing where it is none. folder: where modules are looked for first."""
    path = program[0] if program[0] != "-m" else _file_of(program[1], folder)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except (OSError, ValueError):
        return ""
