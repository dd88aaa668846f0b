"""Notes in a worker what the script writes, renames, removes and reads below the directories of checkpoints: the record of saves.

An audit hook of Python sees each file as it is opened, renamed or removed, and wrappers see what C++ and Rust code writes:
torch.save to a path, safetensors, and the process of DCP's `async_save`. Not seen: C code that opens files itself, processes that
the script starts (but for children that it forks), stores into a mapping. What was not seen has no record. Below URLs,
`remote_saves.py` sees what goes through fsspec.

The journal is a file for each process, in memory of the agent. Wire protocol, version 1: lines of fields with a tab between them.
Each is there before what it describes happens, and is still there after SIGKILL. The last one may be torn. The first one is

    elastic_ext-saves 1 RANK PID PARENT    PARENT: pid of the process that forked this one; 0: it is the worker itself

and each other one begins with KIND, COUNT (the worker's optimizer steps by then), NS (time.monotonic_ns()) and WHO, a number for
each thread, work item of a pool and file written below a URL, which is never used again (0: the main thread), with "h" behind it
within a signal handler:

    w AT PATH             opens this file for writing, or truncates it. AT: number of the directory; PATH: relative to it
    l AT PATH             makes this another name of a file: what is written to one is in the other
    p AT PATH             WHO, which stands for another process, writes this directory or file
    m AT PATH AT PATH N   renames the first to the second; AT is -1: somewhere else. N: how many files below the first it has open
    d AT PATH             removes this file or empty directory
    r AT PATH             reads this file; once for each entry, until that is written again
    u AT PATH             the last `w` or `m` of WHO to this path has not happened
    s FIRST               has made a step. FIRST: the count by which its optimizer had made its own first one
    e                     WHO has ended, and so have those that belong to it: see `writers.py`
    f                     WHO has ended with an exception, and so have those that belong to it
    x                     the script has returned or left by SystemExit, not with the code of an error (1, 2, a text), nor as it
                          handled an exception; "h": that of a signal handler. Again when its exit handlers have returned
    k STEP                the script has reported its save of this step as complete; -1: of an unknown one

In PATH a backslash, a tab and a newline are written as \\\\, \\t and \\n. If a line cannot be written, the record is broken:
`progress_layout.RECORD_BROKEN`. Then nothing in it may be believed.

This file is loaded by path before the script; see `bootstrap.py` for what it may import.
"""

import _thread
import _weakref
import os
import sys
import time

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType, ModuleType

    Place = tuple[int, str]  # number of the directory, -1: elsewhere; and the path relative to it

    from elastic_ext.workers.bootstrap.writers import SaveWriter, SaveWriters, WatchedFuture

VERSION = 1
MAX_BYTES = 8 << 20
"""Of memory that one journal may take: 100,000 lines. It is shared with what the script itself has there, such as batches."""
NO_ROOM = "no room for the journal of saves"
LOOK_BYTES = 1 << 18  # from one look at that to the next
SAVED_EVENT = "elastic_ext.saved"  # of sys.audit: see `training.saves.report_saved`
OWN = ".elastic_ext"  # our own files beside the checkpoints
MOST_OPTIMIZERS, MOST_PLACES = 64, 512  # remembered
MOST_LINKS = 40  # in a path, as for the kernel
_ELSEWHERE: "Place" = (-1, "")
_WRITES = os.O_WRONLY | os.O_RDWR
_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
_NO_FILE = 0, 0  # device and inode of none
_ABSENT, _DIRECTORY, _FILE, _LINK = 0, 0o040000, 0o100000, 0o120000  # see stat.S_IFMT


