"""Runs the user's script as `__main__` and reports on it to the agent; see `bootstrap.py`, which loads this by path.

A step is a call to `step` of a torch.optim.Optimizer, seen by the global post hook of torch.optim. Every optimizer counts,
including one inside another (ZeroRedundancyOptimizer, a subclass that calls super().step()). A step that GradScaler skips does
not. Checked with torch 2.8, 2.13 and 2.15: eager, fused, DDP, FSDP2, GradScaler, several optimizers, LBFGS (one per `step`, not
per closure), optimizer in backward, torch.compile of the model and of the step (torch itself breaks the graph inside `step`).
Not seen: replays of a CUDA graph that holds the step, and optimizers that do not derive from torch.optim.Optimizer.
Importing this module has no side effects.
"""

import _signal  # type: ignore[import-not-found]
import marshal
import os
import sys
import time
from _frozen_importlib import BuiltinImporter
from _frozen_importlib_external import MAGIC_NUMBER, SourceFileLoader, SourcelessFileLoader

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, ModuleType, TracebackType
    from typing import Any

    from elastic_ext.workers import progress_layout as layout
    from elastic_ext.workers import worker_env
    from elastic_ext.workers.bootstrap import error_file
    from elastic_ext.workers.worker_env import WorkerMessage

    Namespace = dict[str, object]

    def _load(name: str, folder: str = "") -> Any: ...
else:

    def _load(name: str, folder: str = "") -> "ModuleType":
        """Run a file of this package from its cached bytecode, without adding it to sys.modules."""
        path = os.path.join(os.path.dirname(__file__), folder, f"{name}.py")
        module = type(sys)(f"elastic_ext_{name}")
        exec(SourceFileLoader(module.__name__, path).get_code(module.__name__), module.__dict__)
        return module

    layout = _load("progress_layout", os.pardir)
    worker_env = _load("worker_env", os.pardir)
    error_file = _load("error_file")

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
_OURS = (f"{_PACKAGE}/workers/", f"{_PACKAGE}/features/")  # what is loaded by path, in tracebacks
_SAFE_PATH = getattr(sys.flags, "safe_path", sys.flags.isolated)  # Python 3.10 has only -I
_PY_FILE_INPUT = 257  # Py_file_input

_OPTIMIZER_MODULE = "torch.optim.optimizer"
# torch.distributed.checkpoint.state_dict steps an optimizer without state, to allocate it; plain SGD never has any, so at each
# save. That is not a training step.
_STATE_INITIALIZER = "_init_optim_state"
RECORDER_END_S = 2.0  # a look at its records takes 30 ms at most; one that takes longer is stuck, and this worker must end


def run_as_main(argv: "list[str]", message: "WorkerMessage") -> None:
    """Run [SCRIPT, *ARGS] or ["-m", MODULE, *ARGS] as `__main__`; message: the agent's message.

    Raises the script's exception unchanged: the caller lets it reach the interpreter, which then ends the process as usual.
    This also works in a forked child: the printed traceback omits the callers' frames.
    """
    pid = os.getpid()
    row: memoryview | None = None
    namespace: Namespace = {}
    run: Callable[..., object] | None = None
    try:
        worker_env.let_interrupts_in(message)
        worker_env.take_mark(message, _import_stdlib)
        _connect_stderr(message)
        worker_env.leave_notices_to_the_agent()
        row = _arm(message)
        sys.argv[:] = ["-m", *argv[2:]] if argv[:1] == ["-m"] else argv  # runpy replaces "-m" with the module's file
        namespace = fresh_main()
        run, arguments = resolve(argv, namespace)
        run(*arguments)
        _saves.script_left(None)
    except BaseException as error:
        ended_ns = time.monotonic_ns()  # before the error file is written, which takes time
        # The terminal sends SIGINT, and the agent once more: the second one must not interrupt what follows.
        heard = _signal.signal(_signal.SIGINT, _signal.SIG_IGN) if isinstance(error, KeyboardInterrupt) else None
        # A child forked by the script also gets here, but only the process that the agent started reports to the agent.
        recorded = pid == os.getpid() and _record(error, row, ended_ns)
        _reports.ending(error, ended_ns)
        _saves.script_left(error)
        if not isinstance(error, SystemExit):
            quiet = recorded and message.get("quiet_traceback") is True
            _show_without_our_frames(quiet, namespace if run is exec else {}, heard)
        raise
    finally:
        _reports.modules()
        _reports.over()
        if row is not None and pid == os.getpid():
            layout.note_sign(row, now := time.monotonic_ns())
            layout.end(row, now)
    if run is exec:
        forget_file(namespace)


