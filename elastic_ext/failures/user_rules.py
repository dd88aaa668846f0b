"""User rules, from a TOML file and the entry-point group `elastic_ext.rules`. Only tier 1 of the table precedes them.

    [[rule]]
    name = "license server"
    pattern = "license * not available"     # plain text; * stands for anything within one line
    exit_code = 17
    exception = "vendor.LicenseError"       # full or bare class name
    signal = "SIGUSR1"
    kind = "network"
    decision = "restart"

A rule matches if all of its conditions hold; it needs at least one of pattern, exit_code, exception and signal. A pattern ignores
case and is not a regular expression: it cannot backtrack, so a worker's output cannot stall the agent.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from elastic_ext.base import diagnosis, files
from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import literal, printable
from elastic_ext.failures.evidence import EvidenceView
from elastic_ext.failures.rules import GROUP, RULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONDITIONS = ("pattern", "exit_code", "exception", "signal")
MAX_SHOWN = 200  # characters of a bad value
FIELDS = ("name", *CONDITIONS, "kind", "decision")
USER_KINDS = tuple(kind for kind in diagnosis.KINDS if kind != diagnosis.CASCADE)
USER_DECISIONS = tuple(response.value for response in diagnosis.Response if response is not diagnosis.Response.FOLLOW)
MAX_PATTERN = 500  # characters
MAX_BYTES = 1 << 20  # of a file
_TAKEN = frozenset(rule.name for rule in RULES)
_REGEX_SIGNS = (".*", ".+", "\\", "(?", "[0-9]", "[a-z", ")|(", "^")


@dataclass(frozen=True)
class UserRule:
    """One user rule, with the fields of the file; None means no such condition. origin: the file or the entry point."""

    name: str
    kind: str
    response: diagnosis.Response
    origin: str = ""
    pattern: str | None = None
    exit_code: int | None = None
    exception: str | None = None
    signal: str | None = None
    tier: int = 0
    checkpoints_back: int = 0

    @property
    def because(self) -> str:
        """The end of the reason that users read."""
        return f"the rule {self.name!r} of {printable(self.origin) or 'the user'}"

    def matches(self, view: EvidenceView) -> bool:
        """Return whether all conditions hold."""
        evidence = view.evidence
        return (
            (self.exit_code is None or self.exit_code == evidence.exit_code)
            and (self.exception is None or self.exception in view.exception_names)
            and (self.signal is None or self.signal == view.signal)
            and (self.pattern is None or contains_pattern(self.pattern.lower(), view.text.lower))
        )


def contains_pattern(pattern: str, text: str) -> bool:
    """Return whether a line of the text holds the pattern. Linear, since the leftmost match of each part is enough."""
    first, *others = pattern.split("*")
    start = 0
    while (at := text.find(first, start)) >= 0:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        at += len(first)
        for part in others:
            at = text.find(part, at, end)
            if at < 0:
                break
            at += len(part)
        else:
            return True
        start = end + 1
        if start > len(text):
            break
    return False


def load(path: str | None) -> tuple[UserRule, ...]:
    """Return the rules of a file (None for no file), then those of the entry points.

    Raises:
        UsageError: a rule is invalid; the message names the file or the entry point, the rule, and the expected value.
    """
    return (*(from_file(path) if path else ()), *from_entry_points(entry_points(group=GROUP)))


def from_file(path: str) -> tuple[UserRule, ...]:
    """Return the rules of a TOML file. Raises UsageError."""
    try:
        content = tomllib.loads(files.read_text(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"rules file {path} cannot be read as TOML: {_one_line(error)}") from error
    unknown = sorted(content.keys() - {"rule"})
    if unknown or not isinstance(content.get("rule", []), list):
        shown = ", ".join(unknown) or "a rule that is not an array of tables"
        raise UsageError(f"rules file {path}: expected [[rule]] tables only, found {shown}")
    return from_tables(content.get("rule", []), f"rules file {path}")


def from_entry_points(points: Iterable[EntryPoint]) -> tuple[UserRule, ...]:
    """Return the rules of other packages. Each entry point is a callable that returns tables or UserRules. Raises UsageError."""
    rules: list[UserRule] = []
    for point in points:
        origin = f"entry point {point.name} ({point.value})"
        try:
            tables = list(point.load()())
        except Exception as error:  # another package may raise anything
            raise UsageError(f"{GROUP}: {origin} failed: {type(error).__name__}: {_one_line(error)}") from error
        rules += from_tables(tables, origin)
    return tuple(rules)


def from_tables(tables: Iterable[object], origin: str) -> tuple[UserRule, ...]:
    """Make rules from tables like those of a file. Raises UsageError."""
    return tuple(
        table if isinstance(table, UserRule) else _checked(table, f"{origin}: rule {number}", origin)
        for number, table in enumerate(tables, 1)
    )


def _checked(table: object, where: str, origin: str) -> UserRule:
    if not isinstance(table, Mapping):
        raise UsageError(f"{where}: expected a table with {', '.join(FIELDS)}")
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}: expected a name, a non-empty string")
    where = f"{where} ({name!r})"
    if name in _TAKEN:
        raise UsageError(f"{where}: a rule of elastic_ext has this name, and what it means there: expected another one")
    if unknown := [str(key) for key in table if key not in FIELDS]:
        raise UsageError(f"{where}: unknown field{'s' * (len(unknown) > 1)} {', '.join(unknown)}; known: {', '.join(FIELDS)}")
    if not any(condition in table for condition in CONDITIONS):
        raise UsageError(f"{where}: expected at least one of {', '.join(CONDITIONS)}")
    for key, expected, good in _CHECKS:
        if key in table and not good(table[key]):
            raise UsageError(f"{where}: {key}={literal(table[key], MAX_SHOWN)}: expected {expected}")
    for key in ("kind", "decision"):
        if key not in table:
            raise UsageError(f"{where}: expected a {key}")
    conditions: dict[str, Any] = {condition: table.get(condition) for condition in CONDITIONS}
    return UserRule(name, table["kind"], diagnosis.Response(table["decision"]), origin, **conditions)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_pattern(value: object) -> bool:
    """Return whether this is text with *. A regular expression is refused, since as plain text it would never match."""
    if not isinstance(value, str) or len(value) > MAX_PATTERN or "\n" in value or not value.strip("*"):
        return False
    return not any(sign in value for sign in _REGEX_SIGNS)


_CHECKS = (
    (
        "pattern",
        f"plain text of one line, at most {MAX_PATTERN} characters, in which * stands for anything; not a regular expression",
        _is_pattern,
    ),
    ("exit_code", "a whole number, 1 to 255", lambda code: type(code) is int and 1 <= code <= 255),
    ("exception", "the name of a class", lambda name: _is_text(name) and name.replace(".", "").isidentifier()),
    ("signal", 'the name of a signal, e.g. "SIGUSR1"', lambda name: _is_text(name) and name in signal.Signals.__members__),
    ("kind", f"one of {', '.join(USER_KINDS)}", lambda kind: kind in USER_KINDS),
    ("decision", f"one of {', '.join(USER_DECISIONS)}", lambda decision: decision in USER_DECISIONS),
)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
