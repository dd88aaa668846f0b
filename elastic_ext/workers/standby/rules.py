"""Decides what may be imported before a worker starts, and when a worker must start cold. Pure functions that return reasons.

No script may behave differently in a standby than after a cold start. Two cases need care: a file beside the script may hide an
already imported module, and an import may have read a variable that the script sets before it imports the module itself.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import all_suffixes

from elastic_ext.workers.standby.import_checks import PER_WORKER

# All but the first are imported by DDP, FSDP2, torch.compile and checkpoints at their first use, about 3 s in total. A server
# that is hurried (see `pool`) ends between two of them: half of what torch._dynamo would import is here before it.
DEFAULT_MODULES = (
    *("torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", "torch.distributed.fsdp", "torch._dynamo"),
    *("torch.nn.parallel", "torch.optim", "torch.distributed.checkpoint"),
)

# Prefixes of variables that C code reads when it is loaded, bypassing os.environ: the getenv calls of torch 2.13 (CPU) at import,
# found by LD_PRELOAD, and for CUDA, those in the static initialisers of its sources.
READ_BY_LIBRARIES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_", "DNNL_", "ONEDNN_", "MKLDNN_", "KINETO_"),
    *("TORCH_ALLOW_", "TORCH_BLAS_", "TORCH_CPP_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LINALG_", "TORCH_ROCM_", "TORCH_SHOW_"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_API_USAGE"),
    *("MALLOC_", "LD_", "PYTHON", "OPENSSL_", "LC_", "LANG"),
)

SERVER_BYTES = 700 << 20  # DEFAULT_MODULES, and as much again for the user's modules
STANDBY_BYTES = 64 << 20  # not shared with the server; measured 4 to 12 MB before it runs
RESERVE_BYTES = 512 << 20  # left for the training

_BIND = "--physcpubind="  # torch/numa/binding.py, of 2.9 and newer


class ColdReason(str, Enum):
    """The reason for a cold start, as the metrics count it: a fixed set of labels, never text from outside."""

    OFF = "off"  # the settings turn standbys off, or the program is not a Python program
    NOT_READY = "not_ready"
    CHANGED = "changed"  # the surroundings differ from those in which the standbys were started
    WRAPPED = "wrapped"  # another command wraps the command
    PROCESSORS = "processors"  # a standby can no longer be bound to them
    MEMORY = "memory"
    LACKING = "lacking"  # descriptors, processes or memory are temporarily short
    HIDDEN_MODULE = "hidden_module"  # a file beside the script hides an imported module
    UNSAFE_IMPORT = "unsafe_import"
    AFTER_A_FAILURE = "after_a_failure"
    SERVER_FAILED = "server_failed"


@dataclass(frozen=True)
class Cold:
    """The reason for a cold start. text: for the log only; it may hold what modules have printed or raised."""

    reason: ColdReason
    text: str


@dataclass(frozen=True)
class Learned:
    """A worker's imports and changes by its first step."""

    modules: tuple[tuple[str, str | None], ...] = ()  # modules that it had imported, in order, each with its file if it has one
    changed: frozenset[str] = frozenset()  # names of the environment variables that it had changed


def in_packages(name: str, packages: Collection[str]) -> bool:
    """Return whether a module is one of these packages or lies in one of them."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in packages for length in range(1, len(parts) + 1))


def to_exclude(name: str) -> str:
    """Return what to exclude if importing `name` was unsafe: its package, since any part imports it; in torch, only `name`."""
    package = name.partition(".")[0]
    return name if package == "torch" else package


def worth_preloading(learned: Learned, users: Iterable[str], excluded: Collection[str]) -> list[str]:
    """Return the modules that lie in none of the user's folders, in the order in which a worker imported them."""
    folders = tuple(os.path.join(os.path.realpath(folder), "") for folder in users)
    kept = []
    for name, origin in learned.modules:
        if name in ("__main__", "__mp_main__") or origin is None or in_packages(name, excluded):
            continue
        # Installed packages may lie below the user's folder, in a virtual environment.
        installed = {"site-packages", "dist-packages"} & set(origin.split(os.sep))
        if os.path.isabs(origin) and (installed or not os.path.realpath(origin).startswith(folders)):
            kept.append(name)
    return kept