class SaveRecord:
    """The journal of this process, and what it must know for the next line.

    Invariant: nothing that this does is seen by the script, but for its time. An error of its own breaks the record.
    """

    def __init__(
        self,
        journal: "JournalFile",
        places: "SavePlaces",
        steps: "Callable[[], int]",
        report: "Callable[[str], None]",
        writers: "type[SaveWriters]",
    ) -> None:
        """Nothing is noted before `install`. steps: returns the count of optimizer steps. report: gets why the record broke.

        writers: that class, since files are loaded by path here.
        """
        self.off = False
        self.places = places
        self._journal, self._steps, self._report = journal, steps, report
        self._kind, self._writers = writers, writers(self.note)
        self._optimizers: dict[object, int] = {}  # by weak reference: the count by which each had made its first step
        self._has_left, self._exit_failed = False, False  # the script has ended; one of its exit handlers has failed
        self._is_child = False
        self._seen = _EntriesRead()

    def install(self) -> None:
        """Note from now on. This cannot be undone: Python removes no audit hook."""
        os.register_at_fork(after_in_child=self._forked)
        wrappers = _Wrappers(self)
        wrappers.look()
        sys.addaudithook(_hook_of(self, wrappers))

    def guarded(self, method: "Callable[..., None]") -> "Callable[..., None]":
        """Return the method as the script may call it: an error breaks the record, and the script does not notice."""

        def call(*args: object) -> None:
            if not self.off:
                try:
                    method(*args)
                except _FAULTS as error:
                    self.fail(error)

        return call

    def stepped(self, optimizer: object) -> None:
        """An optimizer has made a step, which is counted already."""
        if self.off:
            return
        try:
            key = _weakref.ref(optimizer)
            first = self._optimizers.get(key)
            if first is None:
                first = self._optimizers[key] = self._steps()
                self._writers.steps.add(self._writers.trains())
                if len(self._optimizers) > MOST_OPTIMIZERS:
                    self._optimizers = {each: of for each, of in self._optimizers.items() if each() is not None}  # type: ignore[operator]
            if self._writers.steps.wanted:
                who = self._checked(self._writers.trains())
                if self._writers.steps.shows(who, first):
                    self.note("s", who, str(first))
            if self._writers.ended:
                self._writers.note_ends()
        except _FAULTS as error:
            self.fail(error)

    def left(self, error: "BaseException | None" = None) -> bool:
        """The script has ended. error: what has ended it. Return whether nothing was cut off in its own thread."""
        if self.off or not self._kind.ended_well(error):
            return False
        try:
            self._writers.note_ends(looks=2)
            in_handler = error is not None and self._kind.came_from_handler(error)
            if not self._exit_failed:
                self.note("x", self._checked(), in_handler=in_handler)
            self._has_left = True
        except _FAULTS as fault:
            self.fail(fault)
            return False
        return not in_handler

    # What is about to happen.

    def opens(self, path: object, mode: object = "", folder: int = -1) -> None:
        """A file is about to be opened for writing. mode: None if os.open does, whose event does not have `dir_fd`."""
        if type(path) is str and self.places.is_elsewhere(path):
            return
        found = self.places.candidates(path) if mode is None else [self.places.find(path, folder)]
        for place, full in found:
            kind = _kind_of(full) if place[0] >= 0 else _DIRECTORY
            if kind != _DIRECTORY:  # opened for a temporary file in it, whose own name comes next
                who = self._checked()
                self.note("w", who, *_fields(place), in_handler=self._writers.in_handler())
                who.unsure = (place, lambda full=full: _kind_of(full) == _ABSENT) if kind == _ABSENT else None
                self._changed(place)

    def makes_link(self, kind: str, path: object, folder: int = -1) -> None:
        """kind: w or l."""
        place, full = self.places.find(path, folder, follow=False)
        if place[0] >= 0 and _kind_of(full) == _ABSENT:  # else it fails
            self.note(kind, self._checked(), *_fields(place), in_handler=self._writers.in_handler())
            self._changed(place)

    def renames(self, source: object, target: object, source_fd: int = -1, target_fd: int = -1) -> None:
        before, source_path = self.places.find(source, source_fd, follow=False)
        after, target_path = self.places.find(target, target_fd, follow=False)
        if before[0] < 0 and after[0] < 0:
            return
        moved = _identity_at(source_path)
        if moved == _NO_FILE:
            return
        who = self._checked()
        onto_entry = before[0] >= 0 and after[0] >= 0 and "/" not in after[1]
        files = _open_below(source_path) if onto_entry else 0
        self.note("m", who, *_fields(before), *_fields(after), str(files), in_handler=self._writers.in_handler())
        who.unsure = after, lambda: _has_stayed(moved, source_path, target_path)
        self._changed(after)

    def removes(self, path: object, folder: int = -1) -> None:
        place, full = self.places.find(path, folder, follow=False)
        if place[0] >= 0 and _kind_of(full) != _ABSENT:
            self.note("d", self._checked(), *_fields(place), in_handler=self._writers.in_handler())
            self._changed(place)

    def reads(self, path: str) -> None:
        """path: absolute, or relative to the current directory."""
        if path[:1] != "/":
            path = f"{_directory_of(-1)}/{path}"
        if not path.startswith(self.places.prefixes) or self._seen.has(path):
            return
        place, full = self.places.find(path)
        if (
            place[0] >= 0
            and _kind_of(full) == _FILE
            and self._seen.add(place, path if self.places.has_no_link(path, place) else "")
        ):
            self.note("r", self._writers.this(), *_fields(place))

    def notes(self, kind: str, place: "Place", items: "list[int]") -> None:
        """Something below a URL is about to be written (w, l), removed (d) or read (r), which this process cannot look at.

        Add the number of its work item, if it is a file that is written: call `ends` with that.
        """
        if kind == "r" and place[0] >= 0 and self._seen.add(place, ""):
            self.note(kind, self._writers.this(), *_fields(place))
        elif kind != "r" and place[0] >= 0:
            writers = [who := self._checked()]
            if kind == "w":
                writers += [self._writers.other(), who]  # the thread comes last: it has written the file, see `fold.py`
                items.append(writers[1].number)
            in_handler = self._writers.in_handler()
            for each in writers:
                self.note(kind, each, *_fields(place), in_handler=in_handler)
            self._changed(place)

    def ends(self, kind: str, number: int) -> None:
        """A work item of `notes` has ended well (e) or not (f)."""
        self.note(kind, self._writers.other(number))

    def hands_over(self, path: object) -> "Callable[[WatchedFuture], None]":
        """Another process will write this. Return what is to be called with its future."""
        place, _ = self.places.find(path)
        if place[0] < 0:
            return lambda future: None
        who = self._writers.other()
        self.note("p", who, *_fields(place))
        self._changed(place)
        return lambda future: self._writers.follow(who, future)

    def reports_saved(self, step: object = None, *_: object) -> None:
        self.note("k", self._checked(), str(int(step)) if isinstance(step, int) and step >= 0 else "-1")

    def ignores(self, unraisable: object) -> None:
        """Python ignores an exception: that of an exit handler, or of a thread without a Thread object, which it has ended."""
        said = str(getattr(unraisable, "err_msg", ""))
        if self._has_left or "thread started by" in said:
            self._exit_failed |= self._writers.fails() and self._has_left

    def replaces_process(self, path: object, *_: object) -> None:
        """What a child runs after os.exec is just another program that is not seen; but of the worker, nothing is seen then."""
        if not self._is_child and (isinstance(path, int) or _kind_of(os.fsdecode(path)) != _ABSENT):  # type: ignore[arg-type]
            self._break("the script replaces its process (os.exec), and what runs after that is not seen")

    def check(self, *_: object) -> None:
        """Take back what this thread was about to do last, if it has not been done."""
        self._checked()

    def _checked(self, writer: "SaveWriter | None" = None) -> "SaveWriter":
        who: SaveWriter = writer or self._writers.this()
        if who.unsure is not None:
            (place, has_failed), who.unsure = who.unsure, None
            if has_failed():
                self.note("u", who, *_fields(place))
        return who

    def _changed(self, place: "Place") -> None:
        self._seen.forget(place)
        self._writers.steps.want(self._steps())

    # The journal.

    def note(self, kind: str, who: "SaveWriter", *fields: str, in_handler: bool = False) -> None:
        if self.off:
            return
        said = kind, str(self._steps()), str(time.monotonic_ns()), f"{who.number}h" if in_handler else str(who.number), *fields
        try:
            self._journal.write("\t".join(said))
        except (OSError, ValueError) as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Break the record because of this error.

        But one that a signal handler or another thread (PyThreadState_SetAsyncExc) has raised meanwhile goes on to the script.
        That of another thread mostly has no arguments; errors of Python itself have some.
        """
        if not error.args or type(error).__module__ != "builtins" or self._kind.came_from_handler(error):
            raise error
        self._break(f"{type(error).__name__}: {error}")

    def _break(self, why: str) -> None:
        if not self.off:
            self.off = True
            self._report(why)

    def _forked(self) -> None:
        """In a child that the script has forked: it gets a journal of its own, once there is something to note."""
        if self.off:
            return
        self._writers, self._journal = self._kind(self.note), self._journal.of_child()
        self._is_child = True
        if "multiprocessing.util" in sys.modules:
            self._journal.begun = self._follow_child

    def _follow_child(self) -> None:
        """Note the end of a child of `multiprocessing`, which runs no exit handlers but these."""

        def over() -> None:
            if _child_succeeds():
                self.left()

        sys.modules["multiprocessing.util"].Finalize(None, over, exitpriority=-1000)


class _EntriesRead:
    """Which entries were read, each noted once until it is written again."""

    def __init__(self) -> None:
        self._entries: set[Place] = set()
        self._paths: set[str] = set()  # of their files and folders, as the script names them; those without links

    def has(self, path: str) -> bool:
        """Return whether that is known of this absolute path without a long look."""
        return path in self._paths or (path.rpartition("/")[0] in self._paths and _kind_of(path) != _LINK)

    def add(self, place: "Place", path: str) -> bool:
        """Return whether its entry is new. path: of the file, if it has no links."""
        entry = place[0], place[1].partition("/")[0]
        is_new = entry not in self._entries
        if is_new and len(self._entries) >= MOST_PLACES:
            self._entries.clear()
            self._paths.clear()
        self._entries.add(entry)
        if path:
            if len(self._paths) >= MOST_PLACES:
                self._paths.clear()
            self._paths |= {path, path.rpartition("/")[0]}
        return is_new

    def forget(self, place: "Place") -> None:
        entry = place[0], place[1].partition("/")[0]
        if entry in self._entries:
            self._entries.discard(entry)
            self._paths.clear()


class SavePlaces:
    """Where a path is: in which of the directories of checkpoints, and where there."""

    def __init__(self, directories: "Sequence[str]") -> None:
        """directories: absolute paths, and URLs, below which nothing is found here."""
        given = {at: os.path.normpath(each) for at, each in enumerate(directories) if each.startswith("/")}
        both = {(f"{each}/", at) for at, one in given.items() for each in (one, os.path.realpath(one))}
        self._below = sorted(both, reverse=True)  # of two, the one inside the other comes first
        self.prefixes = tuple(each for each, _ in self._below)
        self._elsewhere: set[str] = set()  # folders that are in none

    def find(self, path: object, folder: int = -1, follow: bool = True) -> "tuple[Place, str]":
        """Return where this is, and its absolute path.

        folder: descriptor of the directory that it is relative to, if any. follow: a link stands for what it leads to.
        """
        if isinstance(path, int):  # a descriptor: its file has been opened before
            return _ELSEWHERE, ""
        name = os.fsdecode(path)  # type: ignore[arg-type]  # str, bytes or PathLike
        if not name.startswith("/"):
            beside = _directory_of(folder)
            if not beside:
                return _ELSEWHERE, ""
            name = os.path.join(beside, name)
        head, tail = os.path.split(name.rstrip("/"))
        if head in self._elsewhere and _kind_of(name) != _LINK:
            return _ELSEWHERE, name
        real = _real(name) if follow else f"{_real(head)}/{tail}"
        for full in (real, os.path.normpath(name)):
            for below, at in self._below:
                if full.startswith(below):
                    inside = full[len(below) :]
                    return (_ELSEWHERE if inside.partition("/")[0] == OWN else (at, inside)), full
        if len(self._elsewhere) >= MOST_PLACES:
            self._elsewhere.clear()
        self._elsewhere.add(head)
        return _ELSEWHERE, real

    def is_elsewhere(self, path: str) -> bool:
        """Return whether that is known of this absolute path without a long look."""
        return path.rpartition("/")[0] in self._elsewhere and _kind_of(path) != _LINK

    def has_no_link(self, path: str, place: "Place") -> bool:
        """Return whether this path leads to this place by its names alone."""
        return any(at == place[0] and path == below + place[1] for below, at in self._below)

    def candidates(self, path: object) -> "list[tuple[Place, str]]":
        """Return where os.open may be about to open this: relative to the current directory, or to one that is open."""
        found = [self.find(path)]
        if not isinstance(path, int) and not os.fsdecode(path).startswith("/"):  # type: ignore[arg-type]
            folders = {each for each in _open_paths() if f"{each}/".startswith(self.prefixes) and _kind_of(each) == _DIRECTORY}
            found += [self.find(os.path.join(each, os.fsdecode(path))) for each in folders]  # type: ignore[arg-type]
        return found

    def forget(self, *_: object) -> None:
        """A link has come: what was elsewhere may be here now."""
        self._elsewhere.clear()


class JournalFile:
    """The file of one process; it is made with its first line."""

    def __init__(self, path: str, rank: int, parent: int = 0) -> None:
        """path: beginning of the path of all journals of this worker. parent: pid of the process that forked this one."""
        self.begun: Callable[[], None] | None = None  # called once there is a file
        self._prefix, self._rank, self._pid = path, rank, os.getpid()
        self._path = f"{path}.{self._pid}.{time.monotonic_ns()}"
        self._head = f"elastic_ext-saves {VERSION} {rank} {self._pid} {parent}\n"
        self._file, self._identity = -1, _NO_FILE
        self._making = _thread.RLock()  # a signal handler may come here amid it
        self._unchecked = 0  # bytes since the last look at how many there are

    def of_child(self) -> "JournalFile":
        """Return the journal of a child; call this there."""
        return JournalFile(self._prefix, self._rank, self._pid)

    def write(self, line: str) -> None:
        """Add a line. Raises OSError: there is no room, or too much is there already."""
        if not self._is_open():
            with self._making:
                if not self._is_open():
                    self._make()
        encoded = f"{line}\n".encode("utf-8", "surrogateescape")
        if os.write(self._file, encoded) != len(encoded):
            raise OSError(NO_ROOM)
        self._unchecked += len(encoded)
        if self._unchecked >= LOOK_BYTES:
            self._unchecked = 0
            if os.fstat(self._file).st_blocks * 512 > MAX_BYTES:
                raise OSError(f"the journal of saves is larger than {MAX_BYTES >> 20} MiB")

    def _is_open(self) -> bool:
        return self._file >= 0 and _identity_of(self._file) == self._identity  # the script may close what it has not opened

    def _make(self) -> None:
        """Make the file with its first line, or open it again. If a signal handler has done that meanwhile, nothing changes."""
        head = self._head.encode()
        first = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.pwrite(first, head, 0) != len(head):
                raise OSError(NO_ROOM)
        finally:
            os.close(first)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._identity, self._file = _identity_of(file), file
        begun, self.begun = self.begun, None
        if begun is not None:
            begun()


class _Wrappers:
    """What is put around the functions whose files Python does not open. Modules may be imported at any time."""

    def __init__(self, record: SaveRecord) -> None:
        self._record = record
        self._done: set[str] = set()

    def look(self) -> None:
        """Wrap what has been imported since. Call this as each import begins, and before a module's code runs."""
        for name, wrap in WRAPPED.items():
            module = sys.modules.get(name)
            if module is not None and name not in self._done and wrap(module, self._record):
                self._done.add(name)


