"""Faults, as they are done to the hosts, and healed."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.checkpoints.directory.own_files import MANIFEST
from elastic_ext.checkpoints.formats.candidates import order_of, order_or_oldest
from tests.chaos.processes import Process
from tests.chaos.seeded.hosts import CUT, STORE, Hosts
from tests.chaos.seeded.members import leader
from tests.chaos.seeded.object_store import WELL, Ill
from tests.chaos.seeded.schedule import BETWEEN, HOSTS, KINDS, SPARE, Fault
from tests.chaos.seeded.surroundings import OOM_KILL_FIRST, is_slow, slow
from tests.lossy_network import CLEAN, Way

LINKS = {
    "cut": (CUT, CUT),
    "cut out": (CUT, CLEAN),
    "cut in": (CLEAN, CUT),
    "delay": (Way(delay_s=0.1), Way(delay_s=0.1)),
    "loss": (Way(loss=0.15), Way(loss=0.15)),
    "reorder": (Way(reorder=0.2), Way(reorder=0.2)),
}
_STORE_ILL = {"store errors": Ill(errors=0.4), "store throttling": Ill(a_second=2.0)}
SLOW_BYTES, SLOW_WRITES = 20_000, 5  # a second
SIGNALS = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "terminate": signal.SIGTERM}


class NotYet(Exception):
    """There is nobody, or nothing, that it can be done to; maybe soon."""


@dataclass(frozen=True)
class Struck:
    """target: the host, "" for what is no host's. pids: of agents, workers and helpers that were struck themselves."""

    target: str
    pids: list[int]
    detail: str = ""
    heal: Callable[[], None] | None = None


def strike(fault: Fault, hosts: Hosts) -> Struck:
    """Raises NotYet."""
    if hosts.done:
        raise NotYet
    target = _target(fault, hosts)
    if target in hosts.down or (fault.kind == "lose host" and hosts.plan.embedded and target == HOSTS[0]):  # it has the store
        raise NotYet
    return _STRIKES.get(fault.kind, _process)(fault, target, hosts)


def _target(fault: Fault, hosts: Hosts) -> str:
    """Hosts that train, where hosts are meant: others than the plan says for those that only wait."""
    scope = KINDS[fault.kind].scope
    if scope not in ("host", "two hosts"):
        return fault.target
    group = hosts.history.group
    return trainers(fault.target, {each["rank"]: host for host, each in group.items()}, hosts.down)


def trainers(target: str, by_rank: Mapping[int, str], down: Collection[str]) -> str:
    """The target of a plan, with those of the lowest ranks in place of hosts that only wait. Raises NotYet."""
    meant = target.split(BETWEEN)
    there = [host for host in meant if host in by_rank.values() or host in down]
    others = [host for _, host in sorted(by_rank.items()) if host not in there]
    found = [*there, *others][: len(meant)]
    if not by_rank or len(found) < len(meant):
        raise NotYet
    return BETWEEN.join(sorted(found))


def _link(fault: Fault, host: str, hosts: Hosts) -> Struck:
    def mend() -> None:
        if host not in hosts.down:
            hosts.link(host, CLEAN, CLEAN)

    hosts.link(host, *LINKS[fault.kind])
    return Struck(host, [], heal=mend)


def _process(fault: Fault, host: str, hosts: Hosts) -> Struck:
    verb, _, role = fault.kind.partition(" ")
    found = sorted(hosts.of_role(host, role), key=lambda each: each.pid)
    if not found:
        raise NotYet
    victim = found[0]
    victim.send(SIGNALS[verb])
    return Struck(host, [victim.pid], heal=_resume([victim]) if verb == "pause" else None)


def _resume(victims: list[Process]) -> Callable[[], None]:
    def resume() -> None:
        for each in victims:
            each.send(signal.SIGCONT)

    return resume


def _pause_host(fault: Fault, host: str, hosts: Hosts) -> Struck:
    found: dict[int, Process] = {}
    while new := [each for each in hosts.pids(host) if each.pid not in found]:  # what was forked meanwhile, too
        for each in new:
            each.send(signal.SIGSTOP)
            found[each.pid] = each
    return Struck(host, [*found], heal=_resume([*found.values()]))


