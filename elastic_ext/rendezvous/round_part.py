"""A node's part in one round on etcd, from the round's seal until its end."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from elastic_ext.base import waits
from elastic_ext.base.contracts import Exchange, SingleNode
from elastic_ext.base.errors import RoundOver
from elastic_ext.base.printable import cut
from elastic_ext.etcd import EtcdError
from elastic_ext.failures.ledger import JobVerdict, Report, decode_verdict, encode_report
from elastic_ext.rendezvous import board, topics
from elastic_ext.rendezvous.board import Topic
from elastic_ext.rendezvous.contract import EndKind, RoundEnd
from elastic_ext.rendezvous.place import Place
from elastic_ext.rendezvous.round_records import Assignment, Header, RoundReport, State
from elastic_ext.rendezvous.tasks import RETRY_S

logger = logging.getLogger(__name__)

V = TypeVar("V")

DELETED_S = 2.0  # a round that ends this soon after somebody has deleted the node's record has probably ended because of that
WARN_AFTER_S = 10.0  # for a verdict; longer than workers on other nodes take to end. Then a warning says what the agent waits for

NO_NEWS_S = 3600.0  # of the others, for a node whose workers have finished: longer than people take to mend a store
MAX_REASON = 300  # characters of what has failed on a node that leaves without a verdict
UNREPORTED = (
    "another node has not reported, or large messages are lost; check the logs of the other nodes, and the MTU between the hosts"
)


def round_end(header: Header, round_: int, seal: str | None) -> RoundEnd | None:
    """Return how a round has ended according to the newest header; None if it runs.

    seal: of the round's own header; None before the first round. Two rounds may have one number if all records were lost and a
    node that never saw them began again from 1.
    """
    if header.round == round_ and header.state is State.CLOSED:
        return RoundEnd(EndKind.CLOSED, header.reason)
    if header.round != round_ or seal not in (None, header.seal):
        return RoundEnd(EndKind.BROKEN, header.reason)
    if header.state is State.BROKEN:
        return RoundEnd(header.end or EndKind.BROKEN, header.reason, lost=bool(header.lost))
    return None


class EtcdRound:
    """See `rendezvous.contract.RoundPart`, which documents the methods without a docstring.

    Before the first round it is the part in round 0, in which no workers run.
    """

    def __init__(
        self,
        place: Place,
        header: Header,
        assignment: Assignment | None,
        workers: int,
        continues: bool = False,
    ) -> None:
        """
        Args:
            header: of the round, when it was sealed.
            workers: number of them on this node.
            continues: the last verdict, on an earlier round, lets the job go on.
        """
        self.round = header.round
        self.header, self.assignment = header, assignment
        self.continues = continues  # by the last verdict, on this round or an earlier one
        self.server: TCPStore | None = None  # the round's store, on the node of rank 0
        self._place, self._participant = place, place.participant
        self._workers = workers
        self._claims = frozenset[str]()  # the topics on which it has posted what the others must hear
        self._unheard = waits.Lasting(place.take_s)  # of such claims

    def workers(self) -> list[Worker]:
        header, assignment = self.header, self._assigned
        return [
            Worker(local, assignment.base_rank + local, assignment.base_role_rank + local, header.world, assignment.role_world)
            for local in range(self._workers)
        ]

    @property
    def _assigned(self) -> Assignment:
        assert self.assignment is not None, "before the first round"
        return self.assignment

    @property
    def exchange(self) -> Exchange:
        return SingleNode() if self.header.nodes == 1 else EtcdExchange(self._place, self.header, self._assigned, self.over)

    # While it runs.

    def over(self) -> RoundEnd | None:
        now = time.monotonic()
        if self._unheard.is_over(bool(self._claims) and self._place.unheard(now), now):
            return RoundEnd(
                EndKind.CUT_OFF, f"the workers of this node hang, and the others do not hear: {self._place.why_unheard}"
            )
        if self._place.fence.closed:
            return RoundEnd(
                EndKind.CUT_OFF,
                "the other nodes may continue without this one, which is cut off from the job's store or was declared dead",
            )
        if (failure := self._participant.failure) is not None:
            # It may be the leader, and the others would wait for it: they go on without it when its workers are gone.
            return RoundEnd(EndKind.CUT_OFF, f"this node can no longer take part in the job: {failure}")
        return round_end(self._participant.header, self.round, self.header.seal if self.assignment is not None else None)

    def stop_by(self) -> float | None:
        now = time.monotonic()
        if now < self._participant.registration.deleted_at + DELETED_S:
            return now
        return self._place.fence.stop_by

    def break_off(self, reason: str, failed: bool = False, signal: str = "") -> None:
        self._participant.end_round(self.round, State.BROKEN, reason, EndKind.FAILED if failed else None, signal)

    def post(self, topic: Topic[V], value: V | None) -> None:
        self._claims = self._claims | {topic.name} if topic.must_be_heard and value is not None else self._claims - {topic.name}
        self._participant.update(lambda node: dataclasses.replace(node, board=board.posted(node.board, self.round, topic, value)))

    def agreed(self, topic: Topic[V]) -> V | None:
        header = self._participant.header
        return topic.agreed(header.agreed) if header.round == self.round else None

    # It ends.

    def report(self, text: str, follows: bool = False) -> None:
        """Record that the workers of this node have been stopped.

        Args:
            text: what failed in this round, a record of `failures.ledger`.
            follows: see RoundReport.
        """
        report = RoundReport(self.round, text, follows)
        self._participant.update(lambda node: dataclasses.replace(node, report=report))

    def done(self) -> None:
        """Record that the workers of this node have finished the round without a failure."""
        self._participant.update(lambda node: dataclasses.replace(node, done=self.round))

    def conclude(self, report: Report) -> JobVerdict:
        """Return the one verdict of the whole job. If etcd is silent for as long as a rendezvous may take, judge alone.

        Raises RendezvousConnectionError, RendezvousTimeoutError: etcd answers, but does not hear this node, or has no verdict in
        time; alone, a node would restart its workers again and again.
        """
        self.report(encode_report(report), report.waits_for_others)
        verdict = self._await_verdict()
        if verdict is None:
            logger.warning("no verdict from the job on round %s; this node judges for itself", self.round)
            left_behind = self._participant.header.round > self.round
            verdict = self._place.policy.judge_alone(self._place.node_id, report, self.round, left_behind)
            if self._answers() and not verdict.ends_job:
                limit_s, held_up = self._place.patience.timeout_s, self._place.held_up_by(time.monotonic())
                raise RendezvousTimeoutError(
                    f"no verdict of the job on round {self.round} in {limit_s:g} s (join_timeout), though its store answers: "
                    f"{held_up or UNREPORTED}; this node leaves; here: {cut(report.diagnosis.reason, MAX_REASON)}"
                )
        self.continues = not verdict.ends_job
        return verdict

    def _answers(self) -> bool:
        """Return whether the job waits for its verdict on this round, and the store answers this node."""
        header = self._participant.header
        runs = header.round == self.round and not header.ended and self._participant.failure is None
        return runs and not self._place.silent(time.monotonic())

    def _await_verdict(self) -> JobVerdict | None:
        """Return the job's verdict on this round; None if there is none and none will come in time."""
        now = time.monotonic()
        deadline = now + self._place.patience.timeout_s
        wait = waits.Waiting(f"the verdict of the job on the failure in round {self.round}", now, WARN_AFTER_S)
        silence, unheard = waits.Lasting(self._place.patience.silent_s), waits.Lasting(self._place.take_s)
        with self._place.changed:
            while True:
                header = self._participant.header
                if header.round == self.round and header.verdict:
                    return decode_verdict(header.verdict)
                over = header.round != self.round or header.ended
                now = time.monotonic()
                lost = silence.is_over(self._place.silent(now), now)
                if over or lost or self._participant.failure is not None or now >= deadline:
                    return None
                if unheard.is_over(self._place.unheard(now), now):
                    raise RendezvousConnectionError(self._place.why_unheard)
                wait.say(now, deadline, "this node judges for itself" if self._place.silent(now) else "this node leaves")
                self._place.changed.wait(wait.pause_s(now, deadline))

    def await_all_done(self) -> bool:
        """While the store answers there is no time limit, unlike in torch's barrier: a node that left the round would break it.

        Raises RendezvousConnectionError: how the others have ended will not be known.
        """
        self.done()
        wait, unheard = waits.Waiting("the other nodes to finish", time.monotonic()), waits.Lasting(self._place.take_s)
        no_news = waits.Lasting(NO_NEWS_S)
        with self._place.changed:
            while self._participant.header.state is not State.DONE:
                self._place.raise_failure()  # a node that can neither write nor read any more would wait forever
                if self.over() is not None:
                    return False
                now = time.monotonic()
                if unheard.is_over(self._place.unheard(now), now):
                    raise RendezvousConnectionError(self._place.why_unheard)
                held_up = self._place.held_up_by(now)
                if no_news.is_over(bool(held_up), now):
                    raise RendezvousConnectionError(
                        f"no news of the other nodes in {NO_NEWS_S:g} s: {held_up}; the workers here have finished"
                    )
                wait.say(now, no_news.until, f"this node leaves: {held_up}" if held_up else "their workers still run")
                self._place.changed.wait(no_news.until - now if held_up else None)
        return True


