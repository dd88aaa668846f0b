"""Finds imports that must not happen before a fork, because forked processes would differ from ones that import by themselves.

Fork copies one thread and all locks, open files stay shared, and a value computed at import is the same in every fork. After a
cold start, each process has its own. So the server checks after each import whether a forked process could notice a difference.

Standard library only: `server.py` loads this by path, in an interpreter that may not have elastic_ext.
"""

import os
import random
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from typing import Any

PER_WORKER = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE"),
        *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("CUDA_VISIBLE_DEVICES", "ELASTIC_EXT_WORKER", "ELASTIC_EXT_RESUME_FROM", "ELASTIC_EXT_RESUME_STEP"),
        *(
            "ELASTIC_EXT_LAUNCH",
            "ELASTIC_EXT_CHECKPOINT_DIR",
            "ELASTIC_EXT_LOCAL_DIR",
            "ELASTIC_EXT_SAVE_DIR",
            "ELASTIC_EXT_NODE_NAME",
        ),
        *("GLOO_SOCKET_IFNAME", "RES_OPTIONS"),
        *(f"ELASTIC_EXT_MEMORY_{name}" for name in ("DIR", "LIMIT", "EVERY", "DOMAIN", "MB_S")),
        *("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),  # of flight_recorder
    }
)
"""Variables that the agent sets for each worker. No preloaded module may have read them."""

OWN_PREFIX_ONLY = frozenset({"tqdm", "fsspec", "networkx"})
"""Packages that iterate over all variables at import but, as their sources show, keep only those with their own prefix."""

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci", "/dev/hl", "/dev/xdna")
HARMLESS_FILES = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")
_MAPPING = ("os", "_collections_abc", "collections.abc")  # modules whose frames lie between os.environ and the code that uses it


class _WatchedVariables(dict[bytes, bytes]):
    """Replaces the dict behind os.environ during imports. Records which variables are read by name, and which module reads all.

    Code that iterates over all variables, such as a copy, reads none by name: it asks for the values in the order of the keys.
    """

    def __init__(self, values: "dict[bytes, bytes]") -> None:
        super().__init__(values)
        self.read: set[str] = set()
        self.copied_by: str | None = None  # a module that has iterated over all variables
        self._iterating: list[bytes] = []  # keys whose values an iteration has yet to ask for, in reverse order

    def __iter__(self) -> "Iterator[bytes]":
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _MAPPING:
            frame = frame.f_back
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in OWN_PREFIX_ONLY:
            self.copied_by = name
        keys = list(super().__iter__())
        self._iterating = keys[::-1]
        return iter(keys)

    def __getitem__(self, key: bytes) -> bytes:
        if self._iterating and self._iterating[-1] == key:
            self._iterating.pop()
        else:
            self._iterating.clear()
            self.read.add(os.fsdecode(key))
        return super().__getitem__(key)


class ImportChecks:
    """Checks the imports of this process. Call `begin`, then `before` and `why_unsafe` around each import, then `end`."""

    def __init__(self) -> None:
        self.read: dict[str, set[str]] = {}  # variables that imports have read by name; keyed by the requested module
        self._cwd = os.getcwd()
        self._files = _open_files()
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        """Watch os.environ from now on."""
        self._plain = os.environ._data  # type: ignore[attr-defined]
        self._watched = _WatchedVariables(self._plain)
        os.environ._data = os.environb._data = self._watched  # type: ignore[attr-defined]

    def end(self) -> None:
        """Stop watching os.environ; variables that imports have set stay."""
        self._plain.clear()
        self._plain.update(self._watched.items())
        os.environ._data = os.environb._data = self._plain  # type: ignore[attr-defined]

    def before(self) -> None:
        """Record the state before an import."""
        self._watched.read.clear()
        self._watched.copied_by = None
        if "tempfile" in sys.modules:
            sys.modules["tempfile"]._name_sequence = None  # type: ignore[attr-defined]
        _draw_on()
        self._before = {
            "generators": _generators(),
            "shared": _shared_memory(),
            "path": _own_path(),
            "torch's": torchs_directory(),
        }

    def why_unsafe(self, name: str) -> "str | None":
        """Return why it is unsafe to fork from this process after importing `name`; None if it is safe."""
        self.read[name] = set(self._watched.read)
        return self._variables() or self._shared() or self._values()

    def _variables(self) -> "str | None":
        if own := sorted(self._watched.read & PER_WORKER):
            return f"it reads {own[0]} when it is imported, which differs between workers"
        if self._watched.copied_by is not None:
            return f"{self._watched.copied_by} reads all variables when it is imported, and some differ between workers"
        return None

    def _shared(self) -> "str | None":
        if opened := _open_files() - self._files:
            self._files |= opened
            device = next((path for _, path in opened if path.startswith(DEVICES)), None)
            return f"it opens {device or sorted(opened)[0][1]} when it is imported, which workers would share"
        if mapped := _shared_memory() - self._before["shared"]:
            return f"it maps {min(mapped)} when it is imported, which is a lock or memory that workers would share"
        if threads() > 1:
            # OpenBLAS stops its threads at a fork and restarts them on demand, in both processes. Other libraries do not.
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            if threads() > 1:
                return "it starts a thread when it is imported"
        if _children():
            return "it starts a process when it is imported"
        return None

    def _values(self) -> "str | None":
        if os.getcwd() != self._cwd:
            return "it changes the current directory when it is imported"
        if _own_path() != self._before["path"]:
            return "it changes sys.path when it is imported, before the script's directory is on it"
        before, now = self._before["generators"], _generators()
        if seeded := [kind for kind in before if now.get(kind) != before[kind]]:
            return f"it seeds {seeded[0]} when it is imported, and each worker must have its own seed"
        # CPython's private generator of temporary file names: None until the first name.
        named = getattr(sys.modules.get("tempfile"), "_name_sequence", None) is not None
        if named and torchs_directory() == self._before["torch's"]:
            return "it makes a temporary file or directory when it is imported, which workers would share"
        return None


