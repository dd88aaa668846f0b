"""Notes what the script writes, copies, removes and reads through fsspec below a URL of checkpoints: for `saves.py`.

No event of Python shows what a filesystem of fsspec does. So its own functions are wrapped: `open`, `copy` and `rm`; and of those
on asyncio, such as s3fs, the ones that are made from its coroutines. Not seen are other clients (boto3), filesystems that move a
file without these functions, and what processes write that the script starts.

This file is loaded by path before the script; see `bootstrap.py` for what it may import.
"""

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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
    "_put_file": ("w", 1),
    "_put": ("w", 1),
    "_cp_file": ("w", 1),
    "_copy": ("w", 1),
    "_rm_file": ("d", 0),
    "_rm": ("d", 0),
}
_NAMES = "path", "rpath", "path2"  # of that argument


class RemotePlaces:
    """The URLs of checkpoints, and what wraps the functions of fsspec that change something below them."""

    def __init__(self, urls: "Mapping[int, str]") -> None:
        """urls: by the number of the directory."""
        self._urls = [(at, url.partition("://")[0], url) for at, url in urls.items()]

    def find(self, filesystem: "Filesystem", path: object) -> "Place":
        """Return where a path of a filesystem is."""
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

    def _notes(self, record: "SaveRecord", filesystem: "Filesystem", kind: str, path: object, many: bool = False) -> None:
        """Note this of one path, or several. many: it is the directory of files whose names are not known here."""
        for each in path if isinstance(path, (list, tuple, dict)) else [path]:
            unknown = kind == "w" and (many or str(each).endswith("/"))
            record.notes("l" if unknown else kind, self.find(filesystem, each))

    def _wrap_filesystem(self, module: "ModuleType", record: "SaveRecord") -> bool:
        kind = getattr(module, "AbstractFileSystem", None)
        if kind is None:
            return False
        noted = record.guarded(self._notes)
        opens, copies, removes = kind.open, kind.copy, kind.rm

        def open(self: "Filesystem", path: object, mode: str = "rb", *args: object, **kwargs: object) -> object:
            noted(record, self, "r" if mode.startswith("r") and "+" not in mode else "w", path)
            return opens(self, path, mode, *args, **kwargs)

        def copy(self: "Filesystem", path1: object, path2: object, recursive: bool = False, **kwargs: object) -> object:
            noted(record, self, "w", path2, recursive)
            return copies(self, path1, path2, recursive=recursive, **kwargs)

        def rm(self: "Filesystem", path: object, *args: object, **kwargs: object) -> object:
            noted(record, self, "d", path)
            return removes(self, path, *args, **kwargs)

        for wrapped, original in ((open, opens), (copy, copies), (rm, removes)):
            wrapped.__dict__["__wrapped__"], wrapped.__doc__ = original, original.__doc__
            setattr(kind, wrapped.__name__, wrapped)
        return True

    def _wrap_sync_wrapper(self, module: "ModuleType", record: "SaveRecord") -> bool:
        """It makes the functions that scripts call of each filesystem's coroutines."""
        original = getattr(module, "sync_wrapper", None)
        if original is None:
            return False
        noted = record.guarded(self._notes)

        def sync_wrapper(func: "Callable[..., object]", obj: "Filesystem | None" = None) -> "Callable[..., object]":
            call: Callable[..., object] = original(func, obj=obj)
            name = getattr(func, "__name__", "")
            if obj is None or name not in _COROUTINES:
                return call
            kind, at = _COROUTINES[name]

            def wrapper(*args: object, **kwargs: object) -> object:
                path = args[at] if len(args) > at else next((kwargs[each] for each in _NAMES if each in kwargs), "")
                noted(record, obj, kind, path, bool(kwargs.get("recursive") or (args[2:] and args[2] is True)))
                return call(*args, **kwargs)

            wrapper.__dict__["__wrapped__"], wrapper.__name__, wrapper.__doc__ = call, call.__name__, call.__doc__
            return wrapper

        module.__dict__["sync_wrapper"] = sync_wrapper
        return True
