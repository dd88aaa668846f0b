"""The agents' part in the record of saves: they gather what the workers of a round have noted, and record what it proves.

Each agent reads the journals of its own workers. The others send theirs to the agent of group rank 0 through the round's store.
That one decides (`checkpoints/record/proof.py`) and writes (`checkpoints/record/stored.py`). Where each node of several saves in
a `local_dir` of its own, it tells the others what to record there (`orders`).

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic_ext.agent.beginning import RoundBeginning
from elastic_ext.agent.companion import Companion, LocalWorkers, RoundPlace
from elastic_ext.agent.feature import Feature, JobParts, RoundParts
from elastic_ext.base import errors, records, round_store, threads
from elastic_ext.checkpoints.agreement.shared_dir import SharedDir
from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.formats.candidates import step_of
from elastic_ext.checkpoints.record.journal import JournalPart, JournalTail, SavePath
from elastic_ext.checkpoints.record.parts import LOCAL, of_node
from elastic_ext.checkpoints.record.proof import RoundProof
from elastic_ext.checkpoints.storage import LocalStorage, Storage, open_storage, poll
from elastic_ext.features.record.keeping import Keeping, keeping_of
from elastic_ext.features.record.orders import NodeRecord, Orders, PartList, WholeRecord
from elastic_ext.features.record.pauses import LOOK_S
from elastic_ext.features.record.posts import SCHEMA, SHARED, PostsOfNodes, RankSteps, SavePost, read_orders
from elastic_ext.features.resume.watch import ResumePoint, addresses
from elastic_ext.rendezvous.round_records import EndKind
from elastic_ext.workers.progress import Progress

if TYPE_CHECKING:
    from elastic_ext.features.record.mirror import PartMirror

logger = logging.getLogger(__name__)

ANSWER_S = 0.5  # for the last words of other nodes at the end of a round, if they could still prove something
NODES_PER_S = 50.0  # that are asked for their steps, as long as these could prove something
JOIN_S = ANSWER_S + 1.0
LAST_TURNS = 5  # at the end of a round: what is to be listed, and what to be written; again where a node was at work meanwhile
LAST_S = 10.0  # the same where nodes save apart, and none was lost: what is not recorded then is lost to the next round

NOT_RECORDED = "saves of this round are no longer recorded: %s"
NOT_PROVED = "saves of this round are no longer proved, and checkpoints are found by their formats and names: %s"


@dataclass(frozen=True)
class Whole:
    """On group rank 0: this node's own record, and what says what all nodes do."""

    own: NodeRecord
    record: WholeRecord


@dataclass(frozen=True)
class AgentSide:
    """What the agent knows, and is told.

    rounds: see `Resumption`. proved: called with each entry that was recorded as proved, and its directory. is_broken: whether a
    node was lost, or leaves. recorded: called with what all nodes were told to record of their parts, once this one has done so.
    """

    rounds: int = 0
    proved: Callable[[SavePath, Storage], None] = lambda entry, storage: None
    is_broken: Callable[[], bool] = lambda: False
    recorded: Callable[[Orders], None] = lambda orders: None


