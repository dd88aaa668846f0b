"""The record of one round in the directories that the agent of group rank 0 can write to itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.record.journal import SavePath
from elastic_ext.checkpoints.record.parts import LOCAL
from elastic_ext.checkpoints.record.proof import RecordedSave, RoundProof
from elastic_ext.checkpoints.record.stored import AttemptRecord, known_saves, newest_attempt
from elastic_ext.checkpoints.storage import Entry, Storage
from elastic_ext.features.record.pauses import EVERY_S, Due

logger = logging.getLogger(__name__)


@dataclass
class Keeping:
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
    _due: dict[SavePath, Due] = field(default_factory=dict)  # by entry
    _refused: dict[SavePath, str] = field(default_factory=dict)  # by entry: why the storage has refused it last

    @property
    def attempt(self) -> int:
        """The number of the round."""
        return self.attempts[0].attempt

    def list_proved(self, asked: int, now: float) -> bool:
        """List what was proved since. asked: the last question so far. Return whether a list waits."""
        record = self.proof.record()
        saves = [each for each in record.saves if self._is_kept(each)]
        self._forget_gone(saves)
        self._note_removed(record.removed)
        for save in saves:
            entry = save.entry
            due = self._due.get(entry, Due())
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
                self._due[entry] = self._due.get(entry, Due()).later(now)
                del self._listed[order]
            elif answered >= question:
                with self._tried(entry):
                    self.attempts[entry.at].write(save, found, record.reads)
                    self._written[entry] = save
                    self.proved(entry, self.storages[entry.at])
                    self._due[entry] = Due(now + EVERY_S)
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


def keeping_of(
    storages: Sequence[Storage],
    world: int,
    rounds: int = 0,
    proved: Callable[[SavePath, Storage], None] = lambda entry, storage: None,
    apart: bool = False,
) -> Keeping:
    """Return what keeps the record of a round in these directories, which have one number for it. Raises OSError.

    rounds: the number of the last round that other records know. apart: see `RoundProof`.
    """
    least = 1 + max([rounds, *(newest_attempt(known_saves(each).values()) for each in storages)])
    attempts = [AttemptRecord(each, world, least) for each in storages]
    shared, *local = [each.before for each in attempts]
    proof = RoundProof(shared, world, apart)
    for each in local:
        proof.know(LOCAL, {**shared, **each})
    return Keeping(attempts, proof, storages, proved)