def worker_message() -> "WorkerMessage":
    """Return the agent's message to this worker. If it is unusable, print a warning and return an empty one."""
    text = os.environ.get(worker_env.WORKER_ENV, "").strip()
    if not text:
        return {}
    make_scanner = _import_stdlib("_json").make_scanner  # the core of json.loads; json itself would load re, enum and functools
    decoder: Any = {"strict": True, "object_hook": None, "object_pairs_hook": None}
    decoder.update(parse_float=float, parse_int=int, parse_constant=float)
    try:
        message, end = make_scanner(type("Decoder", (), decoder))(text, 0)
        return worker_env.checked(message if end == len(text) else None)
    except (StopIteration, SystemError):  # a syntax error; SystemError because json.decoder is not loaded
        why = "expected a JSON object"
    except ValueError as error:
        why = str(error)
    _warn(f"{worker_env.WORKER_ENV} is ignored: {why}: {text!r}")
    return {}


def exit_handlers_are_done() -> None:
    """Report that the exit handlers are done. Register this first with atexit, so that it runs last.

    A thread that returns from torch's C++ code while the interpreter ends aborts the process. So wait for the one that reads the
    flight recorder; and if a copy in memory was given up, end here: its thread waits there for other ranks, which may end, too.
    """
    _saves.exit_handlers_done()
    _reports.exit_handlers_done()
    threads = sys.modules["threading"].enumerate() if "threading" in sys.modules else ()
    if _reports.ends_with is not None and any(each.name.startswith(worker_env.MEMORY_THREAD) for each in threads):
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                pass  # it is closed, or None
        os._exit(_reports.ends_with)


