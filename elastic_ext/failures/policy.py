"""The response to a failure: that of the rule, unless history, nodes or budget overrule it. Pure functions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import comb

from elastic_ext.base.diagnosis import (
    CASCADE,
    CODE,
    CRASH,
    DATA,
    DEVICE_MEMORY,
    HANG,
    HARDWARE,
    HOST_MEMORY,
    NETWORK,
    NUMERIC,
    PREEMPTION,
    STORAGE,
    USER_STOP,
    Kind,
    Response,
)
from elastic_ext.base.printable import counted
from elastic_ext.base.records import Seconds, ZeroOrOne, stored_as
from elastic_ext.failures.classify import Diagnosis
from elastic_ext.failures.evidence import WAITS, Precedent
from elastic_ext.failures.rules import (
    ACCESS,
    CUT_RULE,
    DAMAGED,
    ELSEWHERE,
    HANG_RULE,
    HARDWARE_EXIT,
    ILL_STORAGE,
    ILLEGAL_ACCESS,
    INTERFACE,
    MOUNT,
    NETWORK_RULE,
    NO_EVIDENCE,
    OF_SCRIPT,
    PEERS,
    PROGRAM_OUTPUT,
    SERVICE,
    TRY_AGAIN,
    USER_RULES,
)

NO_LIMIT = -1
# Waits before the second and the third try: what is down may be back in two minutes, and a bug is not. After the first step the
# second try waits for nothing. Seconds at backoff=1, by rule; longer by up to half, at random.
SPREAD_S = {
    **dict.fromkeys((NO_EVIDENCE, SERVICE), (30.0, 90.0)),
    **dict.fromkeys(
        (NETWORK_RULE, INTERFACE, CUT_RULE, "storage-client", "storage-busy", "storage-load", MOUNT, *PEERS), (0.0, 90.0)
    ),
}
IMMEDIATE_RESTARTS = 1  # charged restarts in a row without a wait, since one restart cures most failures
WARM_START, CUT_AGAIN = "warm-start", "cut-again"  # names of rules
# Before the first step, these stop a job that has never done one. Where its script has passed this point before, a node may lack
# a file or a package, or the last try has left something behind.
STARTED_BEFORE = frozenset(
    {"code-always", "argparse", "access-refused-at-start", "arguments-at-start", "files-at-start", "usage-exit"}
)
REPEATED, SAME_NODE, CEILING, IN_A_ROW, BAD_NODE = "repeated", "same-node", "ceiling", "in-a-row", "bad-node"
_BY_HISTORY = (REPEATED, SAME_NODE, CEILING, IN_A_ROW, BAD_NODE)
# Below it, chance does not explain how often a node has failed: in a job of 2,048 nodes twice in 6 failures, of 64 nodes three
# times in 7, of 8 nodes four times in 5. In arXiv 2605.09370, 3 of 63 nodes have more than half of all exclusions.
CHANCE = 0.01
GONE_BACK = "it happened twice after loading the same checkpoint: the one before it is tried, if there is one"
MOVED = "its ranks move to another node, to show whether they fail or the node"
ONE_MORE_TRY = "one more try shows whether it happens again"  # said only while it is to come
LEAST_NODES = 4  # of a job in which chance seldom chooses the same one twice
LEAST_STEPS = 10  # of a try that fails at the same step as the one before it: fewer say nothing
MAX_SAME_FAILURES = 3  # how often the same failure may happen without progress, at any budget
MAX_FAILURES_IN_A_ROW = 8  # without progress, charged, of any sort: an error whose text varies is never the same
# A later launch may find these mended; a library that was missing three times stays so.
AWAY = (ILL_STORAGE - {"shared-object"}).union(PEERS, (CUT_RULE, SERVICE))
MAX_FREE_TRIES = 5  # without progress, of a script that asks for another try; each further one is charged

# Exit codes of the agent (from sysexits.h if possible).
EX_FAILED = 1  # the budget is spent, or the cause is unknown
EX_CODE = 65  # a bug in the code or the data: do not retry
EX_NODE = 69  # this node is bad: replace it
EX_TRY_AGAIN = 75  # preemption or an infrastructure failure: requeue
EX_CONFIG = 78  # configuration or usage
EX_USER = 130  # the user stopped it

# Presets: the codes that schedulers get in place of those above. Kubeflow's restartPolicy ExitCode retries only codes of 128 and
# above: retryable codes get 128 added, and the user's stop becomes 2 (the number of SIGINT), since 130 would cause a restart.
EXIT_CODES: dict[str, dict[int, int]] = {
    "design": {},
    "stock": dict.fromkeys((EX_FAILED, EX_CODE, EX_NODE, EX_TRY_AGAIN, EX_CONFIG, EX_USER), 1),
    "kubeflow": {EX_NODE: 128 + EX_NODE, EX_TRY_AGAIN: 128 + EX_TRY_AGAIN, EX_USER: 2},
}

# The codes with which an agent may leave when it gives up, in any preset; 0 means that the job has finished.
STOP_CODES: frozenset[int | None] = frozenset({EX_FAILED, EX_CODE, EX_NODE, EX_TRY_AGAIN, EX_CONFIG, EX_USER}).union(
    *(codes.values() for codes in EXIT_CODES.values())
)


def exit_code_for(code: int, preset: str) -> int:
    """Return the code that a scheduler gets in place of `code`. preset: one of EXIT_CODES."""
    return EXIT_CODES[preset].get(code, code)


# A repeated failure becomes kind "code", unless it has one of these kinds, which are more specific.
_KIND_STAYS = frozenset({HOST_MEMORY, DEVICE_MEMORY, NUMERIC, STORAGE})
_EXIT_OF_KIND = {CODE: EX_CODE, DATA: EX_CODE, USER_STOP: EX_USER, HARDWARE: EX_NODE, PREEMPTION: EX_TRY_AGAIN}


class Action(Enum):
    """The action of one agent: leave, or restart its workers. `Decision.response` is the response of the whole job."""

    STOP = "stop"
    RESTART = "restart"


ACTIONS = {
    Response.STOP: Action.STOP,
    Response.REQUEUE: Action.STOP,
    Response.REPLACE_NODE: Action.STOP,
    Response.CONFIRM: Action.RESTART,
    Response.RESTART: Action.RESTART,
    Response.RESTART_FREE: Action.RESTART,
}


@dataclass(frozen=True)
class Decision:
    """The decision for one agent, with its reason."""

    action: Action
    kind: Kind
    reason: str
    exit_code: int | None = None  # the agent's exit code if it leaves, else None
    rule: str = ""  # the rule of the table, or of this module if it overruled the table
    charged: bool = False  # whether the restart counts against the budget
    # the response of the whole job; None if no rule was applied
    response: Response | None = field(default=None, metadata=stored_as("verdict"))
    checkpoints_back: ZeroOrOne = 0  # 1 to resume from the checkpoint before the newest
    delay_s: Seconds = 0.0  # seconds to wait before the restart; 0 without one
    cold: bool = False  # whether to start the workers without warm standbys
    moves_ranks: bool = False  # whether the ranks of the node with the cause move to another node; see `_moves_ranks`

    @property
    def word(self) -> str:
        """Return it in one word: the response of the job or, without one, the action of the agent."""
        return str((self.response or self.action).value)


@dataclass(frozen=True)
class Budget:
    """The restarts that a job may have, and those charged so far."""

    max_restarts: int = NO_LIMIT  # NO_LIMIT for none
    charged: int = 0  # restarts charged so far
    # the most restarts for failures of a kind, by kind; max_restarts applies as well
    kind_limits: Mapping[str, int] = field(default_factory=dict)
    charged_by_kind: Mapping[str, int] = field(default_factory=dict)  # restarts charged so far, by kind

    @property
    def left(self) -> bool:
        """Whether another restart may be charged."""
        return self.max_restarts == NO_LIMIT or self.charged < self.max_restarts


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
class Backoff:
    """Exponential backoff with jitter, so that nodes and jobs with the same failure do not all come back at once."""

    base_s: float = 1.0  # seconds before the second charged restart in a row; 0 to never wait
    max_s: float = 60.0  # the longest wait in seconds

    def delay_s(self, charged: int, jitter: float) -> float:
        """Return the wait before this restart.

        Args:
            charged: the restart's number since the last progress, from 1.
            jitter: a random number from 0 to 1; it shortens the wait by up to half.
        """
        if charged <= IMMEDIATE_RESTARTS or self.base_s <= 0:
            return 0.0
        doublings = min(charged - IMMEDIATE_RESTARTS - 1, 32)
        return min(self.max_s, self.base_s * 2.0**doublings) * (1 - jitter / 2)


UNLIMITED = Budget()
NODES_UNKNOWN = Nodes()
NO_BACKOFF = Backoff(0.0)

_CHARGED = frozenset({Response.CONFIRM, Response.RESTART})


@dataclass(frozen=True)
class _Outcome:
    """A decision in the making."""

    response: Response
    kind: str
    reason: str
    rule: str
    exit_code: int = EX_FAILED


def decide(
    diagnosis: Diagnosis,
    budget: Budget = UNLIMITED,
    history: Sequence[Precedent] | None = None,
    nodes: Nodes = NODES_UNKNOWN,
    exit_codes: str = "design",
    backoff: Backoff = NO_BACKOFF,
    jitter: float = 0.0,
) -> Decision:
    """Return what to do about the root cause of a round's failures.

    Args:
        diagnosis: the root cause.
        history: earlier failures of the job, oldest first; None uses those of the evidence.
        exit_codes: one of EXIT_CODES.
        backoff, jitter: the wait before the restart; see Backoff.
    """
    past = tuple(diagnosis.evidence.history if history is None else history)
    of_table = _from_table(diagnosis, past)
    outcome = _apply_history(of_table, diagnosis, past, nodes)
    blamed = not diagnosis.checkpoints_back and _checkpoint_to_blame(diagnosis, past)
    if blamed and outcome.rule in _BY_HISTORY:  # the checkpoint comes before the code and the node
        outcome = of_table
    if budget.left:
        outcome = _retry_cold(outcome, diagnosis, past)
    outcome = _within_budget(_within_kind_limit(outcome, budget), budget)
    action = ACTIONS[outcome.response]
    waits = outcome.rule == SAME_NODE and diagnosis.evidence.before_first_step  # perhaps it was only the first to see it
    charged = outcome.response in _CHARGED
    cold = charged and _warm_start_to_blame(diagnosis, outcome.kind)
    moves_ranks = charged and not blamed and _moves_ranks(outcome, diagnosis, nodes)
    goes_on = outcome.response is Response.REPLACE_NODE  # the job does, on the other nodes
    more = [text for text, holds in ((GONE_BACK, blamed and action is Action.RESTART), (MOVED, moves_ranks)) if holds]
    return Decision(
        action,
        outcome.kind,
        "; ".join([outcome.reason, *more]),
        exit_code_for(outcome.exit_code, exit_codes) if action is Action.STOP else None,
        outcome.rule,
        charged,
        outcome.response,
        max(diagnosis.checkpoints_back, int(blamed)) if action is Action.RESTART or goes_on else 0,
        max(
            backoff.delay_s(max(budget.charged + 1 if charged else 0, _asked(outcome, past)), jitter),
            _spread_s(diagnosis, past, nodes) * backoff.base_s * (1 + jitter / 2) if charged or waits else 0.0,
        ),
        cold,
        moves_ranks=moves_ranks,
    )


def _asked(outcome: _Outcome, past: Sequence[Precedent]) -> int:
    """Return how often a program has asked for another try without progress: it waits ever longer for it."""
    if outcome.kind != PREEMPTION or outcome.response not in (Response.RESTART_FREE, Response.RESTART):
        return 0
    return 1 + sum(earlier.same_fingerprint and earlier.progress is not True for earlier in past)


def _spread_s(diagnosis: Diagnosis, past: Sequence[Precedent], nodes: Nodes) -> float:
    """Return the seconds to wait so that the tries of what may be an outage are spread over time."""
    waits, early = SPREAD_S.get(diagnosis.rule, ()), diagnosis.evidence.before_first_step
    if nodes.only_one and diagnosis.rule in PEERS:
        return 0.0  # nothing outside this host can mend that
    stuck = (False, None) if early else (False,)
    tries = sum(earlier.same_fingerprint and earlier.progress in stuck for earlier in past)
    return waits[min(tries, len(waits) - 1)] if waits and (early or tries) else 0.0


def _from_table(diagnosis: Diagnosis, past: tuple[Precedent, ...]) -> _Outcome:
    response = Response.RESTART if diagnosis.response is Response.FOLLOW else diagnosis.response
    exit_code = {
        Response.STOP: _EXIT_OF_KIND.get(diagnosis.kind, EX_CODE),  # for any kind: another try would end the same way
        Response.REQUEUE: EX_TRY_AGAIN,
        Response.REPLACE_NODE: EX_NODE,
    }.get(response, EX_FAILED)
    outcome = _Outcome(response, diagnosis.kind, diagnosis.reason, diagnosis.rule, exit_code)
    if diagnosis.rule == TRY_AGAIN:
        return _charged_without_progress(outcome, past)
    evidence = diagnosis.evidence
    at_start = evidence.before_first_step and diagnosis.rule in STARTED_BEFORE
    doubts = (
        (
            at_start and any(earlier.first_step_done for earlier in past),
            "this job has done steps, so its node or what the last try left may be to blame",
        ),
        (
            diagnosis.tier == PROGRAM_OUTPUT and outcome.kind == CODE and evidence.exit_code == EX_TRY_AGAIN,
            "the script, which has logged it, asks for another try (exit code 75)",
        ),
    )
    doubt = next((why for holds, why in doubts if holds), "") if response is Response.STOP else ""
    return _Outcome(Response.CONFIRM, outcome.kind, f"{outcome.reason}; but {doubt}", outcome.rule) if doubt else outcome


def _charged_without_progress(outcome: _Outcome, past: Sequence[Precedent]) -> _Outcome:
    """Charge a script that has asked for another try too often: it might for ever, at the price of all nodes."""
    tries = sum(earlier.same_fingerprint and earlier.progress is False for earlier in past)
    if tries < MAX_FREE_TRIES:
        return outcome
    reason = f"{outcome.reason}; it has asked {tries + 1} times without progress, so this try is charged"
    return replace(outcome, response=Response.RESTART, reason=reason)


def _apply_history(outcome: _Outcome, diagnosis: Diagnosis, past: tuple[Precedent, ...], nodes: Nodes) -> _Outcome:
    """Apply the rules that span several failures: a confirmed bug, a node that fails alone, and the ceiling."""
    if diagnosis.evidence.cut and _in_all_cuts(diagnosis, past):
        outcome = _cut_again(outcome, diagnosis, past, nodes)
    if len(diagnosis.evidence.differs) > 1:
        outcome = _without_majority(outcome, diagnosis, past)
    if of_lost_node(diagnosis):
        outcome = _lost_again(outcome, past)
    if outcome.rule == HARDWARE_EXIT:
        outcome = _on_several_nodes(outcome, diagnosis, past)
    same = [earlier for earlier in past if earlier.same_fingerprint and earlier.progress is not True]
    if outcome.response is Response.REPLACE_NODE and not nodes.one_may_leave:
        reason = f"{outcome.reason}; this node should be replaced, but the job cannot run without it"
        exit_code = EX_NODE if outcome.rule != HARDWARE_EXIT else EX_FAILED  # if the job ends now
        outcome = _Outcome(Response.RESTART, outcome.kind, reason, outcome.rule, exit_code)
    if outcome.response not in _CHARGED:
        return outcome
    surely_stuck = sum(earlier.progress is False for earlier in same)
    unknown_at_start = diagnosis.evidence.before_first_step and diagnosis.rule == NO_EVIDENCE
    confirmed = len(same) + 1 >= MAX_SAME_FAILURES if unknown_at_start else _confirmed(same)
    only_here = _only_here(diagnosis, same, past, nodes)
    may_be_code = outcome.response is Response.CONFIRM or unknown_at_start
    if (may_be_code and not only_here and confirmed) or _as_code_does(diagnosis, same):
        return _repeated(outcome, diagnosis, same)
    of_node = outcome.response is Response.CONFIRM or surely_stuck + 1 < MAX_SAME_FAILURES or any(map(_has_moved, same))
    if only_here and nodes.one_may_leave and of_node:
        reason = f"{outcome.reason}; the same failure occurred {len(same) + 1} times, only on node {diagnosis.evidence.node}"
        return _Outcome(Response.REPLACE_NODE, outcome.kind, reason, SAME_NODE, EX_NODE)
    if surely_stuck + 1 >= MAX_SAME_FAILURES and outcome.kind != PREEMPTION:
        return _at_ceiling(outcome, diagnosis, same, past, nodes)
    row = [earlier for earlier in past if earlier.charged and earlier.progress is False]
    if len(row) + 1 >= MAX_FAILURES_IN_A_ROW and outcome.kind != PREEMPTION:
        outside = sum(kind in (STORAGE, NETWORK) for kind in (outcome.kind, *(earlier.kind for earlier in row)))
        exit_code = EX_TRY_AGAIN if 2 * outside > len(row) + 1 else outcome.exit_code
        reason = f"{outcome.reason}; it was failure {len(row) + 1} in a row without progress"
        return _Outcome(Response.STOP, outcome.kind, reason, IN_A_ROW, exit_code)
    if not (too_often := _too_often_for_chance(diagnosis, past, nodes)):
        return outcome
    reason, missing = f"{outcome.reason}; {too_often}", _unproven(diagnosis, past, nodes)
    if not missing:
        return _Outcome(Response.REPLACE_NODE, outcome.kind, reason, BAD_NODE, EX_NODE)
    return replace(outcome, reason=f"{reason}, but {missing}")


def of_lost_node(diagnosis: Diagnosis) -> bool:
    """Return whether the loss of a node caused the failure (see `judgement`); kind: of what it did to workers of other nodes."""
    free = diagnosis.response is Response.RESTART_FREE and diagnosis.tier != USER_RULES
    return free and diagnosis.kind in (NETWORK, CASCADE)


def _lost_again(outcome: _Outcome, past: Sequence[Precedent]) -> _Outcome:
    """Leave with "try again" after many losses of nodes: a script may bring its hosts down, and each restart is free.

    Where steps may just not be counted, any number is possible: a long job loses many nodes.
    """
    lost = sum(earlier.lost_node and earlier.surely_none_since for earlier in past) + 1
    if lost < MAX_FAILURES_IN_A_ROW:
        return outcome
    reason = f"{outcome.reason}; it is loss {lost} of a node without progress: does the script bring its hosts down?"
    return _Outcome(Response.REQUEUE, outcome.kind, reason, IN_A_ROW, EX_TRY_AGAIN)


def _on_several_nodes(outcome: _Outcome, diagnosis: Diagnosis, past: Sequence[Precedent]) -> _Outcome:
    """Replace no node for an exit code that many nodes end with: perhaps the script means something else by it."""
    elsewhere = [each for each in past if each.same_fingerprint and each.node != diagnosis.evidence.node]
    if not diagnosis.evidence.shared and len(elsewhere) < MAX_SAME_FAILURES - 1:
        return outcome
    reason = f"{outcome.reason}; but it was on other nodes, too: perhaps the script means something else by it"
    stuck = sum(each.progress is not True for each in elsewhere) >= MAX_SAME_FAILURES - 1
    return _Outcome(Response.STOP if stuck else Response.RESTART, outcome.kind, reason, CEILING if stuck else outcome.rule)


def _at_ceiling(
    outcome: _Outcome, diagnosis: Diagnosis, same: Sequence[Precedent], past: Sequence[Precedent], nodes: Nodes
) -> _Outcome:
    """Stop for the same failure MAX_SAME_FAILURES times without progress. same: see `_only_here`."""
    evidence, rule = diagnosis.evidence, diagnosis.rule
    at_one_step = (evidence.step or 0) >= LEAST_STEPS and all(each.same_step for each in same)
    trained = evidence.first_step_done or any(each.first_step_done for each in past)
    one_node = evidence.node is not None and all(each.node == evidence.node for each in same)
    bug = rule in PEERS and at_one_step  # one rank has fewer batches than the others, say
    inside = rule in PEERS and nodes.at_failure == 1  # all peers are on this host, so no network is to blame
    worked = rule == NETWORK_RULE and trained and not at_one_step  # so the name is right
    codes = (
        (bug or inside, EX_FAILED),
        (worked or rule in AWAY, EX_TRY_AGAIN),
        (outcome.kind == HARDWARE and (diagnosis.shown_by_hardware or one_node), EX_NODE),
    )
    exit_code = next((code for holds, code in codes if holds), EX_FAILED)
    times = sum(earlier.progress is False for earlier in same) + 1
    reason = f"{outcome.reason}; the same failure occurred {times} times without progress"
    reason += ", always at the same step, as with a bug (do all ranks make as many steps?)" if bug else ""
    return _Outcome(Response.STOP, outcome.kind, reason, CEILING, exit_code)


def _unproven(diagnosis: Diagnosis, past: Sequence[Precedent], nodes: Nodes) -> str:
    """Return why a node stays that has failed too often for chance; "": it leaves."""
    if not nodes.one_may_leave:
        return "the job cannot run without it"
    if diagnosis.evidence.cut:
        return "" if _of_several(diagnosis, past) else "either of the two hosts may be the bad one"
    of_node = diagnosis.evidence.link_failed or _stayed(diagnosis, past)
    return "" if of_node else "perhaps one of its ranks fails, or sees an outage first"


def _repeated(outcome: _Outcome, diagnosis: Diagnosis, same: Sequence[Precedent]) -> _Outcome:
    """Stop for a bug. A number that leaves its range at another step each time may come from hardware that computes wrongly."""
    kind = outcome.kind if outcome.kind in _KIND_STAYS else CODE
    moved = diagnosis.evidence.node is not None and any(each.node not in (diagnosis.evidence.node, None) for each in same)
    where = " at the same step" if diagnosis.rule == HANG_RULE else " on another node" if moved else ""
    reason = f"{outcome.reason}; the same failure recurred{where} without progress"
    if outcome.kind == NUMERIC and any(each.same_step is False for each in same):
        reason += ", at another step: if a GPU computes wrongly, integrity_every can find it"
        return _Outcome(Response.STOP, kind, reason, REPEATED, EX_FAILED)
    return _Outcome(Response.STOP, kind, reason, REPEATED, EX_FAILED if diagnosis.rule == HANG_RULE else EX_CODE)


def _only_here(diagnosis: Diagnosis, same: Sequence[Precedent], past: Sequence[Precedent], nodes: Nodes) -> bool:
    """Return whether the same failure has happened on this node alone, so that the node is to blame and not the code.

    same: the same failures without progress since.

    Before the first step, a bad mount counts only from the third time on: it may be an outage.
    """
    node, may_be_outage = diagnosis.evidence.node, diagnosis.rule == MOUNT and diagnosis.evidence.before_first_step
    often = len(same) >= (MAX_SAME_FAILURES - 1 if may_be_outage else 1)
    wherever = any(each.same_fingerprint and each.same_rank and each.node not in (node, None) for each in past)
    # Of a bug on all nodes one may be the first by chance, twice, and where none may leave it is one in the end.
    by_chance = diagnosis.rule in STARTED_BEFORE and (nodes.at_failure < LEAST_NODES or not nodes.one_may_leave)
    here = all(earlier.node == node for earlier in same) and not wherever and not by_chance
    return often and here and _place_counts(diagnosis, nodes)


def _place_counts(diagnosis: Diagnosis, nodes: Nodes) -> bool:
    """Return whether a node may be to blame for such a failure if it comes back there alone.

    Invariant: no node leaves for a failure whose cause is elsewhere. The node that reports it lives, and the first of several to
    do so is often the leader's.
    """
    evidence, rule = diagnosis.evidence, diagnosis.rule
    several = evidence.cut or evidence.shared or len(evidence.differs) > 1  # for a cut, see `_in_all_cuts`
    outage = evidence.before_first_step and rule in SPREAD_S and rule not in (NO_EVIDENCE, MOUNT)
    known = evidence.node is not None and not nodes.only_one and not several
    return known and not outage and rule not in OF_SCRIPT | DAMAGED | ELSEWHERE


def _as_code_does(diagnosis: Diagnosis, same: Sequence[Precedent]) -> bool:
    """Return whether what may have other causes has happened again as only a bug happens: at the same step, without progress.

    That is a crash on another node, and a hang in which all ranks wait for each other. By then this try had done LEAST_STEPS: a
    link that is down, or any two failures of a job that copies its state at each step, would come at its first steps.
    """
    evidence, crashes = diagnosis.evidence, diagnosis.kind == CRASH
    hangs = diagnosis.rule == HANG_RULE and evidence.hang_blame[:1] == (WAITS,)
    stuck = [each for each in same if each.progress is False and each.first_step_done and each.same_step]
    elsewhere = hangs or any(each.node not in (evidence.node, None) for each in stuck)
    return (crashes or hangs) and (evidence.step or 0) >= LEAST_STEPS and bool(stuck) and elsewhere


def _moves_ranks(outcome: _Outcome, diagnosis: Diagnosis, nodes: Nodes) -> bool:
    """Return whether the next try should show what the failure follows: the node, which is bad then, or the rank, as a bug does.

    If the ranks stay, a failure that comes back shows neither, and a node that is well has to leave: rank 0 alone writes
    checkpoints and logs, so it meets each outage of their servers, and one rank's data may make its loss NaN.
    """
    of_rank = diagnosis.evidence.rank >= 0 and not diagnosis.evidence.link_failed and outcome.kind != PREEMPTION
    return of_rank and nodes.at_failure > 1 and _place_counts(diagnosis, nodes)


def of_a_node(diagnosis: Diagnosis) -> bool:
    """Return whether a bad node causes such failures, and an outage, a full disk or another worker's failure does not."""
    blame = diagnosis.evidence.hang_blame
    hangs = diagnosis.rule == HANG_RULE and bool(blame) and blame[0] < WAITS
    known = len(diagnosis.evidence.differs) < 2 and not diagnosis.evidence.shared  # of two replicas, either may be the bad one
    return known and (hangs or diagnosis.kind in (HARDWARE, CRASH) or diagnosis.rule in ILLEGAL_ACCESS)


