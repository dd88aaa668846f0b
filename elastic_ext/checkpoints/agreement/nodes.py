"""Agree on the checkpoint that a round resumes from: the same answer on every node.

It is the newest of all sources: copies in the nodes' memory, their local directories, and `checkpoint_dir`, which all nodes
share. Each node offers what it has in its own; the agent of node 0 chooses, once per round, and sends its choice to the
others (see `messages`). They wait until they see the checkpoint themselves, because a shared directory may be late
to show what another host has written.

A run that begins at `resume_from` goes on from its own progress after a restart: checkpoints written after it began. When that
was is in a file in the directory of checkpoints, `.elastic_ext/resume_from/RUN.json`, with one field: {"resume_from": the
setting, without credentials}. Its modification time, by the clock of the storage, is when the run began. If the user changes the
setting, the run begins again.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TypeVar

from elastic_ext.base import waits
from elastic_ext.base.contracts import Exchange, Resumption, SavePlace
from elastic_ext.base.errors import BadCheckpoints, ElasticExtError, RoundOver, StorageAway, UsageError
from elastic_ext.base.printable import printable, redacted
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints import verifying
from elastic_ext.checkpoints.agreement import messages
from elastic_ext.checkpoints.agreement.messages import Agreement, NewestSaved, Offers, Tier
from elastic_ext.checkpoints.agreement.shared_dir import SharedDir
from elastic_ext.checkpoints.choice import hints, listing, rank_files
from elastic_ext.checkpoints.choice.decisions import Choice, Resume
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.directory import own_files, save_place, tiers
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.candidates import Inspection, order_of, order_or_oldest
from elastic_ext.checkpoints.record.stored import known_saves, newest_attempt
from elastic_ext.checkpoints.sharing.all_nodes import AllNodes
from elastic_ext.checkpoints.storage import Entry, Storage, is_away, open_parent, open_storage, poll, split_path

logger = logging.getLogger(__name__)

VISIBLE_S = 60.0  # limit for the other nodes to see a checkpoint (NFS caches attributes for up to 60 s: acregmax)
ANSWER_S = 30 * 60.0  # limit for node 0 to answer: verifying a terabyte at 1 GB/s takes 17 minutes
AWAY_S = 10 * 60.0  # limit for a storage that does not answer: most outages of object stores are shorter
OFFERS_S = 60.0  # limit for all nodes to list their local directories; a dead node never answers
RESUME_FROM = f"{own_files.MARKERS}/resume_from"

# What a node lacks that cannot open a checkpoint of this tier.
_LACKS = {
    Tier.MEMORY: "in memory, but this node has no memory for copies: set memory_every and memory_limit alike on all nodes, and "
    "give each a tmpfs at /dev/shm",
    Tier.LOCAL: "in local_dir, but this node has none: set local_dir on all nodes",
    Tier.NAMED: "in a directory other than checkpoint_dir, but resume_from on this node names none: set the same resume_from "
    "on all nodes",
}


@dataclass(frozen=True)
class NodeInRound:
    node: int = 0  # its group rank
    nodes: int = 1  # number of nodes
    workers: int = 1  # number of its workers
    memory: str = ""  # its directory for copies in memory; "" for none
    # refused, saved: see `Offers`.
    refused: tuple[str, ...] = ()
    saved: NewestSaved | None = messages.NONE_SAVED
    ranks: tuple[int, ...] = (0,)  # global ranks of its workers
    shared: SharedDir | None = None  # how the nodes read each other's local directories; None: they do not
    unshared: str = ""  # why they do not, for people
    restarts: bool = False  # this is not the first round
    resumes: bool = False  # a script of this job was seen to take our word for what to resume from


def agree(settings: Settings, run_id: str, exchange: Exchange, place: NodeInRound) -> Resumption:
    """Return what the round resumes from. All nodes of the round call this; all return the same result or raise the same error.

    Only the path of a checkpoint in the nodes' own tiers differs: each node gets the path of its own part.

    Raises:
        BadCheckpoints: checkpoints exist, but none may be used.
        UsageError: a setting is wrong; this node does not see the checkpoint that the others see; the job restarts, and only the
            user can say from which checkpoint.
        StorageAway: the storage has not answered for AWAY_S, and no copy in memory makes up for that.
        OSError: the storage refuses in another way (on node 0; a UsageError on the others).
        RoundOver: the round ended before all nodes knew the answer, or a node that has files of it does not answer.
    """
    if settings.checkpoint_dir is None:
        return Resumption()
    side = _NodeSide(settings, settings.checkpoint_dir, run_id, place)
    exchange.offer(messages.encode(side.offers()))
    if place.node != 0:
        return side.seen(messages.read_agreement(exchange.choice(ANSWER_S)), time.monotonic() + VISIBLE_S)
    try:
        received = side.received(exchange)
        found = once_there(lambda: side.decide(received))
        servers = tuple(each.server for each in received) if place.shared is not None else ()
        rounds = max((each.rounds for each in received), default=0)
        agreement = replace(found, rounds=rounds, place=side.save_place(received), servers=servers)
    except RoundOver:
        raise
    except (ElasticExtError, OSError) as error:
        exchange.publish(messages.encode(messages.failure(error)))
        raise
    exchange.publish(messages.encode(agreement))
    return replace(side.resumption(agreement), lost=side.lost)


T = TypeVar("T")


def once_there(act: Callable[[], T]) -> T:
    """Act once the storage answers. The workers of all nodes wait: still better than to lose the nodes, or work.

    Raises StorageAway, if it does not for AWAY_S, and what `act` raises.
    """

    def look() -> T | OSError:
        try:
            return act()
        except OSError as error:
            if not is_away(error):
                raise
            return error

    found = look()
    if isinstance(found, OSError):
        logger.warning("the storage of the checkpoints does not answer: %s; waiting for it, %g s at most", found, AWAY_S)
        began = time.monotonic()
        wait = waits.Waiting("the storage of the checkpoints", began)

        def answers(seen: T | OSError) -> bool:
            if away := isinstance(seen, OSError):
                wait.say(time.monotonic(), began + AWAY_S, "this node leaves")
            return not away

        found = poll(look, answers, began + AWAY_S)
    if isinstance(found, OSError):
        raise StorageAway(f"the storage of the checkpoints has not answered for {AWAY_S:g} s: {printable(str(found))}") from found
    return found


class _NodeSide:
    """One node's part in one agreement. Opens each directory once."""

    def __init__(self, settings: Settings, checkpoint_dir: str, run_id: str, place: NodeInRound) -> None:
        self._settings, self._place = settings, place
        local_dir = settings.local_dir if not settings.resume_from else None  # which overrides it
        self._local = open_storage(local_dir) if local_dir is not None else None
        self._memory = open_storage(place.memory) if place.memory else None
        self._remote = RemoteTier(settings, checkpoint_dir, run_id, place)
        self.lost = ""  # see `Resumption`; set by `decide`
        self._all_nodes: Storage | None = None  # of the local directories, on node 0

    @cached_property
    def _asked_for(self) -> Storage | None:
        """The directory of the checkpoint if resume_from is a path or URL; else None."""
        resume_from = self._settings.resume_from.rstrip("/")
        return open_parent(resume_from)[0] if "/" in resume_from else None

    def offers(self) -> Offers:
        local, place = _listed(self._local, f"local_dir {self._settings.local_dir}"), self._place
        return Offers(
            usable=local is not None,
            offers=local or (),
            memory=_listed(self._memory, "the copies in memory") or (),
            refused=place.refused,
            has_memory=self._memory is not None,
            saved=place.saved,
            rounds=_rounds(self._local, self._settings, place.shared),
            place=self._save_place(),
            server=place.shared.offered() if place.shared is not None else None,
        )

    def _save_place(self) -> SavePlace:
        """Return where this node can save in this round."""
        several = self._place.nodes > 1
        if self._local is None or (several and self._settings.local_saves != "all"):
            return SavePlace()
        if several and self._place.shared is None:
            return SavePlace(False, f"other nodes cannot read it: {self._place.unshared}", full=True)
        return save_place.find(self._local, self._remote.storage)

    def save_place(self, received: Sequence[Offers]) -> SavePlace:
        """Return where all nodes save in this round, on node 0."""
        if self._local is None:  # nor has any other node
            return save_place.NAMED if self._settings.local_dir is not None else SavePlace()
        if self._place.nodes > 1 and self._settings.local_saves != "all":
            return save_place.SEVERAL
        return save_place.of_all([each.place for each in received], self._place.nodes)

    def received(self, exchange: Exchange) -> list[Offers]:
        """Return what the nodes have in their own tiers, by rank; nothing if that is not known of all of them."""
        if self._local is None and self._memory is None:
            return []
        where = "local_dir" if self._memory is None else "memory or local_dir"
        texts = exchange.offers(OFFERS_S)
        if texts is None:
            logger.warning("not resuming from %s: a node has none, or did not report its checkpoints in time", where)
            return []
        try:
            return [messages.read_offers(text) for text in texts]
        except RecordError as error:
            logger.warning("not resuming from %s: %s", where, printable(str(error)))
            return []

    def decide(self, received: Sequence[Offers]) -> Agreement:
        """Choose the newest of all sources, on node 0. If the remote directory has nothing newer than the others, only list it.

        Raises as `agree` does, and OSError if the storage does not answer and must be waited for.
        """
        choice = self._from_script(received)
        self._remote.local = choice
        saved = self._of_script(choice.resume) if choice is not None and choice.resume is not None else None
        if saved is None and not any(each.offers or each.memory for each in received):
            return self._remote.newest(None)
        away = self._remote.refresh()
        memory = messages.newest_whole(received, self._remote.quarantined.union(*(each.refused for each in received)))
        if away is None:
            own = [_from_memory(memory), _from_local_dirs(received, self._remote.quarantined), saved]
            found = [each for each in own if each is not None]
            agreement = self._remote.newest(reduce(newer, found) if found else None)
        else:
            agreement = self._without_storage(away, memory, received)
        for name, reason in memory.lost[:1]:
            if order_or_oldest(name) > order_or_oldest(agreement.name):
                self.lost = printable(reason)
                logger.warning("not resuming from %s in memory, but from an older checkpoint: %s", printable(name), self.lost)
        return agreement

    def _from_script(self, received: Sequence[Offers]) -> Choice | None:
        """Return the choice among what a script has saved in its own way in the nodes' local directories."""
        if self._local is None:
            return None
        settings, verify = self._settings, verifying.Mode(self._settings.verify)
        try:
            self._all_nodes = self._shown_as_one(received)
            if self._all_nodes is None:
                return None
            wanted = listing.Wanted(pattern=settings.checkpoint_pattern, verify=verify, of_scripts=True)
            choice = listing.newest_in(self._all_nodes, wanted)
        except (OSError, UsageError) as error:
            logger.warning("not resuming from local_dir %s: %s", settings.local_dir, error)
            return None
        _log_passed_over(choice)
        return choice

    def _shown_as_one(self, received: Sequence[Offers]) -> Storage | None:
        """Return the local directories of all nodes as one; None if no script has saved there. Raises OSError."""
        place, local = self._place, self._local
        assert local is not None
        if place.nodes == 1 and place.shared is not None and place.shared.kept().parts:
            return place.shared.all_nodes(place.node, [None])
        if place.nodes == 1:
            return local if any(each.rounds for each in received) or notes.is_used(local) else None
        if place.shared is None or not any(each.rounds for each in received):
            return None
        return place.shared.all_nodes(place.node, [each.server for each in received])

    def _of_script(self, resume: Resume) -> Agreement:
        agreement, all_nodes = agreement_of(resume, Tier.LOCAL), self._all_nodes
        if not isinstance(all_nodes, AllNodes):
            return agreement
        of_ranks = rank_files.files_by_rank(all_nodes, agreement.name)
        own = tuple(messages.RankFile(rank, split_path(path)[1]) for rank, path in sorted(of_ranks.items()))
        files, number = all_nodes.files_of_save(agreement.name), all_nodes.number_of(agreement.name)
        return replace(agreement, files=files, rank_files=own, number=number)

    def _without_storage(self, away: OSError, memory: messages.MemoryChoice, received: Sequence[Offers]) -> Agreement:
        """Return a copy in memory to resume from while the storage is away. Raises `away` if the storage must be waited for."""
        agreement, local = _from_memory(memory), tiers.newest_loadable(each.offers for each in received)
        # What has answered before may have shown something newer.
        if agreement is None or self._remote.has_answered or not messages.needs_no_storage(memory.offer, local, received):
            raise away
        logger.warning(
            "the storage of the checkpoints does not answer: %s; resuming without it from %s in memory, which is as new as any "
            "checkpoint that the nodes know of",
            away,
            printable(agreement.name),
        )
        return agreement

    def resumption(self, agreement: Agreement) -> Resumption:
        """Return what this node resumes from. Raises UsageError if this node lacks the agreed directory, or cannot fetch it.

        Raises RoundOver if another node does not answer meanwhile.
        """
        if self._place.shared is not None:
            self._place.shared.servers = agreement.servers
        step, reason = agreement.step, printable(agreement.reason[: messages.MAX_TEXT])
        found = Resumption("", step, reason, agreement.passed_over, rounds=agreement.rounds, place=agreement.place)
        if not agreement.name:
            return found
        directory, is_local = self._directory(agreement), agreement.tier == Tier.LOCAL
        if agreement.files:
            directory = self._fetched(agreement)
            files = {each.rank: directory.path(each.name) for each in agreement.rank_files}
        else:
            files = rank_files.files_by_rank(directory, agreement.name)
        path = directory.path(agreement.name)
        return replace(
            found,
            path=path,
            passed_over=False,
            local=is_local,
            files=files,
            save_number=agreement.save_number,
            fetched=agreement.number if agreement.files else 0,
        )

    def _fetched(self, agreement: Agreement) -> Storage:
        """Return the directory in which this node has all that it needs. Raises UsageError, RoundOver."""
        assert self._place.shared is not None
        try:
            return self._place.shared.fetch(agreement, self._place.node, self._place.ranks)
        except (ConnectionError, TimeoutError) as error:  # a node that was lost meanwhile: that ends the round for all
            raise RoundOver(f"{printable(agreement.name)} cannot be fetched: {printable(str(error))}") from error
        except OSError as error:
            raise UsageError(
                f"{platform.node()} cannot get the checkpoint {printable(agreement.name)} from the local_dir of other nodes: "
                f"{printable(str(error))}"
            ) from error

    def seen(self, agreement: Agreement, deadline: float) -> Resumption:
        """Return the `resumption`, after waiting until this node sees a checkpoint that all nodes share.

        Also raises UsageError if it does not see it by the deadline (time.monotonic()).
        """
        found = self.resumption(agreement)
        if found.path and agreement.tier in (Tier.SHARED, Tier.NAMED):
            await_visible(self._directory(agreement), agreement.name, deadline)
        return found

    def _directory(self, agreement: Agreement) -> Storage:
        """Return where an agreed checkpoint is, as this node opens it. Raises UsageError if this node has no such directory."""
        if agreement.tier == Tier.SHARED:
            return self._remote.storage
        found = {Tier.MEMORY: self._memory, Tier.LOCAL: self._local}.get(agreement.tier, self._asked_for)
        if found is None:
            raise UsageError(f"group rank 0 resumes from {printable(agreement.name)} {_LACKS[agreement.tier]}")
        return found


