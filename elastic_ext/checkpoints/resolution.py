"""The agent's side of checkpoints: which one a round resumes from, the same on every node, and which one is put aside.

The agent of group rank 0 looks once a round and says in the store of the round what it found; the others wait until they see it
too, because a shared directory may show late what another host has written.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

from elastic_ext.checkpoints import catalog, detect, discovery, tiers
from elastic_ext.checkpoints.discovery import NONE, Choice, Wanted
from elastic_ext.checkpoints.formats import Verdict
from elastic_ext.checkpoints.manifest import order_of
from elastic_ext.checkpoints.storage import Storage, open_parent, open_storage, polled
from elastic_ext.checkpoints.tiers import Offer
from elastic_ext.checkpoints.verify import Mode
from elastic_ext.errors import BadCheckpoints, ElasticExtError, UsageError
from elastic_ext.printable import redacted
from elastic_ext.settings import Settings

logger = logging.getLogger(__name__)

KEY = "elastic_ext.resume"
LOCAL_KEY = "elastic_ext.local"  # .GROUP_RANK: what each node could load from its own disk
BEGUN = f"{catalog.MARKERS}/resume_from"  # one file for each run that was told where to begin
SEEN_S = 60.0  # that a checkpoint may take to be seen by the other nodes (NFS caches attributes for up to 60 s: acregmax)
ANSWER = timedelta(minutes=30)  # that group rank 0 may take: verifying a terabyte at 1 GB/s takes 17 minutes
TOLD = timedelta(seconds=60)  # that a node may take to look into its local directory; one that is dead never says


class Store(Protocol):
    """What is used of torch's Store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


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


def agree(settings: Settings, run_id: str, store: Store, place: Place) -> Resumption:
    """The same answer on all nodes of a round; the agent of node 0 looks.

    One from the local tier has the path of this node's own part.

    Raises what `choose` raises, on all nodes; UsageError where this node does not see what the others do.
    """
    if settings.checkpoint_dir is None:
        return Resumption()
    store.set(f"{LOCAL_KEY}.{place.node}", json.dumps({"workers": place.workers, "offers": _offers(settings, place.node)}))
    if place.node == 0:
        try:
            local = _newest_local(settings, store, place)
            found = _newer(settings, run_id, local)
        except (ElasticExtError, OSError) as error:
            store.set(KEY, json.dumps({"error": str(error), "bad": isinstance(error, BadCheckpoints)}))
            raise
        store.set(KEY, json.dumps(asdict(found)))
        return _placed(settings, found)
    store.wait([KEY], ANSWER)
    said: Mapping[str, Any] = json.loads(store.get(KEY))
    if "error" in said:
        kind = BadCheckpoints if said["bad"] else UsageError
        raise kind(f"group rank 0 cannot tell what to resume from: {said['error']}")
    found = _placed(settings, Resumption(**said))
    if found.path and not found.local:
        await_seen(found.path, time.monotonic() + SEEN_S)
    return found


# The local tier.


def _offers(settings: Settings, node: int) -> list[dict[str, Any]] | None:
    """None: this node has no local tier that can be used."""
    if settings.local_dir is None or settings.resume_from:
        return None
    try:
        return [asdict(offer) for offer in tiers.offers(open_storage(settings.local_dir), node)]
    except OSError as error:
        logger.warning("local_dir %s cannot be looked at: %s", settings.local_dir, error)
        return None


def _newest_local(settings: Settings, store: Store, place: Place) -> Offer | None:
    """The newest one that all nodes have their parts of."""
    if settings.local_dir is None:
        return None
    keys = [f"{LOCAL_KEY}.{node}" for node in range(place.nodes)]
    try:
        store.wait(keys, TOLD)
    except RuntimeError as error:  # torch.distributed.DistStoreError, of which 2.8 has no public name of a timeout
        logger.warning("local_dir is not resumed from: some node has not said what it has: %s", error)
        return None
    said = [json.loads(store.get(key)) for key in keys]
    if settings.checkpoint_dir is None or any(each["offers"] is None for each in said):
        return None
    told = [[Offer(**{**offer, "nodes": tuple(offer["nodes"])}) for offer in each["offers"]] for each in said]
    barred = catalog.in_quarantine(open_storage(settings.checkpoint_dir))
    return tiers.newest_of_all(told, [each["workers"] for each in said], barred)


def _newer(settings: Settings, run_id: str, local: Offer | None) -> Resumption:
    """Of both tiers. The remote directory is only listed where it has nothing newer."""
    if local is None or settings.checkpoint_dir is None:
        return choose(settings, run_id)
    order = _order(local.name)
    resumption = Resumption(local.name, local.step, f"newest of all nodes' local_dir, {len(local.nodes)} of them", local=True)
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

    def look() -> Verdict | None:
        entry = storage.stat(name)
        return detect.check(storage, entry, detect.plugins()) if entry is not None else None

    verdict = polled(look, lambda seen: seen is not None and seen.complete, deadline)
    if verdict is None or not verdict.complete:
        seen = verdict.reason if verdict is not None else "nothing there"
        raise UsageError(
            f"{platform.node()} does not see the checkpoint {path} that the other nodes resume from ({seen}): put "
            "checkpoint_dir on storage that every node mounts"
        )


def put_aside(settings: Settings, resumed_from: str, newest: bool, reason: str) -> str | None:
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
