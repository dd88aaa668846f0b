"""What several failures mean, as two tables. The answer of a rule (`rules`) is the input; of each table, the first row that holds
counts: ANSWERS says what the nodes and the past make of it, HISTORY what repetition makes of a restart. Pure functions only.

To add a row: one here, and three cases in `tests/failures/test_policy.py`, which fails without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from elastic_ext.base import diagnosis as kinds
from elastic_ext.base.diagnosis import CODE, CRASH, HARDWARE, NETWORK, NUMERIC, PREEMPTION, STORAGE, Response, Weight
from elastic_ext.base.errors import EX_CODE, EX_FAILED, EX_NODE, EX_TRY_AGAIN, EX_USER
from elastic_ext.failures import rules
from elastic_ext.failures.classify import Diagnosis
from elastic_ext.failures.evidence import WAITS, Evidence, Precedent

# Waits before the second and the third try: what is down may be back in two minutes, and a bug is not. After the first step the
# second try waits for nothing. Seconds at backoff=1, by rule; longer by up to half, at random.
_MAY_BE_AWAY = (
    rules.NETWORK_RULE,
    rules.INTERFACE,
    rules.CUT_RULE,
    rules.MOUNT,
    rules.STORAGE_CLIENT,
    rules.BUSY,
)
SPREAD_S = {
    **dict.fromkeys((rules.NO_EVIDENCE, rules.SERVICE), (30.0, 90.0)),
    **dict.fromkeys((*_MAY_BE_AWAY, *rules.PEERS), (0.0, 90.0)),
}
# Names of rules.
WARM_START, UNSEEN = "warm-start", "progress-unknown"
REPEATED, SAME_NODE, CEILING, IN_A_ROW, BAD_NODE = "repeated", "same-node", "ceiling", "in-a-row", "bad-node"
_FINAL = frozenset({"directory-taken"})  # they say that no other try would help, on whatever node
_ON_ALL_NODES = frozenset({rules.GPU_DEAD, rules.HARDWARE_EXIT})  # what several nodes report at once is the hardware of none
LEAST_NODES = 4  # in a job of this many, chance seldom chooses the same node twice
LEAST_STEPS = 10  # of a try that fails at the same step as the one before it: fewer say nothing
MAX_SAME_FAILURES = 3  # how often the same failure may happen without progress, at any budget
FEW_NODES_TIMES = 6  # for `bad-node` in a job of two or three nodes: chance chooses one of these three times in a row
MANY_NODES, RECENT = 64, 8  # chance chooses one of 64 nodes three times of eight for 0.5 % of the failures
MAX_FAILURES_IN_A_ROW = 8  # without progress, charged, of any sort: an error whose text varies is never the same
MAX_FREE_TRIES = 5  # without progress, of a script that asks for another try; each further one is charged
# A repeated failure becomes kind "code", unless it has one of these kinds, which are more specific.
_KIND_STAYS = frozenset({kinds.HOST_MEMORY, kinds.DEVICE_MEMORY, NUMERIC, STORAGE})
_HOSTS_KINDS = frozenset({HARDWARE, CRASH, kinds.HOST_MEMORY})
_AWAY_KINDS = frozenset({NETWORK, STORAGE})
_EXIT_OF_KIND = {CODE: EX_CODE, kinds.DATA: EX_CODE, kinds.USER_STOP: EX_USER, HARDWARE: EX_NODE, PREEMPTION: EX_TRY_AGAIN}


@dataclass(frozen=True)
class Nodes:
    """The nodes of the job. None means unknown."""

    running: int | None = None  # number of nodes that run or wait now, including this one
    needed: int | None = None  # minimum number of nodes of the job
    members: int = 0  # number of nodes of the round that has failed: a spare cannot fail. 0: as many as run

    @property
    def at_failure(self) -> int:
        """The number of nodes of which one has failed; 0: unknown."""
        return self.members or self.running or 0

    @property
    def only_one(self) -> bool:
        """Whether this is the only node, so that the place of a failure says nothing."""
        return self.running == 1

    @property
    def one_may_leave(self) -> bool:
        """Whether this node may leave. It may if the number of nodes is unknown."""
        return self.running is None or self.running - 1 >= max(self.needed or 1, 1)


@dataclass(frozen=True)
class Outcome:
    """A decision in the making."""

    response: Response
    kind: str
    reason: str
    rule: str
    exit_code: int = EX_FAILED


@dataclass(frozen=True)
class Facts:
    """What the rows look at: a failure, and what the job's past and its nodes say of it."""

    answer: Outcome  # so far
    diagnosis: Diagnosis
    evidence: Evidence
    rule: str
    nodes: Nodes
    weight: Weight
    past: tuple[Precedent, ...]
    same: tuple[Precedent, ...]  # the same failures, without progress since as far as is known
    times: int  # how often it has happened, by them, this time included; the numbers below count this time, too
    stuck: int  # those without progress for certain
    on_one: bool  # whether all of them were on one known node
    elsewhere: bool  # whether one was on another node
    moved: bool  # whether the ranks of its node have moved since one of them
    in_step: bool  # whether all were at the same step
    trained: bool  # whether the job has done a step, in this try or before
    no_further: bool  # whether this try made no more steps than one that ended so, and it is unknown where they began
    unseen: int  # how often it has just happened in a row, with nothing known of steps and checkpoints
    losses: int  # nodes that were lost without progress for certain
    differing: str  # the hosts of replicas that differ without a majority; "": there are none
    row: int  # charged failures of any sort without progress
    row_away: bool  # whether most of them were of the storage or the network
    stops_at_start: bool
    place_counts: bool
    only_here: bool
    on_this_node: int

    @property
    def repeated(self) -> bool:
        """Whether a bug is confirmed. It takes one time more where nothing is known of steps, or a service may be down."""
        early_and_unknown = self.evidence.before_first_step and self.rule == rules.NO_EVIDENCE
        raised = self.answer.kind == CODE and self.evidence.exception is not None and self.unseen > 1
        least = 2 if (raised or self.no_further or self.stuck > 1) and not early_and_unknown else MAX_SAME_FAILURES
        suspected = self.answer.response is Response.CONFIRM or early_and_unknown
        confirmed = suspected and self.times >= least and not self.only_here
        return self.weight is not Weight.PRINTED and (confirmed or _as_code_does(self.diagnosis, self.same))

    @property
    def since(self) -> str:
        """What is known of progress since it happened first."""
        hint = ": where no checkpoint is known, only more steps would" if self.no_further else ""
        return "without progress" if self.stuck > 1 else f"and nothing shows progress{hint}"

    @property
    def away(self) -> bool:
        """Whether something certainly is away that a later launch may find.

        Names may be wrong, until the job has trained. What comes back at the same step may be a bug.
        The lines of a rank that has lost a peer count, too: such cascades show nothing else, and the network is assumed.
        """
        of_peers = self.rule in rules.PEERS and self.nodes.at_failure != 1  # else all peers are on this host
        raised, shown = self.evidence.exception, self.diagnosis.outage is True
        of_ours = raised is not None and raised.type == rules.STORAGE_FAILED  # the checkpoint was there when it was chosen
        known = self.rule in (rules.CUT_RULE, rules.BUSY) or (self.rule == rules.MOUNT and shown) or of_ours
        at_other_steps = self.diagnosis.outage is None and not all(each.same_step for each in self.same)
        of_client = self.rule in (rules.SERVICE, rules.STORAGE_CLIENT) and (shown or at_other_steps)
        named = of_client or (self.rule in (rules.MOUNT, rules.NETWORK_RULE) and not self.in_step)
        certain = known or (named and self.trained)
        return (certain and self.weight.certain) or (of_peers and self.weight is not Weight.PRINTED)

    @property
    def of_hardware(self) -> bool:
        certain = self.answer.kind == HARDWARE and self.weight.certain and not self.evidence.shared
        return certain and (self.diagnosis.shown_by_hardware or self.on_one)