class EtcdExchange:
    """One node's side of the agreement on a checkpoint; see `base.contracts`. For the agent's thread.

    Offers are under the nodes' leases, and the choice is in the header. The round's store is not used: torch's TCPStore takes
    writes from anybody who reaches its port, and every rank would load what is chosen there. Usually the choice costs one
    transaction, and each node learns of it through its watch on the header.

    Invariant: only what was written for this round is read: headers are compared by number and seal, and the keys of offers
    hold the seal.
    """

    def __init__(self, place: Place, header: Header, assignment: Assignment, over: Callable[[], RoundEnd | None]) -> None:
        """over: why the round is over; None: it runs."""
        self._participant, self._changed = place.participant, place.changed
        self._header, self._assignment, self._over = header, assignment, over
        self._publish_s = place.patience.timeout_s

    def offer(self, text: str) -> None:
        if self._header.local:
            self._participant.offer(self._assignment.seal, self._assignment.rank, text)

    def offers(self, timeout_s: float) -> list[str] | None:
        if not self._header.local:
            return None
        deadline = time.monotonic() + timeout_s
        folder = self._participant.context.keys.offers(self._assignment.seal)
        keys = [f"{folder}{rank}".encode() for rank in range(self._header.nodes)]
        found: dict[bytes, str] = {}
        events = threading.Event()
        with self._participant.client.watch_with_snapshot(folder, on_item=lambda: self._wake(events)) as watch:
            while any(key not in found for key in keys):
                events.clear()
                again_s = timeout_s
                try:
                    while (item := watch.get(timeout_s=0)) is not None:
                        found |= {event.kv.key: event.kv.text for event in item.events if event.kind == "put"}
                except EtcdError:  # the snapshot could not be read; the next `get` tries again
                    again_s = RETRY_S
                if all(key in found for key in keys):
                    break
                if (left_s := deadline - time.monotonic()) <= 0:
                    return None
                self._wait(events, min(again_s, left_s))
        return [found[key] for key in keys]

    def publish(self, text: str) -> None:
        choice = topics.ResumeChoice(text)
        made = topics.RESUME.for_all(choice)
        self._participant.change_header(
            self._header.round, lambda header: dataclasses.replace(header, agreed=board.agree(header.agreed, made))
        )
        self._await(lambda found: found == choice, self._publish_s, "the job's store to take the choice of a checkpoint")

    def choice(self, timeout_s: float) -> str:
        return self._await(lambda found: True, timeout_s, "the choice of a checkpoint by the node of rank 0").text

    def _await(self, wanted: Callable[[topics.ResumeChoice], bool], timeout_s: float, what: str) -> topics.ResumeChoice:
        began = time.monotonic()
        deadline, wait = began + timeout_s, waits.Waiting(what, began)
        with self._changed:
            while True:
                header = self._participant.header
                if self._assignment.of(header) and header.state is State.RUNNING:
                    found = topics.RESUME.agreed(header.agreed)
                    if found is not None and wanted(found):
                        return found
                self._check_round()
                if (now := time.monotonic()) >= deadline:
                    raise RendezvousTimeoutError(
                        f"no answer in {timeout_s:g} s: waited for {what}; check that host and the network"
                    )
                wait.say(now, deadline, "this node leaves")
                self._changed.wait(wait.pause_s(now, deadline))

    def _wake(self, events: threading.Event) -> None:
        with self._changed:
            events.set()
            self._changed.notify_all()

    def _wait(self, events: threading.Event, timeout_s: float) -> None:
        """Wait until there are events. Raises RoundOver."""
        with self._changed:
            self._check_round()
            if not events.is_set():
                self._changed.wait(timeout_s)

    def _check_round(self) -> None:
        header = self._participant.header
        if not self._assignment.of(header):
            raise RoundOver(f"the job has moved on to round {header.round}")
        if (why := self._over()) is not None:
            raise RoundOver(why.reason)
