"""What a failure means: the table of `rules`, first match wins. Pure.

Missing evidence is "unknown", never "fine" and never "a bug".
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base.kinds import CASCADE, NETWORK, USER_STOP, Kind, Response
from elastic_ext.base.printable import printable
from elastic_ext.base.records import ZeroOrOne
from elastic_ext.failures import fingerprint, tracebacks
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.failures.matching import ASKED, EXIT_ONLY, HARDWARE_SAID, PROGRAM_SAID, Facts, Rule, Words
from elastic_ext.failures.rules import COUNTS_AS, RULES, TEXTS, XIDS_ANNOTATE, held_by_another_process
from elastic_ext.failures.user_rules import UserRule

MAX_TEXT = 64 * 1024  # characters of a message, and of the end of a tail, that are looked at in all
MAX_MESSAGE = 8 * 1024  # of a longer message both ends are

# After these a traceback on stderr need not be the end of it: what ended the process came from outside Python.
_NOT_RAISED = frozenset({"SIGKILL", "SIGTERM", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"})
_BY_TIER = {tier: tuple(rule for rule in RULES if rule.tier == tier) for tier in (ASKED, HARDWARE_SAID, PROGRAM_SAID, EXIT_ONLY)}


@dataclass(frozen=True)
class Diagnosis:
    """What one worker's failure means.

    Attributes:
        kind: one of `kinds.KINDS`.
        decision: what the rule asks for; `policy.decide` may ask for more after a look at the history and the budget.
        rule: name of the rule.
        reason: who ended, of what, and why the rule says so.
        fingerprint: equal for two failures that are the same.
        evidence: with the exception that was found on stderr, if there was no other.
        tier: of the rule, 1 to 4; 0: a user's.
        checkpoints_back: 1: resume from the checkpoint before the newest.
        order: when the job learnt of it, e.g. an etcd revision; equal for all that one node tells at a time.
    """

    kind: Kind
    decision: Response
    rule: str
    reason: str
    fingerprint: str
    evidence: Evidence
    tier: int
    checkpoints_back: ZeroOrOne = 0
    order: int = 0

    @property
    def deterministic(self) -> bool:
        """Another try would end the same way."""
        return self.decision is Response.STOP


def classify(evidence: Evidence, user_rules: Sequence[UserRule] = ()) -> Diagnosis:
    """Return what the failure of one worker means. Never raises; well under a millisecond."""
    evidence = _completed(evidence)
    rule = _first_match(evidence, user_rules)
    exception = evidence.exception
    return Diagnosis(
        rule.kind,
        rule.verdict,
        rule.name,
        f"{describe(evidence)}: {rule.because}{_annotation(evidence)}",
        fingerprint.of_exception(exception) if exception else fingerprint.of_exit(rule.name, ended_by(evidence)),
        evidence,
        rule.tier,
        rule.checkpoints_back,
    )


def _first_match(evidence: Evidence, user_rules: Iterable[UserRule]) -> Rule | UserRule:
    exception = evidence.exception
    names = exception_names(exception)
    signal_name = worker_signal(evidence)
    message = _ends(exception.message) if exception else ""
    tail = evidence.stderr_tail[len(message) - MAX_TEXT :]
    all_text = Facts(evidence, names, Words(f"{message}\n{tail}" if message else tail, TEXTS), signal_name)
    for rule in _BY_TIER[ASKED]:
        if rule.matches(all_text):
            return rule
    for user_rule in user_rules:
        if user_rule.matches(all_text):
            return user_rule
    # An exception speaks for itself: what else is on stderr is looked at only where no rule knows the exception.
    said = [Facts(evidence, names, Words(message, TEXTS), signal_name)] if exception else []
    if tail:
        said.append(Facts(evidence, frozenset(), all_text.text, signal_name))
    for tier, views in ((HARDWARE_SAID, [all_text]), (PROGRAM_SAID, said or [all_text]), (EXIT_ONLY, [all_text])):
        for facts in views:
            for rule in _BY_TIER[tier]:
                if rule.matches(facts):
                    return rule
    raise AssertionError("the last rule of the table matches everything")


def _ends(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE // 2]}\n{message[-MAX_MESSAGE // 2 :]}"


def _completed(evidence: Evidence) -> Evidence:
    """With a subprocess's negative exit code as a signal, and with the exception that only stderr tells of."""
    if evidence.exit_code is not None and evidence.exit_code < 0 and evidence.signal is None:
        evidence = replace(evidence, exit_code=None, signal=signal_name(-evidence.exit_code))
    if evidence.exception is None and worker_signal(evidence) not in _NOT_RAISED:
        found = tracebacks.last_exception(evidence.stderr_tail[-MAX_TEXT:])
        evidence = replace(evidence, exception=found) if found else evidence
    return evidence


