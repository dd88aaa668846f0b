"""What a failure means: a table, first match wins. Pure, standard library only.

This is the first cut: positive evidence of a code bug is told from everything else. `failure_rules.md` of the project's design is
the whole table; its sources are named there. Missing evidence is "unknown", never "fine" and never "a bug".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic_ext.failures.evidence import Evidence

CASCADE = "cascade"  # this worker died of another one's death
NETWORK = "network"  # what a cascade is when nothing else has failed


@dataclass(frozen=True)
class Diagnosis:
    """What one worker's failure means. deterministic: another try would end the same way."""

    kind: str
    deterministic: bool
    rule: str
    reason: str
    evidence: Evidence


@dataclass(frozen=True)
class Rule:
    name: str
    matches: Callable[[Evidence], bool]
    kind: str
    deterministic: bool
    because: str


def _raised(*types: str) -> Callable[[Evidence], bool]:
    wanted = frozenset(types)
    return lambda evidence: evidence.exception is not None and evidence.exception.type in wanted


def _raised_with(type_: str, *texts: str) -> Callable[[Evidence], bool]:
    def matches(evidence: Evidence) -> bool:
        exception = evidence.exception
        return exception is not None and exception.type == type_ and any(text in exception.message for text in texts)

    return matches


def _raised_before_first_step(*types: str) -> Callable[[Evidence], bool]:
    raised = _raised(*types)
    return lambda evidence: raised(evidence) and evidence.first_step_done is False


PEER_GONE_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Watchdog caught collective operation timeout",
)


def _peer_gone(evidence: Evidence) -> bool:
    exception = evidence.exception
    if exception is None:
        return False
    return exception.type == "torch.distributed.DistBackendError" or any(text in exception.message for text in PEER_GONE_TEXTS)


def _exited(*codes: int) -> Callable[[Evidence], bool]:
    wanted = frozenset(codes)
    return lambda evidence: evidence.exit_code in wanted and evidence.exception is None


RULES: tuple[Rule, ...] = (
    Rule(
        "stopped-by-agent",
        lambda evidence: evidence.stopped_by_agent,
        CASCADE,
        False,
        "the agent stopped it because another worker had failed",
    ),
    Rule(
        "peer-gone",
        _peer_gone,
        CASCADE,
        False,
        "a peer was gone in the middle of a collective; the cause is elsewhere",
    ),
    Rule(
        "shared-object",
        _raised_with(
            "ImportError",
            "cannot open shared object",
            "Stale file handle",
            "Input/output error",
            "Transport endpoint is not connected",
        ),
        "storage",
        False,
        "a shared object could not be read: a network file system does this",
    ),
    Rule(
        "code-always",
        _raised(
            "SyntaxError",
            "IndentationError",
            "TabError",
            "NameError",
            "UnboundLocalError",
            "ImportError",
            "ModuleNotFoundError",
            "AttributeError",
            "NotImplementedError",
        ),
        "code",
        True,
        "an error of this type comes back on every try",
    ),
    Rule(
        "code-before-first-step",
        _raised_before_first_step("TypeError", "ValueError", "KeyError", "IndexError", "AssertionError", "ZeroDivisionError"),
        "code",
        True,
        "raised before the first optimizer step: it comes back on every try",
    ),
    Rule(
        "files-before-first-step",
        _raised_before_first_step(
            "FileNotFoundError",
            "PermissionError",
            "IsADirectoryError",
            "UnicodeDecodeError",
            "json.decoder.JSONDecodeError",
        ),
        "data",
        True,
        "raised before the first optimizer step: the input is missing or wrong",
    ),
    Rule("usage-exit", _exited(2, 126, 127), "code", True, "this exit code means wrong usage, not executable or not found"),
    Rule(
        "sysexits",
        _exited(*range(64, 75), 76, 77, 78),
        "code",
        True,
        "the program chose an exit code of sysexits.h that means: do not retry",
    ),
    Rule("unknown", lambda evidence: True, "unknown", False, "nothing says that another try would fail"),
)


def classify(evidence: Evidence) -> Diagnosis:
    """Return what the failure of one worker means."""
    rule = next(rule for rule in RULES if rule.matches(evidence))
    return Diagnosis(rule.kind, rule.deterministic, rule.name, f"{describe(evidence)}: {rule.because}", evidence)


def root_cause(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Return the one that explains the others.

    A cascade never outvotes a real cause, and evidence of a bug on one worker outvotes what its peers died of; then the earliest.
    """
    cause = min(
        diagnoses, key=lambda diagnosis: (diagnosis.kind == CASCADE, not diagnosis.deterministic, diagnosis.evidence.ended_ns)
    )
    return replace(cause, kind=NETWORK) if cause.kind == CASCADE else cause


def describe(evidence: Evidence) -> str:
    """One line: which rank ended, and of what."""
    exception = evidence.exception
    if exception is not None:
        place = f" at {exception.frames[-1]}" if exception.frames else ""
        message = exception.message.splitlines()[0][:200] if exception.message else ""
        return f"rank {evidence.rank} raised {exception.type}{': ' + message if message else ''}{place}"
    if evidence.signal is not None:
        return f"rank {evidence.rank} was killed by {evidence.signal}"
    code = "an unknown exit code" if evidence.exit_code is None else f"exit code {evidence.exit_code}"
    return f"rank {evidence.rank} ended with {code}"
