"""What an operator asks of a running job: that a node leave without losing work (`elastic-ext drain`; `drains` decides), or that
the job save now. Knows nothing of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from elastic_ext.base import printable, records, settings
from elastic_ext.base.errors import EX_REFUSED, EX_TRY_AGAIN, EX_UNAVAILABLE, UsageError
from elastic_ext.cli import Commands, job_source, print_error, print_line
from elastic_ext.etcd import EtcdClient, Event, Snapshot, errors, values
from elastic_ext.failures.ledger import encode_ledger, given_back
from elastic_ext.rendezvous import board, drains, header_record, job_records, running_job, tasks, topics
from elastic_ext.rendezvous.keys import JobKeys, checked
from elastic_ext.rendezvous.round_records import Drain, Header, Node, RecordReader, State, decode

TIMEOUT_S = 600.0
MAX_REASON = 200  # characters: every node of the job reads it
MEANINGS = {
    0: "the node has left, and the job runs again or has finished; with --undo: the host may take part",
    EX_UNAVAILABLE: "no such job runs, or etcd does not answer",
    EX_TRY_AGAIN: "no checkpoint in time, and nothing was done; or the job did not run again in time (the message says which)",
    EX_REFUSED: "refused, nothing was changed: the job would have fewer nodes than it takes",
    78: "wrong usage or settings, no such node, or several machines of this name",
    130: "interrupted with Ctrl-C: the node still leaves, unless `--undo` withdraws that",
}


def add_command(commands: Commands) -> None:
    drain = commands.add_parser("drain", help="take a node out of a running job at its next checkpoint")
    drain.description = (
        "Take a node out of a job once a checkpoint is saved, and wait until the job runs without it: a spare steps "
        "in, or the job goes on smaller. No restart is charged. The host may not come back for `refuse_node` seconds."
    )
    drain.epilog = "Exit codes: " + "; ".join(f"{code}: {meaning}" for code, meaning in MEANINGS.items()) + "."
    drain.add_argument("node", metavar="NODE", help="a host, or the id of a node on it, as `elastic-ext status` shows them")
    job_source.add_job(drain)
    drain.add_argument("--reason", metavar="TEXT", default="", help="why: for logs, the status, and an agent started there again")
    drain.add_argument(
        "--timeout",
        type=job_source.seconds,
        metavar="S",
        default=TIMEOUT_S,
        help="seconds to wait for the checkpoint, and then for the job to run; default: %(default)g",
    )
    how = drain.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="do not wait for a checkpoint: the steps since the last one are repeated")
    how.add_argument("--undo", action="store_true", help="withdraw a drain that has not begun, or let a repaired host come back")
    drain.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Drain, or undo it; return one of MEANINGS. Raises UsageError. TLS and user come from the settings, as for an agent."""
    with contextlib.ExitStack() as stack:
        try:
            client = stack.enter_context(job_source.job_client(args.rdzv_endpoint, args.rdzv_id))
            if args.undo:
                print_line(undo(client, args.rdzv_id, args.node))
                return 0
        except running_job.Unreachable as error:
            print_error(str(error))
            return EX_UNAVAILABLE
        refused_s = settings.read({}, os.environ).refuse_node
        request = drains.DrainRequest(args.node, " ".join(args.reason.split())[:MAX_REASON], refused_s, args.now)
        try:
            over = drain(client, args.rdzv_id, request, args.timeout, print_line)
        except KeyboardInterrupt:
            print_error(f"the drain of {args.node} goes on; --undo withdraws it")
            return 130
    (print_line if over.ending is Ending.DRAINED else print_error)(over.reason)
    return over.ending.value


class Ending(Enum):
    """How a request has ended: the exit code of the command."""

    DRAINED = 0  # the node has left, and the job runs again or has finished
    LATE = EX_TRY_AGAIN  # the time is over; the reason says what holds
    TOO_FEW = EX_REFUSED  # refused, nothing was changed
    NO_JOB = EX_UNAVAILABLE  # none runs, or etcd does not answer


@dataclass(frozen=True)
class DrainOutcome:
    """The end of a request. reason: one line, for people."""

    ending: Ending
    reason: str


@dataclass(frozen=True)
class DrainAsked:
    host: str  # of the nodes
    nodes: tuple[str, ...]  # their ids
    round: int  # that ran or had ended then
    ran: bool  # one of the nodes was in that round, which therefore has to end


@dataclass(frozen=True)
class Seen:
    header: Header | None  # None if it is gone, and the job with it
    nodes: frozenset[str]  # ids of all current nodes
    done: tuple[Drain, ...] = ()  # drains of these nodes that the leader has released, by now or before


