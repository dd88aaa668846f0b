"""The child process of `preflight.py`: measures devices, disks, storage and the network, with torch.

Its task is JSON in the variable ELASTIC_EXT_PREFLIGHT, the fields of `preflight.Task`. With `together`, torch's variables (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT) describe the processes that measure together; they meet in torch's store only, so that a
link that is cut costs its own pair and nothing else.

Output, one JSON object per line: {"doing": TEXT} before each step, {"figure": FIELDS} for each Figure; of rank 0 also those of
all others; {"end": true} at the end.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.cli import one_line, preflight
from elastic_ext.cli.preflight import NODE, OTHERS, SETTINGS, SHARED_GIB, DevicesSeen, Figure, outliers, tournament
from elastic_ext.rendezvous import address

MATMUL_S, COPY_S, DISK_S = 0.3, 0.2, 0.5  # to measure for; each runs twice at least
TILE = 1024  # rows of the smallest matrix
DEVICES_S = 4.0  # for all devices of this process together
DISK_BYTES, STORAGE_BYTES = 4 << 20, 4 << 20  # of one write
MEETING_S = 30.0  # for the other processes to come
PAIR_S = 5.0  # for two nodes to connect, and for each of their collectives
PAIRS_S = 6.0  # a round of the tournament begins no later than this; with many nodes not each pair is measured
FIRST_BYTES, MOST_BYTES = 64 << 10, 64 << 20  # of an all_reduce
LONG_S = 0.05  # a larger one is not tried after one that takes so long
LATENCY_S = 0.2


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    with os.fdopen(output, "w", buffering=1) as file:

        def report(what: str, value: object) -> None:
            print(json.dumps({what: value}), file=file, flush=True)

        _Probe(json.loads(os.environ["ELASTIC_EXT_PREFLIGHT"]), report).run()
        report("end", True)
    os._exit(0)  # skip the threads of libraries


class _Probe:
    """All that one process measures. task: fields of `preflight.Task`."""

    def __init__(self, task: Mapping[str, Any], report: Callable[[str, object], None]) -> None:
        self._task, self._report = task, report
        self._figures: list[Figure] = []

    def run(self) -> None:
        self._report("doing", "looking for devices")
        found, missing = _devices(), _missing(self._task["workers"])
        party = self._meet() if self._task["together"] else None
        mates = party.ranks(party.node) if party else [0]  # those on this node
        name, first = (party.names[party.node], mates.index(party.rank)) if party else (socket.gethostname(), 0)
        self._measure_devices(name, found[first :: len(mates)])
        if first == 0:
            self._figures += [Figure(preflight.DEVICES, (name,), "", "", None, *why) for why in missing]
            self._measure_directories(name)
        if party is not None:
            self._measure_pairs(party, found[first % len(found)])
            self._gather(party)
        for figure in self._figures:
            self._report("figure", asdict(figure))

    def _meet(self) -> _Party:
        self._report("doing", "waiting for the other processes")
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _choose_interface(os.environ["MASTER_ADDR"])
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=MEETING_S)))
        store = dist.PrefixStore("elastic_ext/preflight", store)
        own = socket.gethostname()
        store.set(f"node/{rank}", json.dumps([self._task["node"] or own, own]))
        keys = [f"node/{each}" for each in range(world)]
        if not _answers(store, keys, MEETING_S):
            missing = ", ".join(str(each) for each, key in enumerate(keys) if not store.check([key]))
            sys.exit(f"rank {missing} did not come within {MEETING_S:g} s")
        nodes = [json.loads(store.get(f"node/{each}")) for each in range(world)]
        return _Party(store, rank, tuple(key for key, _ in nodes), tuple(host for _, host in nodes))

    def _measure_devices(self, node: str, names: Sequence[str]) -> None:
        """Measure each device; measure those once more that are outliers, and keep the better figure."""
        share = min(1.0, DEVICES_S / (len(names) * (MATMUL_S + COPY_S))) if names else 1.0
        found: list[Figure] = []
        shared: dict[str, float] = {}
        for name in names:
            self._report("doing", f"measuring {name}")
            if (held_gib := _held_gib(name)) > SHARED_GIB:
                shared[name] = held_gib
                why = f"other processes hold {held_gib:.3g} GiB of its memory"
                self._figures.append(Figure(preflight.DEVICES, (node,), name, "", None, why, OTHERS))
            found += _device_figures(node, name, share, name in shared)
        for slow in outliers(found):
            self._report("doing", f"measuring {slow.part} again")
            figures = _device_figures(node, slow.part, share, slow.part in shared)
            again = [each for each in figures if each.measure == slow.measure]
            found = [each for each in found if each is not slow] + [
                max(slow, *again, key=lambda each: -1.0 if each.value is None else each.value)
            ]
        self._figures += found

    def _measure_directories(self, node: str) -> None:
        for setting, directory in self._task["disks"].items():
            self._report("doing", f"writing to {directory or 'a temporary file'}")
            self._figures.append(_disk_figure(node, setting, directory))
        if storage := self._task["storage"]:
            self._report("doing", "writing to checkpoint_dir")
            if "://" in storage or os.path.isdir(storage):
                self._figures.append(_storage_figure(node, storage))

    def _measure_pairs(self, party: _Party, device: str) -> None:
        began = time.monotonic()
        party.ends(0)  # its own part
        for number, pairs in enumerate(tournament(len(party.nodes)), 1):
            if not party.goes_on(number, time.monotonic() - began < PAIRS_S):
                break
            pair = next((pair for pair in pairs if party.node in pair), None)
            if pair is not None:
                names = tuple(party.names[each] for each in pair)
                self._report("doing", f"an all_reduce of {' and '.join(names)}")
                members = [rank for each in pair for rank in party.ranks(each)]
                found = _pair_figures(party, members, f"{number}/{pair[0]}", device, names)
                self._figures += found if party.rank == members[0] else []
            party.ends(number)

    def _gather(self, party: _Party) -> None:
        """Give rank 0 the figures of all."""
        self._report("doing", "gathering the figures")
        party.store.set(f"figures/{party.rank}", json.dumps([asdict(figure) for figure in self._figures]))
        if party.rank == 0:
            others = range(1, len(party.keys))
            _answers(party.store, [f"figures/{rank}" for rank in others], MEETING_S)
            for rank in others:
                if party.store.check([f"figures/{rank}"]):
                    self._figures += [Figure.of(fields) for fields in json.loads(party.store.get(f"figures/{rank}"))]
                else:
                    name, error = party.names[party.nodes.index(party.keys[rank])], "gave no figures; its own output says why"
                    self._figures.append(Figure(preflight.PROCESS, (name,), f"rank {rank}", "", None, error))


@dataclass(frozen=True)
class _Party:
    """The processes that measure together. keys: of each rank, what its node has for itself; hosts: its host's name."""

    store: dist.Store
    rank: int
    keys: tuple[str, ...]
    hosts: tuple[str, ...]

    @property
    def nodes(self) -> list[str]:
        """The key of each node, in the order of their first ranks."""
        return list(dict.fromkeys(self.keys))

    @property
    def names(self) -> list[str]:
        """The name of each node: that of its host, with a number where hosts have the same name."""
        hosts = [self.hosts[self.keys.index(node)] for node in self.nodes]
        return [host if hosts.count(host) == 1 else f"{host}#{number}" for number, host in enumerate(hosts)]

    @property
    def node(self) -> int:
        return self.nodes.index(self.keys[self.rank])

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, key in enumerate(self.keys) if key == self.nodes[node]]

    def goes_on(self, number: int, has_time: bool) -> bool:
        """Return whether there is a round `number`, from 1: rank 0 decides, once all have ended the one before."""
        if self.rank == 0:
            ready = _answers(self.store, [f"all/{number - 1}"], MEETING_S)
            self.store.set(f"round/{number}", "go" if has_time and ready else "stop")
        elif not _answers(self.store, [f"round/{number}"], 2 * MEETING_S):
            sys.exit(f"rank 0 began no round within {2 * MEETING_S:g} s")
        return bool(self.store.get(f"round/{number}") == b"go")

    def ends(self, number: int) -> None:
        if self.store.add(f"ended/{number}", 1) == len(self.keys):
            self.store.set(f"all/{number}", "")


