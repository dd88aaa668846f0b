"""What the agent starts in place of the user's script: `python -u bootstrap.py [-m] SCRIPT ARGS...`.

It runs the script as `__main__` the way `python -u [-m] SCRIPT ARGS...` does (CPython 3.10 to 3.13, Modules/main.c and
Python/pythonrun.c), writes down the exception that leaves the script at the moment it does, counts optimizer steps in shared
memory and dumps all stacks when the agent asks. What a script can still notice: two frames below its own, so recursion reaches
two calls less deep, and `sys._getframe` or a warning's stacklevel can walk into them.

Started by path, perhaps by an interpreter that has no elastic_ext: standard library only, and before the script runs only modules
that every interpreter loads at start or that are written in C, so a script's own `json.py` or `signal.py` is found as always.
Importing this module does nothing.

A step is a call of `step` of a torch.optim.Optimizer, seen by the global post hook of torch.optim. Every optimizer counts, and an
optimizer in another (ZeroRedundancyOptimizer, a subclass that calls super().step()) counts too; a step that GradScaler skips does
not. Checked with torch 2.8, 2.13 and 2.15: eager, fused, DDP, FSDP2, GradScaler, several optimizers, LBFGS (one per `step`, not
per closure), optimizer in backward, torch.compile of the model and of the step (torch itself breaks the graph inside `step`).
Not seen: replays of a CUDA graph that holds the step, and optimizers that do not derive from torch.optim.Optimizer.
"""

import sys

_SAFE_PATH = getattr(sys.flags, "safe_path", sys.flags.isolated)  # Python 3.10 has only -I
if __name__ == "__main__" and not _SAFE_PATH:
    del sys.path[0]  # the directory of this file: nothing may be imported from there by its short name

# ruff: noqa: E402
import atexit
import marshal
import os
import time
from _frozen_importlib import BuiltinImporter
from _frozen_importlib_external import MAGIC_NUMBER, SourceFileLoader, SourcelessFileLoader
from _signal import SIGRTMIN  # type: ignore[import-not-found]

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, ModuleType, TracebackType
    from typing import Any

WORKER_ENV = "ELASTIC_EXT_WORKER"
"""JSON object, any key may be missing: slot (int), progress, stacks, stderr, news, modules (paths), quiet_traceback (bool), agent
(str), store (list of host and port). What it has imported is written to `modules` at its first optimizer step, or at its end."""
ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"

STACKS_SIGNAL = SIGRTMIN + 8
"""Appends the stacks of all threads to the stacks file. Death for a process without the handler: look at STACKS_ARMED first."""

SLOT_BYTES = 1536
"""One worker's part of the progress file: native 64-bit words at the indices below, each written by one store."""
PID = 0  # 0 until all the rest is in place
STEPS = 1  # optimizer steps done
LAST_STEP_NS = 2  # time.monotonic_ns() of the last step, 0: none yet
FIRST_STEP_NS = 3
OPTIM_HOOKED = 4  # 1: torch.optim is there and steps are counted
STACKS_ARMED = 5  # 1: STACKS_SIGNAL has its handler
# Written by elastic_ext.training.saves, where the script uses it.
ASKS_FOR_SAVES = 6  # 1: it asks at its step boundaries whether to save
SAVES = 7  # checkpoints that it has seen committed
SAVE_NS = 8  # how long the last of them took, from the request to the commit
SAVED_STEP = 9  # of the last of them, plus 1
SAVE_KEPT = 10  # number of the last save on demand that was committed
SAVE_FAILED = 11  # number of the last save on demand that was not
# Written at the end of a worker that fails of an exception or of sys.exit.
ENDS_WITH = 12  # its exit code, which is not 0: the script is over, its error file is there
EXIT_HANDLERS_DONE = 13  # 1: all threads and exit handlers are through; what is left is the interpreter's to tear down
# A sign of life is a step, a progress report or a change of phase.
PHASE = 14  # index into PHASES
PHASE_SINCE_NS = 15
PROGRESS = 16  # progress reports
SIGN_NS = 17  # time.monotonic_ns() of the last sign; 0: none yet
FAILED_SAVES = 18  # saves that have failed one after the other
GAPS = 19
"""From here on, for each phase: how many gaps between two signs of life ended in it, by length. A gap of n ms counts in the
bucket n.bit_length(), so bucket b is of gaps shorter than 2 ** b ms and not shorter than half of that."""
GAP_BUCKETS = 24  # the last one is of gaps of 70 minutes and more
PHASES = ("", "step", "data", "compile", "checkpoint", "eval", "exit")  # exit: the script is over, its process is not
# Written by the agent.
AGENT_WORDS = GAPS + len(PHASES) * GAP_BUCKETS
SAVE_WANTED = AGENT_WORDS  # number of the save on demand that is wanted