def may_be_of_a_node(diagnosis: Diagnosis) -> bool:
    """Return whether a bad node may cause such failures, with its mount or its link. The first to notice is not the cause."""
    evidence = diagnosis.evidence
    of_mount = diagnosis.rule == MOUNT and not evidence.shared
    of_link = bool(evidence.cuts) and all(evidence.node in hosts for hosts in evidence.cuts)
    return of_a_node(diagnosis) or of_mount or of_link


def _too_often_for_chance(diagnosis: Diagnosis, past: Sequence[Precedent], nodes: Nodes) -> str:
    """Return why this node is worse than the others; "" if chance explains how often it has failed.

    Progress in between does not count, and neither does time: only how many failures there were in the whole job. If all nodes
    were equal, the chance that one of them has `here` of the last `last` would be comb(last, here) / nodes ** (here - 1) at most,
    with the fewest nodes that ran at one of them. That is for each failure: of 100 on equal nodes one may have this verdict.
    A failure that an outage may cause, too, does not count beside one that only a bad node has. A cut is of two nodes, so by
    chance each is in it twice as often: there it is comb(last, here) * 2 ** here / nodes ** (here - 1) at most.
    """
    node, fewest, cut = diagnosis.evidence.node, nodes.at_failure, bool(diagnosis.evidence.cut)
    weak = not of_a_node(diagnosis)
    suspects = [each for each in past if each.of_nodes and bool(each.cut) == cut and each.maybe_outage == weak]
    wherever = not cut and any(each.same_rank and each.node != node for each in suspects)  # it fails wherever the rank runs
    if node is None or not may_be_of_a_node(diagnosis) or wherever:
        return ""
    here = 1
    for last, earlier in enumerate(reversed(suspects), 2):
        here += node in (earlier.cut or (earlier.node,)) and not earlier.before_repair
        fewest = min(fewest, earlier.of_nodes)
        if comb(last, here) * (2**here if cut else 1) < CHANCE * fewest ** (here - 1):
            return f"{here} of the last {last} failures of this sort were on {node}, too many for chance with {fewest} nodes"
    return ""


