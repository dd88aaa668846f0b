"""The classifier of failures: the first match in the table of `rules` wins. Pure functions only.

The evidence is searched from the strongest to the weakest, and it bounds the answer: see `base.diagnosis.Weight`. Missing
evidence is "unknown", never "fine" and never "a bug".
"""

from __future__ import annotations

import builtins
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

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
from elastic_ext.failures.abort_lines import abort_lines
from elastic_ext.failures.evidence import Evidence, EvidenceView, RaisedException, SearchText, Wrapped
from elastic_ext.failures.fingerprints import library_of, of_exception, of_exit, of_hosts
from elastic_ext.failures.rules import (
    ACCESS,
    BUG_MAYBE,
    COUNTS_AS,
    DISK_FULL,
    EXIT_STATUS,
    GPU_DEAD,
    HARDWARE_EVIDENCE,
    HARDWARE_EXIT,
    NO_EVIDENCE,
    OUTAGE_ERRNOS,
    OUTAGES,
    PROGRAM_OUTPUT,
    RERUN_CODES,
    RULES,
    STOP_REQUESTED,
    TOO_STRONG,
    USER_RULES,
    XIDS_ANNOTATE,
    Rule,
    held_by_another_process,
)
from elastic_ext.failures.servers import BUSY, CLIENT_ERRORS, CLIENTS, UNREACHABLE, answers
from elastic_ext.failures.tracebacks import ended_with, last_exception

if TYPE_CHECKING:
    from elastic_ext.failures.user_rules import UserRule

MAX_TEXT = 64 * 1024  # characters of the end of stderr that are searched
MAX_MESSAGE = 8 * 1024  # of a longer message, only the two ends are searched
MAX_SHOWN = 300  # characters of a message in a reason
_LAST_ERROR = re.compile("Last error:\n|NCCL Last Error: ")  # before NCCL's own words
_ERRNO = re.compile(r"\[Errno (\d{1,4})\]")
_NAMED = re.compile(r"^([A-Za-z_][\w.]{0,200}(?:Error|Exception)): (.{1,2000})", re.MULTILINE)
# Exceptions whose message holds the one that another rank, a child or a compiler has raised.
_FROM_ELSEWHERE = frozenset({"CheckpointException", "RayTaskError", "ActorDiedError"})
_CARRIERS = _FROM_ELSEWHERE | {"ProcessRaisedException"}
_COMPILERS = ("torch._dynamo.", "torch._inductor.", "triton.")
_CAUGHT = re.compile(r"Caught \w{1,80} in (?:DataLoader worker|pin memory thread|replica)")
# Python's own words for a bug. In the frames of a server's client they do not say that the server is away: its client has races
# of its own at a start. Nor do they say that the script is wrong.
_OF_A_CLIENT = frozenset({"a bug in a client's frames"})
_OF_BUGS = frozenset(
    {"TypeError", "NameError", "AttributeError", "LookupError", "AssertionError", "ValueError", "SyntaxError", "ImportError",
     "MemoryError", "ArithmeticError", "NotImplementedError", "FileNotFoundError", "FileExistsError", "IsADirectoryError",
     "NotADirectoryError", "PermissionError"}
)  # fmt: skip
# Classes of backends: all that they say is a library's, quotes and paths included.
_OF_BACKENDS = frozenset({"DistBackendError", "AcceleratorError"})
_ORDER = tuple(Weight)

# How a process ends that has printed its traceback. Any other way to end shows that it has survived what it printed.
_RAISED = frozenset({1, EX_TRY_AGAIN, "SIGABRT"})
_TIERS = (STOP_REQUESTED, HARDWARE_EVIDENCE, PROGRAM_OUTPUT, EXIT_STATUS)
_BY_TIER = {tier: tuple(rule for rule in RULES if rule.tier == tier) for tier in _TIERS}
_DISK_FULL = next(rule for rule in RULES if rule.name == DISK_FULL)
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
    # What its exception says, with those inside; reports keep only the outermost one.
    # whether a class, an errno or an answer says that a server or a file system does not work; None: nothing says anything
    outage: bool | None = None
    lacks_module: bool = False
    of_other: bool = False  # it holds what another rank, perhaps on another host, has raised
    order: int = 0  # when the job learned of it, e.g. an etcd revision; equal for all that one node reports at once

    @property
    def deterministic(self) -> bool:
        """Whether another try would end the same way."""
        return self.response is Response.STOP

    @property
    def shown_by_hardware(self) -> bool:
        """Whether a driver, a link or a check shows it, and not how the script ended."""
        return self.rule == GPU_DEAD or (self.tier == HARDWARE_EVIDENCE and self.rule != HARDWARE_EXIT)

    @property
    def lacks_reason(self) -> bool:
        """Whether another worker may say why: those of Megatron-LM leave together, and one has logged the reason."""
        return self.rule == NO_EVIDENCE and self.evidence.exit_code in RERUN_CODES


