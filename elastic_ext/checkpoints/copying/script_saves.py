"""Copies what a script saves in `local_dir` to the remote directory, whatever its format.

What is copied is what the record of saves proves there and a job may resume from, the newest of each kind: of the names that
differ only in digits. At the end of the job it is everything, if the script saves there. The record goes along, with the times
of the remote files, so it vouches for the copy as for the original. Until all of a save has arrived, the record says that it has
not, and nothing resumes from it.

On several nodes, each runs a copier of its own, with a local directory of its own. A save of which each has a part is copied by
all together (`together`).

Invariants:

- A copy has the bytes that were recorded. They are copied from hard links (`held`), and a file that was written again meanwhile,
  by its size or time, does not appear.
- What is newer in the remote directory, by the record, is never replaced, nor what is proved by what is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from elastic_ext.base import errors
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.held import HeldSaves, LocalSave, has_changed
from elastic_ext.checkpoints.copying.leftovers import LeftoverFiles
from elastic_ext.checkpoints.copying.local_record import LocalRecord
from elastic_ext.checkpoints.copying.remote_record import RemoteRecord
from elastic_ext.checkpoints.copying.removals import follow_removals
from elastic_ext.checkpoints.copying.reports import CopyState
from elastic_ext.checkpoints.copying.sending import SaveSender, needs_announcement
from elastic_ext.checkpoints.copying.targets import OneSave, newer_names, newest_of_each_kind, shared_by_kind
from elastic_ext.checkpoints.copying.together import Tiers, Together
from elastic_ext.checkpoints.directory import upkeep
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.candidates import is_hidden, order_of, step_of
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.record.stored import KnownSave
from elastic_ext.checkpoints.storage import Entry, LocalStorage, Storage

logger = logging.getLogger(__name__)

# At the end: how long the leader of an older save waits for its other parts, and other nodes for the leader before they copy the
# rest, both without progress. What both have a name for is then sent by the leader.
OLDER_S = 20.0

Result = TypeVar("Result")


class ScriptSaves:
    """Copies from one local directory. `turn` does all that can be done now."""

    def __init__(
        self,
        local: LocalStorage,
        remote: Storage,
        pattern: str,
        throttle: Callable[[int], None],
        name_node: Callable[[str], str] = lambda node: node,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """pattern: the setting checkpoint_pattern. throttle: called with the size of each block before it is sent; may wait.

        name_node: see `Tiers`. clock: in seconds.
        """
        record, held = RemoteRecord(remote), HeldSaves(local)
        here, sender = LocalRecord(local, pattern), SaveSender(remote, record, throttle)
        self._tiers = Tiers(local, remote, here, record, held, sender, name_node, clock)
        self._together, self._leftovers = Together(self._tiers), LeftoverFiles(self._tiers, throttle)
        self._done: set[str] = set()  # identities of what was copied, also where there is no room to note that
        self._seen_at: dict[str, float] = {}  # by name, when each was first seen that waits
        self._last = CopyState()
        self._finish_at: float | None = None  # when the end of the job began
        self._reasons: list[str] = []  # why something has failed in this turn
        self._waiting: list[str] = []
        self._given_up: list[str] = []
        self._follows = False  # this node waits for what another one leads

    def turn(self, finish: bool) -> CopyState:
        """Copy one save, and remove what the script has removed; `finish`: copy everything, because no worker runs any more.

        Does not raise: storage errors go into the report, and what fails holds nothing else up.
        """
        self._reasons, self._waiting, self._given_up, self._together.others, self._follows = [], [], [], "", False
        self._tiers.there.forget()
        began, arrived = self._tiers.clock(), ""
        if finish or not notes.is_off(self._tiers.local):
            arrived = self._tried(lambda: self._copy_newest(finish)) or ""
        if finish:
            self._tried(self._copy_rest)
        self._tried(lambda: follow_removals(self._tiers.local, self._tiers.remote, self._tiers.held))
        now = self._tiers.clock()
        self._seen_at = {name: self._seen_at.get(name, now) for name in self._waiting}
        self._last = CopyState(
            lag_steps=lag_steps(self._waiting, arrived or self._last.arrived),
            lag_s=max((now - since for since in self._seen_at.values()), default=0.0),
            waiting=tuple(self._waiting),
            given_up=tuple(self._given_up),
            failures=self._last.failures + 1 if self._reasons else 0,
            reason=self._reasons[0] if self._reasons else "",
            copy_s=now - began if arrived else None,
            arrived=arrived or self._last.arrived,
            others=self._together.others,
        )
        return self._last

    def _tried(self, act: Callable[[], Result]) -> Result | None:
        try:
            return act()
        except (OSError, errors.ElasticExtError) as error:
            self._reasons.append(f"{type(error).__name__}: {error}")
            return None

    # What is to be copied.

    def _copy_newest(self, finish: bool) -> str:
        """Copy one save; `finish`: the newest of each kind, and of several nodes all. Return the name of what has arrived."""
        listed = self._tiers.here.look()
        found = {each.known: each for each in self._tiers.here.candidates(listed)}
        held = {each.known: each for each in self._tiers.held.all()}
        if finish:
            gone = [one for one in self._tiers.here.gone(listed) if not any(each.known in held for each in one.entries)]
            self._tiers.there.note_removed(gone)
        alone, shared = shared_by_kind({**held, **found}.values())
        good = newest_of_each_kind((each for each in alone if pattern_of(each.name) in shared), self._tiers.here.is_good)
        whole = {one.kind: one.known for one in good}
        names = [self._copy_together(shared[kind], finish, whole.get(kind)) for kind in sorted(shared)]
        arrived = next(filter(None, names), "")
        of_alone = {each.known for each in alone}
        pending = self._pending(*([each for each in of.values() if each.known in of_alone] for of in (found, held)))
        for one in pending:
            if not arrived or finish:
                done = self._tried(lambda one=one: self._copy(one))  # type: ignore[misc]
                arrived = one.name if done else arrived
                if done:
                    continue
            self._waiting.append(one.name)
        return arrived

    def _pending(self, found: Sequence[LocalSave], held: Sequence[LocalSave]) -> list[OneSave]:
        """Return the saves of this node alone that must still be copied, oldest first. Raises OSError."""
        tiers = self._tiers
        ones = newest_of_each_kind(found, tiers.here.is_good)
        newest = {one.kind: one.known for one in ones}
        wanted = {each.known for one in ones for each in one.entries}
        left = []
        for each in held:
            kind = pattern_of(each.name)
            if newest.get(kind, each.known) > each.known or self._is_copied(each) or tiers.here.is_barred(each.name):
                tiers.held.release(each)  # what is newer takes its place
            elif each.known not in wanted:
                left.append(each)
        return [one for one in (*ones, *newest_of_each_kind(left)) if not self._is_done(one)]

    def _is_done(self, one: OneSave) -> bool:
        """Return whether it is copied, or nothing more is to be copied of it."""
        if all(map(self._is_copied, one.entries)):
            return True
        newer = newer_names(one, self._tiers.there.known)
        if newer:
            logger.info("%s is not copied: a newer save has its name in %s", newer[0], self._tiers.remote.address)
            self._done |= {each.identity for each in one.entries}
        return bool(newer)

    def _is_copied(self, each: LocalSave) -> bool:
        return each.identity in self._done or notes.copied_as(self._tiers.local, each.name) == each.identity

    # The copy.

    def _copy(self, one: OneSave) -> bool:
        """Copy a save and its record; return whether it has arrived. If not, it was written again, or quarantined.

        Raises OSError, CopyError.
        """
        tiers, sender = self._tiers, self._tiers.sender
        sources = [(each, tiers.held.hold(each)) for each in one.entries]
        pairs = [(each, source) for each, source in sources if source is not None]
        arrived = len(pairs) == len(sources)
        if arrived:
            announced = (
                [sender.announce(each) for each in one.entries] if needs_announcement(one.entries) else [None] * len(pairs)
            )
            for (each, source), at in zip(pairs, announced, strict=True):
                sender.send(each, source, at)
            arrived = not any(has_changed(each, source) or tiers.here.is_barred(each.name) for each, source in pairs)
            tiers.there.forget()
        for each in one.entries if arrived else ():
            sender.commit(each)
        self._let_go(one, arrived)
        return arrived

    def _let_go(self, one: OneSave, arrived: bool) -> None:
        for each in one.entries:
            if arrived:
                self._done.add(each.identity)
            self._tiers.held.release(each)
        for each in one.entries if arrived else ():
            notes.note_copied(self._tiers.local, each.name, each.identity)

    def _copy_together(self, ones: Sequence[OneSave], finish: bool, whole: KnownSave | None) -> str:
        """Go on with a kind of which other nodes have a part. Return the name of what has arrived.

        whole: see `Together.step`.
        """
        step = self._tried(lambda: self._together.step(ones, self._is_gone if finish else self._is_done, finish, whole))
        if step is None:
            self._waiting.append(ones[0].name)
            return ""
        newest, arrived, left = step.newest, "", list[OneSave]()
        for one in step.work:
            done = self._tried(lambda one=one: self._advance(one, finish, newest))  # type: ignore[misc]
            arrived = arrived or (one.name if done else "")
            left += [] if done else [one]
        if newest is not None and newest not in step.work:
            left.append(newest)
            if finish:
                self._tried(lambda: self._together.watch(newest))
        for one in left:
            if not finish or one == newest or (one.leads and self._together.still_s(one) < OLDER_S):
                self._waiting.append(one.name)
                self._follows = self._follows or not one.leads
        return arrived

    def _is_gone(self, one: OneSave) -> bool:
        """Return whether it is done, and still there; or a worse one than is there."""
        if any(map(self._leftovers.is_worse, one.entries)):
            return True
        if not self._is_done(one) or newer_names(one, self._tiers.there.known):
            return self._is_done(one)
        there = all(self._tiers.remote.stat(each.name) is not None for each in one.entries)
        return there and self._together.has_been_committed(one)

    def _advance(self, one: OneSave, finish: bool, newest: OneSave | None) -> bool:
        """newest: the save that matters most."""
        is_older = finish and newest is not None and one is not newest and not self._is_done(newest)
        if is_older and one.leads and newest is not None and self._together.still_s(newest) < OLDER_S:
            self._together.announce(one)  # so the others need not wait
            return False
        arrived = self._together.advance(one)
        if one.leads and not finish:
            self._together.give_up_older(one)
        if arrived:
            self._let_go(one, True)
        return arrived

    # The end of the job.

    def _copy_rest(self) -> None:
        """Copy everything else below the local directory, if the script saves there. Raises OSError."""
        now = self._tiers.clock()
        self._finish_at = now if self._finish_at is None else self._finish_at
        if not notes.is_used(self._tiers.local) or (self._follows and now - self._finish_at < OLDER_S):
            return
        listed = self._tiers.here.look()
        _, shared = shared_by_kind(self._tiers.here.candidates(listed))
        together = {each.name for ones in shared.values() for one in ones for each in one.entries}
        for entry in sorted(listed, key=lambda each: each.name):
            if not (is_hidden(entry.name) or order_of(entry.name) is not None or entry.unusable):
                before = len(self._reasons)
                self._tried(lambda entry=entry: self._copy_at_the_end(entry, entry.name in together))  # type: ignore[misc]
                if len(self._reasons) > before and entry.name not in self._waiting:
                    self._waiting.append(entry.name)

    def _copy_at_the_end(self, entry: Entry, together: bool) -> None:
        """together: other nodes have a part of it."""
        tiers, name = self._tiers, entry.name
        save = tiers.here.of(name)
        if save is not None and has_changed(save, tiers.local):
            save = None
        if save is None and not entry.is_link and pattern_of(name) in tiers.here.kinds_of_several:
            if not self._leftovers.passes_by(entry):
                self._waiting += [name] if name not in self._waiting else []
                is_over = self._finish_at is not None and tiers.clock() - self._finish_at >= OLDER_S
                self._given_up += [name] if is_over else []  # the agents may still record it until then
        elif entry.sibling or save is None or tiers.here.is_barred(name):
            self._leftovers.copy(entry, save)
        elif together and tiers.here.is_checkpoint(save):
            if self._is_done(OneSave((save,))):
                self._leftovers.copy_new(save)
            else:
                logger.info("%s is not copied now: not all nodes have their part of it", entry.path)
        elif together:
            self._leftovers.copy(entry, None)
        elif self._is_done(OneSave((save,))) and (not self._is_copied(save) or tiers.remote.stat(name) is not None):
            self._leftovers.copy_new(save)
        elif self._leftovers.is_worse(save):
            raise upkeep.CopyError(f"{name} was not proved, and its proved copy stays in {tiers.remote.address}")
        elif not self._copy(OneSave((save,))):
            raise upkeep.CopyError(f"{tiers.local.path(name)} is written to while it is copied")
        else:
            self._leftovers.copy_new(save)


def left(local: Storage, waiting: Sequence[str]) -> list[str]:
    """Return what a script has saved and has not arrived, as far as notes say. Raises OSError.

    waiting: names of saves of which the copier has said so.
    """
    used, found = notes.is_used(local), list(waiting)
    for each in sorted(stored.known_saves(local).values()):
        entry = local.stat(each.name) if order_of(each.name) is None else None
        if entry is not None and each.name not in found and not notes.copied_as(local, each.name).startswith(f"{each.number:x} "):
            found += [each.name] if used or detect.check(local, entry).complete else []
    return found or ([f"what else is in {local.address}"] if used else [])


def lag_steps(waiting: Sequence[str], arrived: str) -> int | None:
    """Return by how many steps the last copy is behind, as far as names say; None: none has arrived yet. Pure."""
    if not (waiting and arrived):
        return None if waiting else 0
    return max(0, max(step_of(name) or 0 for name in waiting) - (step_of(arrived) or 0))
