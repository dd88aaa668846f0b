"""Run a check on many damaged inputs; what escapes is collected by kind, with the smallest input that shows it."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

FEW = 1000
CASES = int(os.environ.get("ELASTIC_EXT_TEST_FUZZ", FEW))  # of all targets together
SEED = int(os.environ.get("ELASTIC_EXT_TEST_SEED") or (random.SystemRandom().randrange(10**6) if CASES > FEW else 0))
CASE_S = 60.0  # the host may be busy; most cases take less than a millisecond
MAX_BYTES = 256 << 20  # that a case may add to the memory of this process
MAX_ADDRESSES = 2 << 30  # beyond it the case gets MemoryError, and the host stays well
SHRINKS = 300  # tries to make a failing input smaller
SHOWN = 200  # bytes of it

Mutate = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


class Hung(BaseException):
    """A case took longer than CASE_S."""


class Broken(AssertionError):
    """The check's own word that a promise was broken."""


@dataclass
class Found:
    """Failures of one kind: the type, and the place in our code."""

    case: str
    data: bytes
    trace: str
    count: int = 1

    def __str__(self) -> str:
        shown = repr(self.data[:SHOWN]) + (f"... of {len(self.data)} bytes" if len(self.data) > SHOWN else "")
        return f"{self.count} times, first as {self.case}\n{self.trace}\nsmallest: {shown}"


@dataclass
class Fuzz:
    """Of one target. What `check` raises is a failure, so it catches what is allowed; `run` raises AssertionError with all."""

    target: str
    seed: int = SEED
    found: dict[tuple[str, ...], Found] = field(default_factory=dict)

    def run(self, check: Callable[[bytes], object], samples: Sequence[bytes], mutate: Mutate, count: int) -> None:
        with bounded():
            for number in range(count):
                rng = random.Random(f"{self.seed} {self.target} {number}")
                data = mutate(rng.choice(samples), rng, samples)
                self._one(check, data, f"{self.target} {number}, seed {self.seed}")
        assert not self.found, self.report()

    def _one(self, check: Callable[[bytes], object], data: bytes, case: str) -> None:
        kind, trace = outcome(check, data)
        if kind is None:
            return
        if kind in self.found:
            self.found[kind].count += 1
            return
        self.found[kind] = Found(case, _shrunk(check, data, kind), trace)

    def report(self) -> str:
        return "\n\n".join(f"[{self.target}] {' '.join(kind)}: {found}" for kind, found in self.found.items())


def outcome(check: Callable[[bytes], object], data: bytes) -> tuple[tuple[str, ...] | None, str]:
    """(the kind of failure, its traceback); None: the check passed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, CASE_S, CASE_S)  # again: an exit handler may wait for what hangs
    try:
        check(data)
    except (Exception, Hung) as error:  # noqa: BLE001  (the top of a case: whatever escapes is what is looked for)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "elastic_ext" in frame.filename]
        place = f"{frames[-1].filename.rpartition('elastic_ext/')[2]}:{frames[-1].name}" if frames else ""
        said = str(error)[:80] if isinstance(error, Broken) else ""
        return (type(error).__name__, place, said), "".join(traceback.format_exception(error, limit=-3))[-700:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if (grown := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10) > MAX_BYTES:
        return ("memory",), f"{grown >> 20} MiB more"
    return None, ""


def _shrunk(check: Callable[[bytes], object], data: bytes, kind: tuple[str, ...]) -> bytes:
    """Ever smaller parts are left out as long as it fails the same way."""
    if kind[0] in ("Hung", "memory"):
        return data
    size, tries = max(1, len(data) // 2), SHRINKS
    while size and tries > 0:
        at, shorter = 0, False
        while at < len(data) and tries > 0:
            candidate = data[:at] + data[at + size :]
            tries -= 1
            if outcome(check, candidate)[0] == kind:
                data, shorter = candidate, True
            else:
                at += size
        if not shorter:
            size //= 2
    return data


@contextmanager
def bounded() -> Iterator[None]:
    """Inside, a case that hangs is interrupted (by SIGALRM: pytest-timeout must use its thread), and memory has an end."""

    def hung(*_: Any) -> None:
        raise Hung(f"not done after {CASE_S:g} s")

    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, hung)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_ADDRESSES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)