def _stayed(diagnosis: Diagnosis, past: Sequence[Precedent]) -> bool:
    """Return whether such a failure has stayed on this node although its ranks moved.

    Some ranks, such as 0, do what no other does, so they have bugs of their own and see any outage first. Where the node has the
    same ranks again, as in a job that was submitted again, the move has shown nothing.
    """
    weak = not of_a_node(diagnosis)
    alike = (each for each in past if each.of_nodes and not each.cut and each.maybe_outage == weak)
    return any(each.node == diagnosis.evidence.node and not each.before_repair and _has_moved(each) for each in alike)


def _has_moved(earlier: Precedent) -> bool:
    """Return whether the ranks of its node have moved since."""
    return earlier.moved and not (earlier.same_rank or earlier.rank_here)


def _of_several(diagnosis: Diagnosis, past: Sequence[Precedent]) -> bool:
    """Return whether this node could not reach two others or more: of one pair alone, either may be the bad one."""
    pairs = (*diagnosis.evidence.cuts, *(each.cut for each in past if not each.before_repair))
    return len({host for pair in pairs if diagnosis.evidence.node in pair for host in pair}) > 2


def _in_all_cuts(diagnosis: Diagnosis, past: Sequence[Precedent]) -> bool:
    """Return whether there was a cut before that may still be there, and this node is in all pairs of hosts, then and now.

    Where no node is, it is the network that is cut, and the job needs all its nodes once that is mended.
    """
    evidence = diagnosis.evidence
    earlier = [each.lasting_cut for each in past if each.lasting_cut]
    several = evidence.hang is True or _of_several(diagnosis, past)  # NCCL names one pair, a hang shows all
    return bool(earlier) and several and all(evidence.node in hosts for hosts in (*evidence.cuts, *earlier))


