"""The classifier of failures: the first match in the table of `rules` wins. Pure functions only.

Missing evidence is "unknown", never "fine" and never "a bug". A fingerprint is the type of the exception, the user's innermost
frame, and the shape of the message: equal failures have equal ones.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.base.diagnosis import (
    CASCADE,
    CODE,
    CRASH,
    HANG,
    HOST_MEMORY,
    NETWORK,
    PREEMPTION,
    USER_STOP,
    Kind,
    Response,
    Weight,
)
from elastic_ext.base.errors import EX_TRY_AGAIN
from elastic_ext.base.log_records import MARK
from elastic_ext.base.printable import cut, printable
from elastic_ext.base.records import ZeroOrOne, stored_as
from elastic_ext.failures.evidence import Evidence, EvidenceView, RaisedException, SearchText, Wrapped, contains
from elastic_ext.failures.rules import (
    ACCESS,
    COUNTS_AS,
    EXIT_STATUS,
    HARDWARE_EVIDENCE,
    HARDWARE_EXIT,
    NO_EVIDENCE,
    PROGRAM_OUTPUT,
    RERUN_CODES,
    RULES,
    STOP_REQUESTED,
    USER_RULES,
    XIDS_ANNOTATE,
    Rule,
    held_by_another_process,
)
from elastic_ext.failures.torch_texts import ABORT_LINES, LAST_ERROR, OWN_LINES, WATCHDOG_ENDS_IT
from elastic_ext.failures.tracebacks import HEADER, last_exception
from elastic_ext.failures.user_rules import UserRule

MAX_TEXT = 64 * 1024  # characters that are searched: the message and the end of stderr together
MAX_MESSAGE = 8 * 1024  # of a longer message, only the two ends are searched
MAX_SHOWN = 300  # characters of a message in a reason
_LAST_ERROR = re.compile("Last error:\n|NCCL Last Error: ")  # before NCCL's own words
_ERRNO = re.compile(r"\[Errno (\d{1,4})\]")

# These signals come from outside Python, so a traceback on stderr may not be why the process ended.
_NOT_RAISED = frozenset({"SIGKILL", "SIGTERM", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"})
_TIERS = (STOP_REQUESTED, HARDWARE_EVIDENCE, PROGRAM_OUTPUT, EXIT_STATUS)
_BY_TIER = {tier: tuple(rule for rule in RULES if rule.tier == tier) for tier in _TIERS}
_BACKEND_ERROR = frozenset({"torch.distributed.DistBackendError", "DistBackendError"})
_BEHIND_A_SIGNAL = frozenset({HOST_MEMORY, CASCADE, HANG, CRASH})  # what a signal can come from


@dataclass(frozen=True)
class Diagnosis:
    """The meaning of one worker's failure."""

    kind: Kind  # one of `diagnosis.KINDS`
    # the rule's answer; `policy.decide` may overrule it because of the history or the budget
    response: Response = field(metadata=stored_as("decision"))
    rule: str  # the name of the rule
    reason: str  # which worker ended, how it ended, and why the rule applies
    fingerprint: str  # equal for two failures that are the same
    evidence: Evidence  # includes the exception from stderr if no other was known
    tier: int  # the tier of the rule, 1 to 4; 0 for a user rule
    checkpoints_back: ZeroOrOne = 0  # 1 to resume from the checkpoint before the newest
    weight: Weight = Weight.PRINTED  # where the evidence stands that the rule matched
    order: int = 0  # when the job learned of it, e.g. an etcd revision; equal for all that one node reports at once

    @property
    def deterministic(self) -> bool:
        """Whether another try would end the same way."""
        return self.response is Response.STOP

    @property
    def shown_by_hardware(self) -> bool:
        """Whether a driver, a link or a check shows it, and not how the script ended."""
        return self.tier == HARDWARE_EVIDENCE and self.rule != HARDWARE_EXIT

    @property
    def lacks_reason(self) -> bool:
        """Whether another worker may say why: those of Megatron-LM leave together, and one has logged the reason."""
        return self.rule == NO_EVIDENCE and self.evidence.exit_code in RERUN_CODES


