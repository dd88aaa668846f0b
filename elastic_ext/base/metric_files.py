"""The metrics of training scripts on their way to the agent: one file of memory per process, which only that process writes.

Message, version 1. The agent names a prefix in the worker's message (`metrics`, see `workers.worker_env`): the path of a
directory of its own, and ROUND.LOCAL_RANK.RANK. A process adds .PID.START.RANDOM (START: `running_since`), so that no two
processes ever share a file, even if a pid is used again. The file is a row of chunks, CHUNK bytes each and all allocated:

    8 bytes   MAGIC, with the version
    8 bytes   how much of this chunk is used, with this head; written last, so that a record is whole when it is seen
    records, each: int32 size of the key, int32 number of values, the values (float64), the key, padded to 8 bytes

A value is written with a single store of 8 bytes. No process takes a lock, and nothing is ever moved or removed. A key is the
JSON list [kind, name, help, label names, bounds, label values]. A counter has one value. A gauge has two: its value, and the
time.monotonic() at which it was set, 0.0 before. A histogram has a count for each bound, one for +Inf, and the sum.

What a file holds may be anything: its writer may die between any two stores, and a script may write where it should not. So a
reader takes what it can decode and ignores the rest.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

# Limits of one process, and of one agent over all its workers and rounds. A label that holds a step or an id meets them.
MAX_NAMES = 200
MAX_SERIES = 1000
MAX_LABELS, MAX_BOUNDS = 10, 50
MAX_LABEL, MAX_HELP = 200, 500  # characters; the rest is cut off

MAGIC = b"EXTMET\0\1"
CHUNK = 32 << 10  # room for about 300 series of a counter, and for the largest record
CHUNK_HEAD = 16
MAX_BYTES = 16 << 20
RECORD_HEAD = struct.Struct("=ii")

PER_WORKER = ("local_rank", "rank")  # labels that the agent adds to gauges
RESERVED_PREFIXES = ("elastic_ext_", "process_")  # of the agent's own families
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class Definition:
    """What a script says of a metric. name: without the suffix _total. bounds: of a histogram's buckets, without +Inf."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def values(self) -> int:
        """The number of values of one series."""
        return {COUNTER: 1, GAUGE: 2}.get(self.kind, len(self.bounds) + 2)

    @property
    def names(self) -> frozenset[str]:
        """All names that it may be shown by; no other metric may have one of them."""
        suffixes = {COUNTER: ("", "_total", "_created"), GAUGE: ("",)}
        return frozenset(self.name + each for each in suffixes.get(self.kind, ("", "_bucket", "_count", "_sum", "_created")))

    def agrees(self, other: Definition) -> bool:
        """Return whether both describe the same metric, in any words."""
        return (self.kind, self.name, self.labels, self.bounds) == (other.kind, other.name, other.labels, other.bounds)


def define(kind: str, name: str, help: str, labels: Sequence[str] = (), bounds: Sequence[float] = ()) -> Definition:
    """Return a definition that Prometheus accepts. Raises ValueError: it would not; the message says what is wrong."""
    if not isinstance(name, str) or not isinstance(help, str):
        raise ValueError(f"expected a name and a help text, got {name!r}, {help!r}")
    if kind == COUNTER:
        name = name.removesuffix("_total")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a metric name: expected letters, digits and underscores, with no digit first")
    if name.startswith(RESERVED_PREFIXES):
        raise ValueError(f"{name!r}: names that begin with {' or '.join(RESERVED_PREFIXES)} are the agent's own; choose another")
    if isinstance(labels, str) or len(labels) > MAX_LABELS or len({*labels}) != len(labels):
        raise ValueError(f"{name}: expected at most {MAX_LABELS} different names of labels, in a tuple, got {labels!r}")
    added = {GAUGE: PER_WORKER, HISTOGRAM: ("le",)}.get(kind, ())
    for label in labels:
        if not isinstance(label, str) or not _NAME.fullmatch(label) or label.startswith("__"):
            raise ValueError(
                f"{name}: {label!r} is not a label name: expected letters, digits and underscores, without __ in front"
            )
        if label in added:
            raise ValueError(f"{name}: a {kind} gets the label {label!r} from the agent; choose another")
    found = tuple(float(each) for each in bounds)
    if found[-1:] == (math.inf,):
        found = found[:-1]
    whole = all(map(math.isfinite, found)) and all(low < high for low, high in itertools.pairwise(found))
    if kind == HISTOGRAM and not (whole and 0 < len(found) <= MAX_BOUNDS):
        raise ValueError(f"{name}: expected 1 to {MAX_BOUNDS} buckets in increasing order, got {bounds!r}")
    return Definition(kind, name, printable(help, MAX_HELP), tuple(labels), found if kind == HISTOGRAM else ())


def printable(text: str, longest: int) -> str:
    """Return the text cut off, and without lone surrogates, which no format of Prometheus can show."""
    return text[:longest].encode("utf-8", "backslashreplace").decode()


def encoded(definition: Definition, label_values: Sequence[str]) -> bytes:
    """Return the key of a series."""
    each = definition
    return json.dumps([each.kind, each.name, each.help, each.labels, each.bounds, label_values], ensure_ascii=False).encode()


@functools.lru_cache(maxsize=4 * MAX_SERIES)
def decoded(key: bytes) -> tuple[Definition, tuple[str, ...]] | None:
    """Return the definition and the label values of a series; None if this is no key."""
    try:
        kind, name, help, labels, bounds, values = json.loads(key)
        if kind not in (COUNTER, GAUGE, HISTOGRAM) or len(values) != len(labels):
            return None
        return define(kind, name, help, tuple(labels), tuple(bounds)), tuple(printable(str(each), MAX_LABEL) for each in values)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def record_bytes(key: bytes, values: int) -> int:
    return RECORD_HEAD.size + 8 * values + -(-len(key) // 8) * 8


def records(data: bytes) -> Iterator[tuple[bytes, tuple[float, ...]]]:
    """Return the keys and values in a file, as far as it can be read."""
    for begin in range(0, len(data) - CHUNK_HEAD + 1, CHUNK):
        if data[begin : begin + 8] != MAGIC:
            continue
        (used,) = struct.unpack_from("=Q", data, begin + 8)
        at, end = begin + CHUNK_HEAD, begin + min(used, CHUNK, len(data) - begin)
        while at + RECORD_HEAD.size <= end:
            size, count = RECORD_HEAD.unpack_from(data, at)
            if not (0 < size <= CHUNK and 0 < count <= MAX_BOUNDS + 2):
                break
            values_at = at + RECORD_HEAD.size
            key_at = values_at + 8 * count
            if key_at + size > end:
                break
            yield data[key_at : key_at + size], struct.unpack_from(f"={count}d", data, values_at)
            at = key_at + -(-size // 8) * 8


def running_since(pid: int | str) -> str | None:
    """Return when a process started, in the kernel's ticks since boot; None if it has ended. pid: may be "self".

    In bytes, as `reaper.start_time` is not: a text file may need a lock that another thread held as this process was forked.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[19].decode() if fields[0] not in (b"Z", b"X") else None