INSTANTIATOR = "torch.distributed.nn.jit.instantiator"


def torchs_directory() -> "str | None":
    """Return the temporary directory that torch 2.8 makes, and puts last on sys.path, as it is imported; None: there is no such.

    It is for code that torch generates later, and holds one module. Each standby gets its own; see `server`. Torch 2.13 has none.
    """
    return getattr(sys.modules.get(INSTANTIATOR), "INSTANTIATED_TEMPLATE_DIR_PATH", None)


def _own_path() -> "list[str]":
    torchs = torchs_directory()
    return [each for each in sys.path if each != torchs]


def from_other_files(origins: "Mapping[str, str]", origin_of: "Callable[[object], str | None]") -> "dict[str, str]":
    """Return the modules that were loaded from a different file than in the workers, each with the reason.

    origins: the workers' files by module. origin_of: returns the file of a module object, if any.
    """
    found = {}
    for name, theirs in origins.items():
        ours = origin_of(sys.modules.get(name))
        if ours is None or ours == theirs or os.path.dirname(ours) == torchs_directory():
            continue
        if os.path.isabs(ours) and os.path.isabs(theirs):
            found[name] = f"workers import it from {theirs}, the standby server from {ours}"
    return found


def site_reads_variables(names: "Collection[str]") -> "str | None":
    """Return why the interpreter's start-up code may act differently in each worker, or None. names: keys of sys.modules."""
    for name in ("sitecustomize", "usercustomize"):
        path = getattr(sys.modules.get(name), "__file__", None) if name in names else None
        if path is None:
            continue
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        if "environ" in text or "getenv" in text:
            return f"{path} reads variables in each process, and some differ between workers"
    return None


def why_shadowed(names: "Collection[str]") -> "str | None":
    """Return why a worker with the current sys.path would import a different module than this process has, or None."""
    for name in sorted(names):
        ours = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
        if "." in name or ours is None or not os.path.isabs(ours):  # built in or frozen: found before sys.path is searched
            continue
        found = PathFinder.find_spec(name)
        if found is not None and found.origin != ours:
            return f"workers import {name} from {found.origin}, the standby server from {ours}"
    return None


def threads() -> int:
    """Return the number of threads of this process, including those of C libraries."""
    return len(os.listdir("/proc/self/task"))


def _draw_on() -> None:
    """Draw until the next few draws leave the state's words unchanged: a Mersenne Twister renews 624 words at a time."""
    while random.getstate()[1][-1] > 600:
        random.random()
    numpy = sys.modules.get("numpy.random")
    while hasattr(numpy, "get_state") and numpy.get_state()[2] > 600:  # type: ignore[union-attr]
        numpy.random()  # type: ignore[union-attr]


def _generators() -> "dict[str, object]":
    """Return the state of the random generators that seeding changes but a few draws do not."""
    found: dict[str, object] = {"random": hash(random.getstate()[1][:-1])}
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if hasattr(numpy, "get_state"):
        found["numpy.random"] = hash(numpy.get_state()[1].tobytes())  # type: ignore[union-attr]
    if hasattr(torch, "default_generator"):
        found["torch"] = torch.default_generator.initial_seed()  # type: ignore[union-attr]
    return found


def _shared_memory() -> "set[str]":
    """Return the paths (or addresses) of mapped memory that a fork would share."""
    found = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            address, access, _, _, _, *path = line.split(None, 5)
            if access[3] == "s":
                found.add(path[0].strip() if path else address)
    return found


def _children() -> str:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as children:
            return children.read().strip()
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return ""


def _open_files() -> "set[tuple[int, str]]":
    """Return the descriptors and paths of all open files except harmless ones."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # listdir's own descriptor
        if path not in HARMLESS_FILES:
            found.add((int(name), path))
    return found
