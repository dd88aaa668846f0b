"""Find the newest complete checkpoint in a directory, local or on any fsspec URL.

`families` and `choose` decide over plain listed entries; `_LocalDir` and `_RemoteDir` list and open. A check costs I/O, so
`choose` asks for one only where the answer can still change the choice: a healthy directory of 10,000 checkpoints costs one
listing and one check.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any

from elastic_ext.checkpoints.formats import (
    DCP,
    DCP_METADATA,
    DCP_SHARD_SUFFIX,
    TORCH_SAVE,
    UNKNOWN,
    Entry,
    Verdict,
    check_dcp,
    check_torch_save,
    is_candidate,
)
from elastic_ext.errors import UsageError

# The two halves of 0.25 are a value in the name (a loss, a learning rate), never a step.
_INTEGER = re.compile(r"(?<![0-9])(?<![0-9]\.)[0-9]+(?![0-9])(?!\.[0-9])")
_DIGITS = re.compile(r"[0-9]+")

# Where the filesystems of fsspec keep the time of the last change: local mtime, s3fs LastModified, abfs last_modified,
# gcsfs updated, sftp mtime, memory only created.
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


@dataclass(frozen=True)
class Resume:
    """The checkpoint to resume from. ``path``: absolute local path, or URL. ``step``: from the name, None if it has no number."""

    path: str
    step: int | None
    format: str
    reason: str


@dataclass(frozen=True)
class PassedOver:
    """A candidate that was looked at and not taken."""

    path: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """``resume`` is None when there is nothing to resume from. What is older than it was not looked at and is not listed."""

    resume: Resume | None
    passed_over: tuple[PassedOver, ...] = ()


@dataclass(frozen=True)
class Family:
    """Candidates whose names differ in digits only, newest first. ``newest``: no member was written after this time."""

    pattern: str
    members: tuple[Entry, ...]
    newest: float


def newest_complete(checkpoint_dir: str) -> Choice:
    """Choose the newest complete checkpoint directly under ``checkpoint_dir`` (a local path or a fsspec URL).

    A directory that does not exist yet holds nothing to resume from. Raises UsageError when ``checkpoint_dir`` is a file, may
    not be read or has an unknown or not installed protocol; OSError when the storage does not answer: then nobody knows what
    there is, and starting again from nothing would be the wrong guess.
    """
    try:
        directory = _open_dir(checkpoint_dir)
        listed = list(directory.entries())
    except FileNotFoundError:
        return Choice(None)
    except NotADirectoryError as error:
        raise UsageError(
            f"checkpoint_dir {checkpoint_dir} is a file, expected a directory: name the directory it is in"
        ) from error
    except PermissionError as error:
        raise UsageError(
            f"checkpoint_dir {checkpoint_dir} may not be read ({error.strerror or error}): let this user read it, or change it"
        ) from error
    choice = choose(listed, directory.inspect)
    if any(entry.name == DCP_METADATA or entry.name.endswith(DCP_SHARD_SUFFIX) for entry in listed):
        hint = PassedOver(directory.address, f"is itself a {DCP} directory: checkpoint_dir must name the directory above it")
        return Choice(choice.resume, (*choice.passed_over, hint))
    return choice


def choose(entries: Iterable[Entry], inspect: Callable[[Entry], Verdict]) -> Choice:
    """Choose among listed entries; ``inspect`` is called newest first, and no further than needed.

    Inside a family the order is that of `families`. Between families the one whose best complete member was written last
    wins: an epoch number and a step number do not compare. The entries of one directory lie on one filesystem, so their times
    come from one clock.
    """
    candidates = [entry for entry in entries if is_candidate(entry)]
    passed_over = [PassedOver(entry.path, entry.barred) for entry in candidates if entry.barred]
    found = families(entry for entry in candidates if not entry.barred)
    best: tuple[float, Resume] | None = None
    for family in found:
        if best is not None and family.newest <= best[0]:
            break  # families come newest first: none of the rest can have been written later
        for entry in family.members:
            verdict = inspect(entry)
            if not verdict.complete:
                if verdict.format != UNKNOWN or step_of(entry.name) is not None:  # "logs" beside the checkpoints is no news
                    passed_over.append(PassedOver(entry.path, verdict.reason))
                continue
            written_at = _or_oldest(verdict.written_at)
            if best is None or written_at > best[0]:
                best = written_at, _resume(entry, verdict, family, len(found))
            break
    return Choice(best[1] if best else None, tuple(passed_over))


def _resume(entry: Entry, verdict: Verdict, family: Family, family_count: int) -> Resume:
    reason = f"newest complete of {len(family.members)} named {family.pattern}, {verdict.reason}"
    if family_count > 1:
        reason += f"; written last among {family_count} kinds of names"
    return Resume(entry.path, step_of(entry.name), verdict.format, reason)


def families(entries: Iterable[Entry]) -> tuple[Family, ...]:
    """Group candidates by `pattern_of` their names. The family that may hold the newest comes first."""
    groups: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[pattern_of(entry.name)].append(entry)
    found = [Family(pattern, _newest_first(members), _latest(members)) for pattern, members in groups.items()]
    # At the same time a name with a number goes first: it tells the step.
    return tuple(sorted(found, key=lambda family: (-family.newest, "#" not in family.pattern, family.pattern)))


def step_of(name: str) -> int | None:
    """The last integer in a name: checkpoint_epoch_5.pt -> 5, step_00000120 -> 120, model_latest.pt -> None."""
    numbers = _numbers(name)
    return numbers[-1] if numbers else None


def pattern_of(name: str) -> str:
    """The name with each run of digits replaced by '#': what all names written by one line of code have in common."""
    return _DIGITS.sub("#", name)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in _INTEGER.findall(name))


def _newest_first(members: list[Entry]) -> tuple[Entry, ...]:
    """By step. Where the other numbers of the names contradict the steps (epoch_1_step_900, epoch_2_step_5), by time."""
    by_numbers = sorted(members, key=lambda entry: (_numbers(entry.name), _or_oldest(entry.mtime), entry.name), reverse=True)
    steps = [step_of(entry.name) or 0 for entry in by_numbers]
    if steps == sorted(steps, reverse=True):
        return tuple(by_numbers)
    by_time = sorted(members, key=lambda entry: (_or_oldest(entry.mtime), step_of(entry.name), entry.name), reverse=True)
    return tuple(by_time)


def _latest(members: list[Entry]) -> float:
    # The time of a directory is that of the last change of its list of names, not that of the save: only a check can tell.
    if any(entry.is_dir or entry.mtime is None for entry in members):
        return float("inf")
    return max(_or_oldest(entry.mtime) for entry in members)


def _or_oldest(seconds: float | None) -> float:
    return float("-inf") if seconds is None else seconds


class _Directory:
    """One directory of checkpoints. Subclasses list and open; ``address`` is what a worker would open."""

    def __init__(self, address: str) -> None:
        self.address = address

    def entries(self, child: str = "") -> Iterator[Entry]:
        """List the directory, or the directory ``child`` in it. Raises OSError."""
        raise NotImplementedError

    def open(self, child: str) -> IO[bytes]:
        raise NotImplementedError

    def inspect(self, entry: Entry) -> Verdict:
        """Check one candidate. What cannot be read is incomplete, with the reason; the next one may do."""
        try:
            if entry.is_dir:
                return check_dcp(entry, list(self.entries(entry.name)))
            if entry.size == 0:
                return Verdict(False, TORCH_SAVE, "an empty file")
            with self.open(entry.name) as file:
                return check_torch_save(entry, file)
        except FileNotFoundError:
            return Verdict(False, DCP if entry.is_dir else TORCH_SAVE, "it vanished after it was listed")
        except OSError as error:
            return Verdict(False, DCP if entry.is_dir else TORCH_SAVE, f"it cannot be read: {error.strerror or error}")


class _LocalDir(_Directory):
    """Lists with os.scandir: fsspec's local listing tells nothing of a link's target, and its older versions fail as a whole
    when one file is deleted while they list, which is what retention does."""

    def entries(self, child: str = "") -> Iterator[Entry]:
        root = os.path.join(self.address, child) if child else self.address
        with os.scandir(root) as items:
            for item in items:
                entry = _local_entry(item, root)
                if entry is not None:
                    yield entry

    def open(self, child: str) -> IO[bytes]:
        return open(os.path.join(self.address, child), "rb")


def _local_entry(item: os.DirEntry[str], root: str) -> Entry | None:
    """None for what needs no look of its own. Raises PermissionError where names can be listed but not reached."""
    try:
        found = item.stat()
    except OSError as error:
        if item.is_symlink():
            return Entry(item.name, item.path, False, 0, None, f"a link that leads nowhere ({error.strerror})")
        if isinstance(error, FileNotFoundError):
            return None  # deleted since it was listed
        if isinstance(error, PermissionError):
            raise
        return Entry(item.name, item.path, False, 0, None, f"it cannot be read: {error.strerror}")
    is_dir = stat.S_ISDIR(found.st_mode)
    if item.is_symlink():
        folder, target = os.path.split(os.path.realpath(item.path))
        if folder == os.path.realpath(root) and is_candidate(Entry(target, "", is_dir, 0, None)):
            return None  # its target is listed, has the step in its name, and stays what it is when the link is moved on
    barred = "" if is_dir or stat.S_ISREG(found.st_mode) else "neither a file nor a directory"  # opening a pipe would hang
    return Entry(item.name, item.path, is_dir, found.st_size, found.st_mtime, barred)


class _RemoteDir(_Directory):
    def __init__(self, address: str, filesystem: Any, root: str) -> None:
        super().__init__(address.rstrip("/"))
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def entries(self, child: str = "") -> Iterator[Entry]:
        root = f"{self._root}/{child}" if child else self._root
        address = f"{self.address}/{child}" if child else self.address
        # fsspec shares filesystem objects, with their cached listings, across the process: the last round's would come back.
        self._filesystem.invalidate_cache()
        for info in self._filesystem.ls(root, detail=True):
            path = info["name"].rstrip("/")
            if path != root:
                name = path.rsplit("/", 1)[-1]
                yield Entry(name, f"{address}/{name}", info["type"] == "directory", info.get("size") or 0, _mtime(info))
            elif info["type"] == "file" and info.get("size"):  # object stores may list an empty marker for the directory itself
                raise NotADirectoryError(path)

    def open(self, child: str) -> IO[bytes]:
        file: IO[bytes] = self._filesystem.open(f"{self._root}/{child}", "rb")
        return file


def _mtime(info: Mapping[str, Any]) -> float | None:
    for key in _TIME_KEYS:
        value = info.get(key)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                continue
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _open_dir(checkpoint_dir: str) -> _Directory:
    if not checkpoint_dir:
        raise UsageError("checkpoint_dir is empty, expected a directory or a URL: set it, or leave it out")
    if "://" not in checkpoint_dir:
        return _LocalDir(os.path.abspath(os.path.expanduser(checkpoint_dir)))
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, root = url_to_fs(checkpoint_dir)
    except (ImportError, ValueError) as error:  # fsspec names the missing package, or the protocol that it does not know
        raise UsageError(f"checkpoint_dir {checkpoint_dir} cannot be opened: {error}") from error
    if isinstance(filesystem, LocalFileSystem):
        return _LocalDir(root)
    return _RemoteDir(checkpoint_dir, filesystem, root)