def _answers(store: dist.Store, keys: list[str], timeout_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        return False
    return True


def _choose_interface(master: str) -> None:
    """Have gloo use the interface towards the others where this host's name leads to the loopback, as the agent does."""
    if "GLOO_SOCKET_IFNAME" in os.environ or address.is_loopback(master):
        return
    found = address.look_up(address.address_towards(master))
    if found.loops and found.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = found.interface


def _devices() -> list[str]:
    if not torch.accelerator.is_available():
        return ["cpu"]
    kind = torch.accelerator.current_accelerator().type
    return [f"{kind}:{number}" for number in range(torch.accelerator.device_count())]


def _missing(workers: int) -> list[tuple[str, str]]:
    """Return what is wrong, and what is to blame, if devices of this node are missing. workers: of a job on it; 0: unknown."""
    kind, count, why = "", 0, ""
    if torch.accelerator.is_available():
        kind, count = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
    if kind == "mps" or (not kind and torch.version.cuda is None):
        return []  # as many as there are workers are never there; or this torch is for processors
    if kind == "cuda" and any(" MIG " in torch.cuda.get_device_name(number) for number in range(count)):
        return []  # a process sees one instance of its device, however many there are
    files = _device_files()
    if not kind and files:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            why = one_line(error)
    seen = DevicesSeen(count, files, workers, preflight.listed_devices(os.environ), why)
    missing = preflight.devices_missing(seen)
    return [missing] if missing is not None else []


def _device_files() -> int:
    """Return how many devices of NVIDIA this process is given. A scheduler may let it see others, but not open them."""
    count = 0
    for path in Path("/dev").glob("nvidia[0-9]*"):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except PermissionError:
            continue
        except OSError:
            pass  # it should be there, and has fallen off its bus
        count += 1
    return count


def _held_gib(name: str) -> float:
    """Return how much of a device's memory is taken before this process has put anything there but its context."""
    device = torch.device(name)
    info = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    try:
        free, total = info(device) if info is not None else (0, 0)
    except RuntimeError:  # what measures next says why
        return 0.0
    return float(total - free) / 2**30


def _best_s(run: Callable[[], object], for_s: float, sync: Callable[[], object]) -> float:
    """Return the shortest time of several runs, in seconds. The best one, because other load can only make it longer."""
    run()
    sync()
    best, began = float("inf"), time.monotonic()
    for count in range(1, 1000):
        start = time.perf_counter()
        run()
        sync()
        best = min(best, time.perf_counter() - start)
        if count >= 2 and time.monotonic() - began > for_s:
            break
    return best


def _device_figures(node: str, name: str, share: float, shared: bool = False) -> list[Figure]:
    """Measure matrix products and a copy within a device's memory.

    share: of the usual time. shared: whether other processes use the device, too, and it may be slow or lack memory.
    """
    device, cpu = torch.device(name), name == "cpu"
    kind = _processor() if cpu else _model(device)

    def sync() -> None:
        if not cpu:
            torch.accelerator.synchronize(device)

    figures = []
    for measure, run in ((preflight.MATMUL, _tflops), (preflight.COPY, _copy_gb_s)):
        try:
            value, error, blame = run(device, share, sync), "", OTHERS if shared else NODE
        except _WrongResult as wrong:
            value, error, blame = None, str(wrong), NODE
        except RuntimeError as failure:  # of CUDA, too
            taken = any(text in str(failure) for text in _TAKEN)
            value, error, blame = None, one_line(failure), OTHERS if taken else NODE
        figures.append(Figure(measure, (node,), name, kind, value, error, blame))
    return figures


# Another process uses the device, which is therefore not at fault. The first is torch.OutOfMemoryError's text, and CUDA's where
# there is no room for a process's context (another error class of torch); the second is cuBLAS's; the third concerns the
# processor's memory; the last is CUDA's for a device that allows one process only.
_TAKEN = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "busy or unavailable")
# A full disk is not the node's fault: saves go to checkpoint_dir then. A directory that is missing, or that may not be written
# to, is so on all nodes. EROFS is not here: the kernel mounts a disk that fails read-only.
_BLAMED = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), OTHERS),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG), SETTINGS),
}


