"""Reads from the kernel what a worker without progress does: does it work, sleep, wait for a processor, or is it stopped?

This is the I/O for `detector`. Everything comes from /proc (see proc(5)), but TCP sockets from netlink. None stands for what
cannot be read.

A worker's family is the worker, every process that it has started, and what those have started. Members are found by parent,
which covers a helper in its own session, and by process group and session, which covers a process whose parent has ended. Only a
daemon, which has left both its parent and its session, is missed. (Its environment would identify it. But reading the memory of
another process can block, and the watch must never wait for the processes that it watches.)
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from elastic_ext.hangs import detector, unanswered

_TICKS = os.sysconf("SC_CLK_TCK")
_ENDED = ("Z", "X", "x")

# The system calls in which an interactive debugger waits for its user (Linux asm/unistd_64.h, asm-generic/unistd.h).
_READ = {"x86_64": 0, "aarch64": 63}.get(platform.machine())
_SELECT = {"x86_64": (23, 270), "aarch64": (72,)}.get(platform.machine(), ())  # readline waits here, for stdin only
_EPOLL = {"x86_64": (232, 281, 441), "aarch64": (22, 441)}.get(platform.machine(), ())  # prompt_toolkit waits here
_EPOLLIN = 0x1

# The system calls that any handled signal ends, no matter what its handler does: pause and rt_sigsuspend. Where there is none,
# libc calls ppoll without descriptors and timeout. (The same sources.)
_SIGNAL_WAITS = {"x86_64": (34, 130), "aarch64": (133,)}.get(platform.machine(), ())
_HAS_PAUSE = platform.machine() == "x86_64"
_PPOLL = {"x86_64": 271, "aarch64": 73}.get(platform.machine())


@dataclass(frozen=True)
class ProcessStats:
    """A snapshot of a worker. Its processes are counted from their start."""

    state: str  # state of the main thread, a letter from proc(5)
    cpu_s: float = 0.0  # processor time of the family, including members that have ended and were waited for
    waited_s: float = 0.0  # the time that the worker's own threads were ready to run but had no processor
    io_bytes: int | None = 0  # bytes that the family has moved by read(2) and write(2); None: not known for a member
    # bytes moved by each TCP socket of the family, by inode; None: not known
    sockets: Mapping[int, int] | None = field(default_factory=dict)
    own_sockets: frozenset[int] | None = frozenset()  # inodes of those that the worker itself has open; None: not known
    # a thread of the family is in state D, which no signal ends: it waits for a disk or a file server
    asleep_in_kernel: bool = False
    wchan: str = ""  # where in the kernel the main thread sleeps; "": not known
    debugged: bool = False  # a debugger holds it, or waits for its user at a terminal
    # own_cpu_s, main_cpu_s: the worker's own part of that, and its main thread's part
    own_cpu_s: float = 0.0
    main_cpu_s: float = 0.0
    # its main thread waits for a signal, such as in signal.pause(), and goes on after any; None: not known
    awaits_signal: bool | None = False


@dataclass(frozen=True)
class Rates:
    """A worker's activity between two checks."""

    cpu_share: float | None = None  # the share of a processor that its family used; None: not known
    waiting_share: float | None = None  # the share of the time that its threads waited for a processor; None: not known
    bytes_s: float | None = None  # bytes per second that its family moved through files and sockets; None: not known
    children_share: float | None = None  # the part of cpu_share that other processes used
    threads_share: float | None = None  # the part of its other threads


def rates(before: ProcessStats, now: ProcessStats, took_s: float) -> Rates:
    """Return the rates of one worker over `took_s` seconds.

    A sum shrinks when a family member has ended and no process waited for it. Its rate is then unknown.
    """
    cpu_s, own_s, main_s = now.cpu_s - before.cpu_s, now.own_cpu_s - before.own_cpu_s, now.main_cpu_s - before.main_cpu_s
    moved = _moved(before, now)
    return Rates(
        cpu_share=cpu_s / took_s if cpu_s >= 0 else None,
        waiting_share=max(0.0, now.waited_s - before.waited_s) / took_s,  # a thread that has ended takes its time with it
        bytes_s=moved / took_s if moved is not None else None,
        children_share=max(0.0, cpu_s - own_s) / took_s if cpu_s >= 0 else None,  # they are not read at the same moment
        threads_share=max(0.0, own_s - main_s) / took_s,
    )


