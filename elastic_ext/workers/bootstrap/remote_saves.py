"""Notes what the script writes, copies, removes and reads through fsspec below a URL of checkpoints: for `saves.py`.

No event of Python shows what a filesystem of fsspec does. So its own functions are wrapped: `open`, `copy` and `rm`; and of those
on asyncio, such as s3fs, the ones that are made from its coroutines. A write may fail without a trace on the storage, and a file
is there only once it is closed. So each file that is written is a work item of its own beside the thread that writes it:

    it has ended           the function has returned, or the file's `close`
    it has failed          one of them has raised, or the file was closed as an exception went through, thrown away, or dropped
    neither                the file was never closed

Where the files that are written are not known here, or not when they appear, the save counts as not seen whole: directories
(`put(..., recursive=True)`), what may be skipped (`on_error="ignore"`), transactions, `open(..., compression=...)`, and files
whose `close` cannot be wrapped. Patterns (`put("*.pt", ...)`) are noted by their target alone, whose files are then unknown. Not
seen are other clients (boto3), coroutines that the script awaits, filesystems that move a file without these functions, and what
processes write that the script starts.

This file is loaded by path before the script; see `bootstrap.py` for what it may import.
"""

import os
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import Protocol

    from elastic_ext.workers.bootstrap.saves import Place, SaveRecord

    class Filesystem(Protocol):
        protocol: str | tuple[str, ...]

        def _strip_protocol(self, path: object) -> object: ...


_ELSEWHERE: "Place" = (-1, "")

# What coroutines of an asyncio filesystem do, by their names: the kind of line, and which argument is the path.
_COROUTINES: "dict[str, tuple[str, int]]" = {
    "_pipe_file": ("w", 0),
    "_pipe": ("w", 0),
    "_touch": ("w", 0),
    "_put_file": ("w", 1),
    "_put": ("w", 1),
    "_cp_file": ("w", 1),
    "_copy": ("w", 1),
    "_rm_file": ("d", 0),
    "_rm": ("d", 0),
}
_NAMES = "path", "rpath", "path2"  # of that argument
_MARK = "_elastic_ext_writes"  # attribute of a file: process, number of its work item, exception that was handled at its opening
_IS_OVER = "closed", "forced", "_unclosable"  # attributes of a file that `close` does not write any more


class RemotePlaces:
    """The URLs of checkpoints, and what wraps the functions of fsspec that change something below them."""

    def __init__(self, urls: "Mapping[int, str]") -> None:
        """urls: by the number of the directory."""
        self._urls = [(at, url.partition("://")[0], url) for at, url in urls.items()]

    def find(self, filesystem: "Filesystem", path: object) -> "Place":
        """Return where a path of a filesystem is."""
        inner: Filesystem | None = getattr(filesystem, "fs", None)  # of one that caches, with the same paths
        if inner is not None and hasattr(inner, "protocol"):
            filesystem = inner
        names = filesystem.protocol
        protocols = (names,) if isinstance(names, str) else names
        for at, protocol, url in self._urls:
            if protocol in protocols:
                below = f"{filesystem._strip_protocol(url)}".rstrip("/") + "/"
                full = str(filesystem._strip_protocol(path))
                if full.startswith(below) and not full.startswith(f"{below}.elastic_ext/"):
                    return at, full[len(below) :].rstrip("/")
        return _ELSEWHERE

    @property
    def wrappers(self) -> "dict[str, Callable[[ModuleType, SaveRecord], bool]]":
        """By the module that the functions are in."""
        return {"fsspec.spec": self._wrap_filesystem, "fsspec.asyn": self._wrap_sync_wrapper}

    def _wrap_filesystem(self, module: "ModuleType", record: "SaveRecord") -> bool:
        kind = getattr(module, "AbstractFileSystem", None)
        if kind is None:
            return False
        notes = _Notes(record, self)
        kind.copy, kind.rm = notes.around(kind.copy, "w", 1), notes.around(kind.rm, "d", 0)
        kind.open = notes.around_open(kind.open)
        return True

    def _wrap_sync_wrapper(self, module: "ModuleType", record: "SaveRecord") -> bool:
        """It makes the functions that scripts call of each filesystem's coroutines."""
        original = getattr(module, "sync_wrapper", None)
        if original is None:
            return False
        notes = _Notes(record, self)

        def sync_wrapper(*args: object, **kwargs: object) -> "Callable[..., object]":
            call: Callable[..., object] = original(*args, **kwargs)
            noted = _COROUTINES.get(getattr(call, "__name__", ""))
            filesystem = _argument(args, kwargs, 1, ("obj",), None)
            if filesystem is not None:
                notes.wrap_class(type(filesystem))
            return notes.around(call, *noted, filesystem) if noted is not None else call

        module.__dict__["sync_wrapper"] = _in_place_of(original, sync_wrapper)
        return True


