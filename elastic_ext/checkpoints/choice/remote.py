"""What node 0 finds in `checkpoint_dir`, the tier that all nodes share, while it decides what a round resumes from."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property

from elastic_ext.base.errors import BadCheckpoints
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import below, discovery, messages
from elastic_ext.checkpoints.choice.discovery import NONE, Wanted
from elastic_ext.checkpoints.choice.messages import Agreement
from elastic_ext.checkpoints.choice.run_start import run_began_at
from elastic_ext.checkpoints.choice.selection import Choice, Resume
from elastic_ext.checkpoints.directory import marks
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.manifest import order_of, order_or_oldest
from elastic_ext.checkpoints.formats.verify import Mode
from elastic_ext.checkpoints.storage import Entry, Storage, is_away, open_storage, split_path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Listed:
    """What the directory has shown. quarantined: names of checkpoints that must not be used."""

    entries: tuple[Entry, ...] = ()
    quarantined: frozenset[str] = frozenset()


class RemoteTier:
    """The directory in one agreement. It is opened when first needed."""

    def __init__(self, settings: Settings, checkpoint_dir: str, run_id: str) -> None:
        self._settings, self._checkpoint_dir, self._run_id = settings, checkpoint_dir, run_id
        self._listed: _Listed | None = None

    @cached_property
    def storage(self) -> Storage:
        return open_storage(self._checkpoint_dir)

    @property
    def has_answered(self) -> bool:
        """Whether a `look` has found it."""
        return self._listed is not None

    @property
    def quarantined(self) -> frozenset[str]:
        """The names of checkpoints that must not be used, by the last `look`."""
        return self._listed.quarantined if self._listed is not None else frozenset()

    def look(self) -> OSError | None:
        """List the directory; return the error if the storage is away. Raises UsageError; OSError for other errors."""
        try:
            quarantined = marks.quarantined_names(self.storage)
            self._listed = _Listed(tuple(discovery.list_entries(self.storage)), quarantined)
        except OSError as error:
            if not is_away(error):
                raise
            return error
        return None

    def newest(self, upper: Agreement | None) -> Agreement:
        """Return the newest checkpoint of all tiers.

        upper: the newest of the others, after a `look`; None: they have none. If that `look` has shown nothing that may be newer,
        the directory is not asked again; and only what is newer is verified, because that may take minutes.

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
        """Return whether there may be something newer, by the names. A script's own saves tell their step only when opened."""
        order, listed = order_or_oldest(upper.name), self._listed or _Listed()
        names = [each.name for each in discovery.candidates(listed.entries, self._settings.checkpoint_pattern, detect.plugins())]
        return any(order_of(name) is None or order_or_oldest(name) > order for name in names)

    def _has_newer(self, upper: Agreement) -> bool:
        """Return whether there is something newer, unless it is damaged. Raises UsageError, OSError."""
        choice = self._choose(Mode.OFF)
        if choice.resume is not None and newer(upper, self._agreement(choice.resume)) is not upper:
            return True
        _tell_passed_over(choice)
        return False

    def _newest(self) -> Agreement:
        """Choose from the directory alone. Raises UsageError, BadCheckpoints, OSError."""
        choice = self._choose(Mode(self._settings.verify))
        _tell_passed_over(choice)
        if choice.resume is not None:
            return self._agreement(choice.resume)
        if self._settings.resume_from == NONE:
            return Agreement("", reason="resume_from=none")
        if choice.all_bad:
            raise BadCheckpoints(_none_left(self._checkpoint_dir, choice))
        reason = f"no complete checkpoint in {self._checkpoint_dir}"[: messages.MAX_TEXT // 2]
        seen = choice.question or below.seen_in(self.storage, self._settings.checkpoint_pattern)
        if choice.passed_over:
            reason += f", {len(choice.passed_over)} passed over; a script that knows its own may resume from one"
        if seen:
            reason = f"{reason}; {seen}; {below.FROM_SCRATCH}"[: messages.MAX_TEXT]
        return Agreement("", reason=reason, passed_over=bool(choice.passed_over or seen))

    def _agreement(self, resume: Resume) -> Agreement:
        name = split_path(resume.path)[1]
        return Agreement(name, resume.step, resume.reason[: messages.MAX_TEXT], asked_for=self.storage.path(name) != resume.path)

    def _choose(self, verify: Mode) -> Choice:
        """Choose from the run's own progress first, then by resume_from."""
        resume_from = self._settings.resume_from
        wanted = Wanted(pattern=self._settings.checkpoint_pattern, verify=verify)
        if not resume_from:
            return discovery.newest_in(self.storage, wanted)
        own = discovery.newest_in(self.storage, replace(wanted, since=run_began_at(self.storage, self._run_id, resume_from)))
        return own if own.resume is not None else discovery.newest_in(self.storage, replace(wanted, resume_from=resume_from))


def newer(one: Agreement, other: Agreement) -> Agreement:
    """Return the newer one; the first if both are as new. What a script has saved itself has no generation: its step counts."""
    if not other.name:
        return one
    if order_of(other.name) is None:
        return other if other.step is not None and one.step is not None and other.step > one.step else one
    return other if order_or_oldest(other.name) > order_or_oldest(one.name) else one


def _tell_passed_over(choice: Choice) -> None:
    for passed in choice.passed_over:
        logger.warning("checkpoint passed over: %s: %s", passed.path, passed.reason)


def _none_left(directory: str, choice: Choice) -> str:
    listed = "; ".join(f"{passed.path}: {passed.reason}" for passed in choice.passed_over)
    return (
        f"no checkpoint in {directory} may be used: {listed}. Starting from scratch would lose the work: inspect them "
        "(elastic-ext checkpoints ls, verify), lift a quarantine, or set resume_from=none"
    )