# Bounds of the error file: the agent and others read the whole of it.
MESSAGE_CHARACTERS = 16 * 1024
CALLSTACK_CHARACTERS = 128 * 1024
PRESENT_BYTES = 1 << 20
FIRST_FRAMES, LAST_FRAMES = 8, 56

_OPTIMIZER_MODULE = "torch.optim.optimizer"
# torch.distributed.checkpoint.state_dict steps a fresh optimizer once to make it allocate its state: no step of the training.
_STATE_INITIALIZER = "_init_optim_state"


def run_as_main(argv: "list[str]", settings: "dict[str, Any]") -> None:
    """Run [SCRIPT, *ARGS] or ["-m", MODULE, *ARGS] as `__main__`; `settings` is what WORKER_ENV holds.

    Raises what left the script, as it comes: the caller lets it go up to the interpreter, which then ends the process the way it
    always does. Works in a forked child too: the frames of callers are left out of what is printed.
    """
    _connect_stderr(settings)
    pid = os.getpid()
    words = _arm(settings)
    _telling.begin(words, settings)
    sys.argv[:] = ["-m", *argv[2:]] if argv[:1] == ["-m"] else argv  # runpy puts the module's file in place of "-m"
    namespace = _fresh_main()
    run: Callable[..., Any] | None = None
    try:
        run, arguments = _resolve(argv, namespace)
        run(*arguments)
    except BaseException as error:
        # A child forked by the script comes along here too; only the process that the agent started speaks to the agent.
        recorded = pid == os.getpid() and _record(error, words)
        _telling.ends_of(error)
        if not isinstance(error, SystemExit):
            _show_without_our_frames(recorded and settings.get("quiet_traceback") is True, namespace if run is exec else {})
        raise
    finally:
        _telling.modules()
        if words is not None and pid == os.getpid():
            note_sign(words, time.monotonic_ns())
            words[PHASE] = PHASES.index("exit")
    if run is exec:
        _forget_file(namespace)


