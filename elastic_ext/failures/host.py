"""The host's evidence about a failure: the kernel's OOM killer, the GPU driver's log, links that went down, the platform.

Each source answers with plain values within its deadline and never raises, on any host. None means "unknown"
(no such file, no permission to read it, no answer in time), never "fine".

A link that flaps or stays down (a port of InfiniBand or RoCE, an interface that workers use) breaks the collectives of all nodes,
and the host that reports it first is rarely the one with it. Linux counts that. NCCL's own words for it ("Got async event : port
error") go to stdout, and only if NCCL_DEBUG is set.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.base import isolated, threads
from elastic_ext.base.settings import Settings
from elastic_ext.failures import commands
from elastic_ext.failures.evidence import Platform

logger = logging.getLogger(__name__)

SYSFS = Path("/sys/class")
KUBERNETES = "KUBERNETES_SERVICE_HOST"  # each pod has this variable
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")  # NCCL's may begin with "=" (no prefixes) or "^" (all but these)
SAMPLE_S = 300.0  # seconds between two looks while a round runs
# A link that went down longer ago did not cause this failure: collectives give up after 10 minutes (torch's default), and
# InfiniBand after one or two.
WINDOW_S = 900.0
MAX_NAMED = 8  # links in a report


@dataclass(frozen=True)
class Link:
    """One link. downs: how often it has gone down since the host started; None: not counted."""

    up: bool
    downs: int | None


@dataclass(frozen=True)
class LinksDown:
    """Links that were up and went down, by name, e.g. "mlx5_0 port 1". away: one of them is still down, or its device is gone."""

    names: tuple[str, ...] = ()
    away: bool = False


NONE_DOWN = LinksDown()


def links(environ: Mapping[str, str], own: str = "", sysfs: Path = SYSFS) -> dict[str, Link]:
    """Return the links of this host by name. A device whose firmware hangs may never answer.

    Args:
        environ: of the workers; see INTERFACES.
        own: the interface by which the other nodes reach this one; "" if unknown.
    """
    found = {}
    for port in sorted(sysfs.glob("infiniband/*/ports/*")):
        interface = _text(port / "gid_attrs/ndevs/0")  # of RoCE: there, the port's own counter may stay at 0
        downs = [_number(port / "counters/link_downed"), _downs(sysfs / "net" / interface) if interface else None]
        known = [each for each in downs if each is not None]
        found[f"{port.parts[-3]} port {port.name}"] = Link("ACTIVE" in _text(port / "state"), sum(known) if known else None)
    for folder in sorted((sysfs / "net").glob("*")):
        if (folder / "device").exists() or _is_used(folder.name, environ, own):
            found[folder.name] = Link(_text(folder / "carrier") == "1", _downs(folder))
    return found


def _is_used(name: str, environ: Mapping[str, str], own: str) -> bool:
    given = [each for variable in INTERFACES if (each := environ.get(variable, "")) and not each.startswith("^")]
    prefixes = [prefix for each in given for prefix in each.removeprefix("=").split(",") if prefix]
    return name == own or (name != "lo" and name.startswith(tuple(prefixes)))


def went_down(before: Mapping[str, Link], now: Mapping[str, Link]) -> LinksDown:
    """Return the links that were up before and have gone down since, also if they are up again."""
    away = [name for name, link in before.items() if link.up and not (name in now and now[name].up)]
    back = [name for name, link in before.items() if link.up and name not in away and (now[name].downs or 0) > (link.downs or 0)]
    return LinksDown(tuple((*away, *back)[:MAX_NAMED]), bool(away))


def _downs(interface: Path) -> int | None:
    return _number(interface / "carrier_down_count")


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    """Return the content of a file; "" if it cannot be read: an interface that is shut off has no carrier."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