class _Notes:
    """Notes what functions of filesystems and methods of files do. An error of its own breaks the record."""

    def __init__(self, record: "SaveRecord", places: RemotePlaces) -> None:
        self._record, self._places = record, places
        self._begin, self._end = record.guarded(self._begins), record.guarded(self._ends)
        self._follow = record.guarded(self._follows)
        self._classes: set[type] = set()  # of filesystems, those that were wrapped

    def around(self, original: "Callable[..., object]", kind: str, at: int, of: object = None) -> "Callable[..., object]":
        """Return what takes the place of a function. kind: of its lines. at: which argument is the path.

        of: the filesystem that it belongs to; None: its first argument is that.
        """

        def call(*args: object, **kwargs: object) -> object:
            own = args[:1] if of is None else (of,)
            given = args[1:] if of is None else args
            items: list[int] = []
            skips = "ignore" in (kwargs.get("on_error"), *given[3:])
            unknown = skips or bool(kwargs.get("recursive")) or given[2:3] == (True,)
            self._begin(own, kind, _argument(given, kwargs, at, _NAMES, ""), kind == "w" and unknown, items)
            ended = "f"
            try:
                result = original(*args, **kwargs)
                ended = "e"
                return result
            finally:
                self._end(ended, items)

        return _in_place_of(original, call)

    def wrap_class(self, kind: type) -> None:
        """Wrap what the classes of a filesystem have made of coroutines themselves, before `sync_wrapper` was wrapped."""
        for each in kind.__mro__ if kind not in self._classes else ():
            for name, noted in _COROUTINES.items():
                made = vars(each).get(name[1:])
                coroutine = getattr(made, "__wrapped__", None)
                if made is not None and getattr(coroutine, "__name__", "") == name and not hasattr(made, _MARK):
                    setattr(each, name[1:], self.around(made, *noted))
        self._classes.add(kind)

    def around_open(self, original: "Callable[..., object]") -> "Callable[..., object]":
        def open(*args: object, **kwargs: object) -> object:
            own, given = args[:1], args[1:]
            path, mode = _argument(given, kwargs, 0, ("path",), ""), _argument(given, kwargs, 1, ("mode",), "rb")
            if not isinstance(mode, str) or "b" not in mode:  # an error; or text, whose binary file it opens by this function
                return original(*args, **kwargs)
            if mode.startswith("r") and "+" not in mode:
                self._begin(own, "r", path, False, [])
                return original(*args, **kwargs)
            later = not kwargs.get("autocommit", not getattr(args[0], "_intrans", False))
            items: list[int] = []
            self._begin(own, "w", path, later or any(given[4:]) or bool(kwargs.get("compression")), items)
            ended = "f"
            try:
                file = original(*args, **kwargs)
                ended = ""
            finally:
                if ended:
                    self._end(ended, items)
            if items:
                self._follow(own, path, file, items)
            return file

        return _in_place_of(original, open)

    def _begins(self, own: "Sequence[Filesystem]", kind: str, path: object, unknown: bool, items: "list[int]") -> None:
        """Note this of one path, or several. unknown: which files are written there, or when. Add the numbers of work items."""
        for filesystem in own:  # none in a call without arguments
            several = hasattr(path, "__len__") and not isinstance(path, str)  # no iterator: it would be empty then
            for each in path if several else [path]:  # type: ignore[attr-defined]
                if not isinstance(each, (str, os.PathLike)):
                    continue
                hidden = unknown or (kind == "w" and str(each).endswith("/"))
                self._record.notes("l" if hidden else kind, self._places.find(filesystem, each), items)

    def _ends(self, kind: str, items: "Sequence[int]") -> None:
        for number in items:
            self._record.ends(kind, number)

    def _follows(self, own: "Sequence[Filesystem]", path: object, file: object, items: "list[int]") -> None:
        """Note the end of the work item when this file is closed."""
        attributes = getattr(file, "__dict__", None)
        if attributes is not None and "close" not in attributes and self._wrap_file(type(file)):
            attributes[_MARK] = os.getpid(), items[0], id(sys.exc_info()[1])
        else:
            self._begins(own, "w", path, True, [])
            self._ends("e", items)

    def _wrap_file(self, kind: type) -> bool:
        """Wrap what ends a file of this class. Return whether its end is seen then.

        Not in the file itself: that would be a cycle, and what is dropped without `close` would be written later.
        """
        for name in ("discard", "abort", "__del__", "close"):  # what is dropped may be half of a file, and is written so
            original = getattr(kind, name, None)
            if original is not None and not hasattr(original, _MARK):
                try:
                    setattr(kind, name, self._around_end(original, name == "close"))
                except TypeError:  # of C
                    return False
        return hasattr(kind, "close")

    def _around_end(self, original: "Callable[..., object]", closes: bool) -> "Callable[..., object]":
        def end(*args: object, **kwargs: object) -> object:
            file = args[0] if args else None
            pid, number, handled = getattr(file, "__dict__", {}).pop(_MARK, (0, 0, 0))
            passes = sys.exc_info()[1] is not None and handled != id(sys.exc_info()[1])
            well = closes and not passes and not any(getattr(file, each, False) for each in _IS_OVER)
            ended = "f"
            try:
                result = original(*args, **kwargs)
                ended = "e" if well else "f"
                return result
            finally:
                # Not in a child, where this number is of another file; nor as the interpreter ends, which closes what is left.
                if pid == os.getpid() and not sys.is_finalizing():
                    self._end(ended, [number])

        return _in_place_of(original, end)


def _argument(
    given: "Sequence[object]", named: "Mapping[str, object]", at: int, names: "Sequence[str]", default: object
) -> object:
    """Return an argument of a call by its place or its name."""
    return given[at] if len(given) > at else next((named[each] for each in names if each in named), default)


def _in_place_of(original: "Callable[..., object]", call: "Callable[..., object]") -> "Callable[..., object]":
    """Return this function with the names of the other one, by which it is pickled."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(call, name, getattr(original, name, getattr(call, name)))
    call.__dict__.update({"__wrapped__": original, _MARK: True})
    return call
