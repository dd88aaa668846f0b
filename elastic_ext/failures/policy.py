"""The response to a failure: that of the rule, unless nodes, history or budget overrule it. Pure functions only.

`history` has the tables of what several failures mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from elastic_ext.base import diagnosis as kinds
from elastic_ext.base.diagnosis import CODE, HARDWARE, NETWORK, PREEMPTION, Kind, Response
from elastic_ext.base.errors import EX_CODE, EX_CONFIG, EX_FAILED, EX_NODE, EX_TRY_AGAIN, EX_USER
from elastic_ext.base.printable import counted
from elastic_ext.base.records import Seconds, ZeroOrOne, stored_as
from elastic_ext.failures import rules
from elastic_ext.failures.classify import Diagnosis
from elastic_ext.failures.evidence import Precedent
from elastic_ext.failures.history import (
    ANSWERS,
    HISTORY,
    SAME_NODE,
    SPREAD_S,
    WARM_START,
    Facts,
    Nodes,
    Outcome,
    facts_of,
    overruled,
)

NO_LIMIT = -1
IMMEDIATE_RESTARTS = 1  # charged restarts in a row without a wait, since one restart cures most failures
GONE_BACK = "it happened twice after loading the same checkpoint: the one before it is tried, if there is one"
MOVED = "its ranks move to another node, to show whether they fail or the node"
ONE_MORE_TRY = "one more try shows whether it happens again"  # said only while it is to come
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


_OUTSIDE_THE_WORKER = frozenset({kinds.NODE_LOST, NETWORK, PREEMPTION, HARDWARE, kinds.HOST_MEMORY})
_NO_CHECKPOINT_KINDS = frozenset({*_OUTSIDE_THE_WORKER, kinds.CASCADE, CODE, kinds.DATA, kinds.DEVICE_MEMORY, kinds.HANG})


class Action(Enum):
    """The action of one agent: leave, or restart its workers. `Decision.response` is the response of the whole job."""

    STOP = "stop"
    RESTART = "restart"


ACTIONS = {
    **dict.fromkeys((Response.STOP, Response.REQUEUE, Response.REPLACE_NODE), Action.STOP),
    **dict.fromkeys((Response.CONFIRM, Response.RESTART, Response.RESTART_FREE), Action.RESTART),
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

    @property
    def left(self) -> bool:
        """Whether another restart may be charged."""
        return self.max_restarts == NO_LIMIT or self.charged < self.max_restarts


# The longest delay to which a shorter `backoff` doubles. A job that waits for what is away looks once a minute, not more rarely.
LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff with jitter, so that nodes and jobs with the same failure do not all come back at once."""

    base_s: float = 1.0  # seconds before the second charged restart in a row; 0 to never wait

    def delay_s(self, charged: int, jitter: float) -> float:
        """Return the wait before this restart.

        Args:
            charged: the restart's number since the last progress, from 1.
            jitter: a random number from 0 to 1; it shortens the wait by up to half.
        """
        if charged <= IMMEDIATE_RESTARTS or self.base_s <= 0:
            return 0.0
        doublings = min(charged - IMMEDIATE_RESTARTS - 1, 32)
        return min(max(self.base_s, LONGEST_BACKOFF_S), self.base_s * 2.0**doublings) * (1 - jitter / 2)


UNLIMITED = Budget()
NODES_UNKNOWN = Nodes()
NO_BACKOFF = Backoff(0.0)

_CHARGED = frozenset({Response.CONFIRM, Response.RESTART})


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
    facts = overruled(facts_of(diagnosis, past, nodes), ANSWERS)
    blamed = not diagnosis.checkpoints_back and _checkpoint_to_blame(facts)
    asks = facts.answer.kind == PREEMPTION and facts.answer.response is Response.RESTART  # it may, as long as there is a budget
    if facts.answer.response in _CHARGED and not (blamed or asks):  # the checkpoint comes before the code and the node
        facts = overruled(facts, HISTORY)
    outcome = _retry_cold(facts) if budget.left else facts.answer
    outcome = _within_budget(outcome, budget)
    action = ACTIONS[outcome.response]
    waits = outcome.rule == SAME_NODE and diagnosis.evidence.before_first_step  # perhaps it was only the first to see it
    charged = outcome.response in _CHARGED
    moves_ranks = charged and not blamed and _moves_ranks(outcome, facts)
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
            backoff.delay_s(max(budget.charged + 1 if charged else 0, _asked(outcome, facts)), jitter),
            _spread_s(facts) * backoff.base_s * (1 + jitter / 2) if charged or waits else 0.0,
        ),
        charged and _warm_start_to_blame(diagnosis, outcome.kind),
        moves_ranks,
    )