class SaveWatch(Companion):
    """Records the saves of one round, on a thread of its own: a storage or store that hangs must not block the loop."""

    def __init__(
        self,
        place: RoundPlace,
        storage: Storage,
        journals: Mapping[int, str],
        local: Storage | None = None,
        agent: AgentSide | None = None,
    ) -> None:
        """journals: by local rank their paths, as in the workers' messages. local: `local_dir`, if saves there are recorded."""
        self._agent = agent or AgentSide()
        self.patience_s = ANSWER_S  # for each of the others' last words
        self._place, self._storages = place, [storage, *([local] if local is not None else [])]
        self._apart = local if place.nodes > 1 and isinstance(local, LocalStorage) else None  # it is of this node alone
        self._own: NodeRecord | None = None  # made on the thread
        self.answered = 0  # the last question of group rank 0 that was answered here
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
        limit_s = JOIN_S
        if self._own is not None and self._own.is_used and not self._agent.is_broken():
            self.patience_s, limit_s = LAST_S, 3 * LAST_S  # to end, to list, and to write
        self._over.set()
        if self._thread is not None:
            self._thread.join(limit_s)

    # On the thread.

    def _run(self) -> None:
        try:
            self._own = self._own_record()
            if self._place.node == 0:
                self._record(self._own)
            else:
                self._report(self._own)
        except (RuntimeError, ValueError) as error:
            log = logger.debug if self._over.is_set() else logger.warning
            log(NOT_RECORDED, f"the store of the round does not answer: {error}")
        except (OSError, errors.ElasticExtError) as error:
            logger.warning(NOT_RECORDED, error)
        except Exception:  # the top of a thread
            logger.exception(NOT_RECORDED, "a fault of elastic_ext")

    def _own_record(self) -> NodeRecord | None:
        """Return what records this node's part of saves in its own directory; None where it has none, or it cannot be read."""
        if self._apart is None:
            return None
        try:
            place, agent = self._place, self._agent
            return NodeRecord(self._apart, place.node, place.world, len(self._local.ranks), agent.rounds, agent.recorded)
        except OSError as error:
            logger.warning(NOT_RECORDED, f"{self._apart.address}: {error}")
            return None

    def _look(self, asked: int, over: bool = False) -> list[SavePost]:
        """Return what is new here. The last post has the counts. asked: the last question."""
        counts = tuple(RankSteps(rank, row.steps) for rank, row in self._rows())  # first: lines up to these are there by now
        posts = [SavePost(self._place.node, parts=(part,)) for tail in self._tails.values() for part in _parts_of(tail)]
        if self._own is not None:
            self._own.removed(_taken_away(posts, "d"), _taken_away(posts, "m"))
        broken = tuple(rank for rank, row in self._rows() if row.record_broken)  # last: so it is known of all that is missing
        for local_rank, tail in self._tails.items():
            if tail.fault:
                broken += (self._local.ranks[local_rank],)
                self._warn(tail.fault)
        return [*posts, SavePost(self._place.node, asked, counts, broken, over=over)]

    def _open_now(self) -> frozenset[SavePath]:
        """Return the entries of which a file is open for writing, by the numbers of the directories in the journals."""
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

    def _report(self, own: NodeRecord | None) -> None:
        store, last = round_store.connect(*self._place.store_at), SavePost(self._place.node)
        before = own.before if own is not None else ()
        if before:
            self._post(store, replace(last, before=before))
        ended = False  # nothing more will be asked
        try:
            while not (last.over and (ended or own is None)):
                orders: list[Orders] = []
                if last.over:
                    orders, asked, over = read_orders(store, [last.answers + 1]), last.answers + 1, True  # waits for it
                else:
                    over, asked = self._over.wait(LOOK_S), store.add(round_store.SAVES_ASKED, 0)
                    if own is not None:
                        orders = read_orders(store, range(last.answers + 1, asked + 1))
                lists = tuple(each for one in orders for each in own.carry_out(one)) if own is not None else ()
                ended = ended or any(each.end for each in orders)
                last = self._answer(store, last, asked, over, lists)
                self.answered = last.answers
        finally:
            if not last.over:  # what its ranks note from now on is not posted
                self._post(store, self._all_broken(last))

    def _answer(
        self, store: round_store.Store, before: SavePost, asked: int, over: bool, lists: tuple[PartList, ...]
    ) -> SavePost:
        """Post what is new here since that post, and what was asked for. Return the last post."""
        *parts, last = self._look(asked, over)
        if asked > before.answers:
            found = self._open_now()
            names = [tuple(each.path for each in found if each.at == at) for at in (SHARED, LOCAL)]
            last = replace(last, open=names[0], open_apart=names[1], lists=lists)
        if self._own is not None:
            last = replace(last, removed=self._own.take_removed())
        if parts or asked > before.answers or last.broken != before.broken or over or last.removed:
            for post in (*parts, last):
                self._post(store, post)
        return last

    def _post(self, store: round_store.Store, post: SavePost) -> None:
        data = records.encode(post, SCHEMA)
        if len(data) > records.MAX_BYTES:  # parts are small: so it is what is open
            self._warn(f"a report of {len(data)} bytes cannot be posted, {records.MAX_BYTES} at most")
            data = records.encode(self._all_broken(post), SCHEMA)
        number = store.add(round_store.SAVES_POSTED, 1)
        store.set(round_store.saves_post(number), data)

    def _all_broken(self, post: SavePost) -> SavePost:
        return replace(post, broken=tuple(self._local.ranks.values()), parts=(), open=())

    def _record(self, own: NodeRecord | None) -> None:
        posts = PostsOfNodes(self._place)
        storages = self._storages if self._place.nodes == 1 else self._storages[:1]
        rounds = max(self._agent.rounds, own.attempt - 1 if own is not None else 0)
        keeping = keeping_of(storages, self._place.world, rounds, self._agent.proved, apart=self._place.nodes > 1)
        whole = None
        if own is not None:
            own.begin(keeping.attempt)
            whole = Whole(own, WholeRecord(self._place.nodes, keeping.attempt))
            whole.record.usual.know(own.before)
        over = False
        try:
            while not over:
                over = self._over.wait(LOOK_S)
                self._record_now(keeping, posts, math.inf if over else time.monotonic(), whole)
            keeping.write_unproved()
            if whole is not None:
                whole.own.write_unproved(keeping.proof.record())
        finally:
            if whole is not None:  # the others wait for it
                posts.ask(math.inf, orders=Orders(keeping.attempt, end=True))

    def _record_now(self, keeping: Keeping, posts: PostsOfNodes, now: float, whole: Whole | None = None) -> None:
        """Take what is new, and record what it proves. now: infinity, if the workers have ended."""
        self._take(keeping.proof, posts, whole)
        if now == math.inf:
            self._await_others(keeping, posts, whole)
            keeping.proof.release()
        listed, orders = keeping.list_proved(posts.asked, now), self._orders(keeping, posts, now, whole)
        if listed or (orders is not None and orders.says_something):
            self._ask(keeping, posts, now, whole, orders)
        elif keeping.proof.waits and now < math.inf:
            posts.ask(now, self._place.nodes / NODES_PER_S, orders)
        keeping.write_listed(posts.answered, now, posts.open_now)
        for _ in range(LAST_TURNS) if whole is not None and now == math.inf else ():
            self._await_answers(keeping, posts, whole)
            keeping.proof.release()
            orders = self._orders(keeping, posts, now, whole)
            if orders is None or not orders.says_something:
                break
            self._ask(keeping, posts, now, whole, orders)

    def _orders(self, keeping: Keeping, posts: PostsOfNodes, now: float, whole: Whole | None) -> Orders | None:
        if whole is None:
            return None
        open_now = posts.open_now

        def unsure(entry: SavePath) -> bool:
            return entry in open_now or keeping.proof.may_change(entry)

        return whole.record.next(keeping.proof.record(), posts.asked, posts.answered_by_all, now, unsure)

    def _ask(self, keeping: Keeping, posts: PostsOfNodes, now: float, whole: Whole | None, orders: Orders | None) -> None:
        """Ask all nodes for what is new, this one, too."""
        posts.ask(now, orders=orders)
        if whole is not None and orders is not None:
            whole.record.take(whole.own.carry_out(orders))
            for name in (each.name for each in orders.writes):
                self._agent.proved(SavePath(LOCAL, name), self._storages[LOCAL])
        self._take(keeping.proof, posts, whole)
        posts.open[self._place.node] = self._open_now()

    def _take(self, proof: RoundProof, posts: PostsOfNodes, whole: Whole | None = None) -> None:
        for post in [*posts.new(), *self._look(posts.asked)]:
            journals = [part.parsed(str(post.node)) for part in post.parts]
            if post.node and self._apart is not None:
                journals = [replace(each, events=tuple(of_node(event, post.node) for event in each.events)) for each in journals]
            if whole is not None and any(event.place.at >= LOCAL for each in journals for event in each.events):
                whole.own.seen_to_be_used = True
            proof.take(journals, {each.rank: each.steps for each in post.counts}, post.broken)
            if whole is not None:
                whole.record.take(post.lists)
                whole.record.removals.removed((*post.removed, *whole.own.take_removed()))
                whole.record.usual.know(post.before)
        if posts.lost:
            self._warn(posts.lost)
            proof.lose(posts.lost)

    def _await_others(self, keeping: Keeping, posts: PostsOfNodes, whole: Whole | None) -> None:
        if posts.missing and keeping.proof.waits:
            by = time.monotonic() + self.patience_s
            poll(lambda: self._take(keeping.proof, posts, whole), lambda _: not (posts.missing and keeping.proof.waits), by)

    def _await_answers(self, keeping: Keeping, posts: PostsOfNodes, whole: Whole | None) -> None:
        by = time.monotonic() + self.patience_s
        poll(lambda: self._take(keeping.proof, posts, whole), lambda _: posts.answered_by_all >= posts.asked, by)