def classify(evidence: Evidence, user_rules: Sequence[UserRule] = ()) -> Diagnosis:
    """Return the meaning of one worker's failure. Never raises; takes a few milliseconds at most."""
    # A script that leaves by sys.exit("text") has printed the error before.
    recorded = evidence.exception is not None and evidence.exception.type != "SystemExit"
    evidence = _with_signal(evidence)
    of_backend = _lines_of_backend(evidence)
    aborts = worker_signal(evidence) == "SIGABRT" and contains(SearchText(of_backend), ABORT_LINES)
    of_watchdog = _words_of_watchdog(evidence)
    evidence = _completed(evidence, ended_by_script=not (of_watchdog or aborts))
    rule, weight = _first_match(evidence, recorded, Said(of_watchdog, of_backend, aborts), user_rules)
    return Diagnosis(
        rule.kind,
        rule.response,
        rule.name,
        f"{describe(evidence)}: {rule.because}{_annotation(evidence)}",
        _fingerprint(evidence, rule.name),
        evidence,
        rule.tier,
        rule.checkpoints_back,
        weight,
    )


def _fingerprint(evidence: Evidence, rule: str) -> str:
    if evidence.cut:
        return of_hosts("cut", evidence.cut)
    if evidence.differs:
        return of_hosts(rule, evidence.differs)
    if evidence.link_failed:
        return of_hosts("link", (evidence.node or "",))
    if evidence.exception is not None:
        return of_exception(evidence.exception)
    return of_exit(rule, ended_by(evidence))


@dataclass(frozen=True)
class Said:
    """What torch's collective backends have printed about the end of the process."""

    watchdog: str  # see `_words_of_watchdog`
    backend: str  # see `_lines_of_backend`
    aborts: bool  # whether one of these lines says that the backend aborts the process, and SIGABRT has ended it


def _first_match(
    evidence: Evidence, recorded: bool, said: Said, user_rules: Iterable[UserRule]
) -> tuple[Rule | UserRule, Weight]:
    """recorded: the script's exception is known for sure, rather than found on stderr."""
    exception = evidence.exception
    names = exception_names(exception)
    signal_name = worker_signal(evidence)
    message = _ends(exception.message) if exception else ""
    printed = evidence.stderr_tail[len(message) - MAX_TEXT :]
    tail = _of_script(printed)

    def view(names: frozenset[str], *texts: str, errno: int | None = None, raised: bool = False) -> EvidenceView:
        return EvidenceView(evidence, names, SearchText("\n".join(filter(None, texts))), signal_name, errno, raised)

    everything = view(names, message, tail)
    for rule in _BY_TIER[STOP_REQUESTED]:
        if rule.matches(everything):
            return rule, Weight.PLATFORM
    for_users = everything if tail == printed else view(names, message, printed)
    for user_rule in user_rules:
        if user_rule.matches(for_users):
            return user_rule, Weight.PLATFORM
    if found := _first(everything, _BY_TIER[HARDWARE_EVIDENCE]):
        return found, Weight.PLATFORM
    # What a backend says as it fails is an exception of its own.
    by_backend = _first(view(_BACKEND_ERROR, said.backend, raised=True), _BY_TIER[PROGRAM_OUTPUT]) if said.backend else None
    chain = [view(exception_names(each), _ends(each.message), errno=_errno(each), raised=True) for each in _chain(exception)]
    # What is inside counts: a wrapper says what the script was doing. But a bug in handling an error is a bug.
    matches = [match for seen in chain if (match := _first(seen, _BY_TIER[PROGRAM_OUTPUT]))]
    if matches:
        refused = [rule for rule in matches if rule.name in ACCESS]  # the client of a server that refuses has errors of its own
        found = (refused or [rule for rule in reversed(matches) if rule.kind != CODE] or matches)[0]
        # The exception that follows may only say that the operation has failed.
        if by_backend and found.response is Response.FOLLOW:
            return by_backend, Weight.LAST_WORDS
        return found, Weight.CLASS if recorded else Weight.LAST_WORDS
    # Then what was being handled when it was raised, and the rest of stderr.
    handled = view(frozenset(), *exception.causes, raised=True) if exception and exception.causes else None
    if handled and (found := _first(handled, _BY_TIER[PROGRAM_OUTPUT])):
        return found, Weight.MESSAGE
    if by_backend and said.aborts:
        return by_backend, Weight.LAST_WORDS
    if tail or not exception:
        printed_too = replace(everything, exception_names=frozenset())
        at_abort = replace(printed_too, text=SearchText(said.watchdog)) if said.watchdog else printed_too
        for rule in _rules_for_stderr(evidence, recorded):
            if rule.matches(at_abort if rule.survivable else printed_too):
                return rule, Weight.LAST_WORDS if signal_name == "SIGABRT" else Weight.PRINTED
    found = next(rule for rule in _BY_TIER[EXIT_STATUS] if rule.matches(everything))
    return found, Weight.PRINTED if found.name == NO_EVIDENCE else Weight.PLATFORM


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
    inner = last_exception(exception.message)
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