def _wrap_zip_writer(module: "ModuleType", record: SaveRecord) -> bool:
    """Torch's C++ code opens the file of torch.save(..., PATH)."""
    kind = getattr(module, "_open_zipfile_writer_file", None)
    if kind is None:
        return False
    original, opens = kind.__init__, record.guarded(record.opens)

    def __init__(self: object, name: object, *args: object, **kwargs: object) -> None:
        opens(name)
        original(self, name, *args, **kwargs)

    kind.__init__ = __init__
    return True


def _wrap_serialize_file(module: "ModuleType", record: SaveRecord) -> bool:
    """Rust code opens the file of safetensors. `save_file` calls this global; other libraries bind `save_file` itself."""
    original, opens = getattr(module, "serialize_file", None), record.guarded(record.opens)
    if original is None or hasattr(original, "__wrapped__"):
        return original is not None

    def serialize_file(tensors: object, filename: object, *args: object, **kwargs: object) -> object:
        opens(filename)
        return original(tensors, filename, *args, **kwargs)

    serialize_file.__doc__, serialize_file.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    module.__dict__["serialize_file"] = serialize_file
    return True


def _wrap_process_save(module: "ModuleType", record: SaveRecord) -> bool:
    """A process of its own writes for DCP's async_save(async_checkpointer_type=PROCESS)."""
    kind = getattr(module, "_ProcessBasedAsyncCheckpointExecutor", None)
    if kind is None:
        return False
    original = kind.execute_save

    def execute_save(self: object, *args: object, **kwargs: object) -> "WatchedFuture":
        path = kwargs.get("checkpoint_id") or getattr(kwargs.get("storage_writer"), "path", None)
        ends: list[Callable[[WatchedFuture], None]] = []
        if path is not None:
            record.guarded(lambda: ends.append(record.hands_over(path)))()
        future: WatchedFuture = original(self, *args, **kwargs)
        for end in ends:
            record.guarded(end)(future)
        return future

    kind.execute_save = execute_save
    return True