class _WrongResult(Exception):
    """A device has computed a wrong result."""


def _tflops(device: torch.device, share: float, sync: Callable[[], object]) -> float:
    """Return the rate of matrix products, in TFLOP/s. Raises _WrongResult.

    The numbers are -1, 0 and 1, so that sums are whole numbers which each format here holds exactly, added in any order. The
    matrix consists of equal tiles, and so does the right product; of the first tile a product with a vector is compared
    (Freivalds' check).
    """
    chance = torch.Generator().manual_seed(0)
    tile, vector = (torch.randint(-1, 2, (TILE, columns), generator=chance) for columns in (TILE, 1))
    repeats, kind = (1, torch.float32) if device.type == "cpu" else (8, torch.bfloat16)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    factor = tile.to(device, kind).repeat(repeats, repeats)
    product = torch.empty_like(factor)
    best = _best_s(lambda: torch.mm(factor, factor, out=product), share * MATMUL_S, sync)
    tiles, first = product.view(repeats, TILE, repeats, TILE), product[:TILE, :TILE]
    expected = repeats * (tile @ (tile @ vector))
    if not torch.equal(first.cpu().long() @ vector, expected) or not bool((tiles == first[None, :, None, :]).all()):
        raise _WrongResult("a product of matrices is wrong")
    return float(2 * len(factor) ** 3 / best / 1e12)


