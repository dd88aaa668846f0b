"""The classifier of failures: the first match in the table of `rules` wins. Pure functions only.

Missing evidence is "unknown", never "fine" and never "a bug".
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.base.errors import EX_TRY_AGAIN
from elastic_ext.base.kinds import CASCADE, CODE, CRASH, HANG, HOST_MEMORY, NETWORK, PREEMPTION, USER_STOP, Kind, Response
from elastic_ext.base.log_records import MARK
from elastic_ext.base.printable import cut, printable
from elastic_ext.base.records import ZeroOrOne, stored_as
from elastic_ext.failures import exceptions
from elastic_ext.failures.evidence import Evidence, RaisedException, Wrapped
from elastic_ext.failures.rules import (
    ACCESS,
    COUNTS_AS,
    EXIT_STATUS,
    HARDWARE_EVIDENCE,
    NO_EVIDENCE,
    PROGRAM_OUTPUT,
    RERUN_CODES,
    RULES,
    STOP_REQUESTED,
    XIDS_ANNOTATE,
    EvidenceView,
    Rule,
    SearchText,
    held_by_another_process,
)
from elastic_ext.failures.user_rules import UserRule

MAX_TEXT = 64 * 1024  # characters that are searched: the message and the end of stderr together
MAX_MESSAGE = 8 * 1024  # of a longer message, only the two ends are searched
MAX_SHOWN = 300  # characters of a message in a reason
_ERRNO = re.compile(r"\[Errno (\d{1,4})\]")

# These signals come from outside Python, so a traceback on stderr may not be why the process ended.
_NOT_RAISED = frozenset({"SIGKILL", "SIGTERM", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"})
_TIERS = (STOP_REQUESTED, HARDWARE_EVIDENCE, PROGRAM_OUTPUT, EXIT_STATUS)
_BY_TIER = {tier: tuple(rule for rule in RULES if rule.tier == tier) for tier in _TIERS}
_BEHIND_A_SIGNAL = frozenset({HOST_MEMORY, CASCADE, HANG, CRASH})  # what a signal can come from


@dataclass(frozen=True)
class Diagnosis:
    """The meaning of one worker's failure."""

    kind: Kind  # one of `kinds.KINDS`
    # the rule's answer; `policy.decide` may overrule it because of the history or the budget
    response: Response = field(metadata=stored_as("decision"))
    rule: str  # the name of the rule
    reason: str  # which worker ended, how it ended, and why the rule applies
    fingerprint: str  # equal for two failures that are the same
    evidence: Evidence  # includes the exception from stderr if no other was known
    tier: int  # the tier of the rule, 1 to 4; 0 for a user rule
    checkpoints_back: ZeroOrOne = 0  # 1 to resume from the checkpoint before the newest
    order: int = 0  # when the job learned of it, e.g. an etcd revision; equal for all that one node reports at once

    @property
    def deterministic(self) -> bool:
        """Whether another try would end the same way."""
        return self.response is Response.STOP

    @property
    def lacks_reason(self) -> bool:
        """Whether another worker may say why: those of Megatron-LM leave together, and one has logged the reason."""
        return self.rule == NO_EVIDENCE and self.evidence.exit_code in RERUN_CODES


def classify(evidence: Evidence, user_rules: Sequence[UserRule] = ()) -> Diagnosis:
    """Return the meaning of one worker's failure. Never raises; takes a few milliseconds at most."""
    # A script that leaves by sys.exit("text") has printed the error before.
    recorded = evidence.exception is not None and evidence.exception.type != "SystemExit"
    evidence = _completed(evidence)
    rule = _first_match(evidence, recorded, user_rules)
    return Diagnosis(
        rule.kind,
        rule.response,
        rule.name,
        f"{describe(evidence)}: {rule.because}{_annotation(evidence)}",
        _fingerprint(evidence, rule.name),
        evidence,
        rule.tier,
        rule.checkpoints_back,
    )


def _fingerprint(evidence: Evidence, rule: str) -> str:
    if evidence.cut:
        return exceptions.of_hosts("cut", evidence.cut)
    if evidence.differs:
        return exceptions.of_hosts(rule, evidence.differs)
    if evidence.link_failed:
        return exceptions.of_hosts("link", (evidence.node or "",))
    if evidence.exception is not None:
        return exceptions.of_exception(evidence.exception)
    return exceptions.of_exit(rule, ended_by(evidence))