# `safetensors` comes before its parts, which take the function from there.
WRAPPED: "dict[str, Callable[[ModuleType, SaveRecord], bool]]" = {
    "torch.serialization": _wrap_zip_writer,
    "torch.distributed.checkpoint._async_process_executor": _wrap_process_save,
    "safetensors": _wrap_serialize_file,
    "safetensors.torch": _wrap_serialize_file,
    "safetensors.numpy": _wrap_serialize_file,
}


def _hook_of(record: SaveRecord, wrappers: _Wrappers) -> "Callable[[str, tuple[object, ...]], None]":
    """Return the audit hook. It is one flat function, because each event of the script costs a call of it."""
    places, prefixes = record.places, record.places.prefixes

    def links(path: object, folder: int = -1) -> None:
        places.forget()
        record.makes_link("w", path, folder)

    others: dict[str, Callable[..., None]] = {
        "os.rename": record.renames,
        "os.remove": record.removes,
        "os.rmdir": record.removes,
        "os.truncate": lambda path, length: record.opens(path),
        "os.link": lambda source, target, source_fd=-1, target_fd=-1: record.makes_link("l", target, target_fd),
        "os.symlink": lambda source, target, folder=-1: links(target, folder),
        "os.mkdir": record.check,
        "os.exec": record.replaces_process,
        "sqlite3.connect": lambda path: record.opens(path) if path != ":memory:" else None,
        "import": lambda *_: wrappers.look(),
        "exec": lambda *_: wrappers.look(),
        "sys.unraisablehook": lambda _, unraisable: record.ignores(unraisable),
        SAVED_EVENT: record.reports_saved,
    }

    def hook(event: str, args: "tuple[object, ...]") -> None:
        if event == "open":
            if record.off:
                return
            try:
                path, mode, flags = args
                if isinstance(flags, int) and flags & _WRITES:
                    record.opens(path, mode)
                elif type(path) is str and (path[:1] != "/" or path.startswith(prefixes)):
                    record.reads(path)
            except _FAULTS as error:
                record.fail(error)
        elif event in others and not record.off:
            try:
                others[event](*args)
            except _FAULTS as error:
                record.fail(error)

    return hook