class _Reports:
    """This worker's reports to its agent, except its steps. Children that the script forks report nothing."""

    def __init__(self) -> None:
        self._pid = 0
        self.ends_with: int | None = None  # the exit code of this worker, once its script has ended; None: it ends by a signal
        self._row: memoryview | None = None
        self._wake_path: str | None = None
        self._modules_path: str | None = None
        self._stacks_path: str | None = None
        self._environ: dict[str, str] = {}
        self._recorder: Any = None  # recorder.RecorderWatch
        self._sampled: str | None = None
        self._hash_every = 0
        self._hashes_path: str | None = None
        self._replicas: Any = None  # of features/integrity/worker.py

    def begin(self, row: "memoryview | None", message: "WorkerMessage") -> None:
        self._pid, self._row, self.ends_with = os.getpid(), row, 0
        self._wake_path, self._modules_path = message.get("wake_pipe"), message.get("modules")
        self._stacks_path = message.get("stacks")
        self._sampled, self._hash_every = message.get("stragglers"), message.get("integrity_every") or 0
        self._hashes_path = worker_env.hashes_path(message.get("progress"), message.get("slot"))
        self._environ = dict(os.environ)

    def ending(self, error: BaseException, ended_ns: int) -> None:
        """Report that the worker is about to end with this error. Ctrl-C needs no report: its signal ends the worker soon."""
        code = _exit_code(error.code) if isinstance(error, SystemExit) else 1
        self.ends_with = None if isinstance(error, KeyboardInterrupt) else code
        if self._row is None or self._pid != os.getpid() or self.ends_with is None:
            return
        self._row[layout.ENDED_AT_NS], self._row[layout.ENDS_WITH] = ended_ns, code
        if code:
            worker_env.wake(self._wake_path)

    def watch_recorder(self) -> None:
        row = self._row
        if row is None:
            return

        def publish(since_ns: int, now_ns: int, has_begun: bool) -> None:
            look_at_sigterm(row)
            row[layout.OUTSTANDING_BEGUN] = has_begun
            row[layout.OUTSTANDING_NS], row[layout.OUTSTANDING_AT_NS] = since_ns, now_ns

        collective, issued = worker_env.collective_path(self._stacks_path), worker_env.issued_path(self._stacks_path)

        def describe(text: str) -> None:
            try:
                if collective is not None:
                    error_file.replace(collective, text)
            except OSError as error:
                _warn(f"the agent cannot name the collective that does not complete: {error}")

        def publish_sample(text: str) -> None:
            if issued is not None:
                error_file.replace(issued, text)
                row[layout.SAMPLES] += 1
                worker_env.wake(self._wake_path)

        try:
            recorder = _load("recorder")
            sampler = recorder.Sampler(lambda: row[layout.STEPS], publish_sample, self._sampled)
            self._recorder = recorder.RecorderWatch(publish, describe, _warn, sampler)
            self._recorder.start()
        except (OSError, ImportError, RuntimeError) as error:  # elastic_ext is being replaced, or there are no more threads
            _warn(f"torch's flight recorder is not read: {error}; a hang of spinning collectives is noticed later")

    def follow_replicas(self) -> None:
        """Begin to hash replicas, if the agent wants that. Call this once torch is imported, before there are any."""
        path, wake_path = self._hashes_path, self._wake_path
        if not self._hash_every or path is None:
            return

        def publish(text: str) -> None:
            error_file.replace(path, text)
            worker_env.wake(wake_path)

        try:
            self._replicas = _load("worker", f"{_PACKAGE}/features/integrity").ReplicaHashes(self._hash_every, publish, _warn)
        except (OSError, ImportError, AttributeError, KeyError) as error:  # elastic_ext is being replaced, or torch has changed
            _warn(f"integrity_every: replicas are not hashed: {error!r}")

    def stepped(self, steps: int, optimizer: object) -> None:
        """This optimizer has made a step, and its state is at rest. steps: done so far. In the training thread."""
        if self._replicas is not None:
            self._replicas.stepped(optimizer)
        if self._recorder is not None and steps == self._recorder.sampler.at_step:
            self._recorder.wake.set()

    def over(self) -> None:
        if self._recorder is not None and self._pid == os.getpid():
            self._recorder.end()

    def exit_handlers_done(self) -> None:
        if self._row is not None and self._pid == os.getpid() and self._row[layout.ENDS_WITH]:
            self._row[layout.EXIT_HANDLERS_DONE] = 1
            worker_env.wake(self._wake_path)
        if self._recorder is not None and self._pid == os.getpid() and self._recorder.is_alive():
            self._recorder.join(RECORDER_END_S)

    def modules(self) -> None:
        """Write, once, which modules were imported so far, in order, and which variables the script has set. Wake the agent."""
        path, self._modules_path = self._modules_path, None
        if self._pid != os.getpid():
            return
        try:
            if path is not None:
                import json

                found = [(name, origin_of(module)) for name, module in list(sys.modules.items())]
                changed = [name for name in {**os.environ, **self._environ} if os.environ.get(name) != self._environ.get(name)]
                error_file.replace(path, json.dumps({"modules": found, "changed": changed}))
        except Exception as error:  # noqa: BLE001 - only the agent loses information; the script must not notice
            _warn(f"cannot report this worker's imports to the agent: {error_file.text_of(error)}")
        worker_env.wake(self._wake_path)


_reports = _Reports()


