"""What a keeper does in etcd while it runs: it reports its host, replaces members, and serves its agents the endpoints.

For the keeper's one thread. Calls to etcd wait for CALL_S at most, and one that fails is tried again a second later.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from elastic_ext.base import records
from elastic_ext.base.helper_process import Agents
from elastic_ext.etcd import Delete, EtcdClient, EtcdError, Put, Tls
from elastic_ext.etcd.client import Member
from elastic_ext.own_etcd import certificates, decisions, saved_keys
from elastic_ext.own_etcd.cluster import CALLS, ENDPOINTS, HOSTS, SCHEMA, SEEN, SHARED, Call, Cluster
from elastic_ext.own_etcd.decisions import NO_MAJORITY_S, KeeperRecord, KnownMember, Replacement
from elastic_ext.own_etcd.job import LOSES_WRITES, KeeperJob
from elastic_ext.own_etcd.member import MemberRunner, MemberState

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
PATIENCE_S = 60.0  # hosts of a job start within this time of each other, or another host takes the place of the late one
BEGIN_CALL_S = 3.0


class Housekeeping:
    def __init__(
        self, job: KeeperJob, files: certificates.CertificateFiles, runner: MemberRunner, agents: Agents, wake: Callable[[], None]
    ) -> None:
        self.cluster: Cluster  # what is known of it
        self.ready = False  # agents may use etcd, or could once
        self._job, self._files, self._runner, self._agents, self._wake = job, files, runner, agents, wake
        self._patient_until = time.monotonic() + PATIENCE_S
        self._record: KeeperRecord | None = None  # as written
        self._endpoints = ""  # as sent to the agents
        self._saved: saved_keys.SavedKeys | None = None
        self._called = False  # this host's member takes the place of a lost one

    def may_begin(self) -> bool:
        """Return whether this host's member of the beginning has never served, though others do. Else its data is lost."""
        others = [self._job.plan.client_url(host) for host in self._job.plan.hosts if host != self._job.own.name]
        tls = Tls(self._files.ca, self._files.cert, self._files.key)
        try:
            with EtcdClient(others, tls=tls, timeout_s=BEGIN_CALL_S) as client:
                found = [each for each in client.membership.members() if self._runner.peer_url in each.peers]
                return bool(found) and client.get(f"{SEEN}{found[0].member_id:x}").kv is None and bool(found[0].name)
        except EtcdError as error:
            logger.info("the other members do not answer yet: %s", error)
            return True

    def connect(self) -> None:
        """Begin to follow the cluster. Returns at once."""
        job = self._job
        self.cluster = Cluster(job.plan.endpoints, job.plan.run_id, job.own.name, self._files, self._wake)
        if self._runner.state is MemberState.NONE:
            self.cluster.watch(self.cluster.job_keys.header, SHARED)

    def member_serves(self) -> None:
        self.cluster.watch(self.cluster.job_keys.header, SHARED, HOSTS)
        program = self._job.program
        self._agents.say(
            {"say": "info", "text": f"this host runs a member of the job's etcd: {program}, {self._runner.client_url}"}
        )
        if program is not None and program.may_lose_writes:
            text = f"{program}: {LOSES_WRITES} (fixed in 3.5.3); its corruption checks are on; "
            self._agents.say({"say": "info", "text": text + "better put a newer etcd on PATH"})

    def report_new_cluster(self) -> None:
        """Report that this host's member begins again without its data, which no longer had a majority."""
        text = f"the job's etcd has had no majority for {NO_MAJORITY_S:g} s: a new one begins; nodes write their records again"
        logger.warning("%s", text)
        self._agents.say({"say": "warning", "text": text})
        if self._saved is not None:
            self._saved.stop()
        self._saved = self._record = None
        self._called = False
        self._patient_until = time.monotonic() + PATIENCE_S
        self.cluster.silent = None

    def member_lost(self) -> None:
        """Note that this host has no member any more, and can get a new one."""
        self.cluster.watch(self.cluster.job_keys.header, SHARED)

    @property
    def elsewhere(self) -> bool:
        """Whether another host has an agent."""
        return any(record.agents for name, record in self.cluster.hosts.items() if name != self._job.own.name)

    def look(self, now: float) -> float | None:
        """Do what is to be done. Return when to look again though nothing has happened, monotonic; None: never."""
        self.cluster.update()
        runner = self._runner
        if self.cluster.call is not None and runner.state is MemberState.NONE and runner.able:
            logger.info("this host is called to run the member %s", self.cluster.call.name)
            self._called = True
            runner.join(self.cluster.call)
        if runner.state is MemberState.STARTING:
            return None
        try:
            self._serve_agents()
            again = self._replace(now) if runner.state is MemberState.SERVES else None
        except EtcdError as error:
            logger.info("%s", error)
            again = now + AGAIN_S
        due = self._saved.update(now) if self._saved is not None else None
        return min([at for at in (again, due) if at is not None], default=None)

    def _serve_agents(self) -> None:
        """Report this host to the other keepers, then the endpoints to the agents. Raises EtcdError."""
        runner, cluster = self._runner, self.cluster
        is_member = runner.state is MemberState.SERVES
        record = KeeperRecord(runner.peer_url if runner.able else "", runner.client_url, is_member, self._agents.number)
        if record != self._record or not cluster.holds:
            joins = is_member and (self._record is None or not self._record.member)
            cluster.write(record, *(self._joining(cluster) if joins else ()))
            self._record = record
        if is_member and self._job.ledger_file is not None and self._saved is None:
            self._save(cluster, self._job.ledger_file)
        if cluster.endpoints != self._endpoints:
            files = self._files
            self._endpoints = cluster.endpoints
            self.ready = True
            tls = {"ca": files.ca, "cert": files.cert, "key": files.key}
            self._agents.say({"say": "ready", "endpoints": cluster.endpoints, **tls})

    def _joining(self, cluster: Cluster) -> list[Put | Delete]:
        """Return what is written together with the word that this host has a member now. Raises EtcdError.

        Together, because a member that has been seen, on a host that says it has none, is a lost one.
        """
        own = cluster.member_of(self._runner.peer_url)
        ops: list[Put | Delete] = [Put(f"{SEEN}{own.member_id:x}", "")] if own is not None else []
        if cluster.call is not None:
            urls = [url for each in cluster.client.membership.members() for url in each.clients]
            ops += [Put(ENDPOINTS, ",".join(urls)), Delete(CALLS + self._job.own.name)]
        return ops

    def _save(self, cluster: Cluster, ledger_file: str) -> None:
        """Begin to keep what outlives the job; first put back what did, if the job has only begun. Raises EtcdError."""
        saved = saved_keys.SavedKeys(cluster.client, self._job.plan.run_id, self._job.own.name, ledger_file, self._wake)
        if not self._called and (line := saved.restore()):
            self._agents.say({"say": "info", "text": line})
        saved.watch()
        self._saved = saved

    def _replace(self, now: float) -> float | None:
        """Do the next step, if it is this keeper's turn. Return when to look again. Raises EtcdError."""
        hosts = self.cluster.hosts
        living = sorted(name for name, record in hosts.items() if record.member)
        size = len(self._job.plan.hosts)
        if size < 2 or living[:1] != [self._job.own.name] or len(living) == len(hosts) or len(living) >= size:
            return None
        members = self.cluster.client.membership.members()
        known = [KnownMember(each.member_id, each.peers[0], bool(each.name), self.cluster.is_seen(each)) for each in members]
        hosts = self.cluster.read_hosts()  # after what was seen: a member that was is then either in the list or lost
        order = (*self._job.plan.hosts, *self._job.plan.others)
        step = decisions.next_step(size, known, hosts, order, now < self._patient_until)
        if step is None:
            return self._patient_until if now < self._patient_until else None
        self._step(step, hosts)
        return now

    def _step(self, step: Replacement, hosts: dict[str, KeeperRecord]) -> None:
        membership = self.cluster.client.membership
        self._agents.say({"say": "warning", "text": f"the job's etcd: {step.reason}"})
        if step.remove:
            membership.remove(step.remove)
            self.cluster.client.txn([], [Delete(f"{SEEN}{step.remove:x}")])
            return
        peer, name = hosts[step.add].peer, f"{step.add}-{secrets.token_hex(3)}"
        members = membership.add(peer)
        call = Call(name, ",".join(_named(each, peer, name) for each in members))
        self.cluster.client.txn([], [Put(CALLS + step.add, records.encode(call, SCHEMA))])

    def tell_silent(self) -> None:
        """Report to the agents for whom they wait."""
        if silent := self._runner.silent_hosts():
            self._agents.say({"say": "silent", "text": ", ".join(silent)})

    def end(self, timeout_s: float) -> None:
        """Save what outlives the job; leave the other keepers, but not before they know that all is over."""
        if not hasattr(self, "cluster"):
            return
        if self._saved is not None:
            self._saved.end(self.cluster.header)
        self.cluster.withdraw()
        deadline = time.monotonic() + timeout_s
        while self._runner.state is MemberState.SERVES and any(record.member for record in self.cluster.hosts.values()):
            if not self.cluster.await_change(deadline):
                break
        self.cluster.close()


def _named(each: Member, peer: str, name: str) -> str:
    return f"{name if peer in each.peers else each.name}={each.peers[0]}"
