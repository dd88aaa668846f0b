"""Exit codes that schedulers understand, and the verdict where schedulers look for it, no matter who started the agent.

Torch exits with code 1 however the job ended. Here the exception that ends the process carries the exit code: torchrun needs no
change, and a program that calls `elastic_launch` still gets its ChildFailedError.

The verdict file and Kubernetes' termination message hold the verdict of the job as JSON, as `failures.ledger` defines it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import stat
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError

from elastic_ext.base import errors, files, log_records, printable, threads, torch_private
from elastic_ext.base.errors import EX_FAILED, EX_NODE, EX_TRY_AGAIN, EX_USER
from elastic_ext.failures.policy import exit_code_for

logger = logging.getLogger(__name__)

TERMINATION_LOG = "/dev/termination-log"  # Kubernetes mounts it into every container (terminationMessagePath)
MAX_BYTES = 4096  # Kubernetes keeps no more than this
# /dev/stderr is never replaced, though it may lead to a file.
STREAM_DIRS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


class FailuresWithCode(dict[int, ProcessFailure]):
    """Torch's failures with the exit code of the process. Torch passes this object on unchanged in its ChildFailedError.

    why: for the last line. shown_here: this node shows the failures in torch's text, after what the log has said of them.
    """

    def __init__(self, failures: Mapping[int, ProcessFailure], exit_code: int, why: str = "", shown_here: bool = False) -> None:
        super().__init__(failures)
        self.exit_code, self.why, self.shown_here = exit_code, why, shown_here


USER_SIGNALS = (signal.SIGINT, signal.SIGQUIT)  # signals of the user; any other comes from the platform
# Exceptions that end a job without a verdict. One that closes a job says why, unless another agent than ours has closed it.
_ERROR_CODES = (
    (errors.NodeRefused, EX_NODE),
    (RendezvousTimeoutError, EX_TRY_AGAIN),
    (RendezvousConnectionError, EX_TRY_AGAIN),
    (RendezvousClosedError, EX_FAILED),
)

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "elastic_ext.agent.__main__")  # as `python -m` names them


@dataclass
class JobEnd:
    """How the job of this process has ended, as far as that decides its exit code."""

    preset: str = "design"  # a key of policy.EXIT_CODES
    verdict_code: int | None = None  # of the verdict that ended the job; a signal that arrives later does not change it
    succeeded: bool = False  # the job, and no exception has come since


job = JobEnd()


def install(preset: str) -> None:
    """Make the end of a job, by an exception or by success, end this process. preset: a key of policy.EXIT_CODES."""
    job.preset, job.verdict_code, job.succeeded = preset, None, False
    if getattr(sys.excepthook, "__name__", "") != _hook.__name__:
        _hook.before = sys.excepthook  # type: ignore[attr-defined]
        sys.excepthook = _hook


def succeeded_without(group: WorkerGroup, done: Exception) -> RunResult:
    """Note that the job has succeeded while this node waited; return what torch's launcher takes for that."""
    set_succeeded()
    logger.warning("%s; nothing is left to do on this node: exit code 0", done)
    ranks = (worker.global_rank for worker in group.workers)  # torch wants a value for each; -1: never started
    return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))


def set_succeeded() -> None:
    job.succeeded = True
    atexit.unregister(_end_after_success)
    atexit.register(_end_after_success)  # the last one runs first: it calls all others


def exit_code_of(error: BaseException) -> int | None:
    """Return the exit code of a process that this exception ends; None if it has nothing to do with a job."""
    if isinstance(error, ChildFailedError):
        return error.failures.exit_code if isinstance(error.failures, FailuresWithCode) else None
    if isinstance(error, SignalException):
        if job.verdict_code is not None:
            return job.verdict_code
        code = EX_USER if error.sigval in USER_SIGNALS else EX_TRY_AGAIN
    elif isinstance(error, KeyboardInterrupt):  # before torch has installed its handlers
        return EX_USER
    else:
        found = next((code for kind, code in _ERROR_CODES if isinstance(error, kind)), None)
        if found is None:
            return None
        code = found
    return exit_code_for(code, job.preset)


