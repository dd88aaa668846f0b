"""The sources of a checkpoint to resume from: copies in the nodes' memory, their local directories, and `checkpoint_dir`.

Each gives the newest checkpoint in it that a round can load, as an `Agreement`; `newer` compares two of them. `quarantine` takes
the checkpoint that a failure is blamed on out of them, so that the next round resumes from the one before it.

A run that begins at `resume_from` goes on from its own progress after a restart: checkpoints written after it began. When that
was is in a file in the directory of checkpoints, `.elastic_ext/resume_from/RUN.json`, with one field: {"resume_from": the
setting, without credentials}. Its modification time, by the clock of the storage, is when the run began. If the user changes the
setting, the run begins again.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from elastic_ext.base.errors import BadCheckpoints
from elastic_ext.base.printable import redacted
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import listing, offers
from elastic_ext.checkpoints.choice.listing import NONE, Wanted
from elastic_ext.checkpoints.choice.offers import Agreement, MemoryChoice, Offers
from elastic_ext.checkpoints.choice.ordering import Choice, Resume
from elastic_ext.checkpoints.directory import MARKERS, marks, tiers
from elastic_ext.checkpoints.directory.tiers import Offer
from elastic_ext.checkpoints.formats import detect, names
from elastic_ext.checkpoints.formats.detect import Mode
from elastic_ext.checkpoints.formats.manifest import order_of, order_or_oldest
from elastic_ext.checkpoints.storage import Entry, Storage, is_away, open_parent, open_storage, split_path

logger = logging.getLogger(__name__)


RESUME_FROM = f"{MARKERS}/resume_from"


def listed(own: Storage | None, what: str) -> tuple[Offer, ...] | None:
    """Return what this node offers from a directory of its own; None without one, or if it cannot be listed."""
    try:
        return tuple(tiers.offers(own))[: offers.MAX_OFFERS] if own is not None else None
    except OSError as error:
        logger.warning("cannot list %s: %s", what, error)
        return None


def from_memory(choice: MemoryChoice) -> Agreement | None:
    """Return the newest whole copy in the nodes' memory."""
    copy = choice.offer
    reason = "newest copy that is whole in the nodes' memory"
    return Agreement(copy.name, copy.step, reason, memory=True) if copy is not None else None


def from_local_dirs(received: Sequence[Offers], quarantined: Collection[str]) -> Agreement | None:
    """Return the newest checkpoint whose parts are all in the nodes' local directories."""
    if not received or not all(each.usable for each in received):
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
    return Agreement(found.name, found.step, reason, local=True)