def _copy_gb_s(device: torch.device, share: float, sync: Callable[[], object]) -> float:
    """Return the rate of copies within the device's memory, in GB/s. Raises _WrongResult."""
    size = (64 << 20) if device.type == "cpu" else (512 << 20)
    source = torch.arange(size // 4, dtype=torch.int32, device=device)
    copy = torch.zeros_like(source)
    best = _best_s(lambda: copy.copy_(source), share * COPY_S, sync)
    if not torch.equal(copy, source):
        raise _WrongResult("a copy in memory differs from its source")
    return size / best / 1e9


def _model(device: torch.device) -> str:
    """Return the model of a device; its type where torch has no name for it (MPS, MTIA)."""
    name_of = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(name_of(device)) if name_of is not None else device.type


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), platform.machine())
    except OSError:
        model = platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def _there(directory: str) -> str:
    """Return what is there of a directory: a job makes the rest. "": where temporary files go. Raises FileNotFoundError."""
    path = Path(directory or tempfile.gettempdir())
    return str(next((each for each in (path, *path.parents) if os.path.lexists(each)), path))


def _disk_figure(node: str, setting: str, directory: str) -> Figure:
    """Write, with fsync, to a file without a name."""
    data, written, began = os.urandom(DISK_BYTES), 0, time.monotonic()
    try:
        directory = _there(directory)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            while written < 2 * DISK_BYTES or time.monotonic() - began < DISK_S:
                file.write(data)
                os.fsync(file.fileno())
                written += DISK_BYTES
                if written >= 32 * DISK_BYTES:
                    break
    except OSError as error:
        blame = _BLAMED.get(error.errno or 0, NODE)
        return Figure(preflight.DISK, (node,), directory, setting, None, one_line(error), blame)
    return Figure(preflight.DISK, (node,), directory, setting, written / (time.monotonic() - began) / 1e6)


def _storage_figure(node: str, url: str) -> Figure:
    name, data = f".elastic_ext_preflight_{os.urandom(16).hex()}", os.urandom(STORAGE_BYTES)
    began = time.monotonic()
    try:
        storage = open_storage(url)
        storage.put(name, data)
        took_s = time.monotonic() - began
        storage.remove(name)
    except (OSError, UsageError) as error:
        blame = SETTINGS if isinstance(error, UsageError) else _BLAMED.get(error.errno or 0, NODE)
        return Figure(preflight.STORAGE, (node,), "checkpoint_dir", "", None, one_line(error), blame)
    return Figure(preflight.STORAGE, (node,), "checkpoint_dir", "", STORAGE_BYTES / took_s / 1e6)


def _pair_figures(party: _Party, members: Sequence[int], key: str, device: str, names: tuple[str, ...]) -> list[Figure]:
    """Measure all_reduce of all ranks of two nodes. members: their ranks. key: of their part of the store."""
    try:
        store, timeout = dist.PrefixStore(f"pair/{key}", party.store), timedelta(seconds=PAIR_S)
        nccl = device.startswith("cuda")
        place = torch.device(device if nccl else "cpu")
        if nccl:
            torch.cuda.set_device(place)
        group = (dist.ProcessGroupNCCL if nccl else dist.ProcessGroupGloo)(
            store, members.index(party.rank), len(members), timeout
        )
        latency_us, gb_s = _measured(group, place)
    except RuntimeError as error:
        return [Figure(preflight.BANDWIDTH, names, "", "", None, one_line(error))]
    found = {preflight.BANDWIDTH: gb_s, preflight.LATENCY: latency_us}
    return [Figure(measure, names, "", "", value) for measure, value in found.items()]


def _measured(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return the latency in microseconds, and the bandwidth of the largest all_reduce in GB/s."""

    def reduce(tensor: torch.Tensor) -> None:
        group.allreduce([tensor]).wait()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def slowest(value: float) -> float:
        """Every rank gets the same answer, so all go on to the same all_reduce."""
        agreed = torch.tensor([value], dtype=torch.float64, device=device)
        group.allreduce([agreed], dist.ReduceOp.MAX).wait()
        return float(agreed)

    def best_s(size: int, runs: int) -> float:
        tensor, times = torch.zeros(size // 4, device=device), []
        for _ in range(runs):
            start = time.perf_counter()
            reduce(tensor)
            times.append(time.perf_counter() - start)
        return slowest(min(times))

    once_s = best_s(4, 3)
    latency_s = best_s(4, max(3, min(50, int(LATENCY_S / once_s))))
    size = FIRST_BYTES
    while (took_s := best_s(size, 2)) < LONG_S and size < MOST_BYTES:
        size *= 4
    return latency_s * 1e6, size / took_s / 1e9


if __name__ == "__main__":
    main()