class LinkHistory:
    """The last looks at the links, while a round runs. Each look is on a thread of its own: sysfs asks the device."""

    def __init__(self, environ: Mapping[str, str], own: str = "", sysfs: Path = SYSFS) -> None:
        self._environ, self._own, self._sysfs = environ, own, sysfs
        self._looks: deque[tuple[float, dict[str, Link]]] = deque()  # with their times; the oldest alone may be out of the window
        self._look: threading.Thread | None = None
        self._due = 0.0

    def round_started(self) -> None:
        """Forget earlier looks: what happened before this round has nothing to do with it."""
        self._looks.clear()
        self.look()

    def next_look_s(self) -> float:
        """Return the seconds until the next look is due."""
        return max(0.0, self._due - time.monotonic())

    def look(self, now: float | None = None) -> None:
        """Begin a look, unless the last one has not ended. Returns at once. now: time.monotonic() if None."""
        now = time.monotonic() if now is None else now
        self._due = now + SAMPLE_S
        if self._look is None or not self._look.is_alive():
            text = "the links of this host are not read: %s"  # no reason to end a job that runs
            self._look = threads.started(lambda: self._take(now), "elastic_ext-links", logger.debug, text)

    def went_down(self, wait_s: float) -> LinksDown:
        """Return the links that went down in the last WINDOW_S, by the newest look. wait_s: for that look to end, in seconds."""
        if self._look is not None:
            self._look.join(wait_s)
        looks = list(self._looks)
        return went_down(looks[0][1], looks[-1][1]) if looks else NONE_DOWN

    def _take(self, now: float) -> None:
        try:
            self._looks.append((now, links(self._environ, self._own, self._sysfs)))
            while len(self._looks) > 1 and self._looks[1][0] <= now - WINDOW_S:
                self._looks.popleft()
        except OSError as error:
            logger.debug("the links of this host cannot be read: %s", error)


# The GPU driver: the recovery action that it recommends for each GPU (NVML, drivers since 2024).

TIMEOUT_S = 2.0  # a hung driver never answers; a child process can be left behind, a thread of the agent cannot

# nvmlDeviceGpuRecoveryAction_t in nvml.h
ACTIONS = {0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset", 5: "gpu_reset_bus"}


@dataclass(frozen=True)
class RecoveryAction:
    """The action for one GPU. pci: its address. action: from ACTIONS, or "action N" if newer; None if the driver reports none."""

    pci: str
    action: str | None


def recovery_actions(timeout_s: float = TIMEOUT_S) -> list[RecoveryAction] | None:
    """Return one action per GPU; None without pynvml, a driver that supports this, or an answer in time."""
    probe = str(Path(__file__).with_name("nvml_probe.py"))
    return parse_recovery(commands.output(isolated.command(probe), timeout_s))


def parse_recovery(text: str | None) -> list[RecoveryAction] | None:
    """Read the probe's output: a JSON list of [PCI address, action or null]; None for anything else."""
    try:
        found = json.loads(text or "")
        return [
            RecoveryAction(str(pci), None if action is None else ACTIONS.get(int(action), f"action {int(action)}"))
            for pci, action in found
        ]
    except (ValueError, TypeError):
        return None


# The kernel log: Xids, the NVIDIA driver's own error codes.

DEVICE = "/dev/kmsg"
RECORD_BYTES = 8192  # the kernel's own limit; a shorter read is refused
READ_S = 0.05
MAX_XIDS = 1000  # a broken GPU repeats its errors

# "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."; older drivers omit "PCI:" and the
# process, and some write pid='<unknown>'.
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-9A-Fa-f])?)\): "
    r"(\d{1,5})(?:, pid='?(\d{1,10})\b)?"
)


@dataclass(frozen=True)
class Xid:
    """One Xid. pci: the GPU's address in lower case. pid: in the host's pid namespace; None if the driver gives none."""

    number: int
    pci: str
    pid: int | None = None


def parse_xid(line: str) -> Xid | None:
    """Return the Xid of a line of the kernel log; None for any other line."""
    found = _XID.search(line)
    if found is None:
        return None
    pci, number, pid = found.groups()
    return Xid(int(number), pci.lower(), int(pid) if pid else None)


