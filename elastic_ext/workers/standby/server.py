"""The program that imports what workers import and forks warm standbys: processes that wait before the script's first line.

A standby is a child of the agent, not of this process: the process that forks it ends at once, while the agent adopts orphans
(PR_SET_CHILD_SUBREAPER). So the agent waits for it as for any worker. It leads its own session and process group.

Fork copies one thread and all locks, and a value that a module computes at import would be the same in all workers. So each
import is checked (`import_checks.py`). The server reports a module that must not be imported before the fork, and the agent
starts a server without it. A server never has a CUDA context: opening a device counts as unsafe.

A worker can notice two things of not having been started by exec: modules are already imported (of torch 2.8, its directory is on
sys.path), and all standbys of one server share the seed of hash(), as with PYTHONHASHSEED.

Wire protocol. The agent starts the server (`python -u server.py CONTROL`, with the interpreter, options, environment
and folder of the workers) and talks to it over the socket CONTROL (SOCK_SEQPACKET). Each message from the agent is a JSON object:

    {"preload": PATH}           import what the file at PATH names: a `PreloadRequest` as JSON
    {"enough": true}            if it imports: answer now, once torch is there; a round waits for standbys
    {"park": AGENT} + socket    fork a standby that waits at that socket; AGENT is the pid of the agent
    end of file                 the agent is gone or no longer needs the server: end

The server answers each preload with a packet of one byte and the descriptor of a file that holds a `Ready` as JSON.

Each standby uses its own socket (SOCK_STREAM). In this order:

    standby  its pid in decimal digits: it waits
    agent    HEADER_BYTES with the length of what follows, big-endian, together with the descriptors for the numbers in "open"
    agent    a `StandbyRelease` as JSON, of that length
    standby  one byte: it runs from here on. An agent that does not get this byte takes another standby.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
    del sys.path[0]  # the directory of this file: nothing may be imported from it by its short name
_AT_START = frozenset(sys.modules)
_WORKERS_PATH = sys.path[:]
if __name__ == "__main__":  # PYTHONPATH must not replace Python's own modules in the server
    _os = getattr(sys.modules.get("os"), "__file__", None) or ""
    _standard = [number for number, entry in enumerate(sys.path) if entry and entry == _os.rpartition("/")[0]]
    del sys.path[: _standard[0] if _standard else 0]

# ruff: noqa: E402
import array  # noqa: F401 - socket.recv_fds imports it at its first call
import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import mmap
import os
import signal
import socket
import struct
import time

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType
    from typing import TypedDict

    from elastic_ext.workers.bootstrap import runner as _runner
    from elastic_ext.workers.standby import import_checks as _import_checks

    class PreloadRequest(TypedDict):
        modules: list[str]  # to import, in this order
        excluded: list[str]  # modules that other imports must not bring in
        script_dir: str  # the folder that the workers' interpreter puts first on sys.path
        program: list[str]  # what the workers run, [SCRIPT, ...] or ["-m", MODULE, ...], for modules that look at sys.argv
        origins: dict[str, str]  # files of the modules that the workers have imported, by module

    class Ready(TypedDict):
        seconds: float  # how long the imports took
        unsafe: dict[str, str]  # modules that must not be imported before the fork, each with the reason; "" stands for libraries
        absent: dict[str, str]  # modules that cannot be imported, each with the error as "TypeName: message"
        threads: int  # of the server
        names: list[str]  # top-level modules that it has imported, not those of every interpreter or from the script's folder
        read: dict[str, list[str]]  # variables that were read at import, by requested module
        changed: list[str]  # variables that imports have set

    class StandbyRelease(TypedDict):
        argv: list[str]  # [SCRIPT, ...] or ["-m", MODULE, ...], to run as `__main__`
        orig_argv: list[str]  # sys.orig_argv of a cold start
        shown: list[str]  # the command line to show in /proc
        env: dict[str, str]  # of the worker
        open: list[int]  # which of 0, 1 and 2 are open in the worker; one descriptor comes for each, in this order
        processors: list[int]  # to run on; empty: those of the server
        ignored: int  # mask of ignored signals, like SigIgn in /proc
        blocked: list[int]  # numbers of blocked signals


HEADER_BYTES = 4

TOKEN_ENV = "_ELASTIC_EXT_AGENT"
"""A variable of the server and its standbys, not of workers. It holds the agent's token, by which the reaper finds them."""