def _parts_of(tail: JournalTail) -> Iterator[JournalPart]:
    """Yield all that is new: a list of files counts only if no line of a journal is left."""
    while found := tail.read():
        yield from found


def _taken_away(posts: Iterable[SavePost], kind: str) -> list[str]:
    """Return the entries of this node's own `local_dir` that its workers have removed ("d") or moved away ("m")."""
    events = (event for post in posts for part in post.parts for event in part.parsed().events if event.kind == kind)
    gone = (event.place for event in events if event.place.at == LOCAL and event.place == event.place.entry != event.to.entry)
    return list(dict.fromkeys(place.path for place in gone))


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


class RecordOfSaves(Feature):
    """Has the workers note what they save, and records it."""

    _rounds = 0  # see `Resumption`
    _apart = False  # each node of several saves in its own `local_dir`
    _shared: SharedDir | None = None  # how the nodes of the round read each other's

    def __init__(self, parts: JobParts) -> None:
        super().__init__(parts)
        self._mirror: PartMirror | None = None
        if parts.settings.mirrors_saves:
            from elastic_ext.features.record import mirror

            self._mirror = mirror.of_settings(parts.settings)

    def round_begins(self, beginning: RoundBeginning) -> None:
        self._rounds, self._apart = beginning.checkpoint.rounds, beginning.saves_locally
        self._shared = beginning.shared if isinstance(beginning, ResumePoint) else None

    def beside_job(self) -> Companion | None:
        return self._mirror

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.close()

    def message(self) -> Mapping[str, object]:
        return {"saves_below": addresses(self.parts.settings)}

    def beside_round(self, round_: RoundParts) -> Companion | None:
        settings = self.parts.settings
        if settings.checkpoint_dir is None or not round_.bootstrap or round_.progress is None:
            return None
        kept = settings.local_dir is not None and (round_.place.nodes == 1 or self._apart)
        local = open_storage(settings.local_dir or "") if kept else None
        journals = {each: str(message["journal"]) for each, message in round_.messages.items() if "journal" in message}
        shared = open_storage(settings.checkpoint_dir)
        agent = AgentSide(self._rounds, self._tell, self._is_broken)
        if self._mirror is not None:
            self._mirror.begin(round_.place, self._shared)
            agent = replace(agent, recorded=self._mirror.recorded)
        return SaveWatch(round_.place, shared, journals, local, agent)

    def _is_broken(self) -> bool:
        end = self.parts.job.part.over()
        return end is not None and end.kind in (EndKind.BROKEN, EndKind.CUT_OFF)

    def _tell(self, entry: SavePath, storage: Storage) -> None:
        """Report what may be a checkpoint: logs are proved, too."""
        found = storage.stat(entry.path)
        if found is not None and listing.candidates_among([found], self.parts.settings.checkpoint_pattern):
            step = step_of(entry.path, self.parts.settings.checkpoint_pattern)
            self.parts.journal.events.emit("save_recorded", save=entry.path, step=step)
