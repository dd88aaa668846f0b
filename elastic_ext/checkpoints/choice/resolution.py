"""The agent's side of checkpoints: which one a round resumes from, the same on every node, and which one is put aside.

The agent of group rank 0 looks once a round and tells the others what it found (`Exchange`); they wait until they see it too,
because a shared directory may show late what another host has written.

What is told is the name of a checkpoint in a directory that each node knows from its own settings, and no path: whoever can write
where the nodes talk can have them load another of the job's checkpoints, but nothing of his own.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from elastic_ext.base import records
from elastic_ext.base.errors import BadCheckpoints, ElasticExtError, RoundOver, UsageError
from elastic_ext.base.exchange import Exchange
from elastic_ext.base.printable import printable, redacted
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import discovery
from elastic_ext.checkpoints.choice.discovery import NONE, Choice, Wanted
from elastic_ext.checkpoints.directory import catalog, tiers
from elastic_ext.checkpoints.directory.tiers import Offer
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.checks import Inspection
from elastic_ext.checkpoints.formats.manifest import order_of
from elastic_ext.checkpoints.formats.verify import Mode
from elastic_ext.checkpoints.storage import Storage, open_parent, open_storage, polled

logger = logging.getLogger(__name__)

BEGUN = f"{catalog.MARKERS}/resume_from"  # one file for each run that was told where to begin
SEEN_S = 60.0  # that a checkpoint may take to be seen by the other nodes (NFS caches attributes for up to 60 s: acregmax)
ANSWER_S = 30 * 60.0  # that group rank 0 may take: verifying a terabyte at 1 GB/s takes 17 minutes
TOLD_S = 60.0  # that a node may take to look into its local directory; one that is dead never says
SCHEMA = 1  # of what nodes tell each other
MOST_TEXT = 2000  # characters of a reason or an error
MOST_OFFERS = 16  # of one node, the newest
MOST_NAME = 1024  # characters of a checkpoint's name: the longest key of S3


@dataclass(frozen=True)
class Resumption:
    """What a round resumes from. path "": from nothing. step: None where neither content nor name tells one.

    local: it is in the nodes' local directories.
    """

    path: str = ""
    step: int | None = None
    reason: str = ""
    local: bool = False

    @property
    def at(self) -> int | None:
        """The step that the round begins at; None: not known."""
        return self.step if self.path else 0

    @property
    def variables(self) -> dict[str, str]:
        """For the workers; an empty path says that the job begins from nothing."""
        step = {} if self.step is None else {"ELASTIC_EXT_RESUME_STEP": str(self.step)}
        return {"ELASTIC_EXT_RESUME_FROM": self.path, **step}


def choose(settings: Settings, run_id: str) -> Resumption:
    """Look once. Raises UsageError; OSError when the storage does not answer; BadCheckpoints."""
    directory = settings.checkpoint_dir
    if directory is None:
        return Resumption()
    wanted = Wanted(pattern=settings.checkpoint_pattern, verify=Mode(settings.verify))
    told = settings.resume_from
    since = _since(directory, run_id, told) if told else None
    choice = discovery.newest_complete(directory, replace(wanted, since=since))
    if told and choice.resume is None:
        choice = discovery.newest_complete(directory, replace(wanted, resume_from=told))
    for passed in choice.passed_over:
        logger.warning("checkpoint passed over: %s: %s", passed.path, passed.reason)
    if choice.resume is None and choice.all_bad and told != NONE:
        raise BadCheckpoints(_none_left(directory, choice))
    if choice.resume is None:
        return Resumption(reason="resume_from=none" if told == NONE else f"no complete checkpoint in {directory}")
    return Resumption(choice.resume.path, choice.resume.step, choice.resume.reason)


def _none_left(directory: str, choice: Choice) -> str:
    listed = "; ".join(f"{passed.path}: {passed.reason}" for passed in choice.passed_over)
    return (
        f"no checkpoint in {directory} may be used: {listed}. Beginning from nothing would lose the work: look at them "
        "(elastic-ext checkpoints ls, verify), take one out of quarantine, or say resume_from=none"
    )


def _since(directory: str, run_id: str, told: str) -> float:
    """When this run was first told to begin at `told`, by the clock of the storage: what was saved later is its own progress.

    Without this each restart would throw away what the run has done since. Another value of resume_from begins anew.
    """
    storage, name = open_storage(directory), f"{BEGUN}/{_file_name(run_id)}.json"
    record = {"resume_from": redacted(told)}
    try:
        same = json.loads(redacted(storage.read(name).decode())) == record  # older versions kept it as it was
    except (FileNotFoundError, ValueError):
        same = False
    if not same:
        storage.put(name, json.dumps(record).encode())
    found = storage.stat(name)
    if found is None or found.mtime is None:
        logger.warning("%s keeps no times: every restart of this run begins at resume_from=%s", directory, told)
        return float("inf")
    return found.mtime


def _file_name(run_id: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else f"%{ord(letter):x}" for letter in run_id)


@dataclass(frozen=True)
class Place:
    """This node in the round. node: its number (the group rank); workers: of this node."""

    node: int = 0
    nodes: int = 1
    workers: int = 1


def agree(settings: Settings, run_id: str, exchange: Exchange, place: Place) -> Resumption:
    """The same answer on all nodes of a round; the agent of node 0 looks.

    One from the local tier has the path of this node's own part.

    Raises what `choose` raises, on all nodes; UsageError where this node does not see what the others do; RoundOver.
    """
    if settings.checkpoint_dir is None:
        return Resumption()
    exchange.offer(_told_offers(_offers(settings)))
    if place.node == 0:
        try:
            local = _newest_local(settings, exchange)
            found = _newer(settings, run_id, local)
        except RoundOver:
            raise
        except (ElasticExtError, OSError) as error:
            exchange.publish(_told_error(error))
            raise
        exchange.publish(_told_choice(settings, found))
        return _placed(settings, found)
    found = _placed(settings, _read_choice(settings, exchange.choice(ANSWER_S)))
    if found.path and not found.local:
        await_seen(found.path, time.monotonic() + SEEN_S)
    return found


# What is told.


@dataclass(frozen=True)
class _Told:
    """A choice on its way.

    Attributes:
        name: of a checkpoint, in the directory of `_directory`; "": begin from nothing.
        local: in the nodes' local directories instead.
        asked_for: see `_directory`.
        error: why node 0 cannot tell; "": it can. bad: there are checkpoints, and none may be used.
    """

    name: str
    step: int | None = None
    reason: str = ""
    local: bool = False
    asked_for: bool = False
    error: str = ""
    bad: bool = False


def _told_error(error: Exception) -> str:
    return _record(_Told("", error=str(error)[:MOST_TEXT], bad=isinstance(error, BadCheckpoints)))


def _told_choice(settings: Settings, found: Resumption) -> str:
    name, asked_for = (found.path, False) if found.local or not found.path else _name_of(settings, found.path)
    return _record(_Told(name, found.step, found.reason[:MOST_TEXT], found.local, asked_for))


def _name_of(settings: Settings, path: str) -> tuple[str, bool]:
    """The name by which all nodes know a checkpoint, and whether it lies where `resume_from` says."""
    for asked_for in (False, True):
        directory = _directory(settings, asked_for)
        name = path.rpartition("/")[2]
        if directory is not None and open_storage(directory).path(name) == path:
            return name, asked_for
    raise UsageError(f"the checkpoint {path} has no name in checkpoint_dir {settings.checkpoint_dir} that other nodes could know")


def _directory(settings: Settings, asked_for: bool) -> str | None:
    """checkpoint_dir, or the directory of the checkpoint that resume_from names by a path; None: it names none."""
    if not asked_for:
        return settings.checkpoint_dir
    if "/" not in settings.resume_from:
        return None
    return settings.resume_from.rstrip("/").rpartition("/")[0] or "/"


def _read_choice(settings: Settings, text: str) -> Resumption:
    """What node 0 has told. Raises BadCheckpoints, UsageError."""
    try:
        told = records.read(_Told, text, "what group rank 0 says of the checkpoint to resume from", SCHEMA)
    except records.RecordError as error:
        raise UsageError(printable(str(error))) from error
    if told.error:
        kind = BadCheckpoints if told.bad else UsageError
        raise kind(f"group rank 0 cannot tell what to resume from: {printable(told.error[:MOST_TEXT])}")
    if not (_is_own(settings, told.name) if told.local else _is_name(told.name)):
        raise UsageError(
            f"group rank 0 says {printable(told.name[:200])!r} of the checkpoint to resume from, expected the name of one: does "
            "somebody else write to the store of the rendezvous?"
        )
    found = Resumption(told.name, told.step, printable(told.reason[:MOST_TEXT]), told.local)
    if not told.name or told.local:
        return found
    directory = _directory(settings, told.asked_for)
    if directory is None:
        raise UsageError(
            f"group rank 0 resumes from {printable(told.name)} in another directory than checkpoint_dir, and this node is told "
            "of none: give all nodes the same resume_from"
        )
    return replace(found, path=open_storage(directory).path(told.name))


def _is_own(settings: Settings, name: str) -> bool:
    """Of a checkpoint that may be in this node's local directory."""
    return settings.local_dir is not None and order_of(name) is not None


