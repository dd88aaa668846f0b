"""How a rule of the failure table matches evidence. Pure, standard library only.

A rule's texts are plain and are searched for with `in`, one after the other: linear in the searched text, whatever it holds. The
whole table takes 1 to 5 ms for 64 KB, once per failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from elastic_ext.base.kinds import Response
from elastic_ext.failures.evidence import Evidence

Text = str | tuple[str, ...]
"""A text to search for, ASCII and lower case; a tuple: all of its texts in one line."""

USER_RULES, ASKED, HARDWARE_EVIDENCE, PROGRAM_OUTPUT, EXIT_STATUS = range(5)  # the tiers; user rules come after ASKED


@dataclass(frozen=True)
class EvidenceView:
    """The evidence in the form that rules match.

    Attributes:
        exception_names: the exception's full and bare name and, where the table knows it, the base class; empty without one.
        text: the text that a rule's texts are searched for in.
        signal: the signal that ended the worker; exit code 128+N is signal N.
    """

    evidence: Evidence
    exception_names: frozenset[str]
    text: SearchText
    signal: str | None


Condition = Callable[[EvidenceView], bool]


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        because: ends the reason that users read.
        checkpoints_back: 1: resume from the checkpoint before the newest.
    """

    tier: int
    name: str
    kind: str
    response: Response
    because: str
    source: str = ""
    exceptions: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    texts: tuple[Text, ...] = ()
    exit_codes: frozenset[int] = frozenset()
    signals: frozenset[str] = frozenset()
    xids: frozenset[int] = frozenset()
    when: Condition | None = None
    checkpoints_back: int = 0

    def matches(self, view: EvidenceView) -> bool:
        """Whether one of the named conditions holds, and `when` does too."""
        return (self._has_names(view) or contains(view.text, self.texts)) and (self.when is None or self.when(view))

    def _has_names(self, view: EvidenceView) -> bool:
        evidence = view.evidence
        return (
            self._names_nothing
            or not self.exceptions.isdisjoint(view.exception_names)
            or (bool(self.packages) and any(name.startswith(self.packages) for name in view.exception_names))
            or evidence.exit_code in self.exit_codes
            or view.signal in self.signals
            or not self.xids.isdisjoint(evidence.xids)
        )

    @property
    def _names_nothing(self) -> bool:
        """The rule has no condition but `when`, which then decides alone."""
        return not (self.exceptions or self.packages or self.texts or self.exit_codes or self.signals or self.xids)


class SearchText:
    """A text to search in, without regard to case."""

    def __init__(self, text: str) -> None:
        """The table's texts are ASCII, so any other character of `text` may be replaced."""
        self._original = text
        self.ascii = text.encode("ascii", "replace").lower().decode("ascii")

    @cached_property
    def lower(self) -> str:
        """The whole text in lower case: a user's pattern may hold any letter."""
        return self._original.lower()

    def __contains__(self, wanted: str) -> bool:
        return wanted in self.ascii


def contains(text: SearchText, wanted: tuple[Text, ...]) -> bool:
    """Whether one of the wanted texts is there; for a tuple, whether one line holds all of its texts."""
    return any(one in text if isinstance(one, str) else _in_one_line(text.ascii, one) for one in wanted)


def _in_one_line(text: str, parts: tuple[str, ...]) -> bool:
    if not all(part in text for part in parts):
        return False
    rarest, *others = parts
    at = text.find(rarest)
    while at >= 0:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[text.rfind("\n", 0, at) + 1 : end]
        if all(part in line for part in others):
            return True
        at = text.find(rarest, end)
    return False