# What the system says.


def _fields(place: "Place") -> "tuple[str, str]":
    at, path = place
    if not path.isprintable() or "\\" in path:
        path = path.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")
    return str(at), path


def _kind_of(path: str) -> int:
    """Return the type of what is there, as in a file's mode; _ABSENT: nothing is, as far as can be seen."""
    try:
        return os.lstat(path).st_mode & 0o170000
    except OSError as error:
        if not _is_own(error):
            raise
        return _ABSENT


def _identity_at(path: str) -> "tuple[int, int]":
    """Return the device and the inode of a file; _NO_FILE if none is seen there."""
    try:
        found = os.lstat(path)
    except OSError as error:
        if not _is_own(error):
            raise
        return _NO_FILE
    return found.st_dev, found.st_ino


def _has_stayed(moved: "tuple[int, int]", source: str, target: str) -> bool:
    """Return whether a rename of this file has not happened. Since then, another rank may have made the source again."""
    found = _identity_at(source)
    return found != _NO_FILE and (found == moved or _identity_at(target) != moved)


def _directory_of(folder: int) -> str:
    """Return the path of the directory with this descriptor; -1: the current one; empty: there is no such directory now."""
    try:
        return os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
    except OSError as error:
        if not _is_own(error):
            raise
        return ""


def _is_own(error: OSError) -> bool:
    """Return whether a call of this file has raised this; else a signal handler or another thread has, and it must go on."""
    if error.errno is None:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals is globals()