def facts_of(diagnosis: Diagnosis, past: tuple[Precedent, ...], nodes: Nodes) -> Facts:
    """Return the facts, with the table's answer."""
    evidence, node = diagnosis.evidence, diagnosis.evidence.node
    same = tuple(each for each in past if each.same_fingerprint and each.progress is not True)
    row = [each.kind for each in past if each.charged and each.progress is False]
    unseen = takewhile(lambda each: each.same_fingerprint and each.progress is each.first_step_done is None, reversed(past))
    counts = _place_counts(diagnosis, nodes)
    return Facts(
        _of_table(diagnosis),
        diagnosis,
        evidence,
        diagnosis.rule,
        nodes,
        diagnosis.weight,
        past,
        same,
        times=1 + len(same),
        stuck=1 + sum(each.progress is False for each in same),
        on_one=node is not None and all(each.node == node for each in same),
        elsewhere=any(each.node not in (node, None) for each in same),
        moved=any(map(_has_moved, same)),
        in_step=(evidence.step or 0) >= LEAST_STEPS and all(each.same_step for each in same),
        trained=evidence.first_step_done is True or any(each.first_step_done or each.same_checkpoint for each in past),
        # A checkpoint, or `budget_window`, gives a restart back: then it may have trained for weeks since. So for both:
        no_further=any(each.no_further for each in same) and past[-1].recent,
        unseen=1 + len(list(unseen)) if evidence.first_step_done is None and past and past[-1].recent else 1,
        losses=1 + sum(each.lost_node and each.surely_none_since for each in past),
        differing=" and ".join(evidence.differs) if len(evidence.differs) > 1 else "",
        row=1 + len(row),
        row_away=2 * sum(kind in _AWAY_KINDS for kind in (diagnosis.kind, *row)) > 1 + len(row),
        stops_at_start=stops_at_start(diagnosis),
        place_counts=counts,
        only_here=counts and _only_here(diagnosis, past, same, nodes),
        on_this_node=_on_this_node(diagnosis, past, nodes),
    )