def drain_outcome(asked: DrainAsked, seen: Seen) -> DrainOutcome | None:
    """Return the outcome; None while the drain is under way."""
    header = seen.header
    if header is None and seen.nodes:
        return None  # a lost header: the nodes write it again, with its drains
    if header is None or header.ended:
        ended = f"the job has ended: {header.reason}" if header is not None else "the job is gone"
        well = header is not None and header.state is State.DONE
        return DrainOutcome(Ending.DRAINED if well else Ending.NO_JOB, f"{asked.host} is free; {ended}" if well else ended)
    here = [id_ for id_ in asked.nodes if id_ in seen.nodes]
    if here:
        withdrawn = [id_ for id_ in here if drains.of_node(header, id_) is None]
        gone = "the drain was withdrawn; the node stays in the job"
        return DrainOutcome(Ending.LATE, gone) if withdrawn else None
    if header.state is not State.RUNNING or (asked.ran and header.round == asked.round):
        return None
    step = max((each.step for each in seen.done), default=-1)
    saved = f"saved step {step}, " if step >= 0 else ""
    runs = f"round {header.round} runs with {printable.counted(header.nodes, 'node')}"
    return DrainOutcome(Ending.DRAINED, f"{asked.host} has left: {saved}{runs}")


def drain(
    client: EtcdClient, run_id: str, request: drains.DrainRequest, timeout_s: float, notify: Callable[[str], None]
) -> DrainOutcome:
    """Have the nodes of a host leave, and wait until they have and the job runs again.

    timeout_s: for the checkpoint; then again for the job to run. After the first the drain is withdrawn. notify: called with one
    line as soon as the request is written.

    Raises UsageError: no such node, several machines of this name, etcd refuses, or the records are of another version.
    """
    job = _Job(client, run_id)
    try:
        admission, asked = job.ask(request, timeout_s)
        if asked is None:
            return DrainOutcome(_ENDINGS[admission.answer], admission.reason)
        notify(f"{asked.host} is to leave {'now' if request.now else 'at the next checkpoint'}: {admission.reason}")
        return _await_drain(job, asked, timeout_s, mine=admission.answer is drains.Answer.ADMITTED)
    except running_job.NoSuchJob as error:
        return DrainOutcome(Ending.NO_JOB, str(error))
    except tasks.LostRace as error:
        return DrainOutcome(Ending.LATE, str(error))
    except (errors.AuthError, errors.ConfigError, errors.UnsupportedVersion, records.RecordError) as error:
        raise UsageError(f"the job {run_id}: {error}") from error
    except errors.EtcdError as error:
        return DrainOutcome(Ending.NO_JOB, f"{error}; it is unknown whether the node leaves: ask `elastic-ext status`")


def undo(client: EtcdClient, run_id: str, name: str) -> str:
    """Withdraw the drain of a host if it has not begun, and let the host come back. Return what was done, for people.

    name: the host, or the id of a node on it. Raises Unreachable, and UsageError: etcd refuses, or records of another version.
    """
    try:
        return _Job(client, run_id).undo(name)
    except errors.Unavailable as error:
        ask = "ask `elastic-ext status` whether the drain is withdrawn"
        raise running_job.Unreachable(f"the job {run_id}: {error}; {ask}") from error
    except (errors.EtcdError, records.RecordError) as error:
        raise UsageError(f"the job {run_id}: {error}") from error


_ENDINGS = {drains.Answer.LEFT: Ending.DRAINED, drains.Answer.TOO_FEW: Ending.TOO_FEW}