def _is_name(name: str) -> bool:
    """Of something directly in a directory; or "", for nothing."""
    return len(name) <= MOST_NAME and name not in (".", "..") and "/" not in name and "\0" not in name


def _record(told: _Told | _Offers) -> str:
    return json.dumps({"schema": SCHEMA, **asdict(told)})


@dataclass(frozen=True)
class _Offers:
    """What one node tells of its own disk. usable: it has a local tier."""

    usable: bool
    offers: tuple[Offer, ...]


def _told_offers(offers: Sequence[Offer] | None) -> str:
    return _record(_Offers(offers is not None, tuple(offers or ())[:MOST_OFFERS]))


# The local tier.


def _offers(settings: Settings) -> list[Offer] | None:
    """None: this node has no local tier that can be used."""
    if settings.local_dir is None or settings.resume_from:
        return None
    try:
        return tiers.offers(open_storage(settings.local_dir))
    except OSError as error:
        logger.warning("local_dir %s cannot be looked at: %s", settings.local_dir, error)
        return None


def _newest_local(settings: Settings, exchange: Exchange) -> Offer | None:
    """The newest one that the nodes have all parts of."""
    if settings.checkpoint_dir is None or settings.local_dir is None or settings.resume_from:
        return None
    texts = exchange.offers(TOLD_S)
    if texts is None:
        logger.warning("local_dir is not resumed from: not all nodes have one, or not all have said in time what is in it")
        return None
    try:
        said = [records.read(_Offers, text, "what a node has in its local_dir", SCHEMA) for text in texts]
    except records.RecordError as error:
        logger.warning("local_dir is not resumed from: %s", printable(str(error)))
        return None
    if not all(each.usable for each in said):
        return None
    told = [each.offers for each in said]
    barred = catalog.in_quarantine(open_storage(settings.checkpoint_dir))
    found = tiers.newest_of_all(told, barred)
    for offer, ranks in tiers.lacking(told).items():
        if ranks and offer.name not in barred and _order(offer.name) > _order(found.name if found is not None else ""):
            missing = ", ".join(map(str, ranks))
            logger.warning("%s is not resumed from: what ranks %s saved is on no node's local_dir", offer.name, missing)
    return found