def _cut_again(outcome: _Outcome, diagnosis: Diagnosis, past: Sequence[Precedent], nodes: Nodes) -> _Outcome:
    """Without this node, the job needs no way between it and the others."""
    node = diagnosis.evidence.node
    known = any(each.lasting_cut and each.surely_none_since for each in past)
    when = "before, without progress since" if known else "the last time, too"
    reason = f"{outcome.reason}; {node} was cut off like this {when}"
    if not nodes.one_may_leave:
        return replace(outcome, reason=f"{reason}, but the job cannot run without it")
    return _Outcome(Response.REPLACE_NODE, outcome.kind, f"{reason}; {node} leaves", CUT_AGAIN, EX_NODE)


def _without_majority(outcome: _Outcome, diagnosis: Diagnosis, past: Sequence[Precedent]) -> _Outcome:
    """Replicas differ, and none is the odd one: try again once. Progress since then counts for nothing: such errors are rare."""
    hosts = " and ".join(diagnosis.evidence.differs)
    if any(each.same_fingerprint for each in past):
        reason = f"{outcome.reason}; it is the second time, and no majority shows which of {hosts} is bad: replace them all"
        return replace(outcome, response=Response.STOP, reason=reason, exit_code=EX_NODE)
    reason = f"{outcome.reason}; no majority shows which of {hosts} is bad"
    return _Outcome(Response.RESTART, outcome.kind, reason, outcome.rule)