def exception_names(exception: RaisedException | None) -> frozenset[str]:
    """The full name, the bare one, and the class that the table counts it as."""
    if exception is None:
        return frozenset()
    bare = exception.type.rpartition(".")[2]
    return frozenset({exception.type, bare, COUNTS_AS.get(bare, bare)})


def signal_name(number: int) -> str:
    """Return e.g. "SIGKILL"; "signal 35" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def worker_signal(evidence: Evidence) -> str | None:
    """The signal that ended the worker; a shell and Kubernetes tell of it as exit code 128 + N."""
    if evidence.signal is not None or evidence.exit_code is None or not 128 < evidence.exit_code <= 128 + 64:
        return evidence.signal
    return signal_name(evidence.exit_code - 128)


def root_cause(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Return the one that explains the others, over all ranks and nodes that are known of.

    A cascade never outvotes a real cause. Somebody's wish to stop comes first, then evidence of a bug that would come back
    on every try; then, of those that hung, the one that is behind; then the earliest: by `order` across nodes, by time within one
    (the clocks of two nodes cannot be compared).
    """
    cause = min(diagnoses, key=_precedence)
    if cause.decision is not Response.FOLLOW:
        return cause
    return replace(cause, kind=NETWORK, decision=Response.RESTART, reason=f"{cause.reason}, but none is known: the network, then")


def _precedence(diagnosis: Diagnosis) -> tuple[bool, bool, bool, tuple[int, ...], int, int]:
    cascade = diagnosis.kind == CASCADE
    asked = diagnosis.tier == ASKED or diagnosis.kind == USER_STOP
    evidence = diagnosis.evidence
    return cascade, not asked, not diagnosis.deterministic, evidence.hang_blame, diagnosis.order, evidence.ended_ns


def describe(evidence: Evidence) -> str:
    """One printable line: which rank ended, and of what."""
    return printable(_described(evidence))


def _described(evidence: Evidence) -> str:
    exception = evidence.exception
    if evidence.agent_signal is not None and exception is None and evidence.signal is None and evidence.exit_code is None:
        return f"the agent got {evidence.agent_signal}"
    if evidence.hang and evidence.hang_reason:
        return evidence.hang_reason
    if exception is not None:
        place = f" at {exception.frames[-1]}" if exception.frames else ""
        message = first_line(exception.message)[:200]
        return f"rank {evidence.rank} raised {exception.type}{': ' + message if message else ''}{place}"
    return f"rank {evidence.rank} {'was killed by' if evidence.signal is not None else 'ended with'} {ended_by(evidence)}"


def first_line(message: str) -> str:
    """Of a message that may be long; "" if its start is blank."""
    start = message[:1000]
    return start.splitlines()[0] if start.strip() else ""


def ended_by(evidence: Evidence) -> str:
    """The signal or the exit code in words."""
    if evidence.signal is not None:
        return evidence.signal
    return "an unknown exit code" if evidence.exit_code is None else f"exit code {evidence.exit_code}"


def _annotation(evidence: Evidence) -> str:
    """What is worth telling though it does not decide."""
    notes = []
    if seen := sorted(XIDS_ANNOTATE.intersection(evidence.xids)):
        notes.append(f"the driver also reported Xid {', '.join(map(str, seen))}")
    if evidence.gpu_recovery:
        notes.append(f"the driver asks for {', '.join(sorted(set(evidence.gpu_recovery)))}")
    if evidence.exception and (held := held_by_another_process(_ends(evidence.exception.message).lower())):
        notes.append(held)
    return f" ({'; '.join(notes)})" if notes else ""
