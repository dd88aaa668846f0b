"""What outlives the agent: kills the agent's workers when the agent is gone.

A worker whose agent was killed with SIGKILL would go on training, unseen, on devices that the next round needs. The agent starts
this file as a process of its own (`python -I -S`, standard library only: a few MB) and talks to it over standard input:

    workers PID PID ...    the workers of this round (a forked worker may not carry the token)
    will JSON              how to take this node out of the rendezvous: an etcd lease to revoke, and how to reach etcd
    end clean              the agent ends well: what is still alive was left on purpose
    end                    the agent ends otherwise: nothing that it started may stay

The agent's death is an event too: its pidfd becomes readable. Then, as after `end`, everything that carries the agent's token in
its environment is killed, grandchildren included, whatever session or group they moved to; the agent's private directory is
removed. After a death, and only when nothing of the node runs any more, the lease is revoked: the other nodes go on at once.
"""

import os
import select
import shutil
import signal
import sys

# Those are for the agent, and this process ends after it: the agent starts it with them blocked.
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
REVOKE_TIMEOUT_S = 2.0
EXEC_S = 0.3  # from fork to exec; nothing tells of it
AGENT_LOOK_S = 1.0  # whether the agent lives, where no pidfd tells of its end
END_LOOK_S = 0.1
LOOKS = 30  # a process that sleeps in the kernel cannot be killed: give up after so many looks, about as many seconds


def main(agent_pid: int, token: str, run_dir: str) -> None:
    agent = _process(agent_pid)
    told = _listen(agent if os.getppid() == agent_pid else None)  # None: it died before we looked
    if told.end != "clean":
        killed = _kill_all(token.encode(), told.workers, looks_in_vain=1 if told.end else 2)
        shutil.rmtree(run_dir, ignore_errors=True)
        if killed:
            which = "ends" if told.end else "is gone"
            _say(f"elastic_ext: agent {agent_pid} {which}; killed what it had started: {sorted(killed)}")
    shutil.rmtree(run_dir, ignore_errors=True)
    if not told.end and told.will:
        _carry_out(told.will)


def _say(text: str) -> None:
    try:
        os.write(2, text.encode() + b"\n")
    except OSError:
        pass  # who would read it is gone


class Process:
    """A process, and never another one that has got its number since.

    A pidfd holds it. Where there is none (an old kernel, a seccomp profile, no descriptor left) it is known by the time at which
    it started.
    """

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError."""
        self.pid = pid
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (OSError, AttributeError):
            self._began = _began(pid)
            if not self._began:
                raise ProcessLookupError(pid) from None

    @property
    def ended(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, after so long at most."""
        if self.pidfd >= 0:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        if _began(self.pid) == self._began and timeout_s > 0:
            select.select([], [], [], min(timeout_s, END_LOOK_S))
        return _began(self.pid) != self._began

    def kill(self) -> bool:
        """Send SIGKILL; False where it has ended already, or may not be killed."""
        if self.ended:
            return False
        try:
            if self.pidfd >= 0 and hasattr(signal, "pidfd_send_signal"):
                try:
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                except ProcessLookupError:
                    return False
                except OSError:  # refused, perhaps, where kill(2) is not
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


def _began(pid: int) -> bytes:
    """When a process started, as the kernel counts; nothing where it has ended, a zombie too."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b") ")[2].split()  # from the third of proc_pid_stat(5) on
    except OSError:
        return b""
    return fields[19] if fields[0] not in (b"Z", b"X") else b""


class Told:
    """What the agent has said. workers: by pid. will: JSON, or "". end: "clean", "dirty", or "" if it has just died."""

    def __init__(self) -> None:
        self.workers: dict[int, Process] = {}
        self.will = ""
        self.end = ""


def _listen(agent: "Process | None") -> Told:
    """Until the agent ends: return what it has said. agent: None: it is dead, what it said waits to be read."""
    told = Told()
    pending = b""
    poll = select.poll()
    if agent is not None and agent.pidfd >= 0:
        poll.register(agent.pidfd, select.POLLIN)
    poll.register(0, select.POLLIN)
    while True:
        timeout_ms = 0 if agent is None else None if agent.pidfd >= 0 else AGENT_LOOK_S * 1000
        ready = {fd for fd, _ in poll.poll(timeout_ms)}
        if 0 not in ready:
            if ready or agent is None:
                return told  # what was said before the death has been read
            if agent.ended:
                agent = None
            continue
        data = os.read(0, 65536)
        if not data:
            poll.unregister(0)
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            word, _, rest = line.partition(b" ")
            if word == b"end":
                told.end = rest.decode() or "dirty"
                return told
            if word == b"will":
                told.will = rest.decode()
            else:
                for worker in told.workers.values():
                    worker.close()
                told.workers = {int(pid): opened for pid in rest.split() if (opened := _process(int(pid))) is not None}


def _carry_out(will: str) -> None:
    """Revoke the lease through etcd's JSON gateway (3.4 and later): this process has no gRPC."""
    import json
    import ssl
    import urllib.request

    told = json.loads(will)
    context = None
    if told["ca"] or told["cert"]:
        context = ssl.create_default_context(cafile=told["ca"])
        if told["cert"]:
            context.load_cert_chain(told["cert"], told["key"])

    def post(url: str, body: dict[str, object], token: str = "") -> dict[str, str]:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": token} if token else {})
        with opener.open(request, timeout=REVOKE_TIMEOUT_S) as answer:
            found: dict[str, str] = json.loads(answer.read())
        return found

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    for endpoint in told["endpoints"]:
        try:
            token = ""
            if told["user"]:
                token = post(f"{endpoint}/v3/auth/authenticate", {"name": told["user"], "password": told["password"]})["token"]
            post(f"{endpoint}/v3/lease/revoke", {"ID": str(told["lease"])}, token)
        except (OSError, ValueError, KeyError) as error:
            _say(f"elastic_ext: lease {told['lease']:x} not revoked through {endpoint} ({type(error).__name__})")
        else:
            return


def _process(pid: int) -> "Process | None":
    try:
        return Process(pid)
    except ProcessLookupError:
        return None


def _kill_all(token: bytes, workers: dict[int, Process], looks_in_vain: int) -> set[int]:
    """Kill the workers and all that carry the token, until so many looks have found none; return their pids.

    After a death two: a child that was between fork and exec when the agent died carries the token only after its exec.
    """
    killed = {pid for pid, worker in workers.items() if worker.kill()}
    for _ in range(LOOKS):
        found = kill_marked(token)
        killed |= found
        looks_in_vain -= not found
        if looks_in_vain <= 0:
            break
        if not found:
            select.select([], [], [], EXEC_S)
    return killed


def kill_marked(token: bytes) -> "set[int]":
    """Kill each process with the token in its environment. It is taken hold of first, so no reused pid is ever hit."""
    killed = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid() or (process := _process(int(name))) is None:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                marked = token in environ.read()  # empty for a zombie
            if marked and process.kill():
                killed.add(int(name))
                process.wait(1.0)
        except OSError:
            pass  # it ended, or it is another user's
        finally:
            process.close()
    return killed


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