def _place_counts(diagnosis: Diagnosis, nodes: Nodes) -> bool:
    """Return whether a node may be to blame for such a failure if it comes back there alone.

    Invariant: no node leaves for a failure whose cause is elsewhere. The node that reports it lives, and the first of several to
    do so is often the leader's.
    """
    evidence, rule = diagnosis.evidence, diagnosis.rule
    several = evidence.cut or evidence.shared or len(evidence.differs) > 1
    known = evidence.node is not None and not nodes.only_one and not several
    lacking = rule in rules.LACKING or diagnosis.lacks_module
    lacks = lacking and evidence.before_first_step  # later, it is a file of the script's own
    link = not evidence.before_first_step and rule == rules.NETWORK_RULE  # before, it may be an outage
    of_host = diagnosis.kind in _HOSTS_KINDS or rule in rules.OF_HOSTS or of_a_node(diagnosis)
    return known and (of_host or lacks or link) and rule not in rules.ELSEWHERE and not diagnosis.of_other


def _only_here(diagnosis: Diagnosis, past: Sequence[Precedent], same: Sequence[Precedent], nodes: Nodes) -> bool:
    """Return whether the same failure has happened on this node alone, so that the node may be to blame and not the code.

    Before the first step a bad mount counts only from the third time on: it may be an outage. Of a bug on all nodes one may be
    the first by chance, twice, and where none may leave it is one in the end.
    """
    node, may_be_outage = diagnosis.evidence.node, diagnosis.rule == rules.MOUNT and diagnosis.evidence.before_first_step
    wherever = any(each.same_fingerprint and each.same_rank and each.node not in (node, None) for each in past)
    shown = nodes.at_failure >= LEAST_NODES and nodes.one_may_leave and any(map(_has_moved, same))
    by_chance = diagnosis.kind == CODE and diagnosis.evidence.before_first_step
    here = all(each.node == node for each in same) and not wherever and (shown or not by_chance)
    return here and len(same) >= (MAX_SAME_FAILURES - 1 if may_be_outage else 1)


