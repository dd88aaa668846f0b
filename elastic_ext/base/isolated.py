"""Starts a helper program in a child process where no file of the job's directory can shadow a module.

    python -I isolated.py PROGRAM COUNT ENTRY... ARGS...

runs PROGRAM, a module's name or the path of a file, as `__main__` with ARGS. `-I` excludes the working directory, PYTHONPATH and
the user's site-packages. The COUNT entries come from the agent's sys.path, since elastic_ext and fsspec may be importable only
through PYTHONPATH or from a checkout. They are searched last, and never for a module of the standard library.

It uses only those modules of the standard library that every interpreter loads at start.
"""

import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # as typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _StandardLibrary:
    """A finder that finds names of the standard library on the original path, or raises ModuleNotFoundError.

    Some of those modules exist only on other platforms (msvcrt), and libraries try to import them.
    """

    def __init__(self, path: "Sequence[str]") -> None:
        self._path = tuple(path)

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if path is not None or name not in sys.stdlib_module_names:
            return None
        found = PathFinder.find_spec(name, list(self._path), target)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found


def search_last(entries: "Iterable[str]") -> None:
    """Append to sys.path. The new entries shadow no module that is found without them, and none of the standard library."""
    at = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(at, _StandardLibrary(sys.path))
    sys.path += [entry for entry in dict.fromkeys(entries) if entry not in sys.path]


def command(program: str) -> list[str]:
    """Return the command that runs `program`, to be followed by its arguments. program: a module's name or a file's path."""
    entries = _entries()
    options = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *options, __file__, program, str(len(entries)), *entries]


def _entries() -> list[str]:
    """Return sys.path without the working directory, unless PYTHONPATH names it or it contains elastic_ext."""
    import os

    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        here = {os.getcwd(), os.path.realpath(os.curdir)}
    except FileNotFoundError:
        here = set()  # the working directory was removed
    named = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry} if here else set()
    every = [os.path.abspath(entry) for entry in sys.path if entry] if here else [entry for entry in sys.path if entry]
    kept = [entry for entry in every if entry not in here or entry in named]
    return kept if package in kept else [*kept, package]


def _main(program: str, count: str, *rest: str) -> None:
    search_last(rest[: int(count)])
    sys.argv[:] = [program, *rest[int(count) :]]
    import runpy

    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
