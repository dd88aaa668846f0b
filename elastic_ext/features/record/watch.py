"""The agents' part in the record of saves: they gather what the workers of a round have noted, and record what it proves.

Each agent reads the journals of its own workers. The others send theirs to the agent of group rank 0 through the round's store.
That one decides (`checkpoints/record/proof.py`) and writes (`checkpoints/record/stored.py`).

Invariant: what is recorded was listed after its proof, and no worker has written to it before the list was complete. A worker
notes what it does before it does it. So the list counts once all journals were read again, and say nothing new of the entry.

A journal with a hole in it says nothing. So a fault of reading one, or a post, ends all proofs of the round: `RoundProof.lose`.
Where an agent no longer posts, no list counts, because it does not answer. Only what the storage refuses is tried again.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from elastic_ext.agent.beginning import RoundBeginning
from elastic_ext.agent.companion import Companion, LocalWorkers, RoundPlace
from elastic_ext.agent.feature import Feature, RoundParts
from elastic_ext.base import errors, records, round_store, threads
from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.formats.candidates import step_of
from elastic_ext.checkpoints.record.journal import JournalPart, JournalTail, SavePath
from elastic_ext.checkpoints.record.proof import RecordedSave, RoundProof
from elastic_ext.checkpoints.record.stored import AttemptRecord, known_saves, newest_attempt
from elastic_ext.checkpoints.storage import Entry, Storage, open_storage, poll
from elastic_ext.features.resume.watch import addresses
from elastic_ext.workers.progress import Progress

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks into the journals
ANSWER_S = 0.5  # for the last words of other nodes at the end of a round, if they could still prove something
EVERY_S = 10.0  # between two records of one entry: a log may be written again after each step
LONGEST_S = 60.0  # before an entry is listed again of which a file is not there: NFS hides a new one for up to 60 s (acdirmax)
NODES_PER_S = 50.0  # that are asked for their steps, as long as these could prove something
JOIN_S = ANSWER_S + 1.0
SCHEMA = 1
SHARED, LOCAL = 0, 1  # the numbers of `checkpoint_dir` and `local_dir` in the journals, as in the workers' messages

NOT_RECORDED = "saves of this round are no longer recorded: %s"
NOT_PROVED = "saves of this round are no longer proved, and checkpoints are found by their formats and names: %s"


@dataclass(frozen=True)
class RankSteps:
    rank: records.Count
    steps: records.Count


@dataclass(frozen=True)
class SavePost:
    """What an agent reports to that of group rank 0.

    node: its group rank. answers: the number of the last question. counts: steps of its ranks, read before the journals were.
    broken: those whose journal is incomplete. open: in the first answer to that question, entries of which a file is open for
    writing here. over: its workers have ended, and this is the last one.
    """

    node: records.Count
    answers: records.Count = 0
    counts: tuple[RankSteps, ...] = ()
    broken: tuple[records.Count, ...] = ()
    parts: tuple[JournalPart, ...] = ()
    open: tuple[str, ...] = ()
    over: bool = False


class SaveWatch(Companion):
    """Records the saves of one round, on a thread of its own: a storage or store that hangs must not block the loop."""

    def __init__(
        self,
        place: RoundPlace,
        storage: Storage,
        journals: Mapping[int, str],
        local: Storage | None = None,
        rounds: int = 0,
        proved: Callable[[SavePath, Storage], None] = lambda entry, storage: None,
    ) -> None:
        """journals: by local rank their paths, as in the workers' messages. local: `local_dir`, if saves there are recorded.

        rounds: see `Resumption`. proved: called with each entry that was recorded as proved, and its directory.
        """
        self._rounds, self._proved = rounds, proved
        self._place, self._storages = place, [storage, *([local] if local is not None else [])]
        self._tails = {local_rank: JournalTail(path) for local_rank, path in journals.items()}
        self._fault = ""  # the first one of a journal or post
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._workers: LocalWorkers | None = None

    def workers_started(self, workers: LocalWorkers) -> None:
        self._workers = workers
        kind = threads.StoreCall if self._place.nodes > 1 else threading.Thread
        with threads.held() as received:  # an exception of a signal handler inside `start` would come out of it as a KeyError
            self._thread = threads.started(self._run, "elastic_ext-saves", logger.warning, NOT_RECORDED, kind=kind)
        threads.raise_again(received)

    def workers_ended(self, workers: LocalWorkers) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    # On the thread.

    def _run(self) -> None:
        try:
            if self._place.node == 0:
                self._record()
            else:
                self._report()
        except (RuntimeError, ValueError) as error:
            log = logger.debug if self._over.is_set() else logger.warning
            log(NOT_RECORDED, f"the store of the round does not answer: {error}")
        except (OSError, errors.ElasticExtError) as error:
            logger.warning(NOT_RECORDED, error)
        except Exception:  # the top of a thread
            logger.exception(NOT_RECORDED, "a fault of elastic_ext")

    def _look(self, asked: int, over: bool = False) -> list[SavePost]:
        """Return what is new here. The last post has the counts. asked: the last question."""
        counts = tuple(RankSteps(rank, row.steps) for rank, row in self._rows())  # first: lines up to these are there by now
        posts = [SavePost(self._place.node, parts=(part,)) for tail in self._tails.values() for part in _parts_of(tail)]
        broken = tuple(rank for rank, row in self._rows() if row.record_broken)  # last: so it is known of all that is missing
        for local_rank, tail in self._tails.items():
            if tail.fault:
                broken += (self._local.ranks[local_rank],)
                self._warn(tail.fault)
        return [*posts, SavePost(self._place.node, asked, counts, broken, over=over)]

    def _open_now(self) -> frozenset[SavePath]:
        pids = list(self._local.running_pids().values())
        of = {at: open_entries(pids, storage.address) for at, storage in enumerate(self._storages)}
        return frozenset(SavePath(at, name) for at, names in of.items() for name in names)

    @property
    def _local(self) -> LocalWorkers:
        assert self._workers is not None
        return self._workers

    def _rows(self) -> list[tuple[int, Progress]]:
        """Return the ranks of this node, and their progress now."""
        return list(zip(self._local.ranks.values(), self._local.read_progress(), strict=True))

    def _warn(self, fault: str) -> None:
        if not self._fault:
            logger.warning(NOT_PROVED, fault)
        self._fault = self._fault or fault

    def _report(self) -> None:
        store, last = round_store.connect(*self._place.store_at), SavePost(self._place.node)
        try:
            while not last.over:
                over, before = self._over.wait(LOOK_S), last
                asked = store.add(round_store.SAVES_ASKED, 0)
                *parts, last = self._look(asked, over)
                if asked > before.answers:
                    last = replace(last, open=tuple(each.path for each in self._open_now()))
                if parts or asked > before.answers or last.broken != before.broken or over:
                    for post in (*parts, last):
                        self._post(store, post)
        finally:
            if not last.over:  # what its ranks note from now on is not posted
                self._post(store, self._all_broken(last))

    def _post(self, store: round_store.Store, post: SavePost) -> None:
        data = records.encode(post, SCHEMA)
        if len(data) > records.MAX_BYTES:  # parts are small: so it is what is open
            self._warn(f"a report of {len(data)} bytes cannot be posted, {records.MAX_BYTES} at most")
            data = records.encode(self._all_broken(post), SCHEMA)
        number = store.add(round_store.SAVES_POSTED, 1)
        store.set(round_store.saves_post(number), data)

    def _all_broken(self, post: SavePost) -> SavePost:
        return replace(post, broken=tuple(self._local.ranks.values()), parts=(), open=())

    def _record(self) -> None:
        posts = _Posts(self._place)
        keeping = _keeping(self._storages, self._place.world, self._rounds, self._proved)
        over = False
        while not over:
            over = self._over.wait(LOOK_S)
            self._record_now(keeping, posts, math.inf if over else time.monotonic())
        keeping.write_unproved()

    def _record_now(self, keeping: _Keeping, posts: _Posts, now: float) -> None:
        """Take what is new, and record what it proves. now: infinity, if the workers have ended."""
        self._take(keeping.proof, posts)
        if now == math.inf:
            self._await_others(keeping, posts)
            keeping.proof.release()
        if keeping.list_proved(posts.asked, now):
            posts.ask(now)
            self._take(keeping.proof, posts)
            posts.open[self._place.node] = self._open_now()
        elif keeping.proof.waits and now < math.inf:
            posts.ask(now, self._place.nodes / NODES_PER_S)
        keeping.write_listed(posts.answered, now, posts.open_now)

    def _take(self, proof: RoundProof, posts: _Posts) -> None:
        for post in [*posts.new(), *self._look(posts.asked)]:
            journals = [part.parsed(str(post.node)) for part in post.parts]
            proof.take(journals, {each.rank: each.steps for each in post.counts}, post.broken)
        if posts.lost:
            self._warn(posts.lost)
            proof.lose(posts.lost)

    def _await_others(self, keeping: _Keeping, posts: _Posts) -> None:
        if posts.missing and keeping.proof.waits:
            by = time.monotonic() + ANSWER_S
            poll(lambda: self._take(keeping.proof, posts), lambda _: not (posts.missing and keeping.proof.waits), by)


def _parts_of(tail: JournalTail) -> Iterator[JournalPart]:
    """Yield all that is new: a list of files counts only if no line of a journal is left."""
    while found := tail.read():
        yield from found


def open_entries(pids: Iterable[int], directory: str) -> frozenset[str]:
    """Return the entries of a directory of which these processes have files open or mapped for writing."""
    below = os.path.realpath(directory) + "/"
    found = {path[len(below) :].partition("/")[0] for pid in pids for path in _open_for_writing(pid) if path.startswith(below)}
    return frozenset(found)


def _open_for_writing(pid: int) -> Iterator[str]:
    try:
        for file in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                path = os.readlink(f"/proc/{pid}/fd/{file}")
                if path.startswith("/") and _flags(f"/proc/{pid}/fdinfo/{file}") & (os.O_WRONLY | os.O_RDWR):
                    yield path
        with open(f"/proc/{pid}/maps", errors="surrogateescape") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6 and fields[1].startswith("rw-s"):
                    yield fields[5]
    except OSError as error:  # it has ended
        logger.debug("cannot look at what process %s has open: %s", pid, error)


def _flags(path: str) -> int:
    with open(path) as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("flags:")), 0)


class _Posts:
    """What the other nodes of a round post, read on the node of rank 0."""

    def __init__(self, place: RoundPlace) -> None:
        self._others = range(1, place.nodes)
        self._store = round_store.connect(*place.store_at) if self._others else None
        self._read, self.asked, self._asked_at = 0, 0, -math.inf
        self._answers: dict[int, int] = {}  # by node: the last question that it has answered
        self._over: set[int] = set()
        self.open: dict[int, frozenset[SavePath]] = {}  # by node, at its last answer: entries of which a file is open for writing
        self.lost = ""  # why a post could not be read: then something is missing, of whichever node

    @property
    def open_now(self) -> frozenset[SavePath]:
        return frozenset().union(*self.open.values())

    def ask(self, now: float, after_s: float = 0.0) -> None:
        """Ask all nodes to read their journals again, unless they were asked less than `after_s` seconds ago."""
        if now - self._asked_at < after_s:
            return
        self.asked, self._asked_at = self.asked + 1, now
        if self._store is not None:
            self._store.add(round_store.SAVES_ASKED, 1)

    @property
    def answered(self) -> int:
        """The last question that all nodes have answered, or have no more to say to."""
        return min((self._answers.get(each, 0) for each in self._others if each not in self._over), default=self.asked)

    @property
    def missing(self) -> bool:
        """Whether a node may still report something."""
        return len(self._over) < len(self._others)

    def new(self) -> list[SavePost]:
        """Return what was posted since. What cannot be read is lost."""
        found: list[SavePost] = []
        if self._store is None:
            return found
        for number in range(self._read + 1, self._store.add(round_store.SAVES_POSTED, 0) + 1):
            key = round_store.saves_post(number)
            if not self._store.check([key]):
                break  # counted, but not there yet
            self._read = number
            data = self._store.get(key)
            self._store.delete_key(key)
            try:
                post = records.read(SavePost, data, key, SCHEMA)
            except records.RecordError as error:
                self.lost = str(error)
                continue
            if post.node not in self._others:
                self.lost = f"{key} is of node {post.node}, which is no other one of the round"
                continue
            if post.answers > self._answers.get(post.node, 0):
                self._answers[post.node] = post.answers
                self.open[post.node] = frozenset(SavePath(SHARED, name) for name in post.open)
            if post.over:
                self._over.add(post.node)
            found.append(post)
        return found


@dataclass
class _Keeping:
    """Lists what is proved, and writes it once the list counts. `now` is monotonic seconds; infinity: it is the last time.

    attempts: the record in each directory. storages: these. proved: see `SaveWatch`.
    """

    attempts: Sequence[AttemptRecord]
    proof: RoundProof
    storages: Sequence[Storage]
    proved: Callable[[SavePath, Storage], None]
    # By order: the save, its files, and the question that all nodes must have answered.
    _listed: dict[int, tuple[RecordedSave, Mapping[str, Entry], int]] = field(default_factory=dict)
    _written: dict[SavePath, RecordedSave] = field(default_factory=dict)  # by entry
    _due: dict[SavePath, _Due] = field(default_factory=dict)  # by entry
    _refused: dict[SavePath, str] = field(default_factory=dict)  # by entry: why the storage has refused it last

    def list_proved(self, asked: int, now: float) -> bool:
        """List what was proved since. asked: the last question so far. Return whether a list waits."""
        record = self.proof.record()
        saves = [each for each in record.saves if self._is_kept(each)]
        self._forget_gone(saves)
        self._note_removed(record.removed)
        for save in saves:
            entry = save.entry
            due = self._due.get(entry, _Due())
            if save.proved and not save.gone and due.at <= now and not self._is_done(save) and save.order not in self._listed:
                with self._tried(entry):
                    found = self.attempts[entry.at].listed(save)
                    if found:
                        self._listed[save.order] = save, found, asked + 1
                    else:  # another host may not see all files yet
                        self._due[entry] = due.later(now)
        return bool(self._listed)

    def write_listed(self, answered: int, now: float, open_now: Collection[SavePath] = ()) -> None:
        """Record what was listed, is still proved and has not changed since.

        answered: the last question that all nodes have. open_now: entries of which a file is open for writing.
        """
        record = self.proof.record()
        seen = {each.order: each for each in record.saves}
        for order, (save, found, question) in sorted(self._listed.items()):
            same = seen.get(order)
            entry = save.entry
            if same is None or same.gone or not same.proved or same.changes != save.changes or self.proof.may_change(entry):
                del self._listed[order]
            elif entry in open_now:  # what it holds may not be in the file yet
                self._due[entry] = self._due.get(entry, _Due()).later(now)
                del self._listed[order]
            elif answered >= question:
                with self._tried(entry):
                    self.attempts[entry.at].write(save, found, record.reads)
                    self._written[entry] = save
                    self.proved(entry, self.storages[entry.at])
                    self._due[entry] = _Due(now + EVERY_S)
                    del self._listed[order]

    def write_unproved(self) -> None:
        """Record what is not proved at the end of the round, and was not recorded as proved before something was lost."""
        record = self.proof.record()
        for save in record.saves:
            if self._is_kept(save) and not (save.proved or save.gone or self._is_done(save)):
                with self._tried(save.entry):
                    self.attempts[save.entry.at].write_unproved(save, record.reads)

    def _is_kept(self, save: RecordedSave) -> bool:
        """Return whether it is in a directory whose saves are recorded."""
        return 0 <= save.entry.at < len(self.attempts)

    @contextmanager
    def _tried(self, entry: SavePath) -> Iterator[None]:
        """What the storage refuses now is tried again at the next look: a full disk may have room then."""
        try:
            yield
        except OSError as error:
            text = error.strerror or str(error)
            if self._refused.get(entry) != text:
                logger.warning("the save %s cannot be recorded now: %s", entry.path, error)
            self._refused[entry] = text
        else:
            self._refused.pop(entry, None)

    def _is_done(self, save: RecordedSave) -> bool:
        written = self._written.get(save.entry)
        return written is not None and (written.order, written.changes) == (save.order, save.changes)

    def _forget_gone(self, saves: Sequence[RecordedSave]) -> None:
        there = {each.entry for each in saves if not each.gone}
        for entry in [each for each in self._written if each not in there]:
            del self._written[entry]
            self._due.pop(entry, None)
            with self._tried(entry):
                self._forget(entry)
        self._refused = {entry: text for entry, text in self._refused.items() if entry in there}

    def _forget(self, entry: SavePath) -> None:
        attempt, storage = self.attempts[entry.at], self.storages[entry.at]
        if entry.at == LOCAL and storage.stat(entry.path) is None:
            notes.note_removed(storage, entry.path, attempt.knows(entry.path))
        attempt.forget(entry.path)  # last: the copier looks when the record changes

    def _note_removed(self, removed: Iterable[SavePath]) -> None:
        """Let the copier know what the script has removed from `local_dir`, also of earlier rounds."""
        for entry in removed:
            if entry.at == LOCAL < len(self.storages) and self.storages[LOCAL].stat(entry.path) is None:
                with self._tried(entry):
                    self._forget(entry)


def _keeping(
    storages: Sequence[Storage],
    world: int,
    rounds: int = 0,
    proved: Callable[[SavePath, Storage], None] = lambda entry, storage: None,
) -> _Keeping:
    """Return what keeps the record of a round in these directories, which have one number for it. Raises OSError.

    rounds: the number of the last round that other records know.
    """
    least = 1 + max(rounds, *(newest_attempt(known_saves(each).values()) for each in storages))
    attempts = [AttemptRecord(each, world, least) for each in storages]
    shared, *local = [each.before for each in attempts]
    return _Keeping(attempts, RoundProof(shared, world, {**shared, **(local[0] if local else {})}), storages, proved)


@dataclass(frozen=True)
class _Due:
    """When an entry may be recorded next, and how long it was put off the last time, in seconds."""

    at: float = -math.inf
    pause: float = LOOK_S / 2

    def later(self, now: float) -> _Due:
        pause = min(2 * self.pause, LONGEST_S)
        return _Due(now + pause, pause)


class RecordOfSaves(Feature):
    """Has the workers note what they save, and records it."""

    _rounds = 0  # see `Resumption`

    def round_begins(self, beginning: RoundBeginning) -> None:
        self._rounds = beginning.checkpoint.rounds

    def message(self) -> Mapping[str, object]:
        return {"saves_below": addresses(self.parts.settings)}

    def beside_round(self, round_: RoundParts) -> Companion | None:
        settings = self.parts.settings
        if settings.checkpoint_dir is None or not round_.bootstrap or round_.progress is None:
            return None
        local = open_storage(settings.local_dir) if settings.local_dir is not None and round_.place.nodes == 1 else None
        journals = {each: str(message["journal"]) for each, message in round_.messages.items() if "journal" in message}
        shared = open_storage(settings.checkpoint_dir)
        return SaveWatch(round_.place, shared, journals, local, self._rounds, self._tell)

    def _tell(self, entry: SavePath, storage: Storage) -> None:
        """Report what may be a checkpoint: logs are proved, too."""
        found = storage.stat(entry.path)
        if found is not None and listing.candidates_among([found], self.parts.settings.checkpoint_pattern):
            step = step_of(entry.path, self.parts.settings.checkpoint_pattern)
            self.parts.journal.events.emit("save_recorded", save=entry.path, step=step)
