"""What to do about a failure: the table's decision, then a look at the history, the nodes and the budget. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elastic_ext.base.kinds import (
    CODE,
    DATA,
    DEVICE_MEMORY,
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
from elastic_ext.base.records import Seconds, ZeroOrOne
from elastic_ext.failures.classify import Diagnosis
from elastic_ext.failures.evidence import Past
from elastic_ext.failures.matching import USERS
from elastic_ext.failures.rules import NO_EVIDENCE

NO_LIMIT = -1
FREE_OF_WAIT = 1  # charged restarts in a row that begin at once: most failures are over with the first
WARM_START = "warm-start"  # rule
CEILING = 3  # how often the same failure may happen with no progress, whatever the budget

# Exit codes of the agent (sysexits.h where there is one).
EX_FAILED = 1  # budget spent, or not known
EX_CODE = 65  # a bug of the code or the data: do not retry
EX_NODE = 69  # this node is bad: replace it
EX_TRY_AGAIN = 75  # preempted, or the infrastructure: requeue
EX_CONFIG = 78  # configuration or usage
EX_USER = 130  # the user stopped it

# What a scheduler is told in place of the codes above. Kubeflow's restartPolicy ExitCode retries 128 and above and nothing below:
# a retryable code gets 128 added, and the user's stop becomes 2 (the number of SIGINT), since 130 would start the job again.
EXIT_CODES: dict[str, dict[int, int]] = {
    "design": {},
    "stock": dict.fromkeys((EX_FAILED, EX_CODE, EX_NODE, EX_TRY_AGAIN, EX_CONFIG, EX_USER), 1),
    "kubeflow": {EX_NODE: 128 + EX_NODE, EX_TRY_AGAIN: 128 + EX_TRY_AGAIN, EX_USER: 2},
}

# What an agent that gives up may leave with, in any of these; 0 is for who has finished.
STOP_CODES: frozenset[int | None] = frozenset({EX_FAILED, EX_CODE, EX_NODE, EX_TRY_AGAIN, EX_CONFIG, EX_USER}).union(
    *(codes.values() for codes in EXIT_CODES.values())
)


def exit_code_for(code: int, preset: str) -> int:
    """What a scheduler is told in place of `code`. preset: one of EXIT_CODES."""
    return EXIT_CODES[preset].get(code, code)


# A deterministic failure is the code's, but for these, which say more than "code".
_KIND_STAYS = frozenset({HOST_MEMORY, DEVICE_MEMORY, NUMERIC, STORAGE})
_EXIT_OF_KIND = {CODE: EX_CODE, DATA: EX_CODE, USER_STOP: EX_USER, HARDWARE: EX_NODE, PREEMPTION: EX_TRY_AGAIN}


class Action(Enum):
    """What this agent does: leave, or start its workers again. `Decision.verdict` says what the job does."""

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
    """What the agent does now, and why.

    Attributes:
        exit_code: of the agent if it leaves, else None.
        rule: of the table, or of this module where it overruled the table.
        charged: the restart counts against the budget.
        verdict: what the job does; None where no rule was asked.
        checkpoints_back: 1: resume from the checkpoint before the newest.
        delay_s: seconds to wait before the restart.
        cold: the workers are not to be started by warm standbys.
    """

    action: Action
    kind: Kind
    reason: str
    exit_code: int | None = None
    rule: str = ""
    charged: bool = False
    verdict: Response | None = None
    checkpoints_back: ZeroOrOne = 0
    delay_s: Seconds = 0.0
    cold: bool = False


@dataclass(frozen=True)
class Backoff:
    """Exponential, with jitter: nodes and jobs that failed of the same thing shall not all come back at the same moment.

    Attributes:
        base_s: before the second charged restart in a row; 0: never wait.
        most_s: at most.
    """

    base_s: float = 1.0
    most_s: float = 60.0

    def delay_s(self, charged: int, jitter: float) -> float:
        """Before the restart with this number since the last progress. jitter: 0 to 1, at random; it takes off up to half."""
        if charged <= FREE_OF_WAIT or self.base_s <= 0:
            return 0.0
        doublings = min(charged - FREE_OF_WAIT - 1, 32)
        return min(self.most_s, self.base_s * 2.0**doublings) * (1 - jitter / 2)


@dataclass(frozen=True)
class _Outcome:
    """A decision in the making."""

    verdict: Response
    kind: str
    reason: str
    rule: str
    exit_code: int = EX_FAILED


NO_BACKOFF = Backoff(0.0)


def decide(
    diagnosis: Diagnosis,
    restarts_charged: int = 0,
    max_restarts: int = NO_LIMIT,
    history: Sequence[Past] | None = None,
    nodes: int | None = None,
    min_nodes: int | None = None,
    exit_codes: str = "design",
    kind_limits: Mapping[str, int] | None = None,
    kinds_charged: Mapping[str, int] | None = None,
    backoff: Backoff = NO_BACKOFF,
    jitter: float = 0.0,
) -> Decision:
    """Return what to do.

    Args:
        diagnosis: the root cause.
        restarts_charged: restarts that were charged to the budget so far.
        max_restarts: the budget; NO_LIMIT for none.
        history: earlier failures of the job, oldest first; None: those of the evidence.
        nodes: how many run now, this one included; None: not known, then one is taken to be dispensable.
        min_nodes: how many the job needs at least; None: not known.
        exit_codes: one of EXIT_CODES.
        kind_limits: restarts at most for failures of a kind, by kind; the budget holds besides.
        kinds_charged: restarts charged so far, by kind.
        backoff, jitter: how long to wait before the restart; see Backoff.
    """
    past = tuple(diagnosis.evidence.history if history is None else history)
    spare = nodes is None or nodes - 1 >= max(min_nodes or 1, 1)
    outcome = _after_the_table(_from_table(diagnosis, past), diagnosis, past, alone=nodes == 1, spare=spare)
    if max_restarts == NO_LIMIT or restarts_charged < max_restarts:
        outcome = _once_more_cold(outcome, diagnosis, past)
    limit = (kind_limits or {}).get(outcome.kind, NO_LIMIT)
    outcome = _within_kind(outcome, (kinds_charged or {}).get(outcome.kind, 0), limit)
    outcome = _within_budget(outcome, restarts_charged, max_restarts)
    back = diagnosis.checkpoints_back
    if not back and _checkpoint_to_blame(diagnosis, past):
        back = 1
        outcome = replace(
            outcome, reason=f"{outcome.reason}; twice after the same checkpoint was loaded: the one before it is tried"
        )
    action = ACTIONS[outcome.verdict]
    return Decision(
        action,
        outcome.kind,
        outcome.reason,
        exit_code_for(outcome.exit_code, exit_codes) if action is Action.STOP else None,
        outcome.rule,
        outcome.verdict in _CHARGED,
        outcome.verdict,
        back if action is Action.RESTART else 0,
        backoff.delay_s(restarts_charged + 1, jitter) if outcome.verdict in _CHARGED else 0.0,
        cold=outcome.verdict in _CHARGED and _warm_start_to_blame(diagnosis, outcome.kind),
    )


_CHARGED = frozenset({Response.CONFIRM, Response.RESTART})


def _from_table(diagnosis: Diagnosis, past: tuple[Past, ...]) -> _Outcome:
    """What the table says. What no rule knows is a bug to be confirmed if two tries in a row got to no step."""
    verdict = Response.RESTART if diagnosis.decision is Response.FOLLOW else diagnosis.decision
    if diagnosis.rule == NO_EVIDENCE and diagnosis.evidence.first_step_done is False and past and _at_start(past[-1]):
        verdict = Response.CONFIRM
    exit_code = {
        Response.STOP: _EXIT_OF_KIND.get(diagnosis.kind, EX_CODE),  # whatever the kind: another try would end the same way
        Response.REQUEUE: EX_TRY_AGAIN,
        Response.REPLACE_NODE: EX_NODE,
    }.get(verdict, EX_FAILED)
    return _Outcome(verdict, diagnosis.kind, diagnosis.reason, diagnosis.rule, exit_code)


def _at_start(past: Past) -> bool:
    return past.progress is False and not past.first_step_done


def _after_the_table(outcome: _Outcome, diagnosis: Diagnosis, past: tuple[Past, ...], alone: bool, spare: bool) -> _Outcome:
    """The rules over several failures. `alone`: with one node, where a failure was says nothing. `spare`: this node may leave."""
    if outcome.verdict is Response.REPLACE_NODE and not spare:
        reason = f"{outcome.reason}; this node should be replaced, but the job cannot run without it"
        outcome = _Outcome(Response.RESTART, outcome.kind, reason, outcome.rule)
    if outcome.verdict not in _CHARGED:
        return outcome
    node = diagnosis.evidence.node
    same = [earlier for earlier in past if earlier.same_fingerprint and earlier.progress is not True]
    same_node = bool(same) and node is not None and not alone and all(earlier.node == node for earlier in same)
    surely_stuck = sum(earlier.progress is False for earlier in same)
    only_exit = diagnosis.rule == NO_EVIDENCE and diagnosis.evidence.exception is None
    if outcome.verdict is Response.CONFIRM and not same_node and _confirmed(same, only_exit):
        kind = outcome.kind if outcome.kind in _KIND_STAYS else CODE
        where = " on another node" if node is not None and any(earlier.node not in (node, None) for earlier in same) else ""
        return _Outcome(Response.STOP, kind, f"{outcome.reason}; the same came back{where} with no progress", "repeated", EX_CODE)
    if same_node and spare and (outcome.verdict is Response.CONFIRM or surely_stuck + 1 < CEILING):
        reason = f"{outcome.reason}; the same for the {len(same) + 1}. time on node {node} only"
        return _Outcome(Response.REPLACE_NODE, outcome.kind, reason, "same-node", EX_NODE)
    if surely_stuck + 1 >= CEILING and outcome.kind != PREEMPTION:
        exit_code = EX_NODE if outcome.kind == HARDWARE else EX_FAILED
        reason = f"{outcome.reason}; the same for the {surely_stuck + 1}. time with no progress"
        return _Outcome(Response.STOP, outcome.kind, reason, "ceiling", exit_code)
    return outcome


def _once_more_cold(outcome: _Outcome, diagnosis: Diagnosis, past: Sequence[Past]) -> _Outcome:
    """Before the first step a failure may come of what is different in a warm standby: no bug until a usual start fails, too."""
    ends = outcome.verdict is Response.STOP and outcome.exit_code == EX_CODE and diagnosis.tier != USERS
    usual_start_failed = any(each.same_fingerprint and each.warm is False for each in past)
    if not ends or usual_start_failed or not _warm_start_to_blame(diagnosis, outcome.kind):
        return outcome
    reason = f"{outcome.reason}; but its process was a warm standby: once more without"
    return _Outcome(Response.CONFIRM, outcome.kind, reason, WARM_START)


def _warm_start_to_blame(diagnosis: Diagnosis, kind: str) -> bool:
    """Whether the failure may come of how the process was started: it had not got far, and nobody else did it."""
    evidence = diagnosis.evidence
    by_itself = kind not in _BY_OTHERS and evidence.signal != "SIGKILL"
    return bool(evidence.warm) and evidence.first_step_done is False and by_itself


_BY_OTHERS = frozenset({NETWORK, PREEMPTION, HARDWARE, HOST_MEMORY})


def _checkpoint_to_blame(diagnosis: Diagnosis, past: Sequence[Past]) -> bool:
    """The same failure, twice, before the first step after the same checkpoint was loaded."""
    if diagnosis.evidence.first_step_done is not False:
        return False
    return any(each.same_fingerprint and each.same_checkpoint and each.first_step_done is False for each in past)


def _confirmed(same: Sequence[Past], only_exit: bool) -> bool:
    """Whether a suspected bug is one. Where the progress is not known, or only the exit is, it takes one try more."""
    weak = only_exit or all(earlier.progress is None for earlier in same)
    return len(same) >= (2 if weak else 1)


def _within_kind(outcome: _Outcome, charged: int, limit: int) -> _Outcome:
    if outcome.verdict not in _CHARGED or limit == NO_LIMIT or charged < limit:
        return outcome
    reason = f"{outcome.reason}; but all {limit} restarts for failures of kind {outcome.kind} (kind_limits) are spent"
    return _Outcome(Response.STOP, outcome.kind, reason, "kind-limit", EX_FAILED)


def _within_budget(outcome: _Outcome, charged: int, limit: int) -> _Outcome:
    if outcome.verdict not in _CHARGED:
        return outcome
    if limit != NO_LIMIT and charged >= limit:
        reason = f"{outcome.reason}; but all {limit} restarts of the budget (--max-restarts) are spent"
        return _Outcome(Response.STOP, outcome.kind, reason, "budget", EX_FAILED)
    of = "no limit" if limit == NO_LIMIT else f"of {limit}"
    return _Outcome(outcome.verdict, outcome.kind, f"{outcome.reason}; restart {charged + 1} {of}", outcome.rule)
