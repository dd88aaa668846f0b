"""Who writes in a worker, and when that is over: its threads, and the work items of its pools. For `saves.py`, which notes it.

This file is loaded by path before the script; see `bootstrap.py` for what it may import.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import _weakref
import itertools
import os
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Protocol

    Place = tuple[int, str]  # see `saves.py`
    Group = tuple[object, Callable[[], bool]]  # what is the same for all of it; and what says whether others of it still run

    class WatchedFuture(Protocol):
        def add_done_callback(self, call: "Callable[[WatchedFuture], None]", /) -> object: ...
        def cancelled(self) -> bool: ...
        def exception(self) -> object: ...

    class PoolItem(Protocol):
        future: WatchedFuture

    class WorkQueue(Protocol):
        def qsize(self) -> int: ...

    class ThreadOfPool(Protocol):
        ident: int | None

        def is_alive(self) -> bool: ...

    class ThreadPool(Protocol):
        _threads: set[ThreadOfPool]


SIGNALS = (1, 2, 3, 10, 12, 14, 15)  # HUP, INT, QUIT, USR1, USR2, ALRM, TERM: those whose handlers may save, or end the script
_POOLS = "concurrent/futures/thread.py"
_ERROR_CODES = (1, 2)  # exit codes of an error: 1 also stands for a text, 2 for wrong arguments
_EXIT_OF_PARSERS = ("click.exceptions", "Exit"), ("typer.exceptions", "Exit")  # also a script that returns ends so there
_HAS_VARARGS = 0x04  # inspect.CO_VARARGS
MOST_TRAINING = 64  # threads that make steps
MOST_ENDED = 64  # that are followed; of older ones, no end is noted
QUIET_LOOKS = 2
"""An item that a pool has just taken shows nowhere for a moment: so what has ended is over at the second look."""


def _nothing() -> None:
    return None


def _alone() -> bool:
    return False


_ALONE: "Group" = (None, _alone)


class SaveWriter:
    """A thread or a work item of a pool. That of a thread goes when the thread has ended, and says so."""

    def __init__(self, number: int, ended: "Callable[[SaveWriter], None] | None" = None) -> None:
        self.number, self._ended = number, ended
        self.unsure: tuple[Place, Callable[[], bool]] | None = None  # what it was about to do: where, and whether it has failed
        self.item: Callable[[], object] = _nothing  # of a thread: the work item that it runs; it may hold a whole checkpoint
        self.of_item: SaveWriter | None = None
        self.kin: object = None  # of a thread: the code of its function
        self.failures: list[bool] = []  # of a thread: not empty if an exception has ended it

    def __del__(self) -> None:
        if self._ended is not None:
            self._ended(self)


class _End:
    """A thread or work item that has ended. group: those that belong to it."""

    def __init__(self, kind: str, who: SaveWriter, group: "Group") -> None:
        self.kind, self.who, self.group = kind, who, group
        self.looks = 0  # that found nothing else, one after the other


class StepsWanted:
    """Whose next step must be noted: that of each thread that trains, once something was written or removed."""

    def __init__(self) -> None:
        self.wanted = False
        self._since = 0  # the count when it was
        self._noted: set[tuple[int, int]] = set()  # numbers of threads, with the FIRSTs of their steps noted since
        self._trained: set[int] = set()  # numbers of threads
        self._due: set[int] = set()  # of them

    def add(self, who: SaveWriter) -> None:
        """This thread trains."""
        if who.number not in self._trained and len(self._trained) >= MOST_TRAINING:
            self._trained.clear()
        self._trained.add(who.number)

    def want(self, count: int) -> None:
        """Something is written or removed now. count: of steps by now."""
        if not self.wanted:
            self.wanted, self._since, self._due = True, count, set()
        self._due |= self._trained
        self._noted.clear()

    def shows(self, who: SaveWriter, first: int) -> bool:
        """Return whether this step must be noted. first: the count by which its optimizer had made its own first one."""
        is_new = (who.number, first) not in self._noted
        self._noted.add((who.number, first))
        self.add(who)
        if first <= self._since:  # it trained before: the next step of this thread shows nothing new
            self._due.discard(who.number)
            self.wanted = bool(self._due)
        return is_new


class SaveWriters:
    """Who notes something, and when that is over.

    One of several threads or work items for the files of a save may end before another has opened its file. So the end of a work
    item counts once its pool has nothing to do, and that of a thread once no other thread of the same function runs.
    """

    def __init__(self, note: "Callable[..., None]") -> None:
        self._note = note
        self._pid, self._main = os.getpid(), _thread.get_ident()
        self._numbers = itertools.count(1)
        self._here = _thread._local()  # not by ident: the next thread may have the same one
        self._of_main = SaveWriter(0)
        self.ended: dict[int, _End] = {}  # not noted yet, by their numbers
        self._ends = itertools.count()
        self.steps = StepsWanted()

    def this(self) -> SaveWriter:
        """Return the thread that runs this, or the work item that it runs."""
        if _thread.get_ident() == self._main:
            return self._of_main
        who: SaveWriter | None = getattr(self._here, "who", None)
        if who is None:
            who = self._here.who = SaveWriter(next(self._numbers), self._ended)
            thread = _own_thread()
            who.kin = _code_of(thread)
            _follow_failure(thread, who.failures)
        item, pool = _work_item()
        if item is None:
            return who
        if who.item() is not item or who.of_item is None:
            who.item, who.of_item = _weakref.ref(item), self.other()
            self.follow(who.of_item, item.future, pool)
        return who.of_item

    def trains(self) -> SaveWriter:
        """Return the thread whose step this is. A thread of C++ code makes one of the main thread, if that is in backward()."""
        if _thread.get_ident() != self._main and _is_foreign(_own_thread()) and _waits_in_backward(self._main):
            return self._of_main
        return self.this()

    def other(self, number: int = 0) -> SaveWriter:
        """Return a work item with this number; 0: a new one."""
        return SaveWriter(number or next(self._numbers))

    def follow(self, who: SaveWriter, future: "WatchedFuture", group: "Group" = _ALONE) -> None:
        """Note the end of this work item."""

        def done(future: "WatchedFuture") -> None:
            if os.getpid() == self._pid:
                self._add(_End("f" if future.cancelled() or future.exception() is not None else "e", who, group))

        future.add_done_callback(done)

    def note_ends(self, looks: int = 1) -> None:
        """Note what is over. Call this after each step, while there is something in `ended`; at the end it is the last look."""
        busy: dict[int, bool] = {}  # by the id of what is the same for the group
        for number, each in list(self.ended.items()):
            same, is_busy = each.group
            if id(same) not in busy:
                busy[id(same)] = is_busy()
            each.looks = 0 if busy[id(same)] else each.looks + looks
            if each.looks >= QUIET_LOOKS and self.ended.pop(number, None) is not None:
                self._note(each.kind, each.who)

    def _add(self, end: _End) -> None:
        number = next(self._ends)
        self.ended[number] = end
        self.ended.pop(number - MOST_ENDED, None)

    def in_handler(self) -> bool:
        """Return whether a signal handler of the script runs this."""
        codes = _codes_of_handlers() if _thread.get_ident() == self._main else []
        frame = sys._getframe(2) if codes else None
        while frame is not None:
            if any(frame.f_code is code and _has_signal(frame, before) for code, before in codes):
                return True
            frame = frame.f_back
        return False

    def _ended(self, who: SaveWriter) -> None:
        # Not in a child, which has lost the threads of its parent; nor as the interpreter ends, which cuts threads off.
        if os.getpid() == self._pid and not sys.is_finalizing():
            kin, kind = who.kin, "f" if who.failures else "e"
            runs = (lambda: any(each is kin for each in _functions_of_threads())) if kin is not None else _alone
            self._add(_End(kind, who, (kin, runs)))

    def fails(self) -> bool:
        """An exception has ended this thread or an exit handler. Return whether this is the main thread."""
        who: SaveWriter | None = getattr(self._here, "who", None)
        if who is not None:
            who.failures.append(True)
        return _thread.get_ident() == self._main

    @staticmethod
    def ended_well(error: "BaseException | None") -> bool:
        """Return whether what this has ended was through with its work: it has not left as it handled another error."""
        if not isinstance(error, SystemExit):
            return error is None
        code = error.code
        if not (code is None or (isinstance(code, int) and code & 0xFF not in _ERROR_CODES)):
            return False
        caught = error.__cause__ if error.__suppress_context__ else error.__context__
        kind = type(caught)
        return caught is None or (caught.__context__ is None and (kind.__module__, kind.__name__) in _EXIT_OF_PARSERS)

    @staticmethod
    def came_from_handler(error: BaseException) -> bool:
        """Return whether a signal handler of the script has raised this: what it interrupted is not done."""
        codes, trace = _codes_of_handlers(), error.__traceback__
        while trace is not None:
            if any(trace.tb_frame.f_code is code and _has_signal(trace.tb_frame, before) for code, before in codes):
                return True
            trace = trace.tb_next
        return False


def _work_item() -> "tuple[PoolItem | None, Group]":
    """Return the work item of `concurrent.futures` that this thread runs, and the group of its pool: busy while that has work."""
    frame: FrameType | None = sys._getframe(2)
    item: PoolItem | None = None
    while frame is not None:
        if frame.f_code.co_filename.endswith(_POOLS):
            if frame.f_code.co_name == "run":
                item = frame.f_locals.get("self")
            elif frame.f_code.co_name == "_worker" and item is not None:
                local = frame.f_locals
                pool = local.get("executor_reference")
                queue = local.get("work_queue")
                group = queue or object(), _busy_pool(queue, pool() if pool is not None else None)
                if isinstance(local, dict):  # before Python 3.13, the frame keeps this copy, with the item that it lets go
                    local.clear()
                return item, group
        frame = frame.f_back
    return item, _ALONE


def _busy_pool(queue: "WorkQueue | None", executor: "ThreadPool | None") -> "Callable[[], bool]":
    """Return a function that says whether work waits in the pool, or a thread of it runs some."""
    threads = executor._threads if executor is not None else set()

    def is_busy() -> bool:
        running = {each.ident for each in list(threads) if each.is_alive()}
        # A pool that was shut down leaves something in its queue.
        return bool(running) and ((queue is not None and queue.qsize() > 0) or _works(running))

    return is_busy


def _works(idents: "set[int | None]") -> bool:
    """Return whether one of these threads runs a work item."""
    for ident, top in sys._current_frames().items():
        frame: FrameType | None = top if ident in idents else None
        while frame is not None:
            if frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith(_POOLS):
                return True
            frame = frame.f_back
    return False


def _code_of(thread: object) -> object:
    """Return the code of what this thread runs; that of its class, if it has a `run` of its own."""
    target = getattr(thread, "_target", None) or getattr(type(thread), "run", None)
    return getattr(getattr(target, "__func__", target), "__code__", None)


def _own_thread() -> object:
    """Return the Thread object of this thread, if it has one."""
    threading = sys.modules.get("threading")
    return threading._active.get(_thread.get_ident()) if threading is not None else None


def _is_foreign(thread: object) -> bool:
    """Return whether a thread with this object has been started by C++ code, as those of autograd on a GPU are."""
    return thread is None or type(thread).__name__ == "_DummyThread"


def _waits_in_backward(ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    while frame is not None:
        if frame.f_code.co_name in ("backward", "grad") and frame.f_code.co_filename.endswith("torch/autograd/__init__.py"):
            return True
        frame = frame.f_back
    return False


def _follow_failure(thread: object, failures: "list[bool]") -> None:
    """Have the thread add to this list if an exception ends it. Scripts replace threading.excepthook, which it calls so."""
    original = getattr(thread, "_invoke_excepthook", None)
    if original is None:
        failures += [True] * (thread is not None)  # another Python than those that this is for: unknown
        return

    def invoke(*args: object) -> None:
        if not SaveWriters.ended_well(sys.exc_info()[1]):
            failures.append(True)
        original(*args)

    thread.__dict__["_invoke_excepthook"] = invoke


def _functions_of_threads() -> "list[object]":
    """Return those of all other threads that run."""
    threading, own = sys.modules.get("threading"), _thread.get_ident()
    active = list(threading._active.items()) if threading is not None else []
    return [_code_of(each) for ident, each in active if ident != own]


def _codes_of_handlers() -> "list[tuple[CodeType, int]]":
    """Return the code of the script's signal handlers, and how many arguments come before the signal's number.

    They are functions, methods, partials and callable objects.
    """
    found = []
    for number in SIGNALS:
        handler = _signal.getsignal(number)
        if callable(handler) and handler is not _signal.default_int_handler:
            before = len(getattr(handler, "args", ()))  # of a partial
            handler = getattr(handler, "func", handler)
            bound = getattr(handler, "__func__", None)
            if bound is None and not hasattr(handler, "__code__"):
                bound = getattr(type(handler), "__call__", None)  # noqa: B004 - its code, not whether it can be called
            code = getattr(bound or handler, "__code__", None)
            if code is not None:
                found.append((code, before + (bound is not None)))
    return found


def _has_signal(frame: "FrameType", before: int) -> bool:
    """Return whether this frame was called as a signal handler is, not by the script itself.

    Then a number and a frame, or None, follow the first `before` arguments, unless the handler has deleted them.
    """
    code, local = frame.f_code, frame.f_locals
    missing = object()
    given = [local.get(name, missing) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & _HAS_VARARGS:
        given += local.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], (missing, missing))
    if len(given) < before + 2:
        return False
    number, interrupted = given[before : before + 2]
    return (number is missing or (isinstance(number, int) and number in SIGNALS)) and (
        interrupted is missing or interrupted is None or isinstance(interrupted, type(frame))
    )