def _newer(settings: Settings, run_id: str, local: Offer | None) -> Resumption:
    """Of both tiers. The remote directory is only listed where it has nothing newer."""
    if local is None or settings.checkpoint_dir is None:
        return choose(settings, run_id)
    order = _order(local.name)
    resumption = Resumption(
        local.name, local.step, f"newest that the nodes have all parts of in local_dir, saved by {local.nodes}", local=True
    )
    newer = [name for name in tiers.own_checkpoints(open_storage(settings.checkpoint_dir)) if _order(name) > order]
    if not newer:
        return resumption
    try:
        remote = choose(settings, run_id)
    except BadCheckpoints as error:
        logger.warning("%s", error)
        return resumption
    return remote if _order(remote.path.rpartition("/")[2]) > order else resumption


def _order(name: str) -> tuple[int, int]:
    return order_of(name) or (0, 0)


def _placed(settings: Settings, found: Resumption) -> Resumption:
    if not found.local:
        return found
    assert settings.local_dir is not None, "it has offered it"
    return replace(found, path=open_storage(settings.local_dir).path(found.path))


def await_seen(path: str, deadline: float) -> None:
    """Wait until this node sees the checkpoint, complete. Raises UsageError when it does not by the deadline (monotonic)."""
    storage, name = open_parent(path)

    def look() -> Inspection | None:
        entry = storage.stat(name)
        return detect.check(storage, entry, detect.plugins()) if entry is not None else None

    verdict = polled(look, lambda seen: seen is not None and seen.complete, deadline)
    if verdict is None or not verdict.complete:
        seen = verdict.reason if verdict is not None else "nothing there"
        raise UsageError(
            f"{platform.node()} does not see the checkpoint {path} that the other nodes resume from ({seen}): put "
            "checkpoint_dir on storage that every node mounts"
        )


def quarantine(settings: Settings, resumed_from: str, newest: bool, reason: str) -> str | None:
    """Quarantine a checkpoint after a failure that it is blamed for; return its name, None if there is none.

    Args:
        resumed_from: what the failed round had been given; "": nothing.
        newest: the one that was saved last is to blame (numbers that left their range), else `resumed_from`.

    Raises OSError, UsageError.
    """
    if settings.checkpoint_dir is None:
        return None
    path = resumed_from
    if newest:
        wanted = Wanted(pattern=settings.checkpoint_pattern)
        found = discovery.newest_complete(settings.checkpoint_dir, wanted).resume
        path = found.path if found is not None else ""
        newest_local = next(iter(tiers.own_checkpoints(open_storage(settings.local_dir))), "") if settings.local_dir else ""
        if _order(newest_local) > _order(path.rpartition("/")[2]):
            # Barred in both tiers, by its name: it may be on its way to the remote one.
            return _quarantined(open_storage(settings.checkpoint_dir), newest_local, reason)
    if not path:
        return None
    storage, name = open_parent(path)
    entry = storage.stat(name)
    return None if entry is None else _quarantined(storage, name, reason, detect.check(storage, entry).written_at)


def _quarantined(storage: Storage, name: str, reason: str, written_at: float | None = None) -> str:
    catalog.quarantine(storage, name, reason, f"{platform.node()} pid {os.getpid()}", written_at)
    logger.warning("checkpoint %s is put aside: %s; the one before it will be used", storage.path(name), reason)
    return name