def await_visible(storage: Storage, name: str, deadline: float) -> None:
    """Wait until this node sees a complete checkpoint. Raises UsageError at the deadline (time.monotonic())."""

    def look() -> Inspection | None:
        entry = rank_files.own_entry(storage, name)
        return detect.check(storage, entry, named=True) if entry is not None else None

    found = poll(look, lambda seen: seen is not None and seen.complete, deadline)
    if found is None or not found.complete:
        reason = found.reason if found is not None else "nothing is there"
        raise UsageError(
            f"{platform.node()} does not see the checkpoint {storage.path(name)} that the other nodes resume from ({reason}): "
            "put checkpoint_dir on storage that every node mounts"
        )


# The sources. Each gives the newest checkpoint in it that a round can load; `newer` compares two of them.


def _listed(own: Storage | None, what: str) -> tuple[tiers.Offer, ...] | None:
    """Return what this node offers from a directory of its own; None without one, or if it cannot be listed."""
    try:
        return tuple(tiers.offers(own))[: messages.MAX_OFFERS] if own is not None else None
    except OSError as error:
        logger.warning("cannot list %s: %s", what, error)
        return None


def _rounds(local: Storage | None, settings: Settings, shared: SharedDir | None) -> int:
    """Return the number of the last round that is recorded in `local_dir`, also where rounds do not resume from it (None).

    What it keeps of other nodes counts, too: so no later save has the number of one of those.
    """
    if settings.local_dir is None:
        return 0
    try:
        own = newest_attempt(known_saves(local or open_storage(settings.local_dir)).values())
        return max(own, shared.kept().rounds if shared is not None else 0)
    except OSError as error:
        logger.warning("the record of saves in local_dir cannot be listed: %s", error)
        return 0