class _Job(running_job.RunningJob):
    """The records of a job, as drains change them. All methods raise EtcdError and RecordError."""

    def ask(self, request: drains.DrainRequest, timeout_s: float) -> tuple[drains.Admission, DrainAsked | None]:
        """Write the request if it is admitted; None: there is nothing to wait for. Raises UsageError: no such node, or several
        machines have this name; LostRace.
        """
        admission, seen = self.admit(request, timeout_s)
        if admission.answer in (drains.Answer.UNKNOWN, drains.Answer.AMBIGUOUS):
            raise UsageError(admission.reason)
        if admission.answer in _ENDINGS:
            return admission, None
        ran = seen.header.state is not State.RUNNING or not seen.members.isdisjoint(admission.nodes)
        return admission, DrainAsked(drains.host_of(admission.nodes[0]), admission.nodes, seen.header.round, ran)

    def withdraw(self, host: str) -> bool:
        """Take a drain back; return False if it has begun."""
        while True:
            seen = self.read()
            after = drains.withdrawn(seen.header, host)
            if after is seen.header:
                return False
            if self.write(seen, after):
                return True

    def undo(self, name: str) -> str:
        host = drains.host_of(name)
        while True:
            try:
                seen = self.read()
            except running_job.NoSuchJob:  # a refusal outlives the job
                return self._lift(host)
            after = drains.withdrawn(seen.header, host)
            if after is seen.header:
                leaving = drains.released(after).intersection(drains.nodes_on(host, seen.nodes))
                return self._lift(host) + ("; it still leaves now" if leaving else "")
            if self.write(seen, after, values.Delete(self.keys.refusal(host))):  # another agent of the host may have left already
                return f"{host} stays in the job" + ("; nodes of it that have left may come back" if host in seen.refused else "")

    def _lift(self, host: str) -> str:
        forgiven = "; its failures so far no longer count against it (bad-node)" if self._give_back(host) else ""
        deleted = self.client.txn([], [values.Delete(self.keys.refusal(checked(host)))]).responses[0]
        if isinstance(deleted, values.Deleted) and deleted.deleted:
            return f"{host} may come back{forgiven}"
        return f"{host} was neither to leave nor refused{forgiven or ': nothing to undo'}"

    def _give_back(self, host: str) -> bool:
        """Note in the job's ledger that the host was given back; return whether that changes it. An unreadable one stays."""
        while (found := self.client.get(self.keys.ledger).kv) is not None and (before := self.reader.ledger(found)) is not None:
            after = given_back(before, host)
            if after == before:
                return False
            put = values.Put(self.keys.ledger, encode_ledger(after), lease_id=found.lease_id)
            over = values.unchanged(self.keys.ledger, found.mod_revision)
            if self.client.txn([over], [put]).succeeded:  # else: a verdict meanwhile
                return True
        return False


def _await_drain(job: _Job, asked: DrainAsked, timeout_s: float, mine: bool) -> DrainOutcome:
    """Watch the job until the drain is over. mine: this command has asked for it, and withdraws it when its time is over."""
    deadline, begun = time.monotonic() + timeout_s, False
    seen, none_saved = Seen(None, frozenset()), f"no checkpoint in {timeout_s:g} s"
    with job.client.watch_with_snapshot(job.keys.prefix) as watch:
        while True:
            while (left_s := deadline - time.monotonic()) > 0:
                try:
                    item = watch.get(left_s)
                except errors.TlsError:  # it would come at once each time
                    raise
                except errors.Unavailable:  # the job goes on meanwhile, and so does the drain
                    continue
                if item is None:
                    continue
                if isinstance(item, Snapshot):
                    seen = replace(seen, header=None, nodes=frozenset())
                for event in item.events:
                    seen = _seen_after(job, asked, seen, event)
                if (over := drain_outcome(asked, seen)) is not None:
                    return over
                if not begun and (seen.done or not seen.nodes.intersection(asked.nodes)):
                    begun, deadline = True, time.monotonic() + timeout_s
            if begun or not mine:
                return DrainOutcome(Ending.LATE, _late(asked, seen, timeout_s))
            try:
                withdrawn = job.withdraw(asked.host)
            except errors.EtcdError as error:
                return DrainOutcome(Ending.LATE, f"{none_saved}, but the drain of {asked.host} goes on: {error}")
            if withdrawn:
                return DrainOutcome(Ending.LATE, f"{none_saved}: {asked.host} stays in the job; --now does not wait")
            begun, deadline = True, time.monotonic() + timeout_s


def _late(asked: DrainAsked, seen: Seen, timeout_s: float) -> str:
    if seen.nodes.intersection(asked.nodes):
        return f"{asked.host} has not left in {timeout_s:g} s; it still is to leave (--undo withdraws that)"
    header = seen.header
    return f"{asked.host} has left, but the job does not run again after {timeout_s:g} s: {header.reason if header else 'gone'}"


def _seen_after(job: _Job, asked: DrainAsked, seen: Seen, event: Event) -> Seen:
    keys, kv = job.keys, event.kv
    if kv.key == keys.header.encode():
        if event.kind == "delete":
            return replace(seen, header=None)
        header = job.reader.header(kv)
        if header is None:  # unreadable: it changes nothing, the leader writes the one before it again
            return seen
        done = tuple(each for each in header.drains if each.node in asked.nodes and each.released)
        return replace(seen, header=header, done=done or seen.done)
    if kv.key.startswith(keys.nodes.encode()):
        id_ = kv.key[len(keys.nodes.encode()) :].decode(errors="replace")
        known = event.kind == "put" and bool(job_records.nodes_in([kv], keys, job.reader))
        return replace(seen, nodes=seen.nodes | {id_} if known else seen.nodes - {id_})
    return seen