class KernelLog:
    """Reads the kernel log since begin(). This needs permission to read /dev/kmsg: root, or dmesg_restrict=0."""

    def __init__(self, device: str = DEVICE) -> None:
        self._xids: list[Xid] = []
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        self.begin()

    def begin(self) -> None:
        """Skip all records so far."""
        self._xids = []
        if self._descriptor is not None:
            try:
                os.lseek(self._descriptor, 0, os.SEEK_END)  # after the last record
            except OSError:
                self.close()

    def xids(self) -> list[Xid] | None:
        """Return all Xids since begin(); None if the log is unreadable. Takes READ_S at most; the next call reads the rest."""
        if self._descriptor is None:
            return None
        deadline = time.monotonic() + READ_S
        while time.monotonic() < deadline:
            try:
                record = os.read(self._descriptor, RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the kernel has overwritten the next record; the next read gets the oldest one left
            except OSError:
                self.close()
                return None
            if not record:
                break
            xid = parse_xid(record.decode(errors="replace"))
            if xid is not None and len(self._xids) < MAX_XIDS:
                self._xids.append(xid)
        return list(self._xids)

    def close(self) -> None:
        """Release the log."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


# The kernel's out-of-memory kills in the control groups of the agent and its workers. Version 2 counts in memory.events,
# including the groups below; version 1 in memory.oom_control, each group for itself (Linux 4.13). A group counts if its file is
# visible in this mount namespace. Kills by a shortage of the whole host also count.

MAX_BYTES = 1 << 20  # mountinfo of a host with thousands of containers


@dataclass(frozen=True)
class _Hierarchy:
    """One version of control groups: its mount type, controller and file with the count."""

    fstype: str
    controller: str  # as in /proc/PID/cgroup; "" is version 2
    file: str


_HIERARCHIES = (_Hierarchy("cgroup2", "", "memory.events"), _Hierarchy("cgroup", "memory", "memory.oom_control"))


def oom_counts(pids: Iterable[int] = ()) -> dict[str, int]:
    """Return the kills so far, by the file that counts them; empty if no file is readable.

    Args:
        pids: workers that are not reaped yet; each may be in its own group. The agent's group always counts.
    """
    mounts = _read("/proc/self/mountinfo") or ""
    files = {file for pid in ("self", *pids) for file in counting_files(_read(f"/proc/{pid}/cgroup") or "", mounts)}
    return {file: count for file in sorted(files) if (count := _count(file)) is not None}


def oom_kills_since(before: Mapping[str, int]) -> int | None:
    """Return the kills since `before`, a result of oom_counts(); None if unknown.

    A removed group loses its count; then the answer is known only if another group counted a kill.
    """
    rises = [None if (now := _count(file)) is None else now - count for file, count in before.items()]
    known = [rise for rise in rises if rise is not None]
    most = max(known, default=0)  # not the sum: version 2 also counts a kill in every group above it
    return most if most > 0 or (known and len(known) == len(rises)) else None


def counting_files(cgroup: str, mountinfo: str) -> list[str]:
    """Return the files that count the kills of a process, from the texts of its /proc/PID/cgroup and our /proc/self/mountinfo."""
    paths = {}  # by controller
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if number.isdigit() and separator:
            paths.update(dict.fromkeys(controllers.split(","), path))
    found = []
    for line in mountinfo.splitlines():
        fields, separator, source = line.partition(" - ")
        words, (fstype, *options) = fields.split(" "), source.split(" ") or [""]
        if not separator or len(words) < 5 or len(options) < 2:
            continue
        root, mount = _unescape(words[3]), _unescape(words[4])
        for hierarchy in _HIERARCHIES:
            if fstype != hierarchy.fstype or hierarchy.controller not in (*options[1].split(","), ""):
                continue
            below = _below(root, paths.get(hierarchy.controller))
            if below is not None:
                found.append(os.path.normpath(f"{mount}/{below}/{hierarchy.file}"))
    return found


def _below(root: str, path: str | None) -> str | None:
    """Return `path` relative to a mount of `root`; None if `path` is not under `root`."""
    if path is None or "/.." in path:  # outside of our own cgroup namespace
        return None
    if root == "/":
        return path
    return path[len(root) :] if f"{path}/".startswith(f"{root}/") else None


def _unescape(path: str) -> str:
    """Undo the octal escapes of mountinfo: spaces, tabs, newlines and backslashes."""
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(escaped, plain)
    return path


def _count(file: str) -> int | None:
    for line in (_read(file) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdigit():
            return int(value)
    return None


def _read(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES).decode(errors="surrogateescape")
    except OSError:
        return None


def detect(environ: Mapping[str, str]) -> Platform:
    """Ask the platform why this process ends. Takes up to 2 s if the platform hangs.

    Slurm comes first: with Slinky, Slurm's nodes are pods, but Slurm ends the job. A Platform without a name: it is unknown.
    """
    if in_slurm(environ):
        from elastic_ext.failures import slurm

        return slurm.query(environ)
    if KUBERNETES in environ:
        from elastic_ext.failures import kubernetes

        return kubernetes.platform_of(kubernetes.get_pod(environ))
    return Platform()


def import_platform(environ: Mapping[str, str]) -> None:
    """Import what the functions here need of this platform: a failure must not wait for it."""
    if in_slurm(environ):
        importlib.import_module("elastic_ext.failures.slurm")
    if KUBERNETES in environ:
        importlib.import_module("elastic_ext.failures.kubernetes")


def in_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a job of Slurm."""
    return bool(environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", "")))


def slurm_notices(environ: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Return the signals by which Slurm may warn this process that the time is nearly up."""
    if not in_slurm(environ):
        return ()
    from elastic_ext.failures import slurm

    return slurm.NOTICES


def slurm_end(environ: Mapping[str, str]) -> int | None:
    """Return the Unix time at which Slurm ends this job; None if that is unknown."""
    if "SLURM_JOB_END_TIME" not in environ:
        return None
    from elastic_ext.failures import slurm

    return slurm.read_environment(environ).end_time


def deletion_grace_s(environ: Mapping[str, str]) -> float | None:
    """Return the seconds until Kubernetes kills our pod while deleting it; None if unknown. Takes up to 1 s."""
    if KUBERNETES not in environ:
        return None
    from elastic_ext.failures import kubernetes

    return kubernetes.deletion_grace_s(kubernetes.get_pod(environ), time.time())


ANSWER_S = 0.4  # less than `judgement.SETTLE_S`; a platform or driver that answers later counts as unknown
NVIDIA_DRIVER = "/proc/driver/nvidia/version"  # exists while the kernel module is loaded


@dataclass(frozen=True)
class HostEvidence:
    """The host's evidence since the round started. None, or a platform without a name, means unknown."""

    oom_kills: int | None
    xids: tuple[int, ...]
    platform: Platform
    gpu_recovery: tuple[str, ...] = ()
    links: LinksDown = NONE_DOWN
    full: str = ""  # see `no_room`


FULL_BYTES = 1 << 16  # with less room than this, what a worker prints is lost, or the print itself fails


def no_room(logs_dir: str, room: os.statvfs_result, root: bool) -> str:
    """Return how the file system of the workers' logs is full, for people; "" if it has room. root: may use its reserve. Pure."""
    free = room.f_frsize * (room.f_bfree if root else room.f_bavail)
    if room.f_blocks and free < FULL_BYTES:  # one that does not count its blocks never runs out of them
        return f"the file system of the logs in {logs_dir} is full, {free} bytes are free"
    if room.f_files and not (room.f_ffree if root else room.f_favail):
        return f"the file system of the logs in {logs_dir} is full, no inodes are free"
    return ""


class HostProbe:
    """Collects the host's evidence after a failure, and keeps the counts from before the round."""

    def __init__(self, settings: Settings, driver: str = NVIDIA_DRIVER, interface: str = "", logs_dir: str = "") -> None:
        """
        Args:
            driver: a file that exists while NVIDIA's driver is loaded.
            interface: by which the other nodes reach this host.
            logs_dir: where the workers' logs are; "": nowhere.
        """
        import_platform(os.environ)
        self.links = LinkHistory(os.environ, interface)
        self._settings = settings
        self._driver = driver
        self._logs_dir = logs_dir
        self._full = ""
        self._log = KernelLog()
        self._before: dict[str, int] = {}
        self._platform = Platform()
        self._gpu_recovery: tuple[str, ...] = ()
        self._asking: list[threading.Thread] = []

    def close(self) -> None:
        """Release the kernel log."""
        self._log.close()

    def round_started(self, pids: Iterable[int]) -> None:
        """Record the counts at the start of a round. pids: the round's workers."""
        self._before = oom_counts(tuple(pids))
        self.links.round_started()
        self._log.begin()  # ignore records from before this round

    def start_asking(self) -> None:
        """Start to ask the platform, the GPU driver, the links and the disk, each in its own thread; see `evidence`."""
        self.links.look()
        self._platform, self._gpu_recovery, self._full = Platform(), (), ""
        questions: list[Callable[[], None]] = [self._ask_platform, self._ask_room]
        if os.path.exists(self._driver):
            questions.append(self._ask_driver)
        self._asking = [threading.Thread(target=ask, name="elastic_ext-host", daemon=True) for ask in questions]
        for thread in self._asking:
            thread.start()

    def _ask_platform(self) -> None:
        self._platform = detect(os.environ)

    def _ask_room(self) -> None:
        with suppress(OSError):
            self._full = no_room(self._logs_dir, os.statvfs(self._logs_dir), os.geteuid() == 0)

    def _ask_driver(self) -> None:
        """Ask the driver in a child process, which creates no CUDA context."""
        actions = [gpu.action for gpu in recovery_actions() or ()]
        self._gpu_recovery = tuple(action for action in actions if action not in (None, "none"))

    def evidence(self, wait_s: float = ANSWER_S) -> HostEvidence:
        """Return the evidence after `start_asking`. wait_s: seconds for all answers together; later answers count as unknown."""
        deadline = time.monotonic() + wait_s
        for thread in self._asking:
            thread.join(max(0.0, deadline - time.monotonic()))
        xids = tuple(xid.number for xid in self._log.xids() or [])
        links = self.links.went_down(max(0.0, deadline - time.monotonic()))
        return HostEvidence(oom_kills_since(self._before), xids, self._platform, self._gpu_recovery, links, self._full)