MEMORY_KILL_FIRST = 1000  # oom_score_adj: losing a standby costs only time
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)
_shown: "list[mmap.mmap]" = []  # keeps in memory what /proc shows


class StandbyServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._environ = dict(os.environ)
        self._checks = _import_checks.ImportChecks()
        why = _import_checks.site_reads_variables(_AT_START) or _import_checks.why_shadowed(sys.modules.keys() - _AT_START)
        self._unsafe: dict[str, str] = {"": why} if why else {}
        self._absent: dict[str, str] = {}
        self._oom_score = _exchange_oom_score(str(MEMORY_KILL_FIRST))

    def serve(self) -> "StandbyRelease | None":
        """Serve until the agent needs no more, then return None. In a released standby, return what it must run."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._control, 65536, 1)
            if not data:
                if _import_checks.torchs_directory() is not None:
                    sys.modules[_import_checks.INSTANTIATOR]._TEMP_DIR.cleanup()  # no exit handler will do it
                return None
            message = json.loads(data)
            if "preload" in message:
                with open(message["preload"], encoding="utf-8") as file:
                    request: PreloadRequest = json.load(file)
                self._preload(request)
            else:
                if not descriptors:  # "enough", too late; or none could be received: the agent notices, and asks again
                    continue
                waiting = self._park(message["park"], socket.socket(fileno=descriptors[0]))
                if waiting is not None:
                    return self._wait(waiting)

    def _preload(self, request: "PreloadRequest") -> None:
        began = time.monotonic()
        checks = self._checks
        checks.begin()
        excluded = request["excluded"]
        with _as_if_it_ran(request["program"]):
            for name in request["modules"] if "" not in self._unsafe else ():
                if "torch" in sys.modules and self._is_enough():
                    break
                if name in sys.modules or name in self._unsafe:
                    continue
                checks.before()
                self._import(name)
                banned = [each for each in excluded if each in sys.modules]
                excluded = [each for each in excluded if each not in banned]  # later imports are not to blame for them
                why = checks.why_unsafe(name) or (banned and f"it imports {banned[0]}, which must not be imported")
                if why:
                    self._unsafe[name] = why
        checks.end()
        self._unsafe.update(_import_checks.from_other_files(request["origins"], _runner.origin_of))
        gc.collect()
        gc.freeze()  # the collector must not write to shared pages
        self._answer(self._ready(time.monotonic() - began, request["script_dir"]))

    def _is_enough(self) -> bool:
        """Return whether there is a message: while this server imports, none but "enough" comes, or the end of the agent."""
        try:
            self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a module's own code; the worker that imports it will report it
            self._absent[name] = f"{type(error).__name__}: {error}"[:200]

    def _ready(self, seconds: float, script_dir: str) -> "Ready":
        changed = [name for name in os.environ.keys() | self._environ.keys() if os.environ.get(name) != self._environ.get(name)]
        beside = os.path.join(script_dir, "")
        names = {name for name in sys.modules.keys() - _AT_START if "." not in name}
        names = {name for name in names if not str(getattr(sys.modules[name], "__file__", None)).startswith(beside)}
        return {
            "seconds": seconds,
            "unsafe": self._unsafe,
            "absent": self._absent,
            "threads": _import_checks.threads(),
            "names": sorted(names),
            "read": {name: sorted(read) for name, read in self._checks.read.items() if read},
            "changed": sorted(changed),
        }

    def _answer(self, ready: "Ready") -> None:
        descriptor = os.memfd_create("elastic_ext_standby", os.MFD_CLOEXEC)  # the answer may be longer than a packet
        os.write(descriptor, json.dumps(ready).encode())
        try:
            socket.send_fds(self._control, [b"."], [descriptor])
        except OSError:
            pass  # the agent is gone; the next receive reports that
        os.close(descriptor)

    def _park(self, agent: int, waiting: socket.socket) -> "socket.socket | None":
        """Fork a standby. Return its socket in the standby, and None in the server.

        If no process or descriptor is available now, no standby starts, and the agent asks again.
        """
        try:
            adopted, parent_ended = os.pipe()
        except OSError:
            waiting.close()
            return None
        try:
            between = os.fork()
        except OSError:
            for each in (adopted, parent_ended):
                os.close(each)
            waiting.close()
            return None
        if between == 0:
            try:
                child = os.fork()
            except OSError:
                os._exit(1)
            if child:
                os._exit(0)
            os.close(parent_ended)
            os.read(adopted, 1)  # returns when the server has reaped the process in between
            os.close(adopted)
            self._control.close()
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != agent:  # the agent died, or another subreaper has adopted this process
                os._exit(0)
            return waiting
        os.close(adopted)
        waiting.close()
        os.waitpid(between, 0)
        os.close(parent_ended)
        return None

    def _wait(self, waiting: socket.socket) -> "StandbyRelease | None":
        """In a standby, wait for its release and return it; None if the agent is gone or no longer needs the standby."""
        os.setsid()
        try:
            waiting.send(b"%d" % os.getpid())
            header, descriptors, _, _ = socket.recv_fds(waiting, HEADER_BYTES, 3)
            while 0 < len(header) < HEADER_BYTES and (more := waiting.recv(HEADER_BYTES - len(header))):
                header += more
            if len(header) < HEADER_BYTES:
                return None
            text = bytearray()
            while len(text) < int.from_bytes(header, "big"):
                more = waiting.recv(1 << 20)
                if not more:
                    return None
                text += more
            release: StandbyRelease = json.loads(text)
            waiting.send(b".")
        except ConnectionError:
            return None
        waiting.close()
        self._become(release, descriptors)
        return release

    def _become(self, release: "StandbyRelease", descriptors: "list[int]") -> None:
        """Make this waiting process look like one that has just been started."""
        _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
        if self._oom_score:
            _exchange_oom_score(self._oom_score)
        _connect(release["open"], descriptors)
        os.environ.pop(TOKEN_ENV, None)
        set_here = {name: value for name, value in os.environ.items() if self._environ.get(name) != value}
        removed_here = self._environ.keys() - os.environ.keys() - {TOKEN_ENV}
        os.environ.clear()
        os.environ.update({name: value for name, value in {**release["env"], **set_here}.items() if name not in removed_here})
        if release["processors"]:
            os.sched_setaffinity(0, release["processors"])
        _set_signals(release["ignored"])
        signal.pthread_sigmask(signal.SIG_SETMASK, release["blocked"])
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()  # the CPU's generator: those of devices begin with a fixed seed
        if "multiprocessing.process" in sys.modules:
            sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
        if "threading" in sys.modules:
            sys.modules["threading"].main_thread()._set_native_id()  # Python before 3.13 leaves the parent's
        _own_torchs_directory()
        sys.orig_argv[:] = release["orig_argv"]
        _show_as(release["shown"], os.environ)


def _own_torchs_directory() -> None:
    """Give this standby a directory of its own in place of the server's: see `import_checks.torchs_directory`."""
    servers = _import_checks.torchs_directory()
    if servers is None:
        return
    import tempfile

    instantiator = sys.modules[_import_checks.INSTANTIATOR]
    before, own = instantiator._TEMP_DIR, tempfile.TemporaryDirectory()
    vars(instantiator).update(_TEMP_DIR=own, INSTANTIATED_TEMPLATE_DIR_PATH=own.name)
    atexit.unregister(before.cleanup)
    before._finalizer.detach()
    atexit.register(own.cleanup)
    sys.path[:] = [own.name if each == servers else each for each in sys.path]