def _kill_host(fault: Fault, host: str, hosts: Hosts) -> Struck:
    if fault.kind != "kill container":  # nothing of its end reaches the others
        hosts.link(host, CUT, CUT)
    killed = hosts.kill(host)
    return Struck(host, killed, heal=None if fault.kind == "lose host" else lambda: hosts.replace(host))


def _etcd(fault: Fault, target: str, hosts: Hosts) -> Struck:
    """Of the members that run: all, the one that leads, or any one."""
    verb, _, what = fault.kind.partition(" ")
    running = hosts.etcd.running()
    victims = sorted(running)
    if what.endswith("leader"):
        victims = [host for host in victims if host == leader(hosts.etcd, hosts.inside)]
    elif what.endswith("member"):
        victims = random.Random(repr(fault)).sample(victims, min(1, len(victims)))
    if not victims:
        raise NotYet
    detail = ",".join(victims)
    if verb == "cut":
        for host in victims:
            hosts.link(host, CUT, CUT)
        return Struck("", [], detail, lambda: _each(victims, lambda host: hosts.link(host, CLEAN, CLEAN)))
    if verb == "pause":
        members = [Process(running[host], os.getpid(), "", "etcd", ()) for host in victims]
        for each in members:
            each.send(signal.SIGSTOP)
        return Struck("", [], detail, _resume(members))
    for host in victims:
        hosts.etcd.kill(host)
    return Struck("", [], detail, lambda: _each([host for host in victims if host not in hosts.down], hosts.etcd.start))


def _each(hosts: Iterable[str], what: Callable[[str], None]) -> None:
    for host in hosts:
        what(host)


def _two_hosts(fault: Fault, target: str, hosts: Hosts) -> Struck:
    one, other = target.split(BETWEEN)
    if {one, other} & hosts.down:
        raise NotYet
    hosts.part(one, other, True)
    return Struck(target, [], heal=lambda: hosts.part(one, other, False))


def _too_few(fault: Fault, target: str, hosts: Hosts) -> Struck:
    """Fewer nodes are left than the job needs; what is lost is replaced."""
    least, running = int(hosts.plan.nnodes.partition(":")[0]), hosts.running
    victims = random.Random(repr(fault)).sample(running, max(0, len(running) - least + 1))
    if not victims:
        raise NotYet
    for host in victims:
        hosts.link(host, CUT, CUT)
    killed = [pid for host in victims for pid in hosts.kill(host)]
    return Struck("", killed, ",".join(victims), lambda: _each(victims, hosts.replace))


def _spare_comes(fault: Fault, target: str, hosts: Hosts) -> Struck:
    hosts.bring(SPARE)
    return Struck("", [])


def _disk(fault: Fault, target: str, hosts: Hosts) -> Struck:
    """Of a host, or the store that all share."""
    what = fault.kind.partition(" ")[2]
    folder = hosts.disks[target] if target else hosts.store
    if what == "slow":
        slow(folder, SLOW_BYTES, SLOW_WRITES)
        return Struck(target, [], folder.name, lambda: slow(folder, 0, 0))
    if is_slow(folder):
        raise NotYet  # the suite itself would wait for it, and heal nothing meanwhile
    if what == "full":
        if not os.access(folder, os.W_OK) or (folder / "filler").exists():
            raise NotYet  # another fault has it
        _fill(folder / "filler")
        return Struck(target, [], folder.name, lambda: (folder / "filler").unlink(missing_ok=True))
    if _remount(folder, "ro") != 0:
        raise NotYet  # a file is open for writing
    return Struck(target, [], folder.name, lambda: _remount(folder, "rw") and None)


