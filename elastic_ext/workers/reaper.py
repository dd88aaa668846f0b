"""The reaper: a process that outlives the agent and kills the agent's workers once the agent is gone.

A worker whose agent was killed with SIGKILL would keep training, unseen, on devices that the next round needs.

The agent starts the reaper as `python -I -S reaper.py AGENT_PID TOKEN RUN_DIR` (standard library only: a few MB).
TOKEN is in the environment of every process that the agent starts for its job; RUN_DIR is the agent's private directory. What a
worker starts may have another environment (`env -i`), session and parent (a daemon), and no descriptor of ours. So workers also
carry a mark that each process inherits, and that no program has a use for: see `mark`.

Wire protocol: lines on the reaper's standard input. The reaper sends nothing back; the agent only sees it end.

    workers PID PID ...    the workers of this round; replaces the previous list (a forked worker may not carry the token)
    end clean              the agent ends well: it left on purpose what is still alive
    end                    the agent ends in any other way: nothing that it started may stay

The reaper inherits the agent's listening socket for links and never uses it: while it is open, the other nodes know that one of
the two lives (`rendezvous.links`). So the reaper's own end is how they learn that nothing of this node runs any more.

The agent's death is also an event: its pidfd becomes readable. After a death or `end`, the reaper kills everything that carries
the token or the mark, including grandchildren in any session or group, but resource trackers (see `is_tracker`), and removes
RUN_DIR.
"""

import os
import resource
import select
import shutil
import signal
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS, END = "workers", "end"  # the first word of a line
CLEAN = "clean"

# These are for the agent. The reaper must outlive it, so the agent starts the reaper with them blocked. The last two are Slurm's
# notices (sbatch --signal), which may go to all processes of a job (proctrack/linuxproc).
BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
EXEC_S = 0.3  # from a fork to its exec; no event reports the exec
AGENT_CHECK_S = 1.0  # how often to check whether the agent lives, if no pidfd reports its end
END_CHECK_S = 0.1
RLIMIT_LOCKS = 10  # getrlimit(2). No kernel since 2.4.25 does anything with it, so Python has no name for it
SEARCHES = 30  # a process that sleeps in the kernel cannot be killed: give up after this many searches, of about a second each


def main(agent_pid: int, token: str, run_dir: str) -> None:
    _set_soft_limit(os.getpid(), None)  # where the agent is itself a worker of another agent, whose reaper must not end this one
    agent = _process(agent_pid)
    messages = _listen(agent if os.getppid() == agent_pid else None)  # else the agent died before this process checked
    if messages.end != CLEAN:
        killed = _kill_all(token.encode(), messages.workers, empty_searches=1 if messages.end else 2)
        shutil.rmtree(run_dir, ignore_errors=True)
        if killed:
            which = "is ending" if messages.end else "is gone"
            _log(f"elastic_ext: agent {agent_pid} {which}; killed the processes that it left: {sorted(killed)}")
    shutil.rmtree(run_dir, ignore_errors=True)


def _log(text: str) -> None:
    try:
        os.write(2, text.encode() + b"\n")
    except OSError:
        pass  # no process can read it


