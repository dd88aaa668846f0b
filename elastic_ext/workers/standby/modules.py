"""What the standbys of one agent import, chosen from reports of workers and from imports of each server; what they inherit."""

from __future__ import annotations

import json
import logging
import os
import resource
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from elastic_ext.base.printable import masked
from elastic_ext.workers.standby import import_checks, rules

if TYPE_CHECKING:
    from elastic_ext.workers.standby.server import PreloadRequest, Ready


logger = logging.getLogger(__name__)

_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_SOURCE_BYTES = 1 << 20


def surroundings(environ: Mapping[str, str]) -> dict[str, object]:
    """Return what a process inherits now, as a standby did when its server started; keys are names for messages."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        umask = next((line.split()[1] for line in lines if line.startswith("Umask:")), None)
    return {
        **{f"the variable {name}": value for name, value in environ.items() if name not in import_checks.PER_WORKER},
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


@dataclass(frozen=True)
class StandbySpec:
    """The program that standbys are kept ready for."""

    python: tuple[str, ...]  # the interpreter and its options
    bootstrap: str  # the file that a cold start runs with the interpreter
    program: tuple[str, ...]  # [SCRIPT, ...] or ["-m", MODULE, ...]
    workers: int  # number of workers of this agent
    exclude: tuple[str, ...]  # modules that the user names
    # returns the environment of the workers, without the variables that differ between them
    environ: Callable[[], dict[str, str]]
    token: str  # the agent's token, by which the reaper finds what the agent has started

    @property
    def folder(self) -> str:
        """Return the folder that the interpreter puts first on sys.path."""
        if self.program[0] == "-m":
            return os.getcwd()
        path = os.path.realpath(self.program[0])
        return path if os.path.isdir(path) else os.path.dirname(path)


@dataclass(frozen=True)
class ImportOutcome:
    """The consequences of a server's imports for the pool."""

    hopeless: str | None  # why no server can do better; None: another one can, or this one is good
    unsafe: bool  # this server imported modules that it must not; the next one leaves them out


class PreloadedModules:
    """The modules to import. Any thread may call `learn`; only the pool's thread may call the rest."""

    def __init__(self, spec: StandbySpec, run_dir: str) -> None:
        """Start with the defaults. run_dir: a directory for small files: what imports print, and the request for them."""
        self.spec = spec
        self.output, self._request = (os.path.join(run_dir, name) for name in ("standby.out", "standby.modules"))
        self._learned: rules.Learned | None = None  # written once
        self._chosen: list[str] = []  # from `_learned`
        self._excluded = set(spec.exclude)

    def learn(self, path: str) -> bool:
        """Read a worker's report if there is one (`worker_env`: modules). Return whether it is the first; only that counts."""
        if self._learned is not None or not os.path.exists(path):
            return False
        try:
            with open(path, encoding="utf-8") as file:
                report = json.load(file)
            modules = tuple((str(name), origin) for name, origin in report["modules"])
            self._learned = rules.Learned(modules, frozenset(report["changed"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("cannot read a worker's report of its imports: %s", error)
            self._learned = rules.Learned()
        return True

    @property
    def can_choose(self) -> bool:
        """Return whether there is a report from which nothing has been chosen yet."""
        return self._learned is not None and not self._chosen

    def choose(self) -> bool:
        """Choose from the report; return whether waiting standbys may have read variables that the workers set."""
        assert self._learned is not None
        folders = [self.spec.folder, os.getcwd()]
        self._chosen = rules.worth_preloading(self._learned, folders, self._excluded) or list(rules.DEFAULT_MODULES)
        return bool(self._learned.changed)

    def write_request(self) -> str:
        """Write the request for a server's imports; return the path."""
        with open(self._request, "w", encoding="utf-8") as file:
            json.dump(self.request(), file)
        return self._request

    def request(self) -> PreloadRequest:
        learned = self._learned.modules if self._learned is not None else ()
        return {
            "modules": [name for name in (*rules.DEFAULT_MODULES, *self._chosen) if not rules.in_packages(name, self._excluded)],
            "excluded": sorted(self._excluded),
            "script_dir": self.spec.folder,
            "program": list(self.spec.program),
            "origins": {name: origin for name, origin in learned if origin is not None and not name.startswith("__")},
        }

    def check(self, ready: Ready) -> ImportOutcome:
        """Log what was not safe to import, exclude it from now on, and return what that means for the pool."""
        unsafe = {rules.to_exclude(name): why for name, why in {**ready["unsafe"], **self._read_too_early(ready)}.items()}
        absent = {name: why for name, why in ready["absent"].items() if rules.to_exclude(name) not in unsafe}
        for name, why in {**absent, **unsafe}.items():
            logger.info("%s is not preloaded: %s", name or "a library", self.masked(why))
        hopeless = self._why_hopeless(ready, unsafe)
        if hopeless is None:
            self._excluded |= unsafe.keys()
        return ImportOutcome(hopeless, bool(unsafe))

    def _why_hopeless(self, ready: Ready, unsafe: Mapping[str, str]) -> str | None:
        failed = rules.broken_import(ready["absent"], self._chosen, unsafe)
        if failed is not None:
            why = self.masked(ready["absent"][failed])
            return f"{failed}, which the workers import, cannot be imported after torch: {why}"
        for name in ("", "torch"):  # libraries, or what all others import
            if name in unsafe:
                return f"{name or 'a library'}: {unsafe[name]}"
        return f"the standby server has {ready['threads']} threads, expected 1" if ready["threads"] > 1 and not unsafe else None

    def _read_too_early(self, ready: Ready) -> dict[str, str]:
        changed = self._learned.changed if self._learned is not None else frozenset()
        changed |= rules.variables_set(source(self.spec.program, self.spec.folder))
        found = rules.read_too_early(changed, ready["read"], ready["changed"])
        return {module: f"it reads {name} when it is imported, which the script sets later" for module, name in found.items()}

    def masked(self, text: str) -> str:
        """Mask the secrets of the workers' environment, because modules may print and raise anything."""
        return masked(text, self.spec.environ())
