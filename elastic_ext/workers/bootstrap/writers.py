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
QUIET_LOOKS = 2
"""An item that a pool has just taken shows nowhere for a moment: so what has ended is over at the second look."""


def _nothing() -> None:
    return None


class SaveWriter:
    """A thread or a work item of a pool. That of a thread goes when the thread has ended, and says so."""

    def __init__(self, number: int, ended: "Callable[[SaveWriter], None] | None" = None) -> None:
        self.number, self._ended = number, ended
        self.unsure: tuple[str, Place, str] | None = None  # what it was about to do: kind, place, and the path to look at
        self.item: Callable[[], object] = _nothing  # of a thread: the work item that it runs; it may hold a whole checkpoint
        self.of_item: SaveWriter | None = None
        self.kin: object = None  # of a thread: the code of its function

    def __del__(self) -> None:
        if self._ended is not None:
            self._ended(self)


class _End:
    """A thread or work item that has ended. is_busy: returns whether others that belong to it still run."""

    def __init__(self, kind: str, who: SaveWriter, is_busy: "Callable[[], bool]") -> None:
        self.kind, self.who, self.is_busy = kind, who, is_busy
        self.looks = 0  # that found nothing else, one after the other


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
        self.ended: list[_End] = []  # not noted yet

    def this(self) -> SaveWriter:
        """Return the thread that runs this, or the work item that it runs."""
        if _thread.get_ident() == self._main:
            return self._of_main
        who: SaveWriter | None = getattr(self._here, "who", None)
        if who is None:
            who = self._here.who = SaveWriter(next(self._numbers), self._ended)
            who.kin = _function_of_thread()
        item, is_busy = _work_item()
        if item is None:
            return who
        if who.item() is not item or who.of_item is None:
            who.item, who.of_item = _weakref.ref(item), self.other()
            self.follow(who.of_item, item.future, is_busy)
        return who.of_item

    def other(self) -> SaveWriter:
        return SaveWriter(next(self._numbers))

    def follow(self, who: SaveWriter, future: "WatchedFuture", is_busy: "Callable[[], bool]" = lambda: False) -> None:
        """Note the end of this work item. is_busy: returns whether its pool has more to do."""

        def done(future: "WatchedFuture") -> None:
            if os.getpid() == self._pid:
                self.ended.append(_End("f" if future.cancelled() or future.exception() is not None else "e", who, is_busy))

        future.add_done_callback(done)

    def note_ends(self, looks: int = 1) -> None:
        """Note what is over. Call this after each step, while there is something in `ended`; at the end it is the last look."""
        for each in list(self.ended):
            each.looks = 0 if each.is_busy() else each.looks + looks
            if each.looks >= QUIET_LOOKS and each in self.ended:
                self.ended.remove(each)
                self._note(each.kind, each.who)

    def in_handler(self) -> bool:
        """Return whether a signal handler of the script runs this."""
        codes = _codes_of_handlers() if _thread.get_ident() == self._main else []
        frame = sys._getframe(2) if codes else None
        while frame is not None:
            if any(frame.f_code is each for each in codes):
                return True
            frame = frame.f_back
        return False

    def _ended(self, who: SaveWriter) -> None:
        # Not in a child, which has lost the threads of its parent; nor as the interpreter ends, which cuts threads off.
        if os.getpid() == self._pid and not sys.is_finalizing():
            kin = who.kin
            self.ended.append(_End("e", who, lambda: kin is not None and any(each is kin for each in _functions_of_threads())))

    @staticmethod
    def came_from_handler(error: BaseException) -> bool:
        """Return whether a signal handler of the script has raised this: what it interrupted is not done."""
        codes, trace = _codes_of_handlers(), error.__traceback__
        while trace is not None:
            if any(trace.tb_frame.f_code is each for each in codes):
                return True
            trace = trace.tb_next
        return False


def _work_item() -> "tuple[PoolItem | None, Callable[[], bool]]":
    """Return the work item of `concurrent.futures` that this thread runs, and what says whether its pool has more to do."""
    frame: FrameType | None = sys._getframe(2)
    item: PoolItem | None = None
    while frame is not None:
        if frame.f_code.co_filename.endswith(_POOLS):
            if frame.f_code.co_name == "run":
                item = frame.f_locals.get("self")
            elif frame.f_code.co_name == "_worker" and item is not None:
                local = frame.f_locals
                pool = local.get("executor_reference")
                is_busy = _busy_pool(local.get("work_queue"), pool() if pool is not None else None)
                if isinstance(local, dict):  # before Python 3.13, the frame keeps this copy, with the item that it lets go
                    local.clear()
                return item, is_busy
        frame = frame.f_back
    return item, lambda: False


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


def _function_of_thread() -> object:
    threading = sys.modules.get("threading")
    return _code_of(threading._active.get(_thread.get_ident())) if threading is not None else None


def _functions_of_threads() -> "list[object]":
    """Return those of all other threads that run."""
    threading, own = sys.modules.get("threading"), _thread.get_ident()
    active = list(threading._active.items()) if threading is not None else []
    return [_code_of(each) for ident, each in active if ident != own]


def _codes_of_handlers() -> "list[CodeType]":
    """Return the code of the script's signal handlers: functions, methods, partials, callable objects."""
    found = []
    for number in SIGNALS:
        handler = _signal.getsignal(number)
        if callable(handler) and handler is not _signal.default_int_handler:
            handler = getattr(handler, "func", handler)  # of a partial
            for each in (handler, getattr(handler, "__func__", None), vars(type(handler)).get("__call__")):
                code = getattr(each, "__code__", None)
                if code is not None:
                    found.append(code)
    return found