class ExactProcess:
    """One process, never a later one with the same pid.

    A pidfd identifies it. If there is no pidfd (an old kernel, a seccomp profile, no descriptor left), its start time does.
    """

    def __init__(self, pid: int) -> None:
        """Open the process. Raises ProcessLookupError."""
        self.pid = pid
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (OSError, AttributeError):
            self._started = start_time(pid)
            if not self._started:
                raise ProcessLookupError(pid) from None

    @property
    def ended(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; return whether it has ended. May return False before the timeout."""
        if self.pidfd >= 0:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        if start_time(self.pid) == self._started and timeout_s > 0:
            select.select([], [], [], min(timeout_s, END_CHECK_S))
        return start_time(self.pid) != self._started

    def kill(self) -> bool:
        """Send SIGKILL. Return False if the process has already ended or this process may not kill it."""
        if self.ended:
            return False
        try:
            if self.pidfd >= 0 and hasattr(signal, "pidfd_send_signal"):
                try:
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                except ProcessLookupError:
                    return False
                except OSError:  # some seccomp profiles refuse this and allow kill(2)
                    os.kill(self.pid, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def is_tracker(pid: int) -> bool:
    """Return whether a process unlinks what killed processes leave in /dev/shm, once all that hold its pipe have ended.

    It ends by then. Killed before, it would leave their shared memory: that fills the memory restart by restart, and a program
    that gives it the same name again fails.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            program, *arguments = file.read().split(b"\0")
    except OSError:
        return False
    # multiprocessing's, with joblib's copy of it; and that of torch's sharing strategy "file_system"
    ours = any(each.startswith(b"from ") and b"resource_tracker import main" in each for each in arguments)
    return ours or os.path.basename(program) == b"torch_shm_manager"


def mark(pid: int, token: str) -> None:
    """Mark a process and what it starts from now on, for the reaper. token: of the agent, hexadecimal.

    The mark is the soft limit on file locks. Only a process that sets that itself (`ulimit -x`, or pam_limits in a login) loses
    it. Where it cannot be set, as under gVisor, the reaper knows the workers, their sessions, and what has the token.

    A busy agent may come after the process has started others. So with the bootstrap workers mark themselves first (`mark_of`).
    """
    _set_soft_limit(pid, mark_of(token)[1])


def mark_of(token: str) -> "tuple[int, int]":
    """Return the mark: which limit, and its soft value. No ordinary limit is as large."""
    return RLIMIT_LOCKS, int(token[:15], 16) | 1 << 60


def _set_soft_limit(pid: int, limit: "int | None") -> None:
    """Set the soft limit on file locks, if that may be set; see `mark`. None: to the hard one."""
    try:
        _, hard = resource.prlimit(pid, RLIMIT_LOCKS)
        resource.prlimit(pid, RLIMIT_LOCKS, (hard if limit is None else limit, hard))
    except (OSError, ValueError):
        pass


def _has_mark(pid: int, mark: bytes) -> bool:
    """Raises OSError. A zombie keeps it."""
    with open(f"/proc/{pid}/limits", "rb", buffering=0) as limits:  # a host has thousands of processes: nothing more for each
        found = limits.read()
    return mark in found and any(line.startswith(b"Max file locks") and line.split()[3] == mark for line in found.splitlines())


def _has_token(pid: int, token: bytes) -> bool:
    """Raises OSError. A zombie has none."""
    with open(f"/proc/{pid}/environ", "rb") as environ:
        return token in environ.read()


def _is_marked(pid: int, token: bytes, mark: bytes, by_environment: bool) -> bool:
    try:
        return _has_mark(pid, mark) or (by_environment and _has_token(pid, token))
    except OSError:  # it has ended, or belongs to another user
        return False


def _process(pid: int) -> "ExactProcess | None":
    try:
        return ExactProcess(pid)
    except ProcessLookupError:
        return None


def stat_fields(pid: int) -> "list[str]":
    """Return what proc_pid_stat(5) says of a process from its third field on; nothing if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(") ")[2].split()
    except OSError:
        return []


def start_time(pid: int) -> str:
    """Return when a process started, in kernel ticks; "" if it has ended, including zombies."""
    fields = stat_fields(pid)
    return fields[19] if fields and fields[0] not in ("Z", "X") else ""


class Messages:
    """The content of the agent's messages so far."""

    def __init__(self) -> None:
        self.workers: dict[int, ExactProcess] = {}  # by pid
        self.end = ""  # CLEAN, "dirty", or "" if the agent has not sent `end`

    def receive(self, line: bytes) -> None:
        kind, _, rest = line.decode().partition(" ")
        if kind == END:
            self.end = rest or "dirty"
        elif kind == WORKERS:
            for worker in self.workers.values():
                worker.close()
            self.workers = {int(pid): opened for pid in rest.split() if (opened := _process(int(pid))) is not None}


def _listen(agent: "ExactProcess | None") -> Messages:
    """Read messages until the agent sends `end` or dies. agent: None if it is dead; its messages can still be read."""
    messages = Messages()
    pending = b""
    poll = select.poll()
    if agent is not None and agent.pidfd >= 0:
        poll.register(agent.pidfd, select.POLLIN)
    poll.register(0, select.POLLIN)
    while not messages.end:
        timeout_ms = 0 if agent is None else None if agent.pidfd >= 0 else AGENT_CHECK_S * 1000
        ready = {fd for fd, _ in poll.poll(timeout_ms)}
        if 0 not in ready:
            if ready or agent is None:
                break  # the agent is dead, and everything that it sent has been read
            if agent.ended:
                agent = None
            continue
        data = os.read(0, 65536)
        if not data:
            poll.unregister(0)
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            messages.receive(line)
    return messages


def _kill_all(token: bytes, workers: dict[int, ExactProcess], empty_searches: int) -> set[int]:
    """Kill the workers, and all processes with the mark or the token; return their pids.

    empty_searches: stop after this many searches that find nothing. After a death, or if workers were left, it is two, because a
    child that was between fork and exec at that time carries the token only after its exec.
    """
    members = _session_members(workers)  # before the workers end, whose pids name their sessions
    killed = {pid for pid, process in {**members, **workers}.items() if process.kill()}
    for process in members.values():
        process.close()
    empty_searches = 2 if killed else empty_searches
    for _ in range(SEARCHES):
        found = kill_marked(token)
        killed |= found
        empty_searches -= not found
        if empty_searches <= 0:
            break
        if not found:
            select.select([], [], [], EXEC_S)
    return killed


def _session_members(workers: dict[int, ExactProcess]) -> dict[int, ExactProcess]:
    """Open the other processes of the sessions that live workers lead, but resource trackers."""
    members: dict[int, ExactProcess] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        leader = _session_of(pid)
        if pid in workers or leader not in workers or is_tracker(pid) or (process := _process(pid)) is None:
            continue
        if _session_of(pid) == leader and not workers[leader].ended:  # so it is the process that was opened, and the session
            members[pid] = process
        else:
            process.close()
    return members


def _session_of(pid: int) -> int:
    """Return the number of its session; 0 if it has ended."""
    fields = stat_fields(pid)
    return int(fields[3]) if fields else 0


def kill_marked(token: bytes) -> "set[int]":
    """Kill each process with the mark or the token but resource trackers; return their pids."""
    killed = set()
    for process in marked(token):
        if not is_tracker(process.pid) and process.kill():
            killed.add(process.pid)
            process.wait(1.0)
    return killed


def marked(token: bytes, by_environment: bool = True) -> "Iterator[ExactProcess]":
    """Yield each process with the mark, open for its turn. by_environment: also those with the token in their environment.

    Each is read again once it is open, so what is done to it cannot hit another process with the same pid.
    """
    mark = b"%d" % mark_of(token.decode())[1]  # as /proc shows it
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid == os.getpid() or not _is_marked(pid, token, mark, by_environment) or (process := _process(pid)) is None:
            continue
        try:
            if _is_marked(pid, token, mark, by_environment) and not process.ended:
                yield process
        finally:
            process.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
