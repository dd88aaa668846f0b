"""Drains of a job with `checkpoint_dir`: what lies there while this node is to leave."""

from __future__ import annotations

from elastic_ext.agent.companion import Companion
from elastic_ext.agent.feature import RoundParts
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.features.drains.watch import Drains, DrainWatch, Published


def published(settings: Settings) -> Published:
    """Read it. It may take as long as the storage does."""
    if settings.checkpoint_dir is None:
        return Published()
    storage = open_storage(settings.checkpoint_dir)
    choice = listing.newest_in(storage, listing.Wanted(pattern=settings.checkpoint_pattern))
    entries = listing.candidates_among(listing.list_entries(storage), settings.checkpoint_pattern)
    # The time of a directory is that of its names, not of its content: writers of directories give each a name of its own.
    versions = {entry.path: None if entry.is_dir else entry.mtime for entry in entries}
    passed_over = {each.path for each in choice.passed_over}
    lies_there = frozenset(each for each in versions.items() if each[0] not in passed_over)
    if (newest := choice.resume) is None:
        return Published(lies_there=lies_there)
    return Published(newest.path, newest.step, versions.get(newest.path), lies_there)


class ToSaves(Drains):
    def beside_round(self, round_: RoundParts) -> Companion:
        settings = self.parts.settings
        local = settings.local_dir is not None
        return DrainWatch(self.parts.job, round_.saves, self.parts.wake, lambda: published(settings), local)