def _moved(before: ProcessStats, now: ProcessStats) -> int | None:
    """Return the bytes moved by files, and by the sockets that are open now."""
    if before.io_bytes is None or now.io_bytes is None or now.io_bytes < before.io_bytes:
        return None
    if before.sockets is None or now.sockets is None:
        return None
    by_sockets = (max(0, total - before.sockets.get(inode, 0)) for inode, total in now.sockets.items())
    return now.io_bytes - before.io_bytes + sum(by_sockets)


def read(pids: Iterable[int]) -> dict[int, ProcessStats]:
    """Return the stats of these workers, by pid, without those that cannot be read. Each must lead its process group."""
    wanted = set(pids)
    processes = _processes()
    families = members(processes, wanted)
    moved = moved_by_inode()
    found = {}
    for pid in wanted & processes.keys():  # without its family it would seem to do nothing
        try:
            own = _read_process(pid)
        except (OSError, ValueError, IndexError):  # it has just ended, or this /proc differs from proc(5)
            continue
        family = families[pid]
        living = [each for each in family if processes[each].state not in _ENDED]
        found[pid] = replace(
            own,
            cpu_s=sum(processes[each].cpu_s for each in family),
            io_bytes=_io_bytes(living),
            sockets=_moved_of(living, moved),
            own_sockets=frozenset(own_sockets) if (own_sockets := _moved_of([pid], moved)) is not None else None,
            asleep_in_kernel=any(state == detector.ASLEEP_IN_KERNEL for each in living for state in _thread_states(each)),
        )
    return found


def open_sockets(pids: Iterable[int]) -> dict[int, set[int]]:
    """Return the inodes of all open sockets of each worker's family that may be read, by pid."""
    return {pid: _socket_inodes(family)[0] for pid, family in members(_processes(), set(pids)).items()}


def _socket_inodes(family: Iterable[int]) -> tuple[set[int], bool]:
    """Return the inodes of their open sockets, and whether those of all could be read that live."""
    found, whole = set[int](), True
    for pid in family:
        try:
            found |= inodes_of(pid)
        except OSError:
            whole = whole and not _lives(pid)
    return found, whole


def _moved_of(family: Iterable[int], moved: Mapping[int, int] | None) -> dict[int, int] | None:
    """Return the bytes of their TCP sockets by inode; None: not known. moved: see `moved_by_inode`."""
    inodes, whole = _socket_inodes(family)
    return {inode: moved[inode] for inode in inodes if inode in moved} if whole and moved is not None else None


# Families.


@dataclass(frozen=True)
class StatFields:
    """A parsed /proc/PID/stat. cpu_s: includes children that have ended and were waited for."""

    parent: int
    group: int
    session: int
    state: str = "S"
    cpu_s: float = 0.0


def members(processes: Mapping[int, StatFields], workers: Collection[int]) -> dict[int, list[int]]:
    """Return the pids of each worker's family, including its own. processes: all processes of this machine, by pid."""
    found: dict[int, list[int]] = {worker: [] for worker in workers}
    for pid in processes:
        worker = _worker_of(pid, processes, found.keys())
        if worker is not None:
            found[worker].append(pid)
    return found


def _worker_of(pid: int, processes: Mapping[int, StatFields], workers: Collection[int]) -> int | None:
    seen = set()  # the processes were read one after the other, so reused pids could form a cycle
    while pid in processes and pid not in seen:
        one = processes[pid]
        mine = next((each for each in (pid, one.group, one.session) if each in workers), None)
        if mine is not None:
            return mine
        seen.add(pid)
        pid = one.parent
    return None


def _processes() -> dict[int, StatFields]:
    """Return all processes of this machine, by pid; none if not all can be read, as when no descriptor is left for a while."""
    found: dict[int, StatFields] = {}
    try:
        entries = os.listdir("/proc")
    except OSError:
        return found
    for entry in entries:
        if not entry.isdecimal():
            continue
        try:
            state, parent, group, session, *rest = _stat(entry)
            ticks = sum(map(int, rest[7:11]))  # utime, stime, cutime, cstime
        except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):  # it has just ended, or is not to be seen
            continue
        except OSError:
            return {}
        found[int(entry)] = StatFields(int(parent), int(group), int(session), state, ticks / _TICKS)
    return found