def classify(evidence: Evidence, user_rules: Sequence[UserRule] = ()) -> Diagnosis:
    """Return the meaning of one worker's failure. Never raises; takes some ten milliseconds."""
    # A script that leaves by sys.exit("text") has printed the error before.
    recorded = evidence.exception is not None and evidence.exception.type != "SystemExit"
    tail = _of_script(evidence.stderr_tail[-MAX_TEXT:])
    evidence = _completed(_with_signal(evidence), tail)
    printed = _view(evidence, Weight.PRINTED, tail)
    match = _first_match(evidence, printed, recorded, user_rules)
    only_words = match.weight is Weight.PRINTED and match.rule.tier == PROGRAM_OUTPUT
    chain = _chain(evidence.exception) if evidence.exception is not None else []
    because = f"as far as words say, {match.rule.because}" if only_words else match.rule.because
    return Diagnosis(
        match.kind,
        match.response,
        match.rule.name,
        f"{describe(evidence)}: {because}{_annotation(printed, match.rule.name)}",
        _fingerprint(evidence, match.rule.name),
        evidence,
        match.rule.tier,
        match.rule.checkpoints_back if match.weight is not Weight.PRINTED else 0,
        match.weight,
        _shows_outage(evidence, chain),
        any("ModuleNotFoundError" in exception_names(each) for each in chain),
        any(_carrier(each) in _FROM_ELSEWHERE for each in chain),
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
class Match:
    """A rule that matches, and where its evidence stands."""

    rule: Rule | UserRule
    weight: Weight

    @property
    def response(self) -> Response:
        """The answer of the rule, bounded by its evidence."""
        return self.rule.answer(self.weight) if isinstance(self.rule, Rule) else self.rule.response

    @property
    def kind(self) -> str:
        """The kind of the failure. What is printed makes no cascade: another worker has to be known as the cause."""
        alone = self.rule.kind == CASCADE and self.response is not Response.FOLLOW
        return NETWORK if alone else self.rule.kind


def _first_match(evidence: Evidence, printed: EvidenceView, recorded: bool, user_rules: Iterable[UserRule]) -> Match:
    """Search the evidence from the strongest to the weakest.

    printed: what the script has printed. recorded: its exception is known for sure, rather than found on stderr.
    """
    exception = evidence.exception
    message = _ends(exception.message) if exception else ""
    all_of_it = _view(evidence, Weight.PLATFORM, message, printed.text.original)
    if found := _first(all_of_it, STOP_REQUESTED):
        return found
    if asked := _of_user(evidence, message, user_rules):
        return Match(asked, Weight.PLATFORM)
    if found := _first(all_of_it, HARDWARE_EVIDENCE):
        return found
    raised = _of_exception(evidence, exception, recorded) if exception else None
    says_little = raised is None or raised.rule.name == BUG_MAYBE or raised.weight is Weight.PRINTED
    if raised and not says_little and raised.response is not Response.FOLLOW:
        return raised
    follows = raised is not None and raised.response is Response.FOLLOW
    words = _of_abort_lines(evidence, printed.text.original, follows)
    # A failure of the backend comes first: the exception that follows may only say that the operation has failed.
    if words and (raised is None or Response.FOLLOW in (raised.response, words.response)):
        return words
    if raised:
        return raised
    found = _first(all_of_it, EXIT_STATUS)
    if found is None or found.rule.name != NO_EVIDENCE:
        return found or Match(RULES[-1], Weight.PRINTED)
    if exception is not None and exception.type != "SystemExit":
        return replace(found, weight=Weight.CLASS)  # a class that no rule knows is more than a bare exit code
    if evidence.full:  # what the script had to say may have found no room
        return Match(_DISK_FULL, Weight.PLATFORM)
    return _first(printed, PROGRAM_OUTPUT) or found


def _of_user(evidence: Evidence, message: str, user_rules: Iterable[UserRule]) -> UserRule | None:
    view = _view(evidence, Weight.PLATFORM, message, evidence.stderr_tail[-MAX_TEXT:])
    view = replace(view, exception_names=exception_names(evidence.exception))
    return next((rule for rule in user_rules if rule.matches(view)), None)


def _view(evidence: Evidence, place: Weight, *texts: str) -> EvidenceView:
    return EvidenceView(evidence, place, SearchText("\n".join(filter(None, texts))), signal=worker_signal(evidence))


def _first(view: EvidenceView, tier: int) -> Match | None:
    for rule in _BY_TIER[tier]:
        if weight := rule.found(view):
            return Match(rule, Weight.PRINTED if rule.name == NO_EVIDENCE else weight)
    return None


def _of_exception(evidence: Evidence, exception: RaisedException, recorded: bool) -> Match | None:
    """Return the rule for the exception that ended the script. Beside a rule for it, nothing else counts that was printed."""
    weakest = Weight.CLASS if recorded else Weight.MESSAGE if evidence.exit_code == 1 else Weight.ABORT_LINES
    found = [match for each in _chain(exception) if (match := _first(_message_of(evidence, each, exception), PROGRAM_OUTPUT))]
    matches = [replace(match, weight=max(match.weight, weakest, key=_ORDER.index)) for match in found]
    if any(_carrier(each) in _FROM_ELSEWHERE for each in _chain(exception)):  # it may be of another host
        matches = [replace(each, weight=Weight.ABORT_LINES) if each.response in TOO_STRONG else each for each in matches]
    if matches:
        # What is inside counts: a wrapper says what the script was doing. But a bug in handling an error is a bug.
        refused = [match for match in matches if match.rule.name in ACCESS]  # its client has errors of its own then
        return (refused or [match for match in reversed(matches) if match.rule.kind != CODE] or matches)[0]
    # No rule knows it. So what was being handled, or what the message names, may say more, and ends no job.
    for cause in exception.causes:  # what was being handled when it was raised; its class does not say how the script ended
        name, _, said = cause.partition(": ")
        handled = _message_of(evidence, Wrapped(name, said), exception)
        if match := _first(replace(handled, exception_names=frozenset(), errno=None), PROGRAM_OUTPUT):
            return replace(match, weight=Weight.ABORT_LINES)
    return _first(_view(evidence, Weight.PRINTED, _ends(exception.message)), PROGRAM_OUTPUT)


def _message_of(evidence: Evidence, one: RaisedException | Wrapped, outer: RaisedException) -> EvidenceView:
    names = exception_names(one)
    library = library_of(one.frames if isinstance(one, RaisedException) else outer.frames)
    bug = not _OF_BUGS.isdisjoint(names)
    if bug and f"{library}.".startswith(CLIENTS):
        names = _OF_A_CLIENT
    elif library and not bug:
        names |= {f"{library}.{_bare(one.type)}"}
    of_client = any(name.startswith(CLIENTS) for name in names)
    view = _view(evidence, Weight.CLASS, _ends(one.message))
    if not _OF_BACKENDS.isdisjoint(names):
        view = replace(view, text=SearchText(_ends(one.message), of_library=True))
    speakers = names | {"ClientError"} if of_client else names
    asked = not CLIENT_ERRORS.isdisjoint(speakers)
    own = of_client or not (CLIENT_ERRORS - {"OSError"}).isdisjoint(names)
    said = answers(view.text.ascii, view.text.words, own) if asked else frozenset[str]()
    return replace(view, exception_names=names, speakers=speakers, errno=_errno(one), answers=said)


def _of_abort_lines(evidence: Evidence, tail: str, follows: bool) -> Match | None:
    """Return the rule for what libraries have written as they ended the process. follows: its exception is a cascade's.

    A script that ends by an exit code has survived what is not at the end, unless its exception is due to it.
    """
    said, signal_name = abort_lines(tail), worker_signal(evidence)
    if signal_name is None and not (follows or said.at_the_end):
        return None
    if said.backend:  # what a backend says as it fails is an exception of its own
        of_backend = replace(
            _view(evidence, Weight.ABORT_LINES, said.backend), speakers=_BACKEND_ERROR, exception_names=_BACKEND_ERROR
        )
        if found := _first(of_backend, PROGRAM_OUTPUT):
            return found
    view = replace(_view(evidence, Weight.ABORT_LINES), text=SearchText(said.libraries, of_library=True))
    for rule in _BY_TIER[PROGRAM_OUTPUT] if said.libraries else ():
        meant = rule.kind == CASCADE if signal_name is None else signal_name == "SIGABRT" or rule.kind in _BEHIND_A_SIGNAL
        if meant and Weight.ABORT_LINES in rule.places and rule.found(view):
            return Match(rule, Weight.ABORT_LINES)
    return None


def _chain(exception: RaisedException) -> list[RaisedException | Wrapped]:
    """Return the exception, what it was raised from, and the one that its message holds.

    A DataLoader's message ends with a traceback; a compiler's, which is raised "from None", with "OSError: [Errno 16] ...". Other
    messages may quote anything, so an exception in them does not count.
    """
    carries = _carrier(exception) in _CARRIERS or exception.type.startswith(_COMPILERS) or _CAUGHT.match(exception.message)
    if not carries:
        return [exception, *exception.wrapped]
    inner: RaisedException | Wrapped | None = last_exception(exception.message)
    if inner is None and not exception.wrapped and (named := _NAMED.findall(_ends(exception.message))):
        inner = Wrapped(*named[-1])
    return [exception, *exception.wrapped, *([inner] if inner else [])]


def _carrier(exception: RaisedException | Wrapped) -> str:
    return _bare(exception.type.partition("(")[0])  # RayTaskError(KeyError)


def _shows_outage(evidence: Evidence, chain: Sequence[RaisedException | Wrapped]) -> bool | None:
    """See `Diagnosis.outage`. A text alone shows none."""
    raised = evidence.exception
    views = [_message_of(evidence, each, raised) for each in chain] if raised is not None else []
    away = UNREACHABLE | {BUSY}
    if any(
        not OUTAGES.isdisjoint(view.exception_names) or view.errno in OUTAGE_ERRNOS or not away.isdisjoint(view.answers)
        for view in views
    ):
        return True
    return False if any(view.answers for view in views) else None


def _errno(exception: RaisedException | Wrapped) -> int | None:
    """Return the errno of an OSError with a text in any language, or of a class of a library that says so."""
    said = _ERRNO.match(exception.message) if exception.errno is None else None
    return int(said[1]) if said and _OF_BUGS.isdisjoint(exception_names(exception)) else exception.errno


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


def _completed(evidence: Evidence, tail: str) -> Evidence:
    """Add the exception if only stderr shows it: the script has survived what it printed before its last lines.

    tail: what the script has printed.
    """
    exception = evidence.exception
    if (exception is None or not exception.wrapped) and (worker_signal(evidence) or evidence.exit_code) in _RAISED:
        left = exception is None or (exception.type == "SystemExit" and exception.message.isdecimal())  # as hydra leaves
        found = ended_with(tail)
        if found and left:
            evidence = replace(evidence, exception=found)
        elif found and exception and _same(found, exception):  # torch's error file has no causes
            evidence = replace(evidence, exception=replace(exception, wrapped=found.wrapped))
    return evidence


def _same(printed: RaisedException, recorded: RaisedException) -> bool:
    same_type = _bare(printed.type) == _bare(recorded.type)
    return same_type and first_line(printed.message).strip() == first_line(recorded.message).strip()


def _bare(name: str) -> str:
    return name.rpartition(".")[2]


def exception_names(exception: RaisedException | Wrapped | None) -> frozenset[str]:
    """Return the full and the bare names of an exception and of its base classes, and what the table counts them as."""
    if exception is None:
        return frozenset()
    names = {exception.type, *exception.bases}
    names |= {_bare(name) for name in names}
    names |= {COUNTS_AS[name] for name in names if name in COUNTS_AS}
    for name in tuple(names):
        of_python = getattr(builtins, name, None)
        if isinstance(of_python, type) and issubclass(of_python, Exception):
            names |= {base.__name__ for base in of_python.__mro__[1:]} - _BASES_OF_ALL
    return frozenset(names)


_BASES_OF_ALL = frozenset({"Exception", "BaseException", "object"})


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


USAGE = 2  # exit code of argparse, as of most commands


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
    said = _usage_error(evidence)
    how = f"{'was killed by' if evidence.signal is not None else 'ended with'} {ended_by(evidence)}"
    return f"rank {evidence.rank} {how}{f' ({cut(said, MAX_SHOWN)})' if said else ''}"


def _usage_error(evidence: Evidence) -> str:
    """Return what argparse says of a wrong option, as `x.py: error: unrecognized arguments: --y`; "" if it is not that."""
    last = evidence.stderr_tail.rstrip().rpartition("\n")[2]
    return last if evidence.exit_code == USAGE and ": error: " in last else ""


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


def _annotation(printed: EvidenceView, rule: str) -> str:
    """Return facts that did not affect the decision but help the reader of the reason. printed: what the script has printed."""
    notes, evidence = [], printed.evidence
    if evidence.full:
        notes.append(f"on {evidence.node} {evidence.full}: free some, or give another --log-dir")
    if seen := sorted(XIDS_ANNOTATE.intersection(evidence.xids)):
        notes.append(f"the driver also reported Xid {', '.join(map(str, seen))}")
    if evidence.gpu_recovery:
        notes.append(f"the driver recommends {', '.join(sorted(set(evidence.gpu_recovery)))}")
    if evidence.exception and (held := held_by_another_process(_ends(evidence.exception.message).lower())):
        notes.append(held)
    shows_more = evidence.exception and printed.text.original and rule in (NO_EVIDENCE, BUG_MAYBE)
    if shows_more and (said := _first(printed, PROGRAM_OUTPUT)):
        notes.append(f"also on stderr: {said.rule.because}")
    return f" ({'; '.join(notes)})" if notes else ""