class _Saves:
    """The record of saves, if the agent wants one. Unlike the reports, it has what forked children save, too."""

    def __init__(self) -> None:
        self._record: Any = None  # saves.SaveRecord
        self._left_whole = False  # the script has ended, and nothing that its own thread did was cut off

    def begin(self, row: memoryview, message: "WorkerMessage") -> None:
        """Begin to note. In a warm standby, much is imported already."""
        path, directories = message.get("journal"), message.get("saves_below")
        if path is None or not directories:
            return

        def report(why: str) -> None:
            row[layout.RECORD_BROKEN] = 1
            _warn(f"saves are no longer recorded in this round: {why}; checkpoints are found by their formats and names")

        try:
            saves, urls = _load("saves"), {at: each for at, each in enumerate(directories) if "://" in each}
            if urls:
                saves.WRAPPED.update(_load("remote_saves").RemotePlaces(urls).wrappers)
            journal = saves.JournalFile(path, int(os.environ.get("RANK") or message.get("slot") or 0))
            places, writers = saves.SavePlaces(directories), _load("writers").SaveWriters
            self._record = saves.SaveRecord(journal, places, lambda: row[layout.STEPS], report, writers)
            self._record.install()
        except (OSError, ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            report(f"{type(error).__name__}: {error}")

    def stepped(self, optimizer: object) -> None:
        if self._record is not None:
            self._record.stepped(optimizer)

    def script_left(self, error: "BaseException | None") -> None:
        """The script is over, but for its exit handlers. error: what has ended it."""
        if self._record is not None:
            self._left_whole = self._record.left(error)

    def exit_handlers_done(self) -> None:
        if self._left_whole:
            self._record.left()  # again: a handler may have saved


_saves = _Saves()


def look_at_sigterm(row: memoryview) -> None:
    """Report what SIGTERM would do now: a script may install another handler at any time, without any event."""
    over = row[layout.PHASE] == layout.PHASES.index("exit")
    row[layout.JIT_SAVES] = not over and saves_just_in_time(_signal.getsignal(_signal.SIGTERM))


def saves_just_in_time(handler: object) -> bool:
    """Return whether this handler of SIGTERM is that of Hugging Face's Trainer (`enable_jit_checkpoint`), not one that calls it.

    It has the Trainer save after a later step and leaves the process running (`CheckpointManager` in
    transformers/trainer_jit_checkpoint.py, 5.0 to 5.24). After a failure in the job no later step comes.
    """
    manager = getattr(sys.modules.get("transformers.trainer_jit_checkpoint"), "CheckpointManager", None)
    theirs = getattr(manager, "_sigterm_handler", None)
    return theirs is not None and getattr(handler, "__func__", None) is theirs


def _exit_code(code: object) -> int:
    """Return the exit code of a process that ends with SystemExit(code)."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def origin_of(module: object) -> "str | None":
    """Return the file that a module was loaded from, if any."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin if isinstance(origin, str) else None


def _record(error: BaseException, row: "memoryview | None", raised_ns: int) -> bool:
    """Write the error file. Return True if it now describes the error, written by us or by torch's @record."""
    path = os.environ.get(error_file.ERROR_FILE_ENV)
    if not path or (isinstance(error, SystemExit) and not _says_why(error)):
        return False
    first_step_done = bool(row[layout.STEPS]) if row and row[layout.OPTIM_HOOKED] else None
    try:
        return error_file.write(path, error, _without_our_frames(error), first_step_done, raised_ns)
    except Exception as failure:  # noqa: BLE001 - this runs the exception's own code, and nothing may change how the script ends
        reason = error_file.text_of(failure)
        _warn(f"cannot write the error file {path}: {reason}; the agent will see only the exit code")
        return False


def _says_why(exit_: SystemExit) -> bool:
    """Return whether the script left with a text, which Python prints: sys.exit("no data")."""
    return error_file.runpy_refusal(exit_) is not None or not (exit_.code is None or isinstance(exit_.code, int))


def _without_our_frames(error: BaseException) -> "TracebackType | None":
    """Return the traceback from the script's first frame on, or all of it if it contains none of our frames.

    Later frames of ours are left out, too: Ctrl-C may come, or a signal handler of the script may run, while Python calls us.
    They stay at the end of an Exception, which is a bug of ours, or is raised on purpose.
    """
    seen = error.__traceback__
    while seen is not None and not _is_ours(seen):
        seen = seen.tb_next  # callers of run_as_main
    if seen is None:
        return error.__traceback__
    first = step = _next_of_script(seen)
    while step is not None:
        following = _next_of_script(step)
        if following is not None or not isinstance(error, Exception):
            step.tb_next = following
        step = following
    return first


def _next_of_script(trace: "TracebackType") -> "TracebackType | None":
    following = trace.tb_next
    while following is not None and _is_ours(following):
        following = following.tb_next
    return following


def _is_ours(trace: "TracebackType") -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OURS)


