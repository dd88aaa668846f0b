"""What the figures of a preflight mean: which device, disk or pair of nodes is the outlier. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from elastic_ext.cli import FAIL, OK, WARN, Finding

PROCESS, MATMUL, COPY, BANDWIDTH, LATENCY = "process", "matmul", "copy", "bandwidth", "latency"
DEVICES, DISK, STORAGE = "devices", "disk", "storage"
# To blame: the hardware; how the job is configured; other users of the device, or nothing that is known.
NODE, SETTINGS, OTHERS = "node", "settings", "others"
SHARED_GIB = 2.0  # more than the contexts of two processes take (0.3 to 0.6 GiB each, by model and driver)
# What torch says where its build and the driver do not fit, which is so on every node like this one.
_NOT_BUILT_FOR = ("driver on your system is too old", "no NVIDIA driver", "Error 35", "Error 803")
MOST_NAMED = 8  # figures that one finding names


@dataclass(frozen=True)
class Measure:
    title: str  # name of its finding
    unit: str  # of its figures
    # a figure that is this many times worse than the median of its peers is an outlier. Of an even number of peers the better
    # one of the middle two is the median: with three nodes, two of three pairs have the bad one in common
    factor: float
    more_is_better: bool = True  # whether a small figure is bad
    margin: float = 0.0  # an outlier is also worse by this, in `unit`
    outlier: str = FAIL  # state of a finding with an outlier
    advice: str = ""  # what to do about one


_DEVICE = "have the device examined (power, temperature, clocks, ECC errors; `dcgmi diag -r 3`), or leave it out"
_NETWORK = "have the links of what is named examined (cables, errors counted on the interface, firmware), or leave it out"
# Devices of one model differ by some per cent, so 1.5 is a fault; a link that has fallen back to the next lower rate has half or
# less. Disks and storage are shared with others and vary more; latency of a healthy network varies by tens of microseconds.
MEASURES = {
    PROCESS: Measure("processes", "", 1.0),  # has a figure only where one fails
    DEVICES: Measure("devices", "", 1.0),  # likewise
    MATMUL: Measure("matrix products", "TFLOP/s", 1.5, advice=_DEVICE),
    COPY: Measure("memory copy", "GB/s", 1.5, advice=_DEVICE),
    BANDWIDTH: Measure("all_reduce of two nodes", "GB/s", 2.0, advice=_NETWORK),
    LATENCY: Measure("latency of two nodes", "us", 3.0, more_is_better=False, margin=100.0, advice=_NETWORK),
    DISK: Measure("disk writes", "MB/s", 3.0, outlier=WARN, advice="saves to that disk hold up all nodes"),
    STORAGE: Measure("storage writes", "MB/s", 3.0, outlier=WARN, advice="saves from that node hold up all nodes"),
}


@dataclass(frozen=True)
class Figure:
    """One measurement, or the reason why it failed."""

    measure: str  # key of MEASURES
    nodes: tuple[str, ...]  # the node; of a pair both
    part: str  # what of the node was measured: "cuda:3", "/tmp"; "" for a pair
    kind: str  # only figures of one kind are compared: the model of a device, the setting that names a directory
    value: float | None  # in the measure's unit; None if it failed
    error: str = ""  # why it failed; ""
    blame: str = NODE  # if it is bad: NODE, SETTINGS, or OTHERS, with which a job may run

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Figure:
        """Return the figure that `dataclasses.asdict` has made these fields of."""
        return cls(**{**fields, "nodes": tuple(fields["nodes"])})

    def __str__(self) -> str:
        return " ".join(filter(None, (" and ".join(self.nodes), self.part)))


def worse_than_peers(figure: Figure, figures: Sequence[Figure]) -> float | None:
    """Return how many times worse a figure is than the median of its peers, if it is an outlier; else None."""
    peers = _peers(figure, figures)
    if not figure.value or not peers:
        return None
    measure = MEASURES[figure.measure]
    median = _median(measure, peers)
    times = median / figure.value if measure.more_is_better else figure.value / median
    return times if times > measure.factor and abs(figure.value - median) > measure.margin else None


def outliers(figures: Sequence[Figure]) -> list[Figure]:
    return [figure for figure in figures if worse_than_peers(figure, figures) is not None]


def judged(figures: Sequence[Figure]) -> list[Finding]:
    by_measure = {name: [figure for figure in figures if figure.measure == name] for name in MEASURES}
    return [_finding(MEASURES[name], found) for name, found in by_measure.items() if found]


def bad_node(figures: Sequence[Figure]) -> bool:
    """Return whether a check failed for what only this node's hardware is to blame for. figures: of one node."""
    slow = [figure for figure in outliers(figures) if MEASURES[figure.measure].outlier == FAIL]
    return any(figure.blame == NODE for figure in figures if figure.value is None or figure in slow)