def _asked(outcome: Outcome, facts: Facts) -> int:
    """Return how often a program has asked for another try without progress: it waits ever longer for it."""
    asks = outcome.kind == PREEMPTION and outcome.response in (Response.RESTART_FREE, Response.RESTART)
    return facts.times if asks else 0


def _spread_s(facts: Facts) -> float:
    """Return the seconds to wait so that the tries of what may be an outage are spread over time."""
    waits, early = SPREAD_S.get(facts.rule, ()), facts.evidence.before_first_step
    if facts.nodes.only_one and facts.rule in rules.PEERS:
        return 0.0  # nothing outside this host can mend that
    tries = (facts.times if early else facts.stuck) - 1
    return waits[min(tries, len(waits) - 1)] if waits and (early or tries) else 0.0


def _moves_ranks(outcome: Outcome, facts: Facts) -> bool:
    """Return whether the next try should show what the failure follows: the node, which is bad then, or the rank, as a bug does.

    If the ranks stay, a failure that comes back shows neither, and a node that is well has to leave: rank 0 alone writes
    checkpoints and logs, so it meets each outage of their servers, and one rank's data may make its loss NaN.
    """
    of_rank = facts.evidence.rank >= 0 and not facts.evidence.link_failed and outcome.kind != PREEMPTION
    return of_rank and facts.nodes.at_failure > 1 and facts.place_counts


def _retry_cold(facts: Facts) -> Outcome:
    """Allow one more cold start: before the first step, the warm standby itself may cause what looks like a bug."""
    outcome, diagnosis = facts.answer, facts.diagnosis
    ends = outcome.response is Response.STOP and outcome.exit_code == EX_CODE and diagnosis.tier != rules.USER_RULES
    otherwise = any(each.same_fingerprint and (each.warm is False or each.first_step_done) for each in facts.past)
    if not ends or otherwise or not _warm_start_to_blame(diagnosis, outcome.kind):
        return outcome
    reason = f"{outcome.reason}; but its process was a warm standby: one cold start is tried"
    return Outcome(Response.CONFIRM, outcome.kind, reason, WARM_START)


def _warm_start_to_blame(diagnosis: Diagnosis, kind: str) -> bool:
    """Return whether a warm start may be the cause: no step was done, and no failure outside the worker is known."""
    evidence = diagnosis.evidence
    by_itself = kind not in _OUTSIDE_THE_WORKER and evidence.signal != "SIGKILL"
    return bool(evidence.warm) and evidence.before_first_step and by_itself


def _checkpoint_to_blame(facts: Facts) -> bool:
    """Return whether the same failure happened twice before the first step, both times after loading the same checkpoint.

    Never for a failure from outside the worker, or of the storage: all checkpoints would be quarantined one after another. Nor
    for a certain bug or a lack of GPU memory: once the script is mended, it would resume from an older one.
    """
    outside = facts.diagnosis.kind in _NO_CHECKPOINT_KINDS and facts.rule != rules.BUG_MAYBE
    outside |= facts.rule in rules.ILL_STORAGE or facts.rule == "cache-race"
    outside |= facts.evidence.signal in ("SIGKILL", "SIGTERM") or facts.diagnosis.tier == rules.USER_RULES
    same = [each for each in facts.same if each.first_step_done is False]
    # not if it happened with another one, too, or if none was there to try
    return (
        facts.evidence.before_first_step and not outside and not facts.evidence.cut and len(same) == 1 and same[0].same_checkpoint
    )


def _within_budget(outcome: Outcome, budget: Budget) -> Outcome:
    """Return the outcome, or a stop where no restart is left for it."""
    if outcome.response not in _CHARGED:
        return outcome
    limit = budget.max_restarts
    if not budget.left:
        spent = f"the budget of {counted(limit, 'restart')} (--max-restarts) is spent"
        return replace(outcome, response=Response.STOP, reason=f"{outcome.reason}; {spent}", rule="budget")
    of = ", no limit" if limit == NO_LIMIT else f" of {limit}"
    why = f"; {ONE_MORE_TRY}" if outcome.response is Response.CONFIRM and outcome.rule != WARM_START else ""
    return replace(outcome, reason=f"{outcome.reason}{why}; restart {budget.charged + 1}{of}")