@dataclass(frozen=True)
class SaveOutcome:
    """step: of the complete checkpoint; None if none is complete: the reason says why, and `code` is the command's exit code."""

    step: int | None
    reason: str
    code: int = EX_TRY_AGAIN


def save_outcome(requested: Header, header: Header | None, nodes: Iterable[Node]) -> SaveOutcome | None:
    """Return the outcome of the request in `requested`; None while it is under way.

    header: the current one; None if it is gone, and the job with it. nodes: all current ones.
    """
    asked = topics.SAVE.agreed(requested.agreed)
    for node in nodes:
        # A node's record is about its current round; a node that waits for a later round has left this one.
        saved = topics.SAVED.of(node.board, requested.round)
        if node.after < requested.round and asked is not None and saved is not None and saved.number >= asked.number:
            return SaveOutcome(saved.step, f"saved step {saved.step}")
    if header is None:
        return SaveOutcome(None, "the job is gone")
    if header.round != requested.round:
        return SaveOutcome(None, f"round {requested.round} ended before the save; the job is now in round {header.round}")
    if header.state is not State.RUNNING:
        return SaveOutcome(None, f"round {requested.round} ended before the save: {header.reason}")
    return None


def with_save(header: Header) -> Header:
    """Return the header in which the nodes are asked for one more save."""
    made = topics.SAVE.for_all(topics.next_save(topics.SAVE.agreed(header.agreed)))
    return replace(header, agreed=board.agree(header.agreed, made))


def save(client: EtcdClient, run_id: str, timeout_s: float) -> SaveOutcome:
    """Request a save, and wait until it is complete or has become impossible, or the time is over.

    Raises UsageError: etcd refuses, or the records are of another version.
    """
    deadline = time.monotonic() + timeout_s
    keys = JobKeys(checked(run_id))
    try:
        requested = _ask_save(client, keys, deadline)
        return requested if isinstance(requested, SaveOutcome) else _await_save(client, keys, requested, deadline)
    except (errors.AuthError, errors.ConfigError, errors.UnsupportedVersion, records.RecordError) as error:
        raise UsageError(f"the job {run_id}: {error}") from error
    except errors.EtcdError as error:
        return SaveOutcome(None, str(error))


def _ask_save(client: EtcdClient, keys: JobKeys, deadline: float) -> Header | SaveOutcome:
    """Write the request into the header; return that header."""
    while (left_s := deadline - time.monotonic()) > 0:
        found = client.get(keys.header, timeout_s=min(left_s, client.timeout_s)).kv
        header = decode(Header, found.value, keys.header) if found is not None else None
        if found is None or header is None:
            return SaveOutcome(None, "the job is not running: it has no round yet", EX_UNAVAILABLE)
        if header.state is not State.RUNNING:
            code = EX_UNAVAILABLE if header.ended else EX_TRY_AGAIN
            return SaveOutcome(None, f"the job is not running, it is {header.state.value}: {header.reason}", code)
        requested = with_save(header)
        timeout_s = min(max(0.01, deadline - time.monotonic()), client.timeout_s)
        if header_record.swap(client, keys, requested, over=(found.mod_revision, found.lease_id), timeout_s=timeout_s).succeeded:
            return requested
    return SaveOutcome(None, "the job's header kept changing, so no save was requested; try again")


def _await_save(client: EtcdClient, keys: JobKeys, requested: Header, deadline: float) -> SaveOutcome:
    header: Header | None = requested
    reader = RecordReader()
    with client.watch_with_snapshot(keys.prefix) as watch:
        while (left_s := deadline - time.monotonic()) > 0:
            item = watch.get(left_s)
            if isinstance(item, Snapshot):
                header = None
            # One by one: a node's report of its save comes before the end of the round.
            for event in item.events if item is not None else ():
                nodes, kv = dict[str, Node](), event.kv
                if kv.key == keys.header.encode():
                    # An unreadable header changes nothing: the job's leader writes the previous one again.
                    header = (reader.header(kv) or header or requested) if event.kind == "put" else None
                elif kv.key.startswith(keys.nodes.encode()) and event.kind == "put":
                    nodes = job_records.nodes_in([kv], keys, reader)
                now = requested if isinstance(item, Snapshot) else header
                if (over := save_outcome(requested, now, nodes.values())) is not None:
                    return over
            if (over := save_outcome(requested, header, [])) is not None:
                return over
    return SaveOutcome(None, "the save did not complete in time; the job may still complete it")
