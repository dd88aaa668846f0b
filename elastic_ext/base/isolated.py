"""Starts a program of ours in a process of its own, in which nothing of the job's directory hides a module.

    python -I isolated.py PROGRAM COUNT ENTRY... ARGS...

runs PROGRAM, a module's name or the path of a file, as `__main__` with ARGS. `-I` leaves out the working directory, PYTHONPATH
and the user's site-packages. The COUNT entries are those of the agent's sys.path: elastic_ext and fsspec may be installed by
PYTHONPATH only, or be run from a checkout. They are looked at last, and never for a module of the standard library.

Standard library only, and no import here but of what every interpreter has at start.
"""

import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _StandardLibrary:
    """Finds a module with a name of the standard library on the path that was there at start, or refuses it.

    Some of those names are there on other platforms only (msvcrt), and libraries try them.
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


def look_last(entries: "Iterable[str]") -> None:
    """Append to sys.path; what is in there hides no module that is found without, nor one of the standard library."""
    at = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(at, _StandardLibrary(sys.path))
    sys.path += [entry for entry in dict.fromkeys(entries) if entry not in sys.path]


def command(program: str) -> list[str]:
    """Return the command that runs `program`; its arguments are to follow. program: a module's name, or the path of a file."""
    entries = _entries()
    options = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *options, __file__, program, str(len(entries)), *entries]


def _entries() -> list[str]:
    """This process's sys.path without the working directory, unless PYTHONPATH names it or elastic_ext lies in it."""
    import os

    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        here = {os.getcwd(), os.path.realpath(os.curdir)}
    except FileNotFoundError:
        here = set()  # it was removed
    named = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry} if here else set()
    every = [os.path.abspath(entry) for entry in sys.path if entry] if here else [entry for entry in sys.path if entry]
    kept = [entry for entry in every if entry not in here or entry in named]
    return kept if package in kept else [*kept, package]


def _main(program: str, count: str, *rest: str) -> None:
    look_last(rest[: int(count)])
    sys.argv[:] = [program, *rest[int(count) :]]
    import runpy

    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