def _show_without_our_frames(quiet: bool, namespace: "Namespace", heard: object) -> None:
    """Install an excepthook that shows the current exception as if the interpreter had run the script itself.

    quiet: the agent shows it; print nothing unless the script has its own excepthook. namespace: loses its file names afterwards.
    heard: handles SIGINT again; None: as it is.
    """
    previous = getattr(sys, "excepthook", sys.__excepthook__)
    silent = quiet and _is_default(previous)

    def excepthook(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
        sys.excepthook = previous
        trace = sys.last_traceback = _without_our_frames(error)
        BaseException.with_traceback(error, trace)
        try:
            if heard is not None:
                _signal.signal(_signal.SIGINT, heard)
            if not silent:
                previous(kind, error, trace)
        except SystemExit as exit_:
            _reports.ending(exit_, time.monotonic_ns())
            raise
        except BaseException as broken:  # noqa: BLE001 - printed here as the interpreter would, but without this frame
            own = _without_our_frames(broken)
            say("Error in sys.excepthook:")
            sys.__excepthook__(type(broken), BaseException.with_traceback(broken, own), own)
            say("\nOriginal exception was:")
            sys.__excepthook__(kind, error, trace)
        forget_file(namespace)

    sys.excepthook = excepthook


def _is_default(hook: "Callable[..., object]") -> bool:
    """Return whether `hook` is Python's, or torch's wrapper from init_process_group, which adds "[rank0]: " to each line."""
    while getattr(hook, "__name__", None) == "_distributed_excepthook":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
        if "old_hook" not in cells:
            return False
        hook = cells["old_hook"].cell_contents
    return hook is sys.__excepthook__


def _warn(text: str) -> None:
    """Write a warning to fd 2. sys.stderr may be the script's own object, whose errors must not replace another error."""
    try:
        os.write(2, f"elastic_ext: {text}\n".encode(errors="backslashreplace"))
    except OSError:
        pass  # closed: no process can read it


# What the message asks for.


def _connect_stderr(message: "WorkerMessage") -> None:
    """Make fd 2 the agent's named pipe, also for children and C code. On an error, fd 2 stays unchanged."""
    path = message.get("stderr")
    if path is None:
        return
    try:
        os.fstat(2)  # a closed fd 2 stays closed
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without a reader, this fails instead of waiting
        os.set_blocking(pipe, True)
        os.dup2(pipe, 2)
        os.close(pipe)
    except (OSError, TypeError, ValueError) as error:
        _warn(f"the agent keeps no tail of this worker's stderr: cannot open the pipe {path!r}: {error}")


def _arm(message: "WorkerMessage") -> "memoryview | None":
    """Install what the message asks for and return this worker's progress row. Parts that fail are left out."""
    row, stacks = None, False
    try:
        row = _own_row(message)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        _warn(f"the agent sees no progress of this worker: {message.get('progress')!r}, slot {message.get('slot')!r}: {error}")
    try:
        stacks = _dump_stacks_on_signal(message)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        _warn(f"the agent gets no stacks of this worker: {message.get('stacks')!r}: {error}")
    _reports.begin(row, message)  # before the steps are counted: in a warm standby torch is imported already
    if row is not None:
        row[layout.STACKS_ARMED] = stacks
        row[layout.ANSWERS] = _answer_signal(row)
        _saves.begin(row, message)
        _StepCounter(row).register_when_imported()
        row[layout.BEGAN_NS] = row[layout.SETTLED_NS] = time.monotonic_ns()
        row[layout.PID] = os.getpid()
    return row


def _own_row(message: "WorkerMessage") -> "memoryview | None":
    """Return this worker's row of the progress table with its own fields set to 0; None if no progress is wanted."""
    path, slot = message.get("progress"), message.get("slot")
    if path is None or slot is None:
        return None
    version = message.get("progress_version", layout.VERSION)
    if version != layout.VERSION:
        raise ValueError(f"expected version {layout.VERSION} of the progress table, got version {version!r}")
    mmap = _import_stdlib("mmap").mmap
    first = slot * layout.ROW_BYTES
    if first < 0:
        raise ValueError("expected a slot of 0 or more")
    with open(os.fspath(path), "r+b") as file:
        shared = mmap(file.fileno(), first + layout.ROW_BYTES)
    row = memoryview(shared)[first:].cast("Q")
    for field in range(layout.AGENT_FIELDS):
        row[field] = 0
    return row


def _dump_stacks_on_signal(message: "WorkerMessage") -> bool:
    path = message.get("stacks")
    if path is None:
        return False
    import faulthandler

    # A plain descriptor that nothing closes, because the handler may run until the process is gone.
    stacks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    faulthandler.register(worker_env.STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    return True


def _answer_signal(row: memoryview) -> bool:
    """Count ANSWER_SIGNAL in the row, in Python code of the main thread. Return whether this worker can."""
    try:
        _signal.signal(worker_env.ANSWER_SIGNAL, lambda *_: row.__setitem__(layout.ANSWERS, row[layout.ANSWERS] + 1))
        _signal.siginterrupt(worker_env.ANSWER_SIGNAL, False)  # system calls of C code go on
    except (OSError, ValueError) as error:  # not the main thread, say
        _warn(f"the agent cannot see whether this worker stays in one call: {error}")
        return False
    return True


class _StepCounter:
    """Counts the optimizer steps of this process, not those of children that it forks.

    As the first finder on sys.meta_path it sees every import begin. It finds nothing itself, so the import of torch is
    unchanged, errors included. torch.optim imports more after torch.optim.optimizer: at the next import this registers its hook
    and removes itself.
    """

    def __init__(self, row: memoryview) -> None:
        self._row = row
        self._pid = os.getpid()

    def register_when_imported(self) -> None:
        sys.meta_path.insert(0, self)
        self.find_spec(_OPTIMIZER_MODULE)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        register = getattr(sys.modules.get(_OPTIMIZER_MODULE), "register_optimizer_step_post_hook", None)
        if register is not None and not self._row[layout.OPTIM_HOOKED]:
            # A new list, because the import system is iterating over the old one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            register(_untraced(self._count))
            _reports.follow_replicas()
            self._row[layout.OPTIM_HOOKED] = 1

    def _count(self, optimizer: object, args: "tuple[object, ...]", kwargs: "Namespace") -> None:
        """Count a step. args, kwargs: those of the call, with the optimizer first."""
        if os.getpid() == self._pid:
            now = time.monotonic_ns()
            # That function calls step(closure=None); a loop mostly gives no argument, and then this looks no further.
            if (kwargs or len(args) > 1 or not self._row[layout.STEPS]) and _called_from(_STATE_INITIALIZER):
                return
            if not self._row[layout.STEPS]:
                self._row[layout.FIRST_STEP_NS] = now
                _reports.modules()
                _reports.watch_recorder()
            layout.note_sign(self._row, now)
            layout.settle(self._row, now)
            self._row[layout.LAST_STEP_NS] = now
            self._row[layout.STEPS] += 1
            look_at_sigterm(self._row)
            _saves.stepped(optimizer)
            _reports.stepped(self._row[layout.STEPS], optimizer)


def _untraced(hook: "Callable[..., None]") -> "Callable[..., None]":
    """Keep torch.compile out of `hook`: it imports the modules of traced functions by name, and ours have no names.

    Torch does the same to its own functions, such as the one that gives an optimizer its parameters, so this imports nothing new.
    """
    disable = getattr(sys.modules.get("torch._compile"), "_disable_dynamo", None)
    if disable is None:
        return hook
    untraced: Callable[..., None] = disable(lambda *args: hook(*args))  # a lambda, because torch sets an attribute on it
    return untraced


def _called_from(function: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def _import_stdlib(name: str) -> "ModuleType":
    """Import Python's own C module of this name, even if PYTHONPATH has another. What the script finds does not change."""
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


# The script, found, read and compiled as `python [-m] SCRIPT` does (CPython 3.10 to 3.14: Modules/main.c, pythonrun.c).


def fresh_main() -> "Namespace":
    """Put a new `__main__` into sys.modules and return its namespace as the interpreter would initialize it."""
    main: ModuleType = type(sys)("__main__")
    annotations: Namespace = {} if sys.version_info >= (3, 14) else {"__annotations__": {}}
    main.__dict__.update(__loader__=BuiltinImporter, **annotations, __builtins__=sys.modules["builtins"])
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    return main.__dict__


_replaced: "list[ModuleType]" = []  # kept: Python 3.10 uses the one that it has run once more after an error, without a reference


def forget_file(namespace: "Namespace") -> None:
    """Remove the names that atexit handlers and remaining threads do not see after the script ends (PyRun_SimpleFile)."""
    namespace.pop("__file__", None)
    namespace.pop("__cached__", None)


def resolve(argv: "list[str]", namespace: "Namespace") -> "tuple[Callable[..., object], tuple[object, ...]]":
    """Set sys.path[0] and return the function that runs the script, with its arguments (pymain_run_python).

    argv: [SCRIPT, *ARGS] or ["-m", MODULE, *ARGS]. namespace: that of `__main__`.
    """
    if not argv or argv == ["-m"]:
        say("usage: bootstrap.py [-m] SCRIPT ARGS...")
        raise SystemExit(2)
    if argv[0] == "-m":
        if not _SAFE_PATH:
            sys.path.insert(0, os.getcwd())
        import runpy

        return runpy._run_module_as_main, (argv[1], True)  # type: ignore[attr-defined]
    filename = argv[0]
    if not os.path.isabs(filename):  # _Py_abspath, which normalises nothing
        filename = os.getcwd() if filename == "." and sys.version_info >= (3, 11) else f"{os.getcwd()}/{filename}"
    if _has_importer(filename):  # a directory or a zip file
        sys.path.insert(0, filename)
        import runpy

        return runpy._run_module_as_main, ("__main__", False)  # type: ignore[attr-defined]
    if not _SAFE_PATH:
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
    return exec, (_load_script(filename, namespace), namespace)


def _has_importer(path: str) -> bool:
    """Return whether PyImport_GetImporter would find an importer for the path."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _load_script(filename: str, namespace: "Namespace") -> "CodeType":
    """Return the script's code and set `__file__`, `__cached__` and `__loader__` (pymain_run_file, PyRun_SimpleFile)."""
    try:
        with open(filename, "rb") as file:
            data = file.read()
    except OSError as error:
        say(f"{sys.orig_argv[0]}: can't open file {filename!r}: [Errno {error.errno}] {error.strerror}")
        raise SystemExit(2) from None
    compiled = filename.endswith(".pyc") or data[:2] == MAGIC_NUMBER[:2]
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", filename)
    namespace.update(__file__=filename, __cached__=None, __loader__=loader)
    if not compiled:
        return _compile(data, filename, namespace)
    if data[:4] != MAGIC_NUMBER:
        raise RuntimeError("Bad magic number in .pyc file")
    code: CodeType = marshal.loads(data[16:])  # skips the magic number, the flags and two words about the source
    return code


def _compile(data: bytes, filename: str, namespace: "Namespace") -> "CodeType":
    """Compile with the errors of CPython's file parser. They differ for encodings, null bytes and an unexpected end."""
    try:
        return compile(data, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        pass  # handled outside this block, or it would become the context of the same error
    try:
        import ctypes

        fopen, run_file = ctypes.CDLL(None).fopen, ctypes.pythonapi.PyRun_FileExFlags
    except (ImportError, OSError, AttributeError):
        return compile(data, filename, "exec", dont_inherit=True)
    fopen.restype, fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    run_file.restype = ctypes.py_object
    run_file.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, *[ctypes.py_object] * 2, ctypes.c_int, ctypes.c_void_p]
    path = os.fsencode(filename)
    run_file(fopen(path, b"rb"), path, _PY_FILE_INPUT, namespace, namespace, 1, None)
    return compile("", filename, "exec")  # a valid file has just replaced this one, and run_file has run it


def say(text: str) -> None:
    """Print what the interpreter itself would print."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)