def _retry_cold(outcome: _Outcome, diagnosis: Diagnosis, past: Sequence[Precedent]) -> _Outcome:
    """Allow one more cold start: before the first step, the warm standby itself may cause what looks like a bug."""
    ends = outcome.response is Response.STOP and outcome.exit_code == EX_CODE and diagnosis.tier != USER_RULES
    cold_start_failed = any(each.same_fingerprint and each.warm is False for each in past)
    if not ends or cold_start_failed or not _warm_start_to_blame(diagnosis, outcome.kind):
        return outcome
    reason = f"{outcome.reason}; but its process was a warm standby: one cold start is tried"
    return _Outcome(Response.CONFIRM, outcome.kind, reason, WARM_START)


def _warm_start_to_blame(diagnosis: Diagnosis, kind: str) -> bool:
    """Return whether a warm start may be the cause: no step was done, and no failure outside the worker is known."""
    evidence = diagnosis.evidence
    by_itself = kind not in _OUTSIDE_THE_WORKER and evidence.signal != "SIGKILL"
    return bool(evidence.warm) and evidence.before_first_step and by_itself


_OUTSIDE_THE_WORKER = frozenset({NETWORK, PREEMPTION, HARDWARE, HOST_MEMORY})
_NO_CHECKPOINT_KINDS = frozenset({*_OUTSIDE_THE_WORKER, CASCADE, DATA, DEVICE_MEMORY, HANG})
_NOT_OF_A_CHECKPOINT = ILL_STORAGE | ACCESS | {"gpu-driver", "collective-misuse", "command", "cache-race"}