def _first_match(evidence: Evidence, recorded: bool, user_rules: Iterable[UserRule]) -> Rule | UserRule:
    """recorded: the script's exception is known for sure, rather than found on stderr."""
    exception = evidence.exception
    names = exception_names(exception)
    signal_name = worker_signal(evidence)
    message = _ends(exception.message) if exception else ""
    printed = evidence.stderr_tail[len(message) - MAX_TEXT :]
    tail = _of_script(printed)

    def view(names: frozenset[str], *texts: str, errno: int | None = None) -> EvidenceView:
        return EvidenceView(evidence, names, SearchText("\n".join(filter(None, texts))), signal_name, errno)

    everything = view(names, message, tail)
    for rule in _BY_TIER[STOP_REQUESTED]:
        if rule.matches(everything):
            return rule
    for_users = everything if tail == printed else view(names, message, printed)
    for user_rule in user_rules:
        if user_rule.matches(for_users):
            return user_rule
    if found := _first(everything, _BY_TIER[HARDWARE_EVIDENCE]):
        return found
    chain = [view(exception_names(each), _ends(each.message), errno=_errno(each)) for each in _chain(exception)]
    # What is inside counts: a wrapper says what the script was doing. But a bug in handling an error is a bug.
    matches = [match for seen in chain if (match := _first(seen, _BY_TIER[PROGRAM_OUTPUT]))]
    if matches:
        refused = [rule for rule in matches if rule.name in ACCESS]  # the client of a server that refuses has errors of its own
        return (refused or [rule for rule in reversed(matches) if rule.kind != CODE] or matches)[0]
    # Then what was being handled when it was raised, and the rest of stderr.
    if exception and exception.causes and (found := _first(view(frozenset(), *exception.causes), _BY_TIER[PROGRAM_OUTPUT])):
        return found
    if tail or not exception:
        printed_too = replace(everything, exception_names=frozenset())
        if found := _first(printed_too, _rules_for_stderr(evidence, recorded)):
            return found
    return next(rule for rule in _BY_TIER[EXIT_STATUS] if rule.matches(everything))


def _rules_for_stderr(evidence: Evidence, recorded: bool) -> Iterable[Rule]:
    """Return the rules that the end of stderr can match. Scripts print much and go on, so that alone stops no job.

    recorded: see `_first_match`.
    """
    ended_otherwise = worker_signal(evidence) in _NOT_RAISED or evidence.exit_code == EX_TRY_AGAIN
    for rule in _BY_TIER[PROGRAM_OUTPUT]:
        of_evidence = not (rule.texts or rule.survivable)  # no matter what was printed
        meant = rule.kind in _BEHIND_A_SIGNAL if ended_otherwise else not (recorded and rule.survivable)
        if of_evidence or (meant and rule.response is not Response.STOP):
            yield rule


def _first(view: EvidenceView, rules: Iterable[Rule]) -> Rule | None:
    return next((rule for rule in rules if rule.matches(view)), None)


def _chain(exception: RaisedException | None) -> list[RaisedException | Wrapped]:
    """Return the exception, what it was raised from, and the last one of a traceback in its message, as a DataLoader has it."""
    if exception is None:
        return []
    inner = exceptions.last_exception(exception.message)
    return [exception, *exception.wrapped, *([inner] if inner else [])]


def _errno(exception: RaisedException | Wrapped) -> int | None:
    """Return the errno of an OSError with a text in any language."""
    if exception.errno is None and (said := _ERRNO.match(exception.message)):
        return int(said[1])
    return exception.errno


def _of_script(tail: str) -> str:
    """Return stderr without this package's own lines. They are about its threads, often about what the failure caused."""
    return "\n".join(line for line in tail.split("\n") if MARK not in line) if MARK in tail else tail