def _connect(wanted: "list[int]", descriptors: "list[int]") -> None:
    """Make 0, 1 and 2 these descriptors, and set up sys.stdin, stdout and stderr as the interpreter would have."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    for number, descriptor in zip(wanted, descriptors, strict=True):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number not in wanted:
            os.close(number)
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
            continue
        stream = getattr(sys, name)
        # Keep the same objects, since imported modules may hold them. See create_stdio in Python/pylifecycle.c.
        if isinstance(stream, io.TextIOWrapper) and not stream.write_through and number:
            stream.reconfigure(line_buffering=number == 2 or os.isatty(number))


def _show_as(command: "list[str]", environ: "Mapping[str, str]") -> None:
    """Set /proc/PID/cmdline and environ: people look for workers with ps and pkill -f, and the reaper looks for a variable.

    This needs a kernel with CONFIG_CHECKPOINT_RESTORE, as distributions have. Without it, the server's values stay.
    """
    texts = [b"".join(os.fsencode(each) + b"\0" for each in part) for part in (command, map("=".join, environ.items()))]
    memory = mmap.mmap(-1, len(texts[0]) + len(texts[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # /proc reads only such memory
    memory.write(b"".join(texts))
    _shown.append(memory)
    here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        field = ["", "", "", *stat.read().rpartition(") ")[2].split()]  # numbered as in proc_pid_stat(5), from field 3 on
    code_and_data = [int(field[number]) for number in (26, 27, 45, 46, 47)]
    _libc.sbrk.restype = ctypes.c_size_t
    between = [_libc.sbrk(0), int(field[28])]
    borders = [here, here + len(texts[0]), here + len(texts[0]), here + len(memory)]
    # struct prctl_mm_map of linux/prctl.h; the auxiliary vector and the executable stay.
    memory_map = struct.pack("=12QIi", *code_and_data, *between, *borders, 0, 0, -1)
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, memory_map, ctypes.c_ulong(len(memory_map)), ctypes.c_ulong(0))


def _set_signals(ignored: int) -> None:
    """Ignore the signals that the agent ignores and reset the others, as exec would. Handlers set by imports stay."""
    now_ignored, caught = signal_mask("SigIgn"), signal_mask("SigCgt")
    for number in signal.valid_signals():
        bit = 1 << (number - 1)
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ):  # the last two are Python's to ignore
            continue
        if ignored & bit and (number == signal.SIGINT or not caught & bit):
            signal.signal(number, signal.SIG_IGN)
        elif now_ignored & bit and not ignored & bit:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def signal_mask(name: str) -> int:
    """Return a mask of signals in proc_pid_status(5), which all threads of this process share."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith(name + ":"))


