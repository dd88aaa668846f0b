"""`elastic-ext doctor --preflight`: measures this node, and together with others the network between them; names the outlier.

A child process (`preflight_probe.py`) measures, because a device or a disk may hang.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from elastic_ext.base import isolated, name_lookup
from elastic_ext.base.errors import EX_UNAVAILABLE
from elastic_ext.base.settings import Settings
from elastic_ext.cli import FAIL, OK, WARN, Finding, as_json, doctor, exit_code, one_line, rendered
from elastic_ext.failures import slurm

PROBE = str(Path(__file__).with_name("preflight_probe.py"))
VARIABLE = "ELASTIC_EXT_PREFLIGHT"
IMPORTING = "importing torch"  # what the child does first; if it fails there, it is not for this node's hardware
HARDWARE = "preflight"  # the finding where the child hung or died while it measured; a warning where it was killed
ALONE_S, TOGETHER_S = 40.0, 110.0  # for the child once it has imported torch; a healthy node takes some seconds
END_S = 0.5  # for the child to end on its own, and then on SIGTERM
FIRST_PORT, PORTS = 32000, 768  # of the step of a Slurm job, below the ports that the kernel gives out


@dataclass(frozen=True)
class Task:
    """What the child measures, as JSON in the variable VARIABLE. Only the child looks into a directory, which may hang."""

    # Directories to write to, or to what is there above them, by the setting that names them; "": where temporary files go.
    disks: Mapping[str, str]
    storage: str  # checkpoint_dir, if it is there; "" to leave it out
    together: bool  # whether this is one of several processes that measure the network between their nodes
    node: str = ""  # what the processes of this node, and no others, have in common; "": the host's name
    workers: int = 0  # that a job starts on this node; 0: unknown


def party(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for the processes that measure together, and NODE; empty if this process is alone.

    They come from torchrun, or from a step of Slurm with several tasks (srun), not from a batch script.
    """
    if environ.get("WORLD_SIZE", "1") != "1" and "RANK" in environ and "MASTER_ADDR" in environ:
        return {"NODE": environ.get("GROUP_RANK", "")}
    if environ.get("SLURM_STEP_NUM_TASKS", "1") == "1" or "SLURM_PROCID" not in environ:
        return {}
    hosts = slurm.hostnames({**environ, "SLURM_JOB_NODELIST": environ.get("SLURM_STEP_NODELIST", "")})
    number = sum(int(text) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if (text := environ.get(name, "")).isdecimal())
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or (hosts[0] if hosts else ""),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(FIRST_PORT + number % PORTS),
        "NODE": environ.get("SLURM_NODEID", ""),
    }


def run(args: argparse.Namespace) -> int:
    """Measure, and print what was found; return 78 if something failed or is an outlier, else 0. Alone, as an agent's health
    check, 69 if that is the fault of this node's hardware.

    Of several processes that measure together rank 0 prints; another one prints only why it cannot take part.
    """
    read: list[Settings] = []
    first = doctor.check_settings(args.rdzv_conf, os.environ, read)
    if not read:
        return _print([first], args.json)
    variables = {} if args.alone else party(os.environ)
    if variables.get("MASTER_ADDR") == "":
        detail = "the hosts of this step are unknown (SLURM_STEP_NODELIST, scontrol)"
        return _print([Finding("processes", FAIL, detail, "set MASTER_ADDR to the host of task 0")], args.json)
    task = _task(read[0], args.alone, variables)
    environ = {name_lookup.OPTIONS: name_lookup.BRIEFLY, **os.environ, **variables, VARIABLE: json.dumps(asdict(task))}
    figures, failure = measure(environ, TOGETHER_S if task.together else ALONE_S)
    if task.together and environ["RANK"] != "0" and failure is None:
        return 0
    code = _print([*([failure] if failure else []), *judged(figures)], args.json, figures)
    ill = bad_node(figures) or (failure is not None and (failure.name, failure.state) == (HARDWARE, FAIL))
    return EX_UNAVAILABLE if args.alone and ill else code


def _print(findings: list[Finding], as_document: bool, figures: Sequence[Figure] = ()) -> int:
    """Print the findings; as JSON also each figure. Return the exit code."""
    more = {"figures": [asdict(figure) for figure in figures]}
    print(as_json(findings, more) if as_document else rendered(findings), flush=True)
    return exit_code(findings)


def _task(settings: Settings, alone: bool, variables: Mapping[str, str]) -> Task:
    """Return what to measure. Alone, as an agent's health check, a node does not answer for a storage that all nodes share."""
    disks = {"TMPDIR": ""}
    if settings.local_dir is not None and "://" not in settings.local_dir:
        disks["local_dir"] = settings.local_dir
    storage = "" if alone else settings.checkpoint_dir or ""
    workers = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Task(disks, storage, bool(variables), variables.get("NODE", ""), int(workers) if workers.isdecimal() else 0)


def measure(environ: Mapping[str, str], limit_s: float) -> tuple[list[Figure], Finding | None]:
    """Run the child; return its figures, and why it failed, if it did.

    limit_s: seconds from its first line, which comes once torch is imported.
    """
    figures: list[Figure] = []
    doing, ended = IMPORTING, False
    with os.fdopen(os.memfd_create("errors"), "w+b") as errors:  # a disk may be full
        process = subprocess.Popen(
            isolated.command(PROBE), env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )  # in this process group, with which the agent kills a health check
        assert process.stdout is not None
        try:
            for message in _messages(process.stdout, limit_s):
                doing, ended = message.get("doing", doing), message.get("end", ended)
                if "figure" in message:
                    figures.append(Figure.of(message["figure"]))
        except TimeoutError as error:
            return figures, Finding(HARDWARE, FAIL, f"{doing}: {error}")
        finally:
            _end(process)
        if ended:
            return figures, None
        if process.returncode == -signal.SIGKILL:  # not by `_end`, which waits for no process that it has killed
            why = "killed, by the kernel for want of memory, say; that shows nothing of this node's hardware"
            return figures, Finding(HARDWARE, WARN, f"{doing}: {why}")
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    name = "torch" if doing == IMPORTING else HARDWARE
    return figures, Finding(name, FAIL, f"{doing}: {one_line(last) or f'ended with code {process.returncode}'}")


def _messages(pipe: IO[bytes], limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield the child's messages until it ends. Raises TimeoutError."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    within_s, rest = doctor.PROBE_S, b""
    deadline = time.monotonic() + within_s
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        chunk = os.read(pipe.fileno(), 65536)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for message in filter(None, map(_message, lines)):
            if within_s != limit_s:  # the first one
                within_s, deadline = limit_s, time.monotonic() + limit_s
            yield message
    raise TimeoutError(f"no end within {within_s:g} s")


def _message(line: bytes) -> dict[str, Any]:
    """Return a message of the child; {} for a line that a library has printed while it was imported."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of the child; end it if that does not come. What sleeps in the kernel stays."""
    assert process.stdout is not None
    process.stdout.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            process.wait(END_S)
            return
        except subprocess.TimeoutExpired:
            process.send_signal(number)


# What the figures mean: which device, disk or pair of nodes is the outlier.

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
