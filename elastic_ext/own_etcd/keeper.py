"""The keeper: the process beside the agents of a host that runs the host's member of the job's etcd, if it has one.

    python -m elastic_ext.own_etcd.keeper < job    (see `job`; it writes a line once agents can come in)

An agent starts it and comes in (`launch`). Further agents of the host come in to the same one, also an agent that is started
again: it outlives an agent that is killed. A member dies with its keeper. On a host without a member the keeper waits to be
called to take the place of a lost one, and ends with the last agent. With a member it ends with the job: `decisions` says when.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from elastic_ext.base import errors, helper_process, log_records
from elastic_ext.own_etcd import certificates, decisions, folder, housekeeping, member
from elastic_ext.own_etcd.job import KeeperJob, load

logger = logging.getLogger("elastic_ext.own_etcd.keeper")  # this module runs as __main__

TICK_S = 1.0  # no event shows that etcd no longer answers; without an agent here that decides when the keeper ends
AGENT_TICK_S = 5.0  # with one; and an agent that waits learns for whom
DEATHS, DEATHS_S = 3, 60.0  # a member that ends unasked more often than this within this time is not started again
MAKE_WAY_S = decisions.LAST_S + 5.0  # for the keeper of an earlier run, which gets a signal to end
GONE_S = 2.0  # at the end: for the other keepers with a member, which may still need this one


class Keeper:
    def __init__(self, job: KeeperJob, agents: helper_process.Agents) -> None:
        """Raises UsageError: no certificates can be made."""
        self._job, self._agents = job, agents
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._started = time.monotonic()
        self._signalled: float | None = None  # when a signal asked it to end
        self._deaths: list[float] = []  # when the member ended unasked, monotonic
        names = (job.own.name, *([job.own.address] if job.own.address else []), "localhost", "127.0.0.1", "::1")
        self._files = certificates.write(job.secret, job.plan.run_id, names, job.folder)
        self._runner = member.MemberRunner(job, self._files)
        self._house = housekeeping.Housekeeping(job, self._files, self._runner, agents, self.wake)

    def wake(self) -> None:
        """Have the main thread look again. From any thread or signal handler."""
        with suppress(BlockingIOError):
            os.write(self._wakeup[1], b"x")

    def run(self) -> None:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, lambda *_: self._signal())
        for each in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's --signal goes to every process of a step; etcd ignores them, too
            signal.signal(each, signal.SIG_IGN)
        try:
            self._begin_member()
            self._house.connect()  # loads gRPC while etcd starts
            while not (life := self._look()).ends:
                self._wait(life)
            logger.info("ends: %s", life.reason)
        except errors.ElasticExtError as error:
            logger.error("%s", error)
            self._agents.accept()  # the agent that has started this keeper may still be outside
            self._agents.say({"say": "failed", "text": str(error)})
        except Exception as error:
            logger.exception("the keeper fails")  # to a file that goes with the folder: the agents report it
            self._agents.say({"say": "failed", "text": f"the keeper of the job's etcd has failed: {error!r}"})
        finally:
            self._end()

    def _signal(self) -> None:
        self._signalled = self._signalled or time.monotonic()
        self.wake()

    def _begin_member(self) -> None:
        job, runner = self._job, self._runner
        if job.is_first_member and runner.has_data:
            runner.start_new()
        elif job.is_first_member:
            alone = len(job.plan.hosts) == 1
            if alone or not runner.others_serve() or self._house.may_begin():
                runner.start_new()

    def _look(self) -> decisions.Lifetime:
        now = time.monotonic()
        next_step = self._house.look(now)
        over = self._house.cluster.job_over
        seen = decisions.Situation(
            started=self._started,
            agents=self._agents.number,
            had_agents=self._agents.had_agents,
            is_member=self._runner.state is not member.MemberState.NONE,
            over=over,
            elsewhere=self._house.elsewhere,
            orderly=self._agents.orderly,
            silent=self._house.cluster.silent,
            signalled=self._signalled,
        )
        life = decisions.decide_end(seen, now)
        if decisions.forgets_data(seen, len(self._job.plan.hosts), now):
            self._runner.stop()
            self._runner.forget_data()
            self._house.report_new_cluster()
            self._begin_member()
        if not life.ends and not over and not self._agents.number:
            self._agents.stay(f"the job's etcd stays on this host: {life.reason}")
        steps = [at for at in (next_step, life.look_again) if at is not None]
        return decisions.Lifetime(life.ends, life.reason, min(steps, default=None))

    def _wait(self, life: decisions.Lifetime) -> None:
        limit = AGENT_TICK_S if self._agents.number else TICK_S
        if life.look_again is not None:
            limit = min(limit, max(0.0, life.look_again - time.monotonic()))
        running = self._runner.running
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._wakeup[0], *self._agents.descriptors):
                selector.register(descriptor, selectors.EVENT_READ)
            if running is not None:
                selector.register(running.pidfd, selectors.EVENT_READ)
                if not running.served:
                    selector.register(running.ready, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(limit)}
        if self._wakeup[0] in ready:
            os.read(self._wakeup[0], 1 << 16)
        if running is not None and running.pidfd in ready:
            self._member_ended()
        elif running is not None and not running.served and running.ready.fileno() in ready:
            self._runner.note_ready()
            self._house.member_serves()
        for descriptor in ready:
            self._agents.serve(descriptor)
        if not ready and self._agents.number and not self._house.ready:
            self._house.tell_silent()

    def _member_ended(self) -> None:
        """Start it again with its data. Where it was replaced, or keeps ending, this host is one without a member."""
        served = self._runner.running is not None and self._runner.running.served
        words = self._runner.take_end()
        alone = len(self._job.plan.hosts) == 1
        now = time.monotonic()
        self._deaths = [*(at for at in self._deaths if at > now - DEATHS_S), now]
        replaced = words.startswith(member.REMOVED) and not alone  # while no keeper was here
        if not served and not self._house.ready and not replaced:
            raise member.MemberFailed(f"etcd does not start on {self._job.own.name}: {words}")
        self._agents.say({"say": "warning", "text": f"the etcd of this job has ended on {self._job.own.name}: {words}"})
        if len(self._deaths) <= DEATHS and not replaced:
            return self._runner.start_again()
        if alone:
            raise member.MemberFailed(f"the etcd of this job keeps ending on {self._job.own.name}: {words}")
        self._runner.forget_data()
        return self._house.member_lost()

    def _end(self) -> None:
        (self._job.folder / "socket").unlink(missing_ok=True)  # first: an agent that comes now starts another keeper
        self._agents.close()
        try:
            self._house.end(GONE_S)
        finally:
            self._runner.stop()
            folder.remove(self._job.folder)


def main() -> int:
    """Run one keeper; 0 unless it fails. The agents that wait for its end see it as the kernel closes their connections."""
    job = load(sys.stdin.buffer.read())
    taken = folder.take(job.folder)
    if taken is None:
        os.write(1, helper_process.BUSY)
        return 0
    _log_to(job)
    for place in folder.predecessors(job.folder):
        make_way(place)
    folder.remove_abandoned(job.folder)
    agents = helper_process.Agents(helper_process.listen_on_path(job.folder / "socket"), "the keeper of the job's etcd")
    os.write(1, helper_process.UP)
    os.close(taken[1])
    os.dup2(2, 1)
    try:
        keeper = Keeper(job, agents)
    except (errors.ElasticExtError, OSError) as error:
        agents.accept()
        agents.say({"say": "failed", "text": str(error)})
        agents.close()
        folder.remove(job.folder)
        return 1
    keeper.run()
    return 0


def make_way(place: Path) -> None:
    """Have the keeper of an earlier run of this job end, which has the same ports. It does not while it has an agent."""
    keeper = folder.keeper_of(place)
    if keeper is None or keeper.user != os.geteuid() or not keeper.pid:  # 0: it is in another container
        return
    try:
        pidfd = os.pidfd_open(keeper.pid)
    except OSError:
        return
    signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    select.select([pidfd], [], [], MAKE_WAY_S)
    os.close(pidfd)


def _log_to(job: KeeperJob) -> None:
    """Log to the file of the folder: the agent's own output is not this process's to keep open."""
    descriptor = os.open(job.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    log_records.set_node(job.own.name)
    log_records.configure("INFO")


if __name__ == "__main__":
    os._exit(main())  # nothing is left to do, and no thread of gRPC may hold it up