@dataclass(frozen=True)
class DevicesSeen:
    """What the devices of a node are counted by."""

    count: int  # that torch can use; without the processor
    files: int  # /dev/nvidia0, ... that this process may open
    workers: int  # that a job starts on this node; 0: unknown
    listed: int | None  # by CUDA_VISIBLE_DEVICES and its like; None: not set
    why: str = ""  # torch's error if it can use none


def devices_missing(seen: DevicesSeen) -> tuple[str, str] | None:
    """Return what is wrong if a node has fewer devices than it should have, and what is to blame; else None.

    It should have what a variable lists. Else one for each device file, which stays when a device falls off its bus, and one for
    each worker, unless it has none, and computes on its processor, or workers share devices evenly, on purpose.
    """
    if seen.listed is not None:
        expected, by = seen.listed, "the variable of visible devices lists"
    elif seen.files >= seen.workers or not seen.count or seen.workers % seen.count == 0:
        expected, by = seen.files, "/dev has"
    else:
        expected, by = seen.workers, "the workers of this node need"
    if seen.count >= expected:
        return None
    text = f"torch can use {seen.count or 'none'}, and {by} {expected}" + (f": {seen.why}" if seen.why else "")
    unknown = not seen.count and (not seen.files or any(each in seen.why for each in _NOT_BUILT_FOR))
    return text, OTHERS if unknown else NODE


def listed_devices(environ: Mapping[str, str]) -> int | None:
    """Return how many devices the environment lets processes see; None if it names none in particular."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    lists = [[text.strip() for text in environ[name].split(",")] for name in names if name in environ]
    # CUDA ignores what comes after a negative number or nothing
    counts = [sum(1 for _ in takewhile(lambda text: text and not text.startswith(("-", "NoDev")), each)) for each in lists]
    return min(counts, default=None)


def _peers(figure: Figure, figures: Sequence[Figure]) -> list[float]:
    """Return the values of the others that measure the same of the same kind."""
    what = (figure.measure, figure.kind)
    return [each.value for each in figures if each is not figure and each.value and (each.measure, each.kind) == what]


def _median(measure: Measure, peers: Sequence[float]) -> float:
    return statistics.median_high(peers) if measure.more_is_better else statistics.median_low(peers)


def _finding(measure: Measure, figures: Sequence[Figure]) -> Finding:
    failed = [figure for figure in figures if figure.value is None]
    slow = outliers(figures)
    if not failed and not slow:
        return Finding(measure.title, OK, _summary(measure, figures))
    grave = [figure for figure in (*failed, *(slow if measure.outlier == FAIL else ())) if figure.blame != OTHERS]
    texts = _blamed([*failed, *slow], figures)
    texts += [f"{figure}: {figure.error}" for figure in failed] + [_outlier(measure, figure, figures) for figure in slow]
    more = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return Finding(measure.title, FAIL if grave else WARN, "; ".join(texts[:MOST_NAMED]) + more, measure.advice)


def _outlier(measure: Measure, figure: Figure, figures: Sequence[Figure]) -> str:
    peers = _peers(figure, figures)
    times, median = worse_than_peers(figure, figures), _median(measure, peers)
    others = f"the median of the {len(peers)} others" if len(peers) > 1 else "the other"
    return (
        f"{figure}: {figure.value:.3g} {measure.unit}, {times:.1f} times worse than {others}, {median:.3g} "
        f"(limit: {measure.factor:g} times)" + (", and other processes use it" if figure.blame == OTHERS else "")
    )


def _blamed(bad: Sequence[Figure], figures: Sequence[Figure]) -> list[str]:
    """Name each node of which every pair is bad, of several, while there are good pairs without it."""
    found = []
    for node in sorted({node for figure in bad if len(figure.nodes) == 2 for node in figure.nodes}):
        pairs = [figure for figure in figures if node in figure.nodes]
        good = [figure for figure in figures if figure not in bad and node not in figure.nodes]
        if len(pairs) > 1 and good and all(figure in bad for figure in pairs):
            found.append(f"{node} is what its {len(pairs)} pairs have in common")
    return found


def _summary(measure: Measure, figures: Sequence[Figure]) -> str:
    values = [figure.value for figure in figures if figure.value is not None]
    if len(figures) == 1:
        return f"{figures[0]}: {values[0]:.3g} {measure.unit}; there is no other to compare it with"
    if len(figures) <= MOST_NAMED // 2:
        return ", ".join(f"{figure}: {figure.value:.3g}" for figure in figures) + f" {measure.unit}"
    return f"{len(values)} of them, {min(values):.3g} to {max(values):.3g} {measure.unit}"


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which each of the players 0, 1, ... meets each other one once, and in each round one at most."""
    seats: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    half, rounds = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in rounds if pairs]