def _read_process(pid: int) -> ProcessStats:
    status = dict(line.split(":", 1) for line in _text(pid, "status").splitlines() if ":" in line)
    tracer = int(status.get("TracerPid", "0")) != 0
    wchan = _optional(pid, "wchan").strip("\0\n ")
    fields, main = _stat(pid), _optional(pid, f"task/{pid}/stat").rpartition(")")[2].split()
    return ProcessStats(
        state=fields[0],
        waited_s=_waited_s(pid),
        wchan="" if wchan == "0" else wchan,
        debugged=tracer or _reads_terminal(pid),
        own_cpu_s=_cpu_s(fields),
        main_cpu_s=_cpu_s(main) if main else 0.0,
        awaits_signal=_awaits_signal(pid, fields[0], wchan),
    )


def _stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on. The second is a name, which may contain anything."""
    return _text(pid, "stat").rpartition(")")[2].split()


def _cpu_s(fields: list[str]) -> float:
    """Return the processor time of a process, or of a thread, without its children."""
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _io_bytes(family: Iterable[int]) -> int | None:
    """Return the bytes moved by the living members. The counts of the others went to the process that waited for them."""
    total = 0
    for pid in family:
        try:
            counts = dict(line.split(":") for line in _text(pid, "io").splitlines())
            total += int(counts["rchar"]) + int(counts["wchar"])
        except (OSError, ValueError, KeyError):
            if _lives(pid):
                return None  # it belongs to another user, or this kernel does not count
    return total


def _lives(pid: int) -> bool:
    try:
        return _stat(pid)[0] not in _ENDED
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return False
    except OSError:
        return True  # for all that can be seen


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _thread_states(pid: int) -> Iterator[str]:
    for thread in _threads(pid):
        yield _optional(pid, f"task/{thread}/stat").rpartition(")")[2].strip()[:1]


def _waited_s(pid: int) -> float:
    waited_ns = 0
    for thread in _threads(pid):
        fields = _optional(pid, f"task/{thread}/schedstat").split()
        waited_ns += int(fields[1]) if len(fields) > 1 else 0
    return waited_ns / 1e9


def _awaits_signal(pid: int, state: str, wchan: str) -> bool | None:
    call = _optional(pid, "syscall").split()  # "running" if it is in none; not readable without the right to trace
    if call and _SIGNAL_WAITS:
        if not call[0].isdecimal():
            return False
        number, arguments = int(call[0]), [int(each, 16) for each in call[1:4]]
        return number in _SIGNAL_WAITS or (number == _PPOLL and arguments[1:] == [0, 0])
    if state == "R":
        return False
    if "poll" in wchan and not _HAS_PAUSE:
        return None
    return any(name in wchan for name in ("pause", "sigsuspend")) if wchan not in ("", "0") else None


# Debuggers.


def _reads_terminal(pid: int) -> bool:
    """Return whether a thread waits for input from a terminal, as pdb does at a breakpoint and ipdb in its own thread."""
    return any(_is_terminal(pid, descriptor) for thread in _threads(pid) for descriptor in _awaited_descriptors(pid, thread))


def _awaited_descriptors(pid: int, thread: str) -> list[int]:
    """Return the descriptors that the thread waits to read from, according to the arguments of its system call."""
    call = _optional(pid, f"task/{thread}/syscall").split()
    if len(call) < 2 or not call[0].isdecimal():
        return []
    number, first = int(call[0]), int(call[1], 16)
    if number == _READ:
        return [first]
    if number in _SELECT:
        return [first - 1]
    return _watched(pid, first) if number in _EPOLL else []


def _watched(pid: int, epoll: int) -> list[int]:
    """Return the descriptors that this epoll instance watches for input: lines `tfd: N events: HEX ...`, see proc(5)."""
    lines = [line.split() for line in _optional(pid, f"fdinfo/{epoll}").splitlines() if line.startswith("tfd:")]
    return [int(fields[1]) for fields in lines if int(fields[3], 16) & _EPOLLIN]


def _is_terminal(pid: int, descriptor: int) -> bool:
    try:
        return descriptor >= 0 and os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def _text(pid: int | str, name: str) -> str:
    with open(f"/proc/{pid}/{name}", errors="replace") as file:
        return file.read()


def _optional(pid: int | str, name: str) -> str:
    try:
        return _text(pid, name)
    except OSError:
        return ""


# The TCP sockets of this network namespace, by netlink: sock_diag(7), which `ss -ti` uses. The constants are those of
# linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h; the same on every architecture.
#
# Bytes: /proc/PID/io counts read(2) and write(2) but not send(2) and recv(2), so an upload from memory looks idle there. Not
# counted here: other protocols (QUIC, RDMA, sockets to a daemon on this machine), other network namespaces, and what a connection
# moved between the previous check and its end.

_TIMEOUT_S = 1.0  # the kernel answers at once, or not at all

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI48x")  # inet_diag_req_v2: family, protocol, extensions, states, any address
_ATTRIBUTES_AT = 72  # in inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_MOVED = struct.Struct("=QQ")  # of tcp_info: tcpi_bytes_acked, tcpi_bytes_received
_MOVED_AT = 120
# TCP states (net/tcp_states.h) in which a socket can move bytes: established, fin wait 1 and 2, close wait, last ack, closing.
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
_SYN_SENT = 2
# Those in which one may wait for an answer: established, fin wait 1, close wait.
_ENDS_KNOWN = sum(1 << state for state in (1, _SYN_SENT, 4, 8))
# inet_diag_msg: family, state, timer; ports and addresses in network byte order; ms until the timer expires; inode
_MESSAGE = struct.Struct("=BBBx2x2s16s16s12xI12xI")
_FAMILY_BYTES = {2: 4, 10: 16}  # AF_INET, AF_INET6
_RETRANSMIT, _PROBE = 1, 4  # timers
# tcp_info: retransmits, probes, backoff; rto in us; ms since the last acknowledgement
_INFO = struct.Struct("=2xBBB3xI44xI")


def sockets(states: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the inet_diag_msg and the tcp_info of each TCP socket, of both address families.

    states: a bit for each TCP state (net/tcp_states.h).

    Raises OSError: the kernel refuses, or knows no such netlink family.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            yield from _ask(kernel, family, states)


def _ask(kernel: socket.socket, family: int, states: int) -> Iterator[tuple[bytes, bytes]]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), states)
    kernel.send(
        _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, family, 0) + request
    )
    while True:
        for kind, body in _messages(kernel.recv(1 << 16)):
            if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                code = struct.unpack_from("=i", body)[0] if body else 0
                if code:
                    raise OSError(-code, os.strerror(-code))
                return
            yield from ((body, info) for info in _infos(body))


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        yield kind, data[at + _HEADER.size : at + length]
        at += _padded(max(length, _HEADER.size))


def _infos(body: bytes) -> Iterator[bytes]:
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == _INET_DIAG_INFO:
            yield body[at + _ATTRIBUTE.size : at + length]
        at += _padded(max(length, _ATTRIBUTE.size))


def _padded(length: int) -> int:
    """Round up, because messages and attributes begin at multiples of four."""
    return (length + 3) & ~3


def moved_by_inode() -> dict[int, int] | None:
    """Return the bytes sent and acknowledged, or received, by each TCP socket of this network namespace; None: not known."""
    try:
        return {_MESSAGE.unpack_from(message)[-1]: sum(_MOVED.unpack_from(info, _MOVED_AT)) for message, info in sockets(_STATES)}
    except (OSError, struct.error):  # no such netlink family, no such module, Linux before 4.2
        return None


def inodes_of(pid: int) -> set[int]:
    """Return the inodes of all open sockets of the process. Raises OSError if it has ended or belongs to another user."""
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # just closed
            kind, _, inode = os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":")  # socket:[INODE]
            found |= {int(inode[1:-1])} if kind == "socket" else set()
    return found


def connections(inodes: Mapping[int, Collection[int]]) -> dict[int, list[unanswered.TcpConnection]] | None:
    """Return the TCP connections among the sockets of each worker's family; None: not known. By global rank, as `inodes`."""
    try:
        found = {each.inode: each for message, info in sockets(_ENDS_KNOWN) if (each := _connection(message, info))}
    except (OSError, struct.error):
        return None
    return {rank: [found[inode] for inode in own if inode in found] for rank, own in inodes.items()}


def _connection(message: bytes, info: bytes) -> unanswered.TcpConnection | None:
    family, state, timer, port, local, peer, left_ms, inode = _MESSAGE.unpack_from(message)
    retransmissions, probes, backoff, timeout_us, acked_ms = _INFO.unpack_from(info)
    size = _FAMILY_BYTES.get(family)
    if size is None:
        return None
    waits = timer == _RETRANSMIT
    return unanswered.TcpConnection(
        inode,
        _address(local[:size]),
        _address(peer[:size]),
        int.from_bytes(port, "big"),
        connecting=state == _SYN_SENT,
        retransmissions=retransmissions if waits else 0,
        backoff=backoff,
        window_probes=probes if timer == _PROBE else 0,
        timeout_s=timeout_us / 1e6,
        left_s=left_ms / 1000,
        acked_s=acked_ms / 1000,
    )


def _address(packed: bytes) -> str:
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None  # of a socket for both families
    return str(mapped or address)