def _ends(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE // 2]}\n{message[-MAX_MESSAGE // 2 :]}"


def _completed(evidence: Evidence) -> Evidence:
    """Turn a subprocess's negative exit code into a signal, and add the exception if only stderr shows it."""
    if evidence.exit_code is not None and evidence.exit_code < 0 and evidence.signal is None:
        evidence = replace(evidence, exit_code=None, signal=signal_name(-evidence.exit_code))
    exception = evidence.exception
    if (exception is None or not exception.wrapped) and worker_signal(evidence) not in _NOT_RAISED:
        found = exceptions.last_exception(_of_script(evidence.stderr_tail[-MAX_TEXT:]))
        if found and exception is None:
            evidence = replace(evidence, exception=found)
        elif found and exception and _bare(found.type) == _bare(exception.type):  # torch's own error file has no causes
            evidence = replace(evidence, exception=replace(exception, wrapped=found.wrapped))
    return evidence


def _bare(name: str) -> str:
    return name.rpartition(".")[2]


def exception_names(exception: RaisedException | Wrapped | None) -> frozenset[str]:
    """Return the full and the bare names of an exception and of its base classes, and what the table counts them as."""
    if exception is None:
        return frozenset()
    bare = [_bare(name) for name in (exception.type, *exception.bases)]
    return frozenset((exception.type, *exception.bases, *bare, *(COUNTS_AS.get(name, name) for name in bare)))


def signal_name(number: int) -> str:
    """Return the name of a signal, e.g. "SIGKILL", or "signal 35" if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def worker_signal(evidence: Evidence) -> str | None:
    """Return the signal that ended the worker; shells and Kubernetes report it as exit code 128 + N."""
    if evidence.signal is not None or evidence.exit_code is None or not 128 < evidence.exit_code <= 128 + 64:
        return evidence.signal
    return signal_name(evidence.exit_code - 128)


def root_cause(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Return the diagnosis that explains the others, over all known ranks and nodes.

    A cascade never outvotes a real cause, and what the agent stopped explains least: another failure made it do so. A request to
    stop comes first, then evidence of a bug that would recur on every try; then, of workers that have left together, the one
    that says why; then, of the workers that hung, the one that is behind; then the earliest failure: by `order` across nodes, by
    time within one node, because the clocks of two nodes cannot be compared.
    """
    cause = min(diagnoses, key=_precedence)
    if cause.response is not Response.FOLLOW:
        return cause
    return replace(
        cause,
        kind=NETWORK,
        response=Response.RESTART,
        reason=f"{cause.reason}; no other cause is known, so the network is assumed",
    )


def _precedence(diagnosis: Diagnosis) -> tuple[bool | int | tuple[int, ...], ...]:
    cascade = diagnosis.kind == CASCADE
    stopped = cascade and diagnosis.evidence.stopped_by_agent
    requested = diagnosis.kind == USER_STOP or (diagnosis.tier == STOP_REQUESTED and diagnosis.kind == PREEMPTION)
    evidence = diagnosis.evidence
    deterministic, silent = diagnosis.deterministic, diagnosis.lacks_reason
    return cascade, stopped, not requested, not deterministic, silent, evidence.hang_blame, diagnosis.order, evidence.ended_ns


def describe(evidence: Evidence) -> str:
    """Return one printable line: which rank ended, and how."""
    return printable(_described(evidence))


def _described(evidence: Evidence) -> str:
    exception = evidence.exception
    if evidence.agent_signal is not None and exception is None and evidence.signal is None and evidence.exit_code is None:
        return f"the agent received {evidence.agent_signal}"
    if stuck := evidence.cuts_text or (evidence.hang_reason if evidence.hang else ""):
        return stuck
    if evidence.link_failed:
        away = ", and is still down" if evidence.link_away else ""
        return f"{evidence.links[0]}{_more(evidence.links)} of node {evidence.node} went down{away}"
    if evidence.differs:
        return f"the replica of rank {evidence.rank} differs from others"
    if exception is not None:
        place = f" at {exception.frames[-1]}" if exception.frames else ""
        message = cut(_gist(exception.message), MAX_SHOWN)
        return f"rank {evidence.rank} raised {exception.type}{': ' + message if message else ''}{place}"
    return f"rank {evidence.rank} {'was killed by' if evidence.signal is not None else 'ended with'} {ended_by(evidence)}"


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _gist(message: str) -> str:
    """Return the first line, and what NCCL reports as its last error."""
    line, last = first_line(message), first_line(message.partition("Last error:\n")[2])
    return f"{line} ({last})" if last else line


def first_line(message: str) -> str:
    """Return the first line of a message of any length; "" if the message starts with whitespace only."""
    start = message[:1000]
    return start.splitlines()[0] if start.strip() else ""


def ended_by(evidence: Evidence) -> str:
    """Return the signal or the exit code as text."""
    if evidence.signal is not None:
        return evidence.signal
    return "an unknown exit code" if evidence.exit_code is None else f"exit code {evidence.exit_code}"


def _annotation(evidence: Evidence) -> str:
    """Return facts that did not affect the decision but help the reader of the reason."""
    notes = []
    if seen := sorted(XIDS_ANNOTATE.intersection(evidence.xids)):
        notes.append(f"the driver also reported Xid {', '.join(map(str, seen))}")
    if evidence.gpu_recovery:
        notes.append(f"the driver recommends {', '.join(sorted(set(evidence.gpu_recovery)))}")
    if evidence.exception and (held := held_by_another_process(_ends(evidence.exception.message).lower())):
        notes.append(held)
    return f" ({'; '.join(notes)})" if notes else ""