def broken_import(absent: Mapping[str, str], learned: Collection[str], unsafe: Collection[str]) -> str | None:
    """Return a module that a worker has imported but that fails once torch is imported: a warm start would also fail.

    absent: errors by module, as "TypeName: message". A module that is not found is on a path that the script sets up. learned:
    modules that a worker has imported. unsafe: modules excluded for another reason, which may make others fail.
    """
    for name, why in absent.items():
        if name in learned and to_exclude(name) not in unsafe and not why.startswith("ModuleNotFoundError"):
            return name
    return None


def shadowing_file(beside: Iterable[tuple[str, bool]], imported: Collection[str]) -> str | None:
    """Return the name of a file in the script's folder that a worker would import in place of an already imported module.

    beside: names in the folder, each with whether it is a package.
    """
    suffixes = all_suffixes()
    for name, is_package in beside:
        stems = [name] if is_package else [name.removesuffix(suffix) for suffix in suffixes if name.endswith(suffix)]
        if any(stem in imported for stem in stems):
            return name
    return None


def variables_set(source: str) -> frozenset[str]:
    """Return the environment variables that a script sets or removes by os.environ, os.putenv or os.unsetenv.

    If one of these places does not name them (a loop, a constant), all strings in capitals in the whole source count.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()  # the script will not run either
    found: set[str] = set()
    for targets in filter(None, map(_targets, ast.walk(tree))):
        names = {name for each in targets for name in _names(each)}
        if not names:
            return frozenset(name for name in _names(tree) if name.isupper() and name.isidentifier())
        found |= names
    return frozenset(found)


def _targets(node: ast.AST) -> Sequence[ast.AST]:
    """Return the parts of a statement or call that name the environment variables it sets; empty if it sets none."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)) and _last_name(node.value) == "environ":
        return [node.slice]
    if isinstance(node, ast.AugAssign) and _last_name(node.target) == "environ":
        return [node.value]
    if isinstance(node, ast.Call):
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        on_environ = of is not None and _last_name(of) == "environ" and _last_name(node.func) in _SETTERS
        if on_environ or _last_name(node.func) in ("putenv", "unsetenv"):
            return [*node.args, *node.keywords]
    return []


_SETTERS = ("setdefault", "update", "pop", "__setitem__")


def _last_name(node: ast.expr) -> str:
    """Return the last name of an expression: `environ` for `os.environ`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> set[str]:
    texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return texts | {each.arg for each in ast.walk(node) if isinstance(each, ast.keyword) and each.arg is not None}


def read_too_early(
    changed: Iterable[str], read: Mapping[str, Collection[str]], set_by_imports: Collection[str]
) -> dict[str, str]:
    """Return the variable by module where a module reads one at import that the script sets later; "": libraries of any module.

    changed: variables that the script sets. read: variables that were read at import, by requested module. set_by_imports:
    variables that imports themselves set.
    """
    found: dict[str, str] = {}
    for name in sorted(set(changed) - set(set_by_imports) - PER_WORKER):
        if name.startswith(READ_BY_LIBRARIES):
            found.setdefault("", name)
        for module, variables in read.items():
            if name in variables:
                found.setdefault(module, name)
    return found


def split_numactl(command: Sequence[str]) -> tuple[Sequence[str], frozenset[int] | None]:
    """Split `numactl --physcpubind=0-3,8 COMMAND`, as torchrun's NUMA options build it, into command and processors.

    Any other command is returned unchanged, with None.
    """
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


def why_unbindable(processors: frozenset[int] | None, allowed: Collection[int], environ: Mapping[str, str]) -> str | None:
    """Return why a standby bound to these processors now would differ from a process started by numactl, or None."""
    if processors is None:
        return None
    if not processors <= set(allowed):
        return "numactl would bind it to processors that the agent may not use"  # numactl refuses that, with a message
    if not environ.get("OMP_NUM_THREADS"):
        return "it would be bound to processors, but libraries have already counted all of them: set OMP_NUM_THREADS"
    return None


def differs(now: Mapping[str, object], at_start: Mapping[str, object]) -> str | None:
    """Return the name of the first entry that differs; None if none does."""
    return next((name for name in sorted(now.keys() | at_start.keys()) if now.get(name) != at_start.get(name)), None)


def memory_shortage(available: int, count: int, server_runs: bool) -> str | None:
    """Return why memory is too short for `count` more standbys, or None. available: in bytes, see `limits.memory_left`."""
    needed = RESERVE_BYTES + count * STANDBY_BYTES + (0 if server_runs else SERVER_BYTES)
    if available >= needed:
        return None
    return f"{available >> 20} MB of memory are free, but standbys need {needed >> 20} MB"
