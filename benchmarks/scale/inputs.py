"""The figures that go into the simulation, each with its source. What has no source says "assumed".

The papers' tables were read as public notes reproduce them, not in the papers; the trace of InfiniteHBD was read itself
(github.com/stepfun-ai/InfiniteHBD-Trace, fault_trace.json: 584 faults of 400 servers in 348 days).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

ASSUMED = "assumed"
RSC = 'Meta, "Revisiting Reliability", arXiv 2410.21680'
LLAMA = "Llama 3, arXiv 2407.21783, table 5"
TRACE = "InfiniteHBD, arXiv 2502.03885: its published trace"
FT_HSDP = "Meta, FT-HSDP, arXiv 2602.00277"
B200 = "504 B200 GPUs, arXiv 2605.09370"


@dataclass(frozen=True)
class Figure:
    """A figure and its source."""

    value: float
    unit: str
    source: str


RATES: Mapping[str, Figure] = {
    "RSC-2": Figure(2.34, "failures per 1,000 node-days", RSC),
    "Llama 3": Figure(419 / (2048 * 54) * 1000, "failures per 1,000 node-days", f"{LLAMA}: 419 in 54 days on 16,384 GPUs"),
    "InfiniteHBD": Figure(584 / (400 * 348) * 1000, "failures per 1,000 node-days", TRACE),
    "RSC-1": Figure(6.50, "failures per 1,000 node-days", RSC),
}
FIGURES: Mapping[str, Figure] = {
    **{f"rate, {name}": each for name, each in RATES.items()},
    "nodes that fail again": Figure(3 / 63, "of the nodes", f"{B200}: 3 of 63 nodes have over half of all exclusions"),
    "their failures": Figure(0.5, "of all failures", f"{B200}; assumed: their share of the nodes stays"),
    "repair, median": Figure(20.4, "hours", TRACE),
    "repair, mean": Figure(129.3, "hours", f"{TRACE}; a log-normal distribution of this median and mean is assumed"),
    "several nodes at once": Figure(
        57 / 482, "of the failures that take nodes", f"{TRACE}: faults within ten minutes of the one before"
    ),
    "collective timeout": Figure(600, "s", "torch's default for NCCL"),
    "storage, writes": Figure(
        40e9 / 504, "bytes/s and GPU", f"{B200}: bursts of 16 % of 250 GB/s; assumed: it grows with the job"
    ),
    "storage, reads": Figure(150.5e9 / 504, "bytes/s and GPU", f"{B200}: 21.5 % of 700 GB/s; assumed: it grows with the job"),
    "state": Figure(346e6, "bytes a GPU", f"{ASSUMED}: 405e9 parameters, 14 bytes each, on 16,384 GPUs"),
    "step": Figure(6, "s", ASSUMED),
    "setup of a script": Figure(10, "s", ASSUMED),
    "checkpoints on disk": Figure(300, "s between two", ASSUMED),
    "spares": Figure(1e-3, "of the time without a node, on average", f"{ASSUMED}: as many as `elastic-ext plan` advises"),
    "a bad node fails again": Figure(600, "s after training goes on, mean", ASSUMED),
    "the platform takes a bad node away": Figure(3600, "s after its first failure, unless the job has", ASSUMED),
    "somebody submits a stopped job again": Figure(3600, "s", ASSUMED),
    "etcd is away": Figure(300, "s, once in 30 days", ASSUMED),
    "storage is away": Figure(1800, "s, once in 30 days", ASSUMED),
}
MULTIPLE_NODES: Mapping[int, int] = {2: 39, 3: 10, 4: 3, 5: 2, 6: 1, 9: 1, 14: 1}  # groups of that trace, by their nodes

REPAIR_MEDIAN_S = FIGURES["repair, median"].value * 3600
REPAIR_SIGMA = math.sqrt(2 * math.log(FIGURES["repair, mean"].value / FIGURES["repair, median"].value))

# Mixes of causes: (name in the paper, how many, cause in `causes`).
Mix = tuple[tuple[str, int, str], ...]

LLAMA_3: Mix = (
    ("Faulty GPU", 148, "gpu"),
    ("GPU HBM3 memory", 72, "gpu memory"),
    ("Software bug", 54, "software bug"),
    ("Network switch/cable", 35, "network"),
    ("Host maintenance", 32, "node gone"),
    ("GPU SRAM memory", 19, "gpu memory"),
    ("GPU system processor", 17, "gpu processor"),
    ("NIC", 7, "nic"),
    ("NCCL watchdog timeouts", 7, "hang"),
    ("Silent data corruption", 6, "wrong numbers"),
    ("GPU thermal interface and sensor", 6, "gpu hot"),
    ("SSD", 3, "disk ill"),
    ("Power supply", 3, "power"),
    ("Server chassis", 2, "power"),
    ("IO expansion board", 2, "nic"),
    ("Dependency", 2, "service"),
    ("CPU", 2, "host ill"),
    ("System memory", 2, "host ill"),
)
ACME: Mix = (
    ("NVLinkError", 54, "nvlink"),
    ("CUDAError", 21, "gpu"),
    ("NodeFailure", 16, "node gone"),
    ("ECCError", 12, "gpu memory"),
    ("NetworkError", 12, "network"),
    ("ConnectionError", 147, "service"),
    ("S3StorageError", 10, "object store"),
    ("NCCLTimeoutError", 6, "hang"),
    ("NCCLRemoteError", 3, "network"),
    ("DataloaderKilled", 6, "loader killed"),
    ("AttributeError", 67, "AttributeError"),
    ("OutofMemoryError", 14, "gpu out of memory"),
    ("RuntimeError", 65, "shapes"),
    ("AssertionError", 105, "AssertionError"),
    ("ValueError", 33, "ValueError"),
    ("ZeroDivisionError", 5, "ZeroDivisionError"),
    ("ModelLoadingError", 104, "model loading"),
    ("DatasetLoadingError", 5, "dataset loading"),
    ("FileNotFoundError", 568, "FileNotFoundError"),
    ("OSError", 266, "OSError of a path"),
    ("TypeError", 620, "TypeError"),
    ("NameError", 18, "NameError"),
    ("PermissionError", 7, "PermissionError"),
    ("ImportError", 111, "ImportError"),
    ("KeyError", 260, "KeyError"),
    ("SyntaxError", 10, "SyntaxError"),
    ("ArgumentError", 3, "arguments"),
    ("CalledProcessError", 4, "CalledProcessError"),
    ("IndexError", 23, "IndexError"),
)
BYTEROBUST: Mix = (
    ("CUDA error", 19_968, "cuda error"),
    ("CPU overload", 6_095, "cpu overload"),
    ("CPU OOM", 5_567, "host out of memory"),
    ("Insufficient disk space", 2_755, "disk full"),
    ("InfiniBand error", 1_599, "nic"),
    ("Filesystem mount (2.1 %)", 1_163, "file system"),
    ("HDFS error (2.0 %)", 1_107, "object store"),
    ("Job hang", 5_506, "hang, some of code"),
    ("NaN value", 148, "wrong numbers"),
)
PHILLY: Mix = (
    ("CPU out of memory", 12_076, "host out of memory"),
    ("Incorrect inputs", 9_690, "FileNotFoundError"),
    ("Semantic error", 2_943, "TypeError"),
    ("Core dump", 2_912, "core dump"),
    ("Invalid memory access", 2_602, "illegal access of code"),
    ("Model checkpoint error", 1_995, "object store"),
    ("CUDA failure", 1_484, "gpu"),
    ("Syntax error", 1_132, "SyntaxError"),
    ("MPI error", 634, "network"),
    ("GPU out of memory", 487, "gpu out of memory"),
    ("MPI runtime failure", 478, "network"),
    ("Permission error", 299, "PermissionError"),
    ("Import error", 148, "ImportError"),
    ("Job preempted", 147, "preempted"),
    ("CUDA init failed", 141, "gpu not ready"),
    ("Model diverged", 84, "diverged"),
    ("CUDA version mismatch", 49, "driver too old"),
    ("GPU ECC error", 10, "gpu memory"),
)
MIXES: Mapping[str, Mix] = {"Llama 3": LLAMA_3, "Acme": ACME, "ByteRobust": BYTEROBUST, "Philly": PHILLY}
MIX_SOURCES: Mapping[str, str] = {
    "Llama 3": LLAMA,
    "Acme": "Acme, arXiv 2403.07648, table 3",
    "ByteRobust": "ByteRobust, arXiv 2509.16293, table 1; code or data changed by hand and slow jobs (18.1 %) are left out",
    "Philly": "Philly, ATC 2019, table of failures; 6 % are left out, whose cause is unknown (no signature, a traceback alone)",
}


def table() -> list[tuple[str, str, str]]:
    """Return all figures: name, value, source."""
    rows = [(name, f"{each.value:.4g} {each.unit}", each.source) for name, each in FIGURES.items()]
    rows += [
        (f"causes, {name}", f"{sum(count for _, count, _ in MIXES[name]):,} failures", source)
        for name, source in MIX_SOURCES.items()
    ]
    return rows