def _as_code_does(diagnosis: Diagnosis, same: Sequence[Precedent]) -> bool:
    """Return whether what may have other causes has happened again as only a bug happens: at the same step, without progress.

    That is a crash on another node, and a hang in which all ranks wait for each other. By then this try had done LEAST_STEPS: a
    link that is down, or any two failures of a job that copies its state at each step, would come at its first steps.
    """
    evidence = diagnosis.evidence
    waits = diagnosis.rule == rules.HANG_RULE and evidence.hang_blame[:1] == (WAITS,)
    stuck = [each for each in same if each.progress is False and each.first_step_done and each.same_step]
    crashes = diagnosis.kind == CRASH and any(each.node not in (evidence.node, None) for each in stuck)
    return (waits or crashes) and (evidence.step or 0) >= LEAST_STEPS and bool(stuck)


def _has_moved(earlier: Precedent) -> bool:
    """Return whether the ranks of its node have moved since: in a job that was submitted again it may have the same ones."""
    return earlier.moved and not (earlier.same_rank or earlier.rank_here)


def _of_several(evidence: Evidence, past: Sequence[Precedent]) -> bool:
    """Return whether this node could not reach two others or more: of one pair alone, either may be the bad one."""
    pairs = (*evidence.cuts, *(each.cut for each in past if not each.before_repair))
    return len({host for pair in pairs if evidence.node in pair for host in pair}) > 2


def _on_this_node(diagnosis: Diagnosis, past: Sequence[Precedent], nodes: Nodes) -> int:
    """Return how many failures that only a node causes have stayed on this one while its ranks moved, with this one.

    Some ranks, such as 0, do what no other does, so they have bugs of their own and see any outage first. What an outage may
    cause, too, counts apart. Progress in between says nothing; a repair does. A bug that may hit any rank comes back to each node
    in time: so they count in a row or, in a job of MANY_NODES, where several are bad at once, among the last RECENT ones.
    """
    node, cut, away = diagnosis.evidence.node, bool(diagnosis.evidence.cut), diagnosis.kind in _AWAY_KINDS
    of_nodes = (each for each in reversed(past) if each.of_node and not each.before_repair)
    alike = (each for each in of_nodes if bool(each.cut) == cut and (each.kind in _AWAY_KINDS) == away)
    many = nodes.at_failure >= MANY_NODES
    own = takewhile(lambda each: many or node in (each.node, *each.cut), islice(alike, RECENT - 1) if many else alike)
    here = (each for each in own if node in (each.node, *each.cut))
    stayed = sum(_of_several(diagnosis.evidence, past) if cut else _has_moved(each) for each in here)
    return 1 + stayed if may_be_of_a_node(diagnosis) else 0


@dataclass(frozen=True)
class HistoryRow:
    """One row: where `when` holds, it overrules the answer so far. A node that the job needs stays, and the next rows count."""

    name: str
    when: Callable[[Facts], object]
    response: Response
    words: str  # what follows in the reason; {f.NAME} is a fact
    exit_code: int | None = EX_FAILED  # if the job ends now, or a node leaves; None: as the answer so far
    rule: str = ""  # of the verdict; "": as before
    bug: bool = False  # whether it becomes one of kind "code", unless its kind says more

    def applied(self, facts: Facts) -> Facts:
        """Return the facts with the answer of this row."""
        before, said = facts.answer, f"{facts.answer.reason}; {self.words.format(f=facts)}"
        if self.response is Response.REPLACE_NODE and not facts.nodes.one_may_leave:
            return replace(facts, answer=replace(before, reason=f"{said}, but the job cannot run without it"))
        if self.response is Response.REPLACE_NODE and facts.evidence.node:
            said += f"; {facts.evidence.node} leaves"
        kind = CODE if self.bug and before.kind not in _KIND_STAYS else before.kind
        code = before.exit_code if self.exit_code is None else self.exit_code
        return replace(facts, answer=Outcome(self.response, kind, said, self.rule or before.rule, code))