def _with_signal(evidence: Evidence) -> Evidence:
    """Turn a subprocess's negative exit code into a signal."""
    if evidence.exit_code is not None and evidence.exit_code < 0 and evidence.signal is None:
        return replace(evidence, exit_code=None, signal=signal_name(-evidence.exit_code))
    return evidence


def _completed(evidence: Evidence, ended_by_script: bool) -> Evidence:
    """Add the exception if only stderr shows it. ended_by_script: else the script has survived what it printed."""
    exception = evidence.exception
    if (exception is None or not exception.wrapped) and worker_signal(evidence) not in _NOT_RAISED:
        found = last_exception(_of_script(evidence.stderr_tail[-MAX_TEXT:]))
        if found and exception is None and ended_by_script:
            evidence = replace(evidence, exception=found)
        elif found and exception and _bare(found.type) == _bare(exception.type):  # torch's own error file has no causes
            evidence = replace(evidence, exception=replace(exception, wrapped=found.wrapped))
    return evidence


def _words_of_watchdog(evidence: Evidence) -> str:
    """Return the end of stderr, from where a thread of the older backend says that it aborts the process; "" if none does.

    The script has survived any traceback before it, such as that of a tracker's thread: else its error file would name the
    exception.
    """
    if worker_signal(evidence) != "SIGABRT":
        return ""
    tail = _of_script(evidence.stderr_tail[-MAX_TEXT:])
    behind = tail[max(tail.rfind(HEADER), 0) :]
    lower = SearchText(behind).ascii  # as long as `behind`
    at = next((found for text in WATCHDOG_ENDS_IT if (found := lower.find(text)) >= 0), -1)
    return behind[at:] if at >= 0 else ""


def _lines_of_backend(evidence: Evidence) -> str:
    """Return the lines by which nccl2, and torch's watchdog in Python, say that they fail, and why; "" if they do not.

    Nothing else that was printed says why: other threads go on for up to 15 s after the last of these lines.
    """
    text = SearchText(tail := _of_script(evidence.stderr_tail[-MAX_TEXT:]))
    if not contains(text, OWN_LINES):
        return ""
    lines, plain = tail.split("\n"), text.ascii.split("\n")  # as many
    own = {number for number, line in enumerate(plain) if any(all(part in line for part in parts) for parts in OWN_LINES)}
    own |= {number + 1 for number in own if LAST_ERROR in "".join(plain[number + 1 : number + 2])}
    return "\n".join(lines[number] for number in sorted(own))


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
    that says why; then hardware that must be replaced, since its agent asks its driver before it reports; then, of the workers
    that hung, the one that is behind; then the earliest failure: by `order` across nodes, by time within one node, because the
    clocks of two nodes cannot be compared.
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
    known = diagnosis.tier != USER_RULES and diagnosis.rule != HARDWARE_EXIT  # these match what victims print and end with, too
    replaced = known and diagnosis.response is Response.REPLACE_NODE
    later = not requested, not diagnosis.deterministic, diagnosis.lacks_reason, not replaced
    return cascade, stopped, *later, evidence.hang_blame, diagnosis.order, evidence.ended_ns


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
    said = _LAST_ERROR.search(message, 0, MAX_MESSAGE)
    line, last = first_line(message).rstrip(), first_line(message[said.end() :]) if said else ""
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