class _Telling:
    """What this worker tells its agent on the way, besides the steps. Children that the script forks tell nothing."""

    def __init__(self) -> None:
        self._pid = 0
        self._words: memoryview | None = None
        self._news: str | None = None
        self._modules: str | None = None
        self._environ: dict[str, str] = {}

    def begin(self, words: "memoryview | None", settings: "dict[str, Any]") -> None:
        self._pid, self._words = os.getpid(), words
        self._news, self._modules = settings.get("news"), settings.get("modules")
        self._environ = dict(os.environ)

    def ends_of(self, error: BaseException) -> None:
        """The worker is about to end of this. Ctrl-C ends it by a signal, which is soon enough."""
        if self._words is None or self._pid != os.getpid() or isinstance(error, KeyboardInterrupt):
            return
        code = _exit_code(error.code) if isinstance(error, SystemExit) else 1
        self._words[ENDS_WITH] = code
        if code:
            self._wake()

    def exit_handlers_are_done(self) -> None:
        if self._words is not None and self._pid == os.getpid() and self._words[ENDS_WITH]:
            self._words[EXIT_HANDLERS_DONE] = 1
            self._wake()

    def modules(self) -> None:
        """Write what has been imported so far, in the order in which it began, and which variables the script has set. Once."""
        path, self._modules = self._modules, None
        if path is None or self._pid != os.getpid():
            return
        try:
            import json

            found = [(name, origin_of(module)) for name, module in list(sys.modules.items())]
            changed = [name for name in {**os.environ, **self._environ} if os.environ.get(name) != self._environ.get(name)]
            _replace(path, json.dumps({"modules": found, "changed": changed}))
            self._wake()
        except Exception as error:  # noqa: BLE001 - it costs the agent some knowledge; the script must not notice
            _warn(f"the agent does not learn what this worker has imported: {_text(error)}")

    def _wake(self) -> None:
        """As workers.news.tell."""
        if self._news is None:
            return
        try:
            pipe = os.open(self._news, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(pipe, b"\0")
            finally:
                os.close(pipe)
        except (OSError, TypeError, ValueError):
            pass


_telling = _Telling()


def exit_handlers_are_done() -> None:
    """To be the first that is registered with atexit: then it runs as the last."""
    _telling.exit_handlers_are_done()


def _exit_code(code: object) -> int:
    """Of a process that ends of SystemExit(code)."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def origin_of(module: object) -> "str | None":
    """The file that a module was loaded from; None: from none."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin if isinstance(origin, str) else None


def _fresh_main() -> "dict[str, Any]":
    """Put a new `__main__` into sys.modules; its namespace, as the interpreter starts with it, is returned."""
    main: ModuleType = type(sys)("__main__")
    main.__dict__.update(__loader__=BuiltinImporter, __annotations__={}, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main
    return main.__dict__


def _forget_file(namespace: "dict[str, Any]") -> None:
    """As PyRun_SimpleFile when a script is over: atexit handlers and remaining threads do not see these names."""
    namespace.pop("__file__", None)
    namespace.pop("__cached__", None)


def _resolve(argv: "list[str]", namespace: "dict[str, Any]") -> "tuple[Callable[..., Any], tuple[Any, ...]]":
    """Set sys.path[0] and return what to call, with its arguments, to run the script (pymain_run_python)."""
    if not argv or argv == ["-m"]:
        _say("usage: bootstrap.py [-m] SCRIPT ARGS...")
        raise SystemExit(2)
    if argv[0] == "-m":
        if not _SAFE_PATH:
            sys.path.insert(0, os.getcwd())
        import runpy

        return runpy._run_module_as_main, (argv[1], True)  # type: ignore[attr-defined]
    filename = argv[0]
    if not os.path.isabs(filename):  # _Py_abspath: nothing is normalised
        filename = os.getcwd() if filename == "." and sys.version_info >= (3, 11) else f"{os.getcwd()}/{filename}"
    if _has_importer(filename):  # a directory or a zip file
        sys.path.insert(0, filename)
        import runpy

        return runpy._run_module_as_main, ("__main__", False)  # type: ignore[attr-defined]
    if not _SAFE_PATH:
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
    return exec, (_load(filename, namespace), namespace)


def _has_importer(path: str) -> bool:
    """As PyImport_GetImporter."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _load(filename: str, namespace: "dict[str, Any]") -> "CodeType":
    """The script's code; the names that tell a script of its file are set (pymain_run_file, PyRun_SimpleFile)."""
    try:
        with open(filename, "rb") as file:
            data = file.read()
    except OSError as error:
        _say(f"{sys.orig_argv[0]}: can't open file {filename!r}: [Errno {error.errno}] {error.strerror}")
        raise SystemExit(2) from None
    compiled = filename.endswith(".pyc") or data[:2] == MAGIC_NUMBER[:2]
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", filename)
    namespace.update(__file__=filename, __cached__=None, __loader__=loader)
    if not compiled:
        return _compile(data, filename, namespace)
    if data[:4] != MAGIC_NUMBER:
        raise RuntimeError("Bad magic number in .pyc file")
    return marshal.loads(data[16:])  # after the magic number, flags and two words about the source


def _compile(data: bytes, filename: str, namespace: "dict[str, Any]") -> "CodeType":
    """compile(), but errors are those of CPython's parser of files: on encodings, null bytes and a sudden end it differs."""
    try:
        return compile(data, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        pass  # not handled in here, or it would become the context of the same error
    try:
        import ctypes

        fopen, run_file = ctypes.CDLL(None).fopen, ctypes.pythonapi.PyRun_FileExFlags
    except (ImportError, OSError, AttributeError):
        return compile(data, filename, "exec", dont_inherit=True)
    fopen.restype, fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    run_file.restype = ctypes.py_object
    run_file.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, *[ctypes.py_object] * 2, ctypes.c_int, ctypes.c_void_p]
    path = os.fsencode(filename)
    run_file(fopen(path, b"rb"), path, 257, namespace, namespace, 1, None)  # 257: Py_file_input
    return compile("", filename, "exec")  # the file has just been replaced by a good one, and that one has run


def _without_our_frames(trace: "TracebackType | None") -> "TracebackType | None":
    """The traceback from the script's first frame on; as it is where none of our frames is in it."""
    seen = trace
    while seen is not None and seen.tb_frame.f_globals is not globals():
        seen = seen.tb_next  # callers of run_as_main
    if seen is None:
        return trace
    while seen is not None and seen.tb_frame.f_globals is globals():
        seen = seen.tb_next
    return seen


def _show_without_our_frames(quiet: bool, namespace: "dict[str, Any]") -> None:
    """Have the exception that is on its way shown as if the interpreter had run the script itself.

    Args:
        quiet: the agent shows it; nothing is printed unless the script has an excepthook of its own.
        namespace: what forgets its file after that.
    """
    previous = getattr(sys, "excepthook", sys.__excepthook__)
    silent = quiet and _is_default(previous)

    def excepthook(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
        sys.excepthook = previous
        trace = sys.last_traceback = _without_our_frames(trace)
        BaseException.with_traceback(error, trace)
        try:
            if not silent:
                previous(kind, error, trace)
        except SystemExit as exit_:
            _telling.ends_of(exit_)
            raise
        except BaseException as broken:  # noqa: BLE001 - said here as the interpreter says it, which would show this frame
            own = _without_our_frames(broken.__traceback__)
            _say("Error in sys.excepthook:")
            sys.__excepthook__(type(broken), BaseException.with_traceback(broken, own), own)
            _say("\nOriginal exception was:")
            sys.__excepthook__(kind, error, trace)
        _forget_file(namespace)

    sys.excepthook = excepthook


def _is_default(hook: "Callable[..., Any]") -> bool:
    """Python's own excepthook, or torch's around it: init_process_group installs one that adds "[rank0]: " to each line."""
    while getattr(hook, "__name__", None) == "_distributed_excepthook":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
        if "old_hook" not in cells:
            return False
        hook = cells["old_hook"].cell_contents
    return hook is sys.__excepthook__


def _say(text: str) -> None:
    """What the interpreter itself would say."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def _warn(text: str) -> None:
    """To the descriptor: sys.stderr may be an object of the script's, and its errors must not take the place of another."""
    try:
        os.write(2, f"elastic_ext: {text}\n".encode(errors="backslashreplace"))
    except OSError:
        pass  # closed: there is nobody to tell


def _record(error: BaseException, words: "memoryview | None") -> bool:
    """Write the error file; True if it tells of the error now, be it by us or by torch's @record."""
    path = os.environ.get(ERROR_FILE_ENV)
    refusal = _runpy_refusal(error)
    if not path or (isinstance(error, SystemExit) and refusal is None):
        return False
    first_step_done = bool(words[STEPS]) if words and words[OPTIM_HOOKED] else None
    try:
        return _write_error_file(path, error, refusal, first_step_done)
    except Exception as failure:  # noqa: BLE001 - the exception's own code runs in there, and nothing may change how the script ends
        _warn(f"the error file {path} cannot be written: {_text(failure)}; the agent will see the exit code only")
        return False


def _runpy_refusal(error: BaseException) -> "tuple[str, str] | None":
    """Type and message if `error` is the SystemExit by which runpy says that it cannot find or load the module."""
    runpy, reason = sys.modules.get("runpy"), error.__context__
    if not isinstance(error, SystemExit) or runpy is None or not isinstance(reason, runpy._Error):
        return None
    absent = isinstance(reason.__cause__, ModuleNotFoundError) or str(reason).startswith("No module named")
    return "ModuleNotFoundError" if absent else "ImportError", str(reason)


def _write_error_file(path: str, error: BaseException, refusal: "tuple[str, str] | None", first_step_done: "bool | None") -> bool:
    """Under "message" what torch's @record writes, under "elastic_ext" our account; False if the file holds something else.

    Frames are "file.py:line in function", outermost first; first_step_done is None where no steps are counted.
    """
    import json
    import traceback

    trace = _without_our_frames(error.__traceback__)
    kind, message = refusal or (_type_name(type(error)), _text(error))
    steps = traceback.walk_tb(None if refusal else trace)
    frames = [f"{os.path.basename(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}" for frame, line in steps]
    account = {
        "type": kind,
        "message": _clip(message, MESSAGE_CHARACTERS),
        "frames": frames if len(frames) <= FIRST_FRAMES + LAST_FRAMES else frames[:FIRST_FRAMES] + frames[-LAST_FRAMES:],
        "monotonic_ns": time.monotonic_ns(),
        "first_step_done": first_step_done,
    }
    present = b""
    if os.path.exists(path):
        if not os.path.isfile(path):  # a pipe or a device would block or never end
            raise OSError(f"{path} is not a regular file")
        if os.path.getsize(path) > PRESENT_BYTES:
            return False  # the agent does not read it either
        with open(path, "rb") as file:
            present = file.read()
    if present:  # @record was first; what cannot be read stays as it is
        try:
            data = json.loads(present)
        except ValueError:
            return False
        if not isinstance(data, dict):
            return False
    else:
        short = _clip(f"{kind if refusal else type(error).__name__}: {message}", MESSAGE_CHARACTERS)
        shown = short if refusal else "".join(traceback.format_exception(type(error), error, trace))
        extra = {"py_callstack": _clip(shown, CALLSTACK_CHARACTERS), "timestamp": str(int(time.time()))}
        data = {"message": {"message": short, "extraInfo": extra}}
    _replace(path, json.dumps({**data, "elastic_ext": account}))
    return True


def _replace(path: str, text: str) -> None:
    temporary = f"{path}.{os.urandom(8).hex()}.tmp"
    try:
        with open(temporary, "x") as file:  # which follows no link
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _type_name(kind: "type[BaseException]") -> str:
    """Qualified, but for builtins and what the script defines; torch's out-of-memory error under the name torch documents."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    if kind.__name__ == "OutOfMemoryError" and str(kind.__module__).partition(".")[0] == "torch":
        return "torch.OutOfMemoryError"
    return f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the class's own code; this is what the traceback module writes then
        return "<exception str() failed>"


def _clip(text: str, limit: int) -> str:
    """`text`, or its head and tail, in at most `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2 - 32  # leaves room for the line between
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _connect_stderr(settings: "dict[str, Any]") -> None:
    """Let fd 2 be the named pipe of the agent, for children and C code too. On an error it stays what it is."""
    if settings.get("stderr") is None:
        return
    try:
        os.fstat(2)  # closed stays closed
        pipe = os.open(settings["stderr"], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # no reader: an error, and no wait for one
        os.set_blocking(pipe, True)
        os.dup2(pipe, 2)
        os.close(pipe)
    except (OSError, TypeError, ValueError) as error:
        _warn(f"the end of this worker's stderr is not kept: {settings['stderr']!r}: {error}")


def _arm(settings: "dict[str, Any]") -> "memoryview | None":
    """Install what `settings` asks for and return the words of this worker's slot. A part that fails is left out."""
    words, stacks = None, False
    try:
        words = _slot(settings)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        _warn(f"no progress of this worker: {settings.get('progress')!r}, slot {settings.get('slot')!r}: {error}")
    try:
        stacks = _dump_stacks_on_signal(settings)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        _warn(f"no stacks of this worker: {settings.get('stacks')!r}: {error}")
    if words is not None:
        words[STACKS_ARMED] = stacks
        _StepCounter(words).register_when_imported()
        words[PID] = os.getpid()
    return words


def _slot(settings: "dict[str, Any]") -> "memoryview | None":
    """The words of this worker, its own ones zero; None if no progress is wanted."""
    if settings.get("progress") is None or settings.get("slot") is None:
        return None
    mmap = _pythons_own("mmap").mmap
    first = settings["slot"] * SLOT_BYTES
    if first < 0:
        raise ValueError("expected a slot of 0 or more")
    with open(os.fspath(settings["progress"]), "r+b") as file:
        shared = mmap(file.fileno(), first + SLOT_BYTES)
    words = memoryview(shared)[first:].cast("Q")
    for index in range(AGENT_WORDS):
        words[index] = 0
    return words


def _dump_stacks_on_signal(settings: "dict[str, Any]") -> bool:
    if settings.get("stacks") is None:
        return False
    import faulthandler

    # A plain descriptor that nothing closes: the handler runs until the process is gone.
    stacks = os.open(settings["stacks"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    return True


class _StepCounter:
    """Counts the optimizer steps of this process, not those of children that it forks.

    As the first finder on sys.meta_path it sees every import begin and finds nothing itself, so the import of torch stays as it
    is, errors included. torch.optim imports on after torch.optim.optimizer: at the next import it registers its hook and goes.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._pid = os.getpid()

    def register_when_imported(self) -> None:
        sys.meta_path.insert(0, self)
        self.find_spec(_OPTIMIZER_MODULE)

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> None:
        register = getattr(sys.modules.get(_OPTIMIZER_MODULE), "register_optimizer_step_post_hook", None)
        if register is not None and not self._words[OPTIM_HOOKED]:
            # A new list: the import system is going over the old one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            register(self._count)
            self._words[OPTIM_HOOKED] = 1

    def _count(self, optimizer: "Any", args: "Any", kwargs: "Any") -> None:
        if os.getpid() == self._pid:
            now = time.monotonic_ns()
            if not self._words[STEPS]:
                if _called_from(_STATE_INITIALIZER):
                    return
                self._words[FIRST_STEP_NS] = now
                _telling.modules()
            note_sign(self._words, now)
            self._words[LAST_STEP_NS] = now
            self._words[STEPS] += 1


def note_sign(words: memoryview, now_ns: int) -> None:
    """Note a sign of life, and the gap that it ends."""
    last_ns = words[SIGN_NS]
    if last_ns:
        words[GAPS + words[PHASE] * GAP_BUCKETS + min(((now_ns - last_ns) // 1_000_000).bit_length(), GAP_BUCKETS - 1)] += 1
    words[SIGN_NS] = now_ns


def _pythons_own(name: str) -> "Any":
    """One of Python's modules in C, whatever PYTHONPATH holds. The script finds under its name what it would find without us."""
    before, path = sys.modules.get(name), sys.path[:]
    library = os.path.dirname(os.__file__)
    try:
        sys.modules.pop(name, None)
        sys.path[:] = path[path.index(library) :] if library in path else path
        return __import__(name)
    finally:
        sys.path[:] = path
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


def _called_from(function: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def worker_settings() -> "dict[str, Any]":
    """What WORKER_ENV holds; nothing, with a warning, if that is no JSON object."""
    text = os.environ.get(WORKER_ENV, "").strip()
    if not text:
        return {}
    make_scanner = _pythons_own("_json").make_scanner  # what json.loads runs; json itself would load re, enum and functools
    decoder: Any = {"strict": True, "object_hook": None, "object_pairs_hook": None}
    decoder.update(parse_float=float, parse_int=int, parse_constant=float)
    try:
        settings, end = make_scanner(type("Decoder", (), decoder))(text, 0)
        if isinstance(settings, dict) and end == len(text):
            return settings
    except (StopIteration, ValueError, SystemError):
        pass  # all of them mean a syntax error; SystemError because json.decoder is not there to make the right one
    _warn(f"{WORKER_ENV} is ignored: expected a JSON object, got {text!r}")
    return {}


if __name__ == "__main__":
    del sys.orig_argv[-len(sys.argv)]  # this file
    atexit.register(exit_handlers_are_done)
    run_as_main(sys.argv[1:], worker_settings())
