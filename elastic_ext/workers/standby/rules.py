"""What may be imported before a worker starts, and when a worker must be started the usual way: pure, with the reason.

A standby must not be told from a cold start by what a script does. Two things that scripts do need care: a file beside the script
may hide a module that is imported already, and a variable that the script sets before it imports something may have been read.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import all_suffixes

from elastic_ext.workers.standby.import_checks import PER_WORKER

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

# Prefixes of variables that C code reads as it is loaded, where no read of os.environ tells of it: the getenv calls of torch 2.13
# (CPU) at import, by LD_PRELOAD, and for CUDA what its sources read in static initialisers.
READ_BY_LIBRARIES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_", "DNNL_", "ONEDNN_", "MKLDNN_", "KINETO_"),
    *("TORCH_ALLOW_", "TORCH_BLAS_", "TORCH_CPP_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LINALG_", "TORCH_ROCM_", "TORCH_SHOW_"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_API_USAGE"),
    *("MALLOC_", "LD_", "PYTHON", "OPENSSL_", "LC_", "LANG"),
)

SERVER_BYTES = 700 << 20  # with what DEFAULT_MODULES import, and as much again of the user's
STANDBY_BYTES = 64 << 20  # of its own, besides what it shares with the server; measured 4 to 12 MB, before it runs
RESERVE_BYTES = 512 << 20  # that must be left for the training

_BIND = "--physcpubind="  # torch/numa/binding.py, of 2.9 and newer


class ColdReason(str, Enum):
    """Why a worker was started the usual way, as the metrics count it: few words, and nobody else's."""

    OFF = "off"  # by the settings, or there can be none
    NOT_READY = "not_ready"
    CHANGED = "changed"  # something is not what it was when the standbys were started
    WRAPPED = "wrapped"  # the command is put behind another one
    PROCESSORS = "processors"  # it cannot be bound to them any more
    MEMORY = "memory"
    LACKING = "lacking"  # descriptors, processes or memory, for now
    HIDDEN_MODULE = "hidden_module"  # by a file beside the script
    UNSAFE_IMPORT = "unsafe_import"
    AFTER_A_FAILURE = "after_a_failure"
    SERVER_FAILED = "server_failed"


@dataclass(frozen=True)
class Cold:
    """text: for the log only, it may hold what modules have printed or raised."""

    reason: ColdReason
    text: str


@dataclass(frozen=True)
class Learned:
    """What a worker has imported until its first step, with the files, and the variables that it has changed by then."""

    modules: tuple[tuple[str, str | None], ...] = ()
    changed: frozenset[str] = frozenset()


def covered(name: str, packages: Collection[str]) -> bool:
    """Whether the module is one of these or lies in one of these."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in packages for length in range(1, len(parts) + 1))


def blamed(name: str) -> str:
    """What to leave out where an import was not safe: the package, which any part of it brings in; of torch the part."""
    package = name.partition(".")[0]
    return name if package == "torch" else package


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


def must_fail(absent: Mapping[str, str], learned: Collection[str], unsafe: Collection[str]) -> str | None:
    """A module that a worker has imported and that fails where torch is imported before it: a warm start would fail, too.

    absent: why, by module, as "TypeName: message". One that is not found is on a path that the script sets up.
    unsafe: left out for another reason, which may be why it fails.
    """
    for name, why in absent.items():
        if name in learned and blamed(name) not in unsafe and not why.startswith("ModuleNotFoundError"):
            return name
    return None


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
    """Names of the variables that a script's text sets or removes: by os.environ, os.putenv or os.unsetenv.

    Where it does not say there which ones (in a loop, from a constant), all names in capitals that are in the text.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()  # it will not run either
    found: set[str] = set()
    for told in filter(None, map(_what_is_set, ast.walk(tree))):
        names = {name for each in told for name in _names(each)}
        if not names:
            return frozenset(name for name in _names(tree) if name.isupper() and name.isidentifier())
        found |= names
    return frozenset(found)


def _what_is_set(node: ast.AST) -> Sequence[ast.AST]:
    """Where a statement or call that sets variables says which; nothing for any other."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)) and _ends(node.value) == "environ":
        return [node.slice]
    if isinstance(node, ast.AugAssign) and _ends(node.target) == "environ":
        return [node.value]
    if isinstance(node, ast.Call):
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        on_environ = of is not None and _ends(of) == "environ" and _ends(node.func) in _SETS
        if on_environ or _ends(node.func) in ("putenv", "unsetenv"):
            return [*node.args, *node.keywords]
    return []


_SETS = ("setdefault", "update", "pop", "__setitem__")


def _ends(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> set[str]:
    texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return texts | {each.arg for each in ast.walk(node) if isinstance(each, ast.keyword) and each.arg is not None}


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
