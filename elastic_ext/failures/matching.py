"""The rules of the failure table and how they match evidence. Pure functions, standard library only.

A rule's texts are plain text, and `in` searches for them one by one: the time is linear in the searched text, whatever it holds.
The whole table takes 1 to 5 ms for 64 KB, once per failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from elastic_ext.base.kinds import Response
from elastic_ext.failures.evidence import Evidence

Text = str | tuple[str, ...]
"""A text to search for, in lower-case ASCII; a tuple matches if all of its texts are in one line."""

# The tiers. User rules apply after STOP_REQUESTED.
USER_RULES, STOP_REQUESTED, HARDWARE_EVIDENCE, PROGRAM_OUTPUT, EXIT_STATUS = range(5)


@dataclass(frozen=True)
class EvidenceView:
    """The evidence in the form that rules match.

    Attributes:
        exception_names: the full and the bare names of the exception and of its base classes; empty without one.
        text: the text in which a rule's texts are searched.
        signal: the signal that ended the worker; exit code 128+N counts as signal N.
    """

    evidence: Evidence
    exception_names: frozenset[str]
    text: SearchText
    signal: str | None
    errno: int | None = None


Condition = Callable[[EvidenceView], bool]


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        because: the end of the reason that users read.
        checkpoints_back: 1 to resume from the checkpoint before the newest.
        survivable: scripts print such texts and go on (a library tries again, a thread loses a peer that is being stopped), so on
            stderr they say nothing beside an exception that ended the script.
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
    errnos: frozenset[int] = frozenset()
    when: Condition | None = None
    checkpoints_back: int = 0
    survivable: bool = False

    def matches(self, view: EvidenceView) -> bool:
        """Return whether at least one of the named conditions holds, and also `when`."""
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
            or view.errno in self.errnos
        )

    @property
    def _names_nothing(self) -> bool:
        """Whether the rule has no condition except `when`, which then decides alone."""
        named = (self.exceptions, self.packages, self.texts, self.exit_codes, self.signals, self.xids, self.errnos)
        return not any(named)


class SearchText:
    """A text for case-insensitive searches."""

    def __init__(self, text: str) -> None:
        """Keep `text`, and an ASCII form of it: the table's texts are ASCII, so other characters may be replaced."""
        self._original = text
        self.ascii = text.encode("ascii", "replace").lower().decode("ascii")

    @cached_property
    def lower(self) -> str:
        """The whole text in lower case, because a user's pattern may hold any letter."""
        return self._original.lower()

    def __contains__(self, wanted: str) -> bool:
        return wanted in self.ascii


def contains(text: SearchText, wanted: tuple[Text, ...]) -> bool:
    """Return whether one of the wanted texts occurs; a tuple occurs if one line holds all of its texts."""
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