MAX_SHAPE = 300  # characters of the shape of a message that count in a fingerprint

# Of a message, what varies from one try to the next: quoted text, the name of a host, words that hold a digit or a path (counts,
# ids, addresses), units of memory (GPU memory that runs out again does so by MiB or by GiB), and whether it is a NaN or infinite.
_QUOTED = re.compile(r"(?<!\w)(?:'[^']{0,300}'|\"[^\"]{0,300}\"|`[^`]{0,300}`)(?!\w)")
_VARIES = re.compile(r"[\d/]|\A(?:[KMGT]i?B|bytes|(?i:-?nan|-?inf))\b")
_HOST = re.compile(r"(?i:\b(node|host|hostname))[:=] ?[\w.-]{1,255}")
_HOLDERS = re.compile(r"(?:Process <varies> has <varies> <varies> memory in use\. ?){2,20}")  # of a GPU, one or more

# Parts of the paths of library files. Frames from an error file have no directory: see _LIBRARY_CALLS.
_LIBRARY_PATHS = ("/site-packages/", "/dist-packages/", "/lib/python", "/torch/", "<frozen ")
_STANDARD_MODULES = frozenset(sys.stdlib_module_names)

# Frames of torch in a traceback, as "file function". Both must match, because a user may also have a module.py.
_LIBRARY_CALLS = frozenset(
    {
        "module.py _wrapped_call_impl", "module.py _call_impl", "module.py load_state_dict", "module.py __getattr__",
        "_tensor.py backward", "__init__.py backward", "graph.py _engine_run_backward",
        "optimizer.py wrapper", "optimizer.py profile_hook_step", "_contextlib.py decorate_context",
        "dataloader.py __next__", "dataloader.py _next_data", "dataloader.py _process_data", "fetch.py fetch",
        "linear.py forward", "functional.py cross_entropy", "c10d_logger.py wrapper", "distributed_c10d.py all_reduce",
        "distributed_c10d.py init_process_group", "serialization.py load", "distributed.py forward",
    }
)  # fmt: skip


def of_exception(exception: RaisedException) -> str:
    """Return the fingerprint of a failure with an exception."""
    return f"{exception.type} | {top_user_frame(exception.frames)} | {normalised(exception.message)}"


def of_exit(rule: str, ended: str) -> str:
    """Return the fingerprint of a failure without an exception: the rule that matched, and the signal or the exit code."""
    return f"{rule} | {ended}"


def of_hosts(what: str, hosts: tuple[str, ...]) -> str:
    """Return the fingerprint of a failure of certain hosts together. what: "cut" if they cannot reach each other."""
    return f"{what} | {' | '.join(sorted(hosts))}"


def top_user_frame(frames: tuple[str, ...]) -> str:
    """Return the innermost user frame, else the innermost frame, without its directory; "" if there are no frames."""
    users = [frame for frame in frames if not _is_library(frame)] or list(frames)
    return users[-1].rpartition("/")[2] if users else ""


def _is_library(frame: str) -> bool:
    place, _, function = frame.partition(" in ")
    path = place.rpartition(":")[0]
    if "/" in path:
        return any(part in path for part in _LIBRARY_PATHS)
    return path.startswith("<frozen ") or f"{path} {function}" in _LIBRARY_CALLS or path.removesuffix(".py") in _STANDARD_MODULES


def normalised(message: str) -> str:
    """Return the shape of a message: its first line, with placeholders for what varies; cut after that, as the length varies."""
    line = _HOST.sub(r"\1: <varies>", _QUOTED.sub("<quoted>", message.strip().partition("\n")[0][: 4 * MAX_SHAPE]))
    shape = " ".join("<varies>" if _VARIES.search(word) else word for word in line.split())
    return _HOLDERS.sub("Process <varies> has <varies> <varies> memory in use. ", shape)[:MAX_SHAPE]
