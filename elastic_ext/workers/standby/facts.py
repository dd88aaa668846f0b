"""Reads the facts that `rules` decides on from this host: what a process inherits, the script's text, the files beside it."""

from __future__ import annotations

import os
import resource
import stat
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder

from elastic_ext.workers.standby.import_checks import PER_WORKER

_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_SOURCE_BYTES = 1 << 20


def surroundings(environ: Mapping[str, str]) -> dict[str, object]:
    """Return what a process inherits now, as a standby did when its server started; keys are names for messages."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        umask = next((line.split()[1] for line in lines if line.startswith("Umask:")), None)
    return {
        **{f"the variable {name}": value for name, value in environ.items() if name not in PER_WORKER},
        "the current directory": os.getcwd(),
        "the umask": umask,
        "the set of allowed processors": tuple(sorted(os.sched_getaffinity(0))),
        "the priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        **{f"the limit {name}": _limit(number) for name, number in _LIMITS.items()},
    }


def _limit(number: int) -> tuple[int, int] | None:
    try:
        return resource.getrlimit(number)
    except OSError:  # refused
        return None


def listed(folder: str) -> list[tuple[str, bool]]:
    """Return the names in a folder, each with whether it is a package."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.is_dir()) for entry in entries]
    except OSError:
        return []
    return [(name, _is_package(os.path.join(folder, name)) if is_folder else False) for name, is_folder in found]


def _is_package(folder: str) -> bool:
    try:
        return any(name.startswith("__init__.") for name in os.listdir(folder))
    except OSError:
        return False


def source(program: Sequence[str], folder: str) -> str:
    """Return the text of the script, "" if it has none. folder: where to look for modules first."""
    path = program[0] if program[0] != "-m" else _file_of(program[1], folder)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_SOURCE_BYTES)
    except (OSError, ValueError):
        return ""


def _file_of(module: str, folder: str) -> str:
    """Return the file that `python -m module` runs, without importing anything; "" if there is none."""
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