def _end_after_success() -> None:
    """End a launcher, whose code is then 0. An exit handler, because no exception reports a success."""
    succeeded, job.succeeded = job.succeeded, False  # `end` calls the exit handlers
    if succeeded and _may_end_at_once():
        end(0)


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    job.succeeded = False
    code = exit_code_of(error)
    if code is None or (isinstance(error, ChildFailedError) and not is_launcher()):
        _hook.before(kind, error, traceback)  # type: ignore[attr-defined]
    if code is not None:
        say_last(error, code)
        end(code)


def say_last(error: BaseException, code: int) -> None:
    """Say what has ended this process, and its exit code, where the log has not said it. A traceback would bury it."""
    why = str(error)
    if isinstance(error, ChildFailedError):
        failures, launcher = error.failures, is_launcher()
        if not isinstance(failures, FailuresWithCode):  # of torch's own agent: another backend was chosen
            failures = FailuresWithCode(failures, code, "the job has failed", shown_here=True)
        # The log has said it. Then come a text or a traceback of torch, lines from INFO up, or nothing.
        more = failures.shown_here or not launcher or logging.getLogger(log_records.ROOT).isEnabledFor(logging.INFO)
        why = failures.why if more else ""
        if failures.shown_here and launcher:
            kind = type(error)  # torch's own text as people know it, without the launcher's frames before it
            print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=sys.stderr)
    elif isinstance(error, SignalException):
        who = "the user: " if error.sigval in USER_SIGNALS else ""
        why = f"stopped by {who}{torch_private.received(error).name}"
    elif isinstance(error, KeyboardInterrupt):
        why = "stopped by the user: SIGINT"
    elif isinstance(error, errors.NodeDrained):  # nothing went wrong
        why = ""
    if why:
        errors.say_end(why, code)


def end(code: int) -> NoReturn:
    """End the process with this code, after threads and exit handlers.

    A launcher does not take its modules apart, which with torch lasts a quarter of a second: nothing of its own is still open. So
    it need not wait for calls to a store either (`threads.StoreCall`).
    Any other program may have libraries to end, and a tracer results to save: there the interpreter ends the process.
    """
    job.succeeded = False  # or an exit handler would end it with 0
    if not _may_end_at_once():
        raise SystemExit(code)  # the interpreter honors SystemExit even in an excepthook
    atexit.unregister(threads.await_calls)
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # no process reads it, it is closed, or missing
                stream.flush()
    finally:  # even if a signal comes
        os._exit(code)


def _may_end_at_once() -> bool:
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return is_launcher() and sys.gettrace() is None and all(thread.daemon for thread in others)


def is_launcher() -> bool:
    """Return whether the main program of this process is torchrun or our agent's, rather than a program that starts a job."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name in LAUNCHERS if spec is not None else Path(getattr(main, "__file__", "")).name == "torchrun"


def publish(verdict: Mapping[str, object], path: str | None) -> None:
    """Write a verdict as JSON where schedulers look: to `path` and to Kubernetes' termination message. Never raises."""
    text = json.dumps(_redacted(verdict))
    if path:
        _write(Path(path), text + "\n", replace=True)
    if "KUBERNETES_SERVICE_HOST" in os.environ and os.access(TERMINATION_LOG, os.W_OK):
        _write(Path(TERMINATION_LOG), text[:MAX_BYTES], replace=False)  # a mount: it cannot be replaced


def _redacted(value: object) -> object:
    """Redact the texts of a JSON value one by one, so that a mask never removes a quotation mark."""
    if isinstance(value, Mapping):
        return {name: _redacted(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(each) for each in value]
    return printable.redacted(value) if isinstance(value, str) else value


def _write(path: Path, text: str, replace: bool) -> None:
    """Write a text. replace: put a new file in place of the old one, unless that is a pipe or a device."""
    try:
        stream = path.parent in STREAM_DIRS
        if replace and not stream and (path.is_file() or not path.exists()):
            files.write_whole(path, text)
            return
        # Opening a pipe without a reader would block forever.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_APPEND if replace else os.O_TRUNC))
        with open(descriptor, "w", encoding="utf-8") as file:
            if replace and not stream and stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("it has become a link to a file")
            file.write(text)
    except (OSError, ValueError) as error:  # ValueError: not a file name
        logger.warning("the verdict could not be written to %s: %s", path, error)
