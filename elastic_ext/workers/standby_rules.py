"""What may be imported before a worker starts, and when a worker must be started the usual way: pure, with the reason.

A standby must not be told from a cold start by what a script does. Two things that scripts do need care: a file beside the script
may hide a module that is imported already, and a variable that the script sets before it imports something may have been read.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import all_suffixes

from elastic_ext.workers.standby_server import PER_WORKER, READ_BY_LIBRARIES

# All but the first for what DDP, FSDP2, torch.compile and checkpoints import at their first use, some 3 s in all.
DEFAULT_MODULES = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.optim",
    "torch.distributed.checkpoint",
)

SERVER_BYTES = 700 << 20  # with what DEFAULT_MODULES import, and as much again of the user's
STANDBY_BYTES = 64 << 20  # of its own, besides what it shares with the server; measured 4 to 12 MB, before it runs
RESERVE_BYTES = 512 << 20  # that must be left for the training

_BIND = "--physcpubind="  # torch/numa/binding.py, of 2.9 and newer


@dataclass(frozen=True)
class Learned:
    """What a worker has imported until its first step, with the files, and the variables that it has changed by then."""

    modules: tuple[tuple[str, str | None], ...] = ()
    changed: frozenset[str] = frozenset()


def covered(name: str, packages: Collection[str]) -> bool:
    """Whether the module is one of these or lies in one of these."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in packages for length in range(1, len(parts) + 1))


def worth_preloading(learned: Learned, users: Iterable[str], excluded: Collection[str]) -> list[str]:
    """Those of the modules that lie in none of the user's folders, in the order in which a worker imported them."""
    folders = tuple(os.path.join(os.path.realpath(folder), "") for folder in users)
    kept = []
    for name, origin in learned.modules:
        if name in ("__main__", "__mp_main__") or origin is None or covered(name, excluded):
            continue
        # Installed packages may lie below the user's folder, in a virtual environment.
        beside = os.path.realpath(origin).startswith(folders) and not {"site-packages", "dist-packages"} & set(
            origin.split(os.sep)
        )
        if os.path.isabs(origin) and not beside:
            kept.append(name)
    return kept


def hidden(beside: Iterable[tuple[str, bool]], imported: Collection[str]) -> str | None:
    """What in the script's folder would be imported in place of a module that is imported already.

    beside: names in the folder, with whether each is a package.
    """
    suffixes = all_suffixes()
    for name, is_package in beside:
        stems = [name] if is_package else [name.removesuffix(suffix) for suffix in suffixes if name.endswith(suffix)]
        if any(stem in imported for stem in stems):
            return name
    return None


def variables_set(source: str) -> frozenset[str]:
    """Names of the variables that a script's text sets or removes by os.environ, os.putenv or os.unsetenv."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()  # it will not run either
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)) and _ends(node.value) == "environ":
            found |= _strings(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on_environ = _ends(node.func.value) == "environ" and node.func.attr in ("setdefault", "update", "pop", "__setitem__")
            if on_environ or node.func.attr in ("putenv", "unsetenv"):
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
                unnamed = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg is None)]
                found = found.union(*map(_strings, unnamed))
    return frozenset(found)


def _ends(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _strings(node: ast.expr) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def read_too_early(
    changed: Iterable[str], read: Mapping[str, Collection[str]], set_by_imports: Collection[str]
) -> dict[str, str]:
    """Modules that have read, when they were imported, a variable that the script sets; with that variable.

    read: by module that was asked for. set_by_imports: variables that imports themselves set. The key "" stands for libraries
    that are loaded with any module.
    """
    found: dict[str, str] = {}
    for name in sorted(set(changed) - set(set_by_imports) - PER_WORKER):
        if name.startswith(READ_BY_LIBRARIES):
            found.setdefault("", name)
        for module, variables in read.items():
            if name in variables:
                found.setdefault(module, name)
    return found


def unbound(command: Sequence[str]) -> tuple[Sequence[str], frozenset[int] | None]:
    """The command that torchrun's NUMA options have put behind `numactl --physcpubind=0-3,8`, and these processors; else None."""
    if len(command) < 3 or command[0] != "numactl" or not command[1].startswith(_BIND):
        return command, None
    processors: set[int] = set()
    try:
        for part in command[1].removeprefix(_BIND).split(","):
            first, _, last = part.partition("-")
            processors.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return command, None
    return command[2:], frozenset(processors)


def unbindable(processors: frozenset[int] | None, allowed: Collection[int], environ: Mapping[str, str]) -> str | None:
    """Why a standby that is bound to these processors only now could be told from a process that numactl has started, or None."""
    if processors is None:
        return None
    if not processors <= set(allowed):
        return "numactl is to bind it to processors that may not be used"  # it refuses, and says so
    if not environ.get("OMP_NUM_THREADS"):
        return "it is bound to processors and OMP_NUM_THREADS is not set: libraries have counted the processors already"
    return None


def differs(now: Mapping[str, object], at_start: Mapping[str, object]) -> str | None:
    """The first thing that is not what it was, by its name."""
    return next((name for name in sorted(now.keys() | at_start.keys()) if now.get(name) != at_start.get(name)), None)


def room(available: int, count: int, server_runs: bool) -> str | None:
    """Why there is no memory for so many more standbys, or None. In bytes; see `memory.available`."""
    needed = RESERVE_BYTES + count * STANDBY_BYTES + (0 if server_runs else SERVER_BYTES)
    if available >= needed:
        return None
    return f"{available >> 20} MB of memory are left and standbys need {needed >> 20}"
