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
LOOKS = 30  # a process that sleeps in the kernel cannot be killed: give up after so many looks, about as many seconds


def main(agent_pid: int, token: str, run_dir: str) -> None:
    agent = _pidfd(agent_pid)
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


class Told:
    """What the agent has said. workers: pidfd by pid. will: JSON, or "". end: "clean", "dirty", or "" if it has just died."""

    def __init__(self) -> None:
        self.workers: dict[int, int] = {}
        self.will = ""
        self.end = ""


def _listen(agent: "int | None") -> Told:
    """Until the agent ends: return what it has said. agent: its pidfd; None: it is dead, what it said waits to be read."""
    told = Told()
    pending = b""
    poll = select.poll()
    if agent is not None:
        poll.register(agent, select.POLLIN)
    poll.register(0, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll(None if agent is not None else 0)}
        if 0 not in ready:
            return told  # what was said before the death has been read
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
                for pidfd in told.workers.values():
                    os.close(pidfd)
                told.workers = {int(pid): opened for pid in rest.split() if (opened := _pidfd(int(pid))) is not None}


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


def _pidfd(pid: int) -> "int | None":
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _kill_all(token: bytes, workers: dict[int, int], looks_in_vain: int) -> set[int]:
    """Kill the workers and all that carry the token, until so many looks have found none; return their pids.

    After a death two: a child that was between fork and exec when the agent died carries the token only after its exec.
    """
    killed = {pid for pid, pidfd in workers.items() if _kill(pidfd)}
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
    """Kill each process with the token in its environment. The pidfd is opened first, so no reused pid is ever hit."""
    killed = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid() or (pidfd := _pidfd(int(name))) is None:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                marked = token in environ.read()  # empty for a zombie
            if marked and _kill(pidfd):
                killed.add(int(name))
                select.select([pidfd], [], [], 1.0)
        except OSError:
            pass  # it ended, or it is another user's
        finally:
            os.close(pidfd)
    return killed


def _kill(pidfd: int) -> bool:
    """Send SIGKILL; False where the process has ended already."""
    if select.select([pidfd], [], [], 0)[0]:
        return False
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
