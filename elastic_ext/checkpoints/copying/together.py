"""Copies saves of which each node has a part, or the files of its own ranks: all nodes work on the same one (`targets`).

A save with parts. The leader announces it in the record there, sends its part, and commits the record once the files of all parts
have arrived since. The others send their parts once it is announced. All compute the same name for that record, since all parts
have the same `KnownSave`.

Files of which each rank wrote its own. The leader announces its files, and the others then send and commit theirs. The record of
the file of rank 0 is committed last, once all ranks' files are there: until then, nothing resumes from any of them.

Invariants:

- A committed record has the files of one save, of all nodes. What the leader has given up stays announced as not whole.
- A node that was late takes back what it sent for a save whose name a newer one has by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elastic_ext.checkpoints.copying.held import HeldSaves, LocalSave, has_changed
from elastic_ext.checkpoints.copying.local_record import LocalRecord
from elastic_ext.checkpoints.copying.remote_record import ARRIVING, WITH_RANK_0, RemoteRecord, follows_rank_0, is_announced
from elastic_ext.checkpoints.copying.removals import remove_given_up
from elastic_ext.checkpoints.copying.sending import SaveSender
from elastic_ext.checkpoints.copying.targets import ALONE_S, HEARTBEATS, STALLED_S, OneSave, next_target, released
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import KnownSave, StoredSave, Trust, files_at
from elastic_ext.checkpoints.storage import LocalStorage, Storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Progress:
    """Of a save. seen: text that changes while something arrives. since: when it last changed. still_s: since then, at a look."""

    seen: str
    since: float
    still_s: float = 0.0


@dataclass(frozen=True)
class KindStep:
    """What this node does now for a kind. work: saves to go on with. newest: that this node waits for; None: it has arrived."""

    work: tuple[OneSave, ...] = ()
    newest: OneSave | None = None


@dataclass(frozen=True)
class Tiers:
    """The two directories of a node, and what is known of them.

    name_node: called with a name for the heartbeats of this node, before it sends something that others wait for; returns the one
    that it has.
    """

    local: LocalStorage
    remote: Storage
    here: LocalRecord
    there: RemoteRecord
    held: HeldSaves
    sender: SaveSender
    name_node: Callable[[str], str]
    clock: Callable[[], float]


class Together:
    """This node's part in the copies of several nodes. Its methods raise OSError, CopyError."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers, self._record, self._held = tiers, tiers.there, tiers.held
        self._progress: dict[KnownSave, _Progress] = {}
        self._node = ""
        self.others = ""  # text that changes while other nodes send what is missing

    # What is to be done.

    def step(
        self, ones: Sequence[OneSave], done: Callable[[OneSave], bool], finish: bool, whole: KnownSave | None = None
    ) -> KindStep:
        """Return what to do for a kind, and hold what will be copied. ones: what this node has of it, newest first.

        done: whether a save was copied, or is not to be. whole: the newest of the kind of which this node has all; what is older
        is not waited for.
        """
        newest = next((one for one in ones if one.proved and self._is_usable(one) and not self._is_removed(one)), None)
        is_passed = newest is None or (whole is not None and whole > newest.known)
        todo = None if newest is None or is_passed or done(newest) else newest
        held_before = {each.known for each in self._held.all()}
        held = [one for one in ones if any(each.known in held_before for each in one.entries)]
        if finish:
            work = [one for one in ones if self._is_usable(one) and not done(one) and (one.leads or self._is_announced(one))]
            return KindStep(tuple(work), todo)
        if todo is None and not held:
            return KindStep()
        saves = {
            each: save for each, save in self._record.saves(ones[0].kind).items() if save.copied and not follows_rank_0(save)
        }
        last = max((each for each, save in saves.items() if not save.arriving), default=None)
        announced = [each for each, save in saves.items() if is_announced(save) and (last is None or each > last)]
        latest = max(announced, default=None)
        target = self._target(ones, todo, latest)
        kept = {one.known for one in (todo, target) if one is not None}
        for each in [each for one in ones if one.known in kept for each in one.entries]:
            self._held.hold(each)
        led = target.known if target is not None and target.leads else None
        passed = max((each for each in (last, latest, led) if each is not None), default=None)
        now_held = [one for one in ones if one in held or one.known in kept]
        for each in [each for one in released(now_held, kept, passed) for each in one.entries]:
            self._held.release(each)
        work = [one for one in held if one is not target and self.has_been_committed(one)]  # to note that
        return KindStep(tuple(one for one in (target, *work) if one is not None and not done(one)), todo)

    def _is_removed(self, one: OneSave) -> bool:
        """Return whether the script has removed it where its leader runs, which can copy it no more."""
        return not one.leads and self._record.is_removed(one)

    def _target(self, ones: Sequence[OneSave], todo: OneSave | None, latest: KnownSave | None) -> OneSave | None:
        """latest: the newest save of the kind that is announced."""
        if latest is None:
            return todo
        current = next((one for one in ones if self._is_led_by(one, latest) and self._is_usable(one)), None)
        if current is None or not current.leads:
            return todo if todo is not None and todo.leads and todo.known > latest else current
        target = next_target(todo, current, self.still_s(current) > STALLED_S)
        if target is not current:
            logger.info("%s is not copied: its parts on other nodes have not arrived", current.name)
            self._give_up(current)
        return target

    def _is_led_by(self, one: OneSave, announced: KnownSave) -> bool:
        leading = self._leading(one)
        return leading is not None and leading[0] == announced

    def _is_announced(self, one: OneSave) -> bool:
        leading = self._leading(one)
        return leading is not None and (is_announced(leading[1]) or not leading[1].arriving)

    def has_been_committed(self, one: OneSave) -> bool:
        """Return whether the remote record says that all of it is there."""
        leading = self._leading(one)
        return leading is not None and not leading[1].arriving

    def _leading(self, one: OneSave) -> tuple[KnownSave, StoredSave] | None:
        """Return the remote record by which a save counts: that of all parts, or of the file of rank 0. None: it is not there."""
        if one.is_part:
            rows = {one.known: self._record.save(one.known)}
        else:
            rows = {
                each: save for each, save in self._record.of_moment(one.kind, one.moment).items() if save.leader in save.ranks
            }
        return next(((each, save) for each, save in rows.items() if save is not None), None)

    def _is_usable(self, one: OneSave) -> bool:
        here = self._tiers.here
        return all(
            not here.is_barred(each.name)
            and (self._held.has(each) or (here.is_checkpoint(each) and not has_changed(each, self._tiers.local)))
            for each in one.entries
        )

    def still_s(self, one: OneSave) -> float:
        """Return for how long nothing of a save has arrived, as of the last look."""
        progress = self._progress.get(one.known)
        return progress.still_s if progress is not None else 0.0

    # The copy.

    def advance(self, one: OneSave) -> bool:
        """Do what this node can do now for a save. Return whether all of it has arrived."""
        if one.is_part:
            return self._lead_part(one) if one.leads else self._follow_part(one)
        return self._lead_files(one) if one.leads else self._follow_files(one)

    def announce(self, one: OneSave) -> None:
        """Let the other nodes send their part already."""
        if all(self._held.hold(each) is not None for each in one.entries):
            for each, text in _announcements(one):
                self._tiers.sender.announced_at(each, text)

    def watch(self, one: OneSave) -> None:
        """Look whether other nodes are at work, although this one has nothing to do for a save."""
        self._note(one, "")

    def _lead_part(self, one: OneSave) -> bool:
        each, sender = one.entries[0], self._tiers.sender
        source = self._held.hold(each)
        if source is None:
            return self._give_up(one)
        announced = sender.announced_at(each)
        self._node = self._tiers.name_node(f"part-{each.save.part}")
        sender.send_part(each, source, announced)
        missing = sender.missing(each, announced) + sender.unacknowledged(each, announced)
        self._note(one, " ".join(sorted(missing)))
        if missing:
            return False
        if has_changed(each, source) or self._tiers.here.is_barred(each.name):
            return self._give_up(one)
        self._record.forget()
        if self._record.known.get(each.name) != each.known:
            return False
        sender.commit(each)
        sender.forget_acknowledged(each.known)
        remove_given_up(self._tiers.remote, self._record, one.kind, one.known)
        return True

    def _follow_part(self, one: OneSave) -> bool:
        each, sender = one.entries[0], self._tiers.sender
        leading = self._leading(one)
        if leading is None or not is_announced(leading[1]):
            return leading is not None and not leading[1].arriving
        source, announced = self._held.hold(each), self._record.changed(each.known)
        if source is None or announced is None:
            return False
        self._node = self._tiers.name_node(f"part-{each.save.part}")
        sender.send_part(each, source, announced)
        sender.acknowledge(each, announced)
        self._note(one, " ".join(sorted(sender.missing(each, announced))))
        return False

    def _lead_files(self, one: OneSave) -> bool:
        if not self._send_files(one):
            return self._give_up(one)
        self._record.forget()
        rows = self._record.of_moment(one.kind, one.moment)
        if any(each.known not in rows for each in one.entries):
            return False  # passed by meanwhile
        others = {rank for each, save in rows.items() if self._has_arrived(each, save) for rank in save.ranks}
        self._note(one, str(sorted(others)))
        lacking = one.wanted - one.ranks - others
        if lacking and (one.is_of_each_rank or self.still_s(one) < ALONE_S):
            return False
        if self._has_changed(one.entries):
            return self._give_up(one)
        for each in sorted(one.entries, key=lambda each: each.save.leader in each.save.ranks):
            self._tiers.sender.commit(each)
        return True

    def _follow_files(self, one: OneSave) -> bool:
        leading = self._leading(one)
        if leading is None or (leading[1].arriving and not is_announced(leading[1])):
            return False
        rows = self._record.of_moment(one.kind, one.moment)
        if not all(each.known in rows and not rows[each.known].arriving for each in one.entries):
            if not self._send_files(one) or self._has_changed(one.entries):
                return False
            self._record.forget()
            if any(self._record.known.get(each.name) != each.known for each in one.entries):
                return False
            for each in one.entries:
                self._tiers.sender.commit(each)
        rows = self._record.of_moment(one.kind, one.moment)
        self._note(one, str(sorted(rank for save in rows.values() for rank in save.ranks if not save.arriving)))
        return not leading[1].arriving

    def _send_files(self, one: OneSave) -> bool:
        """Announce all, and send them. Return False if one of them has changed."""
        sources = [self._held.hold(each) for each in one.entries]
        if any(source is None for source in sources):
            return False
        announced = [self._tiers.sender.announced_at(each, text) for each, text in _announcements(one)]
        self._node = self._tiers.name_node(str(min(one.ranks)))
        for each, source, at in zip(one.entries, sources, announced, strict=True):
            if source is not None:
                self._tiers.sender.send_part(each, source, at)
        return True

    def _has_changed(self, entries: Iterable[LocalSave]) -> bool:
        return any(self._held.hold(each) is None or self._tiers.here.is_barred(each.name) for each in entries)

    def _has_arrived(self, known: KnownSave, save: StoredSave) -> bool:
        found = files_at(self._tiers.remote, known.name) if save.copied and not save.arriving else {}
        return bool(found) and stored.trust(save, found)[0] is Trust.PROVED

    def _give_up(self, one: OneSave) -> bool:
        leading = self._leading(one)
        if leading is not None:
            self._record.give_up(leading[0])
        for each in one.entries:
            self._held.release(each)
        return False

    def give_up_older(self, one: OneSave) -> None:
        """Of all that is announced of a kind, the others copy the newest."""
        own = {each.known for each in one.entries}
        for each in sorted(self._record.saves(one.kind)):
            if each < one.known and each not in own:
                self._record.give_up(each)

    def _note(self, one: OneSave, arrived: str) -> None:
        """Note what is seen of the other nodes. arrived: text that changes with what has arrived."""
        remote = self._tiers.remote
        nodes = sorted(each.name for each in remote.listed(HEARTBEATS) if each.name != self._node)
        seen = f"{arrived} {[remote.read_if_there(f'{HEARTBEATS}/{node}') for node in nodes]}"
        now, before = self._tiers.clock(), self._progress.get(one.known)
        if before is None or before.seen != seen:
            before = _Progress(seen, now)
        self._progress[one.known] = _Progress(seen, before.since, now - before.since)
        self.others += f"{one.name} {seen} "


def _announcements(one: OneSave) -> list[tuple[LocalSave, str]]:
    return [(each, ARRIVING if one.is_part or each.save.leader in each.save.ranks else WITH_RANK_0) for each in one.entries]