_row = HistoryRow
# What the nodes and the past make of the table's answer.
ANSWERS = (
    _row("trained-before", lambda f: f.stops_at_start and f.trained, Response.CONFIRM,
        "but this job has done steps, so its node or what the last try left may be to blame"),
    _row("asks-again", lambda f: f.diagnosis.tier == rules.PROGRAM_OUTPUT and f.evidence.exit_code == EX_TRY_AGAIN
        and f.answer.response is Response.STOP and f.answer.kind == CODE, Response.CONFIRM,
        "but the script, which has logged it, asks for another try (exit code 75)"),
    _row("not-everywhere", lambda f: f.stops_at_start and f.nodes.at_failure > 1 and not f.evidence.everywhere,
        Response.CONFIRM, "but not all nodes have failed like this, and one may lack something"),
    _row("no-majority-again", lambda f: f.differing and any(each.same_fingerprint for each in f.past), Response.STOP,
        "it is the second time, and no majority shows which of {f.differing} is bad: replace them all", EX_NODE),
    _row("no-majority", lambda f: f.differing, Response.RESTART, "no majority shows which of {f.differing} is bad"),
    _row("lost-again", lambda f: of_lost_node(f.diagnosis) and f.losses >= MAX_FAILURES_IN_A_ROW, Response.REQUEUE,
        "it is loss {f.losses} of a node without progress: does the script bring its hosts down?", EX_TRY_AGAIN, IN_A_ROW),
    _row("at-once", lambda f: f.rule in _ON_ALL_NODES and f.evidence.shared, Response.RESTART,
        "but several nodes report it at once, so it is the hardware of none"),
    _row("exit-code", lambda f: f.rule == rules.HARDWARE_EXIT
        and sum(each.same_fingerprint and each.node != f.evidence.node for each in f.past) >= 2, Response.RESTART,
        "but it was on other nodes, too: perhaps the script means something else by it"),
    _row("exit-code-needed", lambda f: f.rule == rules.HARDWARE_EXIT and not f.nodes.one_may_leave, Response.RESTART,
        "the job cannot run without this node"),
    _row("needed", lambda f: f.answer.response is Response.REPLACE_NODE and not f.nodes.one_may_leave, Response.RESTART,
        "this node should be replaced, but the job cannot run without it", None),
    _row("asked-often", lambda f: f.rule == rules.TRY_AGAIN and f.stuck > MAX_FREE_TRIES, Response.RESTART,
        "it has asked {f.stuck} times without progress, so this try is charged"),
)  # fmt: skip

_THRICE = "the same failure occurred {f.stuck} times without progress"
# What repetition makes of an answer that restarts the job at a price. What only printed words say costs no node, and ends no job
# but by the ceilings.
HISTORY = (
    _row("all-wait-again", lambda f: f.rule == rules.HANG_RULE and f.repeated, Response.STOP,
        "the same failure recurred at the same step without progress", EX_FAILED, REPEATED, True),
    _row("another-number", lambda f: f.answer.kind == NUMERIC and f.repeated and any(each.same_step is False for each in f.same),
        Response.STOP, "the same failure recurred without progress, at another step: if a GPU computes wrongly, integrity_every "
        "can find it", EX_FAILED, REPEATED, True),
    _row("bug-elsewhere", lambda f: f.elsewhere and f.repeated, Response.STOP,
        "the same failure recurred on another node {f.since}", EX_CODE, REPEATED, True),
    _row("bug", lambda f: f.repeated, Response.STOP, "the same failure recurred {f.since}", EX_CODE, REPEATED, True),
    _row("same-node", lambda f: f.weight is not Weight.PRINTED and f.only_here and f.moved, Response.REPLACE_NODE,
        "the same failure occurred {f.times} times, only on node {f.evidence.node}", EX_NODE, SAME_NODE),
    _row("peers-in-step", lambda f: f.stuck >= MAX_SAME_FAILURES and f.rule in rules.PEERS and f.in_step, Response.STOP,
        _THRICE + ", always at the same step, as with a bug (do all ranks make as many steps?)", EX_FAILED, CEILING),
    _row("outage", lambda f: f.stuck >= MAX_SAME_FAILURES and f.away, Response.STOP, _THRICE, EX_TRY_AGAIN, CEILING),
    _row("hardware", lambda f: f.stuck >= MAX_SAME_FAILURES and f.of_hardware, Response.STOP, _THRICE, EX_NODE, CEILING),
    _row("ceiling", lambda f: f.stuck >= MAX_SAME_FAILURES, Response.STOP, _THRICE, EX_FAILED, CEILING),
    _row("unseen", lambda f: f.unseen >= MAX_SAME_FAILURES, Response.STOP,
        "the same failure occurred {f.times} times, and nothing shows progress", EX_FAILED, UNSEEN),
    _row("row-outage", lambda f: f.row >= MAX_FAILURES_IN_A_ROW and f.row_away and f.weight.certain, Response.STOP,
        "it was failure {f.row} in a row without progress", EX_TRY_AGAIN, IN_A_ROW),
    _row("in-a-row", lambda f: f.row >= MAX_FAILURES_IN_A_ROW, Response.STOP,
        "it was failure {f.row} in a row without progress", None, IN_A_ROW),
    _row("bad-node", lambda f: f.on_this_node >= (FEW_NODES_TIMES if 1 < f.nodes.at_failure < LEAST_NODES else
        MAX_SAME_FAILURES), Response.REPLACE_NODE, "{f.on_this_node} failures that only a node causes stayed on "
        "{f.evidence.node} while its ranks moved", EX_NODE, BAD_NODE),
)  # fmt: skip