class RemoteTier:
    """`checkpoint_dir`, the tier that all nodes share, in one agreement. It is opened when first needed.

    Attributes:
        has_answered: whether `refresh` has listed it.
        quarantined: the names of checkpoints that must not be used, by the last `refresh`.
    """

    def __init__(self, settings: Settings, checkpoint_dir: str, run_id: str) -> None:
        self._settings, self._checkpoint_dir, self._run_id = settings, checkpoint_dir, run_id
        self._entries: list[Entry] = []
        self.has_answered = False
        self.quarantined: frozenset[str] = frozenset()

    @cached_property
    def storage(self) -> Storage:
        return open_storage(self._checkpoint_dir)

    def refresh(self) -> OSError | None:
        """List the directory; return the error if the storage is away. Raises UsageError; OSError for other errors."""
        try:
            quarantined = marks.quarantined_names(self.storage)
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
        if not self._may_have_newer(upper) or not self._has_newer(upper):
            return upper
        try:
            return newer(upper, self._newest())
        except BadCheckpoints as error:
            logger.warning("%s", error)
            return upper

    def _may_have_newer(self, upper: Agreement) -> bool:
        """Return whether there may be something newer, by the names. A script's own saves show their step only when opened."""
        order, pattern = order_or_oldest(upper.name), self._settings.checkpoint_pattern
        found = [each.name for each in listing.candidates(self._entries, pattern)]
        return any(order_of(name) is None or order_or_oldest(name) > order for name in found)

    def _has_newer(self, upper: Agreement) -> bool:
        """Return whether there is something newer, unless it is damaged. Raises UsageError, OSError."""
        choice = self._choose(Mode.OFF)
        if choice.resume is not None and newer(upper, self._agreement(choice.resume)) is not upper:
            return True
        _log_passed_over(choice)
        return False

    def _newest(self) -> Agreement:
        """Choose from the directory alone. Raises UsageError, BadCheckpoints, OSError."""
        choice = self._choose(Mode(self._settings.verify))
        _log_passed_over(choice)
        if choice.resume is not None:
            return self._agreement(choice.resume)
        if self._settings.resume_from == NONE:
            return Agreement("", reason="resume_from=none")
        if choice.all_bad:
            raise BadCheckpoints(_none_left(self._checkpoint_dir, choice))
        reason = f"no complete checkpoint in {self._checkpoint_dir}"[: offers.MAX_TEXT // 2]
        seen = choice.question or listing.seen_in(self.storage, self._settings.checkpoint_pattern)
        if choice.passed_over:
            reason += f", {len(choice.passed_over)} passed over; a script that knows its own may resume from one"
        if seen:
            reason = f"{reason}; {seen}; {listing.FROM_SCRATCH}"[: offers.MAX_TEXT]
        return Agreement("", reason=reason, passed_over=bool(choice.passed_over or seen))

    def _agreement(self, resume: Resume) -> Agreement:
        name = split_path(resume.path)[1]
        return Agreement(name, resume.step, resume.reason[: offers.MAX_TEXT], asked_for=self.storage.path(name) != resume.path)

    def _choose(self, verify: Mode) -> Choice:
        """Choose from the run's own progress first, then by resume_from."""
        resume_from = self._settings.resume_from
        wanted = Wanted(pattern=self._settings.checkpoint_pattern, verify=verify)
        if not resume_from:
            return listing.newest_in(self.storage, wanted)
        own = listing.newest_in(self.storage, replace(wanted, since=run_began_at(self.storage, self._run_id, resume_from)))
        return own if own.resume is not None else listing.newest_in(self.storage, replace(wanted, resume_from=resume_from))


def newer(one: Agreement, other: Agreement) -> Agreement:
    """Return the newer one; the first if both are as new. What a script has saved itself has no generation: its step counts."""
    if not other.name:
        return one
    if order_of(other.name) is None:
        return other if other.step is not None and one.step is not None and other.step > one.step else one
    return other if order_or_oldest(other.name) > order_or_oldest(one.name) else one


def _log_passed_over(choice: Choice) -> None:
    for passed in choice.passed_over:
        logger.warning("checkpoint passed over: %s: %s", passed.path, passed.reason)


def _none_left(directory: str, choice: Choice) -> str:
    listed = "; ".join(f"{passed.path}: {passed.reason}" for passed in choice.passed_over)
    return (
        f"no checkpoint in {directory} may be used: {listed}. Starting from scratch would lose the work: inspect them "
        "(elastic-ext checkpoints ls, verify), lift a quarantine, or set resume_from=none"
    )


def run_began_at(storage: Storage, run_id: str, resume_from: str) -> float:
    """Return when this run began at `resume_from`. If it has not begun yet, it begins now.

    The time is in seconds since the epoch by the clock of the storage; infinity if the storage keeps no times. Raises OSError.
    """
    file = "".join(letter if letter.isalnum() or letter in "-_" else f"%{ord(letter):x}" for letter in run_id)
    name = f"{RESUME_FROM}/{file}.json"
    record = {"resume_from": redacted(resume_from)}
    try:
        same = json.loads(redacted(storage.read(name).decode())) == record  # older versions wrote it unredacted
    except (FileNotFoundError, ValueError):
        same = False
    if not same:
        storage.put(name, json.dumps(record).encode())
    found = storage.stat(name)
    if found is None or found.mtime is None:
        logger.warning("%s keeps no file times: every restart of this run resumes from %s", storage.address, resume_from)
        return float("inf")
    return found.mtime


def quarantine(settings: Settings, resumed_from: str, newest: bool, reason: str) -> str | None:
    """Quarantine the checkpoint that a failure is blamed on; return its name, or None if no checkpoint is to blame.

    Args:
        resumed_from: path of the checkpoint that the failed round resumed from; "" if none.
        newest: blame the last saved checkpoint (for numbers that left their range) instead of `resumed_from`.
        reason: for people.

    It stays if no other one could be used: the cause may be newer than it, or the code, or a file of the data.

    Raises OSError, UsageError.
    """
    if settings.checkpoint_dir is None:
        return None
    if newest:
        return _quarantine_newest(open_storage(settings.checkpoint_dir), settings, reason)
    if not resumed_from:
        return None
    storage, name = open_parent(resumed_from)
    if not _another(open_storage(settings.checkpoint_dir), settings, name):
        return None
    return _quarantine_in(storage, name, reason)


def quarantine_newer(settings: Settings, than: int, resumed_from: str, reason: str, shared: bool = True) -> list[str]:
    """Quarantine the checkpoints of later steps, or of unknown ones; return their names. Each node does so for its own tier.

    Unlike `quarantine`, also where no other one may be used: what is in them is surely wrong. What a script has not finished to
    save is left alone: nothing resumes from it, and its mark, without a time, would hold for a good one of that name, too.

    Args:
        than: the last step of the job whose checkpoint may be used.
        resumed_from: path of the checkpoint that the failed round resumed from, which stays; "": it began from nothing, and the
            next one may do so, too.
        reason: for people.
        shared: in `checkpoint_dir`, too. One node does that.

    Raises OSError, UsageError.
    """
    if settings.checkpoint_dir is None or not (shared or settings.local_dir):
        return []
    remote = open_storage(settings.checkpoint_dir)
    found = dict(_newer_in(remote, settings, than, resumed_from)) if shared else {}
    if settings.local_dir:  # they may be on their way to the other tier, or on no other node
        known = {*found, *marks.quarantined_names(remote)}
        local = tiers.own_checkpoints(open_storage(settings.local_dir))
        found |= {name: None for name in local if order_or_oldest(name)[1] > than and name not in known}
    return [_mark(remote, name, reason, written_at, not resumed_from) for name, written_at in found.items()]


def _newer_in(remote: Storage, settings: Settings, than: int, resumed_from: str) -> Iterator[tuple[str, float | None]]:
    """Yield the name of each that is to be quarantined, and when it was written; None for ours, as no other one gets its name."""
    for each in listing.list_checkpoints(remote, settings.checkpoint_pattern):
        later = each.step is None or each.step > than
        if later and not each.quarantined and remote.path(each.name) != resumed_from:
            seen = detect.check(remote, each.entry, named=True)
            is_ours = order_of(each.name) is not None
            if each.complete or seen.unreadable is not None or is_ours:
                yield each.name, None if is_ours else seen.written_at


def _newest_besides(remote: Storage, settings: Settings, left_out: str) -> str:
    found = listing.newest_in(remote, Wanted(pattern=settings.checkpoint_pattern, without=left_out)).resume
    return split_path(found.path)[1] if found is not None else ""


def _another(remote: Storage, settings: Settings, name: str) -> bool:
    """Return whether a checkpoint besides this one may be used."""
    kept = frozenset[str]()
    if settings.local_dir:
        kept = frozenset(each.name for each in tiers.offers(open_storage(settings.local_dir))) - marks.quarantined_names(remote)
    if settings.resume_from or kept - {name} or _newest_besides(remote, settings, name):
        return True
    logger.warning("checkpoint %s is not quarantined: no other one may be used, so it is tried", remote.path(name))
    return False


def _quarantine_newest(remote: Storage, settings: Settings, reason: str) -> str | None:
    newest, on_its_way = _newest_besides(remote, settings, ""), False
    if settings.local_dir:
        of_local = next(iter(tiers.own_checkpoints(open_storage(settings.local_dir))), "")
        if order_or_oldest(of_local) > order_or_oldest(newest):
            newest, on_its_way = of_local, True
    if not newest or not _another(remote, settings, newest):
        return None
    # A quarantine by name holds for both tiers.
    return _mark(remote, newest, reason, None) if on_its_way else _quarantine_in(remote, newest, reason)


def _quarantine_in(storage: Storage, name: str, reason: str) -> str | None:
    entry = names.entry_of(storage, name)
    return None if entry is None else _mark(storage, name, reason, detect.check(storage, entry, named=True).written_at)


def _mark(storage: Storage, name: str, reason: str, written_at: float | None, from_nothing: bool = False) -> str:
    marks.quarantine(storage, name, reason, f"{platform.node()} pid {os.getpid()}", written_at, from_nothing)
    logger.warning("checkpoint %s is quarantined: %s; the next round resumes from the one before it", storage.path(name), reason)
    return name