def _exchange_oom_score(score: str) -> str:
    """Set oom_score_adj; return what it was before, "" if it cannot be set."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            before = file.read().strip()
            file.seek(0)
            file.write(score)
        return before
    except OSError:
        return ""


@contextlib.contextmanager
def _as_if_it_ran(program: "list[str]") -> "Iterator[None]":
    """Make a module that looks at the command line or at `__main__` find what it finds in a worker, within the context."""
    server = sys.modules["__main__"]
    main = type(sys)("__main__")
    if program[0] != "-m":
        main.__file__ = program[0]
    sys.modules["__main__"] = main
    sys.argv[:] = program[1:] if program[0] == "-m" else program
    try:
        yield
    finally:
        sys.modules["__main__"] = server


def _load(name: str, *folder: str) -> "ModuleType":
    """Load a file of this package without adding it to sys.modules. folder: relative to this file's folder."""
    path = os.path.join(os.path.dirname(os.path.realpath(__file__)), *folder, f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"elastic_ext_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _runner = _load("runner", os.pardir, "bootstrap")
    _import_checks = _load("import_checks")
    sys.path[:] = _WORKERS_PATH
    atexit.register(_runner.exit_handlers_are_done)  # the first handler registered is the last to run
    _control = socket.socket(fileno=int(sys.argv[1]))
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _release = StandbyServer(_control).serve()
    if _release is None:
        os._exit(0)  # the exit handlers of imported modules are not for this process
    _runner.run_as_main(_release["argv"], _runner.worker_message())