def _remount(folder: Path, how: str) -> int:
    return subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], capture_output=True, check=False).returncode


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _object_store(fault: Fault, target: str, hosts: Hosts) -> Struck:
    store = hosts.object_store
    assert store is not None
    if fault.kind == "store away":
        hosts.link(STORE, CUT, CUT)
        return Struck("", [], heal=lambda: hosts.link(STORE, CLEAN, CLEAN))
    store.be(_STORE_ILL[fault.kind])
    return Struck("", [], str(_STORE_ILL[fault.kind]), heal=lambda: store.be(WELL))


def _clock(fault: Fault, host: str, hosts: Hosts) -> Struck:
    """An hour forward or back; it is set right by another step."""
    clock = hosts.surroundings.clock(host)
    if clock.ahead_s != 0:
        raise NotYet  # another fault has it
    ahead_s = random.Random(repr(fault)).choice((3600, -3600))
    clock.step(ahead_s)
    return Struck(host, [], f"{ahead_s:+d} s", lambda: clock.step(0))


def _memory(fault: Fault, host: str, hosts: Hosts) -> Struck:
    """The worker is who has most memory in a training that fills it: the kernel is told to take that one first."""
    found = list(hosts.of_role(host, "worker"))
    if not found:
        raise NotYet
    Path(f"/proc/{found[0].pid}/oom_score_adj").write_text(str(OOM_KILL_FIRST))
    memory = hosts.surroundings.memory(host)
    if not memory.press():
        memory.release()
        raise NotYet
    return Struck(host, [found[0].pid], "killed", memory.release)


def _corrupt(fault: Fault, target: str, hosts: Hosts) -> Struck:
    """A bit of each data file of the newest checkpoint; then a worker is killed, so that something is loaded. All workers
    stand still meanwhile: a newer checkpoint would be loaded instead."""
    workers = {host: each for host in hosts.plan.hosts for each in hosts.of_role(host, "worker")}
    for each in workers.values():
        each.send(signal.SIGSTOP)
    try:
        stored = whole(hosts.store)
        newest = max(stored.union(*map(whole, hosts.disks.values())), key=order_or_oldest, default="")
        if not workers or not stored - {newest}:  # without any that may be used the job ends, as it must
            raise NotYet
        there = [folder / newest for folder in (hosts.store, *hosts.disks.values()) if (folder / newest).exists()]
        if not all(os.access(each, os.W_OK) for each in there):  # another fault has made it read-only
            raise NotYet
        hosts.history.record("corrupted", name=newest)
        for each in there:
            _flip_bits(each)
        host = max(workers, key=lambda each: hosts.history.workers[each]["t"])
        workers[host].send(signal.SIGKILL)
        return Struck(host, [workers[host].pid], newest)
    finally:
        for each in workers.values():
            each.send(signal.SIGCONT)


def whole(folder: Path) -> set[str]:
    """Names of checkpoints that have a manifest there."""
    return {each.name for each in folder.iterdir() if order_of(each.name) and (each / MANIFEST).exists()}


def _flip_bits(checkpoint: Path) -> None:
    """In place: the storage may be full."""
    for path in checkpoint.iterdir():
        if path.name != MANIFEST and path.is_file() and (size := path.stat().st_size):
            with path.open("r+b", buffering=0) as file:
                (byte,) = os.pread(file.fileno(), 1, size // 2)
                os.pwrite(file.fileno(), bytes([byte ^ 1]), size // 2)


# By the kind; what is not here is done to one process.
_STRIKES: dict[str, Callable[[Fault, str, Hosts], Struck]] = {
    **dict.fromkeys(LINKS, _link),
    **dict.fromkeys(("kill host", "lose host", "kill container"), _kill_host),
    **dict.fromkeys((kind for kind in KINDS if KINDS[kind].scope == "etcd"), _etcd),
    **dict.fromkeys(("disk full", "disk read-only", "disk slow", "store full", "store read-only", "store slow"), _disk),
    **dict.fromkeys((*_STORE_ILL, "store away"), _object_store),
    "pause host": _pause_host,
    "cut two hosts": _two_hosts,
    "too few nodes": _too_few,
    "spare comes": _spare_comes,
    "clock step": _clock,
    "memory pressure": _memory,
    "checkpoint corrupted": _corrupt,
}