def _from_memory(choice: messages.MemoryChoice) -> Agreement | None:
    copy = choice.offer
    reason = "newest copy that is whole in the nodes' memory"
    return Agreement(copy.name, copy.step, reason, Tier.MEMORY) if copy is not None else None


def _from_local_dirs(received: Sequence[Offers], quarantined: Collection[str]) -> Agreement | None:
    """Return the newest checkpoint whose parts are all in the nodes' local directories."""
    if not all(each.usable for each in received):
        return None
    found = tiers.newest_loadable([each.offers for each in received], quarantined)
    for offer, ranks in tiers.missing_ranks(each.offers for each in received).items():
        is_newer = found is None or order_or_oldest(offer.name) > order_or_oldest(found.name)
        if ranks and is_newer and offer.name not in quarantined:
            missing = ", ".join(map(str, ranks))
            logger.warning("not resuming from %s: the files of ranks %s are in no node's local_dir", offer.name, missing)
    if found is None:
        return None
    reason = f"newest with all its parts in the nodes' local_dir, saved by {found.nodes} node{'s' * (found.nodes != 1)}"
    return Agreement(found.name, found.step, reason, Tier.LOCAL)


class RemoteTier:
    """`checkpoint_dir`, the tier that all nodes share, in one agreement. It is opened when first needed."""

    def __init__(self, settings: Settings, checkpoint_dir: str, run_id: str, place: NodeInRound) -> None:
        self._place = place
        self._settings, self._checkpoint_dir, self._run_id = settings, checkpoint_dir, run_id
        self._entries: list[Entry] = []
        self.local: Choice | None = None  # among what a script has saved in `local_dir`
        self.has_answered = False  # whether `refresh` has listed it
        self.quarantined: frozenset[str] = frozenset()  # the names of checkpoints that must not be used, by the last `refresh`

    @cached_property
    def storage(self) -> Storage:
        return open_storage(self._checkpoint_dir)

    def refresh(self) -> OSError | None:
        """List the directory; return the error if the storage is away. Raises UsageError; OSError for other errors."""
        try:
            quarantined = own_files.quarantined_names(self.storage)
            self._entries = listing.list_entries(self.storage)
        except OSError as error:
            if not is_away(error):
                raise
            return error
        self.quarantined, self.has_answered = quarantined, True
        return None

    def newest(self, upper: Agreement | None) -> Agreement:
        """Return the newest checkpoint of all sources.

        upper: the newest of the others, after `refresh`; None: they have none. If that has shown nothing that may be newer, the
        directory is not asked again; and only what is newer is verified, because that may take minutes.

        Raises UsageError, BadCheckpoints, OSError.
        """
        if upper is None:
            return self._newest()
        order, pattern = order_or_oldest(upper.name), self._settings.checkpoint_pattern
        found = [each.name for each in listing.candidates_among(self._entries, pattern)]
        # By the names. A script's own saves show their step only when opened.
        if not any(order_of(name) is None or order_or_oldest(name) > order for name in found):
            return upper
        choice = self._choose(verifying.Mode.OFF)
        if choice.resume is None or newer(upper, self._agreement(choice.resume)) is upper:
            _log_passed_over(choice)
            return upper
        try:
            return newer(upper, self._newest())
        except BadCheckpoints as error:
            logger.warning("%s", error)
            return upper

    def _newest(self) -> Agreement:
        """Choose from the directory alone. Raises UsageError, BadCheckpoints, OSError."""
        choice = self._choose(verifying.Mode(self._settings.verify))
        _log_passed_over(choice)
        if choice.resume is not None:
            return self._agreement(choice.resume)
        if self.local is not None and (self.local.question or self.local.all_bad) and not (choice.question or choice.all_bad):
            choice = self.local
        if self._settings.resume_from == listing.NONE:
            return Agreement("", reason="resume_from=none")
        if choice.all_bad:
            listed = "; ".join(f"{passed.path}: {passed.reason}" for passed in choice.passed_over)
            raise BadCheckpoints(
                f"no checkpoint in {self._checkpoint_dir} may be used: {listed}. Starting from scratch would lose the work: "
                "inspect them (elastic-ext checkpoints ls, verify), lift a quarantine, or set resume_from=none"
            )
        if choice.question and self._place.restarts:
            how = f"{choice.question}, or resume_from to one of them, or resume_from=none to begin from nothing"
            if self._place.resumes:
                raise UsageError(f"only you can say from which checkpoint to go on: {how}")
            logger.error("elastic_ext: only you can say from which checkpoint to go on: %s; your script gets none", how)
        reason = f"no complete checkpoint in {self._checkpoint_dir}"[: messages.MAX_TEXT // 2]
        seen = choice.question or hints.seen_in(self.storage, self._settings.checkpoint_pattern)
        if choice.passed_over:
            reason += f", {len(choice.passed_over)} passed over; a script that knows its own may resume from one"
        if seen:
            reason = f"{reason}; {seen}; {hints.FROM_SCRATCH}"[: messages.MAX_TEXT]
        return Agreement("", reason=reason, passed_over=bool(choice.passed_over or seen))

    def _agreement(self, resume: Resume) -> Agreement:
        is_shared = self.storage.path(split_path(resume.path)[1]) == resume.path
        return agreement_of(resume, Tier.SHARED if is_shared else Tier.NAMED)

    def _choose(self, verify: verifying.Mode) -> Choice:
        """Choose from the run's own progress first, then by resume_from."""
        resume_from = self._settings.resume_from
        wanted = listing.Wanted(pattern=self._settings.checkpoint_pattern, verify=verify)
        if not resume_from:
            return listing.newest_in(self.storage, wanted)
        own = listing.newest_in(self.storage, replace(wanted, since=run_began_at(self.storage, self._run_id, resume_from)))
        return own if own.resume is not None else listing.newest_in(self.storage, replace(wanted, resume_from=resume_from))


def agreement_of(resume: Resume, tier: Tier) -> Agreement:
    name, reason = split_path(resume.path)[1], resume.reason[: messages.MAX_TEXT]
    return Agreement(name, resume.step, reason, tier, save_number=resume.save_number)


def newer(one: Agreement, other: Agreement) -> Agreement:
    """Return the newer one; the first if both are as new. What a script has saved itself has no generation.

    Of two such saves the record says which was later, because both directories count the same rounds; else their steps count.
    """
    if not other.name:
        return one
    if one.save_number is not None and other.save_number is not None:
        return other if other.save_number > one.save_number else one
    if one.step is not None and other.step is not None and (order_of(one.name) is None) != (order_of(other.name) is None):
        return other if other.step > one.step else one
    if order_of(other.name) is None:
        return other if other.step is not None and one.step is not None and other.step > one.step else one
    return other if order_or_oldest(other.name) > order_or_oldest(one.name) else one


def _log_passed_over(choice: Choice) -> None:
    for passed in choice.passed_over:
        logger.warning("checkpoint passed over: %s: %s", passed.path, passed.reason)


def run_began_at(storage: Storage, run_id: str, resume_from: str) -> float:
    """Return when this run began at `resume_from`. If it has not begun yet, it begins now.

    The time is in seconds since the epoch by the clock of the storage; infinity if the storage keeps no times. Raises OSError.
    """
    file = "".join(letter if letter.isalnum() or letter in "-_" else f"%{ord(letter):x}" for letter in run_id)
    name = f"{RESUME_FROM}/{file}.json"
    record = {"resume_from": redacted(resume_from)}
    try:
        same = json.loads(storage.read_if_there(name) or b"null") == record
    except ValueError:
        same = False
    if not same:
        storage.put(name, json.dumps(record).encode())
    found = storage.stat(name)
    if found is None or found.mtime is None:
        logger.warning("%s keeps no file times: every restart of this run resumes from %s", storage.address, resume_from)
        return float("inf")
    return found.mtime