def _real(path: str) -> str:
    """Return an absolute path without links. os.path.realpath would lose what a signal handler raises meanwhile."""
    done, parts, links = "", path.split("/")[::-1], 0
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        here = f"{done}/{part}"
        if links < MOST_LINKS and _kind_of(here) == _LINK:
            target, links = os.readlink(here), links + 1
            done = "" if target.startswith("/") else done
            parts += target.split("/")[::-1]
            continue
        done = here
    return done or "/"


def _identity_of(file: int) -> "tuple[int, int]":
    try:
        found = os.fstat(file)
    except OSError as error:
        if not _is_own(error):
            raise
        return _NO_FILE
    return found.st_dev, found.st_ino


def _open_paths() -> "Iterator[str]":
    """Yield the paths of what this process has open."""
    for each in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{each}")
        except OSError as error:
            if not _is_own(error):
                raise
            continue  # the list's own
        yield path


def _open_below(path: str) -> int:
    return sum(each == path or each.startswith(f"{path}/") for each in _open_paths())


def _child_succeeds() -> bool:
    """Return whether the function of a child of `multiprocessing` has returned; call this in a finalizer there.

    Python 3.10 to 3.12 call it before the child's exit code is returned, 3.13 and 3.14 after that.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        local = {"_bootstrap": "exitcode", "_launch": "code"}.get(frame.f_code.co_name)
        if local is not None and "multiprocessing" in frame.f_code.co_filename:
            return frame.f_locals.get(local) == 0
        frame = frame.f_back
    return False