def _checkpoint_to_blame(diagnosis: Diagnosis, past: Sequence[Precedent]) -> bool:
    """Return whether the same failure happened twice before the first step, both times after loading the same checkpoint.

    Never for a failure from outside the worker, or of the storage: all checkpoints would be quarantined one after another. Nor
    where none can be the cause, as of GPU memory: once the script is mended, it would resume from an older one.
    """
    outside = diagnosis.kind in _NO_CHECKPOINT_KINDS or diagnosis.rule in _NOT_OF_A_CHECKPOINT or diagnosis.tier == USER_RULES
    outside |= diagnosis.evidence.signal in ("SIGKILL", "SIGTERM") or diagnosis.rule in STARTED_BEFORE
    if outside or not diagnosis.evidence.before_first_step or diagnosis.evidence.cut:
        return False
    same = [each for each in past if each.same_fingerprint and each.first_step_done is False and each.progress is not True]
    return len(same) == 1 and same[0].same_checkpoint  # not if it happened with another one, too, or if none was there to try


def _confirmed(same: Sequence[Precedent]) -> bool:
    """Return whether a suspected bug is confirmed. If progress is unknown, it takes one more try."""
    weak = all(earlier.progress is None for earlier in same)
    return len(same) >= (2 if weak else 1)


def _within_kind_limit(outcome: _Outcome, budget: Budget) -> _Outcome:
    limit = budget.kind_limits.get(outcome.kind, NO_LIMIT)
    if outcome.response not in _CHARGED or limit == NO_LIMIT or budget.charged_by_kind.get(outcome.kind, 0) < limit:
        return outcome
    reason = f"{outcome.reason}; the limit of {counted(limit, 'restart')} for kind {outcome.kind} (kind_limits) is reached"
    return replace(outcome, response=Response.STOP, reason=reason, rule="kind-limit")


def _within_budget(outcome: _Outcome, budget: Budget) -> _Outcome:
    if outcome.response not in _CHARGED:
        return outcome
    limit = budget.max_restarts
    if not budget.left:
        reason = f"{outcome.reason}; the budget of {counted(limit, 'restart')} (--max-restarts) is spent"
        return replace(outcome, response=Response.STOP, reason=reason, rule="budget")
    of = ", no limit" if limit == NO_LIMIT else f" of {limit}"
    why = f"; {ONE_MORE_TRY}" if outcome.response is Response.CONFIRM and outcome.rule != WARM_START else ""
    return replace(outcome, reason=f"{outcome.reason}{why}; restart {budget.charged + 1}{of}")