def _of_table(diagnosis: Diagnosis) -> Outcome:
    response = Response.RESTART if diagnosis.response is Response.FOLLOW else diagnosis.response
    exit_code = {
        Response.STOP: _EXIT_OF_KIND.get(diagnosis.kind, EX_CODE),  # for any kind: another try would end the same way
        Response.REQUEUE: EX_TRY_AGAIN,
        Response.REPLACE_NODE: EX_NODE,
    }.get(response, EX_FAILED)
    return Outcome(response, diagnosis.kind, diagnosis.reason, diagnosis.rule, exit_code)


def overruled(facts: Facts, rows: Sequence[HistoryRow]) -> Facts:
    """Return the facts with the answer of the first row that holds and whose node, if one is to leave, can be spared."""
    for row in rows:
        if row.when(facts):
            facts = row.applied(facts)
            if facts.answer.response is row.response:
                break
    return facts


def stops_at_start(diagnosis: Diagnosis) -> bool:
    """Return whether a rule stops the job before its first step for what a bug causes, or a node that lacks a file."""
    bug = (
        diagnosis.response is Response.STOP
        and diagnosis.kind == CODE
        and diagnosis.tier in (rules.PROGRAM_OUTPUT, rules.EXIT_STATUS)
    )
    return bug and diagnosis.evidence.before_first_step and diagnosis.rule not in _FINAL


def of_lost_node(diagnosis: Diagnosis) -> bool:
    """Return whether the loss of a node caused the failure (see `judgement`), rather than that a rule of the user says so."""
    return diagnosis.kind == kinds.NODE_LOST and diagnosis.tier != rules.USER_RULES


def of_a_node(diagnosis: Diagnosis) -> bool:
    """Return whether a bad node causes such failures, and an outage, a full disk or another worker's failure does not."""
    blame = diagnosis.evidence.hang_blame
    hangs = diagnosis.rule == rules.HANG_RULE and bool(blame) and blame[0] < WAITS
    known = len(diagnosis.evidence.differs) < 2 and not diagnosis.evidence.shared  # of two replicas, either may be the bad one
    return known and (hangs or diagnosis.kind in (HARDWARE, CRASH) or diagnosis.rule in rules.ILLEGAL_ACCESS)


def may_be_of_a_node(diagnosis: Diagnosis) -> bool:
    """Return whether a bad node may cause such failures, with its mount or its link. The first to notice is not the cause.

    Printed words alone say nothing of a node.
    """
    evidence = diagnosis.evidence
    of_mount = diagnosis.rule == rules.MOUNT and not evidence.shared
    of_link = bool(evidence.cuts) and all(evidence.node in hosts for hosts in evidence.cuts)
    return (of_a_node(diagnosis) or of_mount or of_link) and diagnosis.weight is not Weight.PRINTED
