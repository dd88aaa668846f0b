"""How a rule of the table is looked for in the evidence. Pure; the standard library, and RE2 where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from elastic_ext.base.kinds import Response
from elastic_ext.failures.evidence import Evidence

Text = str | tuple[str, ...]
USERS, ASKED, HARDWARE_SAID, PROGRAM_SAID, EXIT_ONLY = range(5)  # the tiers


@dataclass(frozen=True)
class Facts:
    """The evidence as the rules look at it.

    Attributes:
        exception_names: the exception's full and bare name and, where the table knows it, the base class; empty without one.
        text: what texts are looked for in.
        signal: of the worker; exit code 128+N is signal N.
    """

    evidence: Evidence
    exception_names: frozenset[str]
    text: Words
    signal: str | None


Condition = Callable[[Facts], bool]


@dataclass(frozen=True)
class Rule:
    """One row. `because` ends the reason; checkpoints_back: 1 to resume from the checkpoint before the newest."""

    tier: int
    name: str
    kind: str
    verdict: Response
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

    def matches(self, facts: Facts) -> bool:
        return (self._has_names(facts) or contains(facts.text, self.texts)) and (self.when is None or self.when(facts))

    def _has_names(self, facts: Facts) -> bool:
        evidence = facts.evidence
        return (
            self._names_nothing
            or not self.exceptions.isdisjoint(facts.exception_names)
            or (bool(self.packages) and any(name.startswith(self.packages) for name in facts.exception_names))
            or evidence.exit_code in self.exit_codes
            or facts.signal in self.signals
            or not self.xids.isdisjoint(evidence.xids)
        )

    @property
    def _names_nothing(self) -> bool:
        """Then `when` alone decides."""
        return not (self.exceptions or self.packages or self.texts or self.exit_codes or self.signals or self.xids)


class Texts:
    """Many texts that are looked for at once, in one pass over what is searched: RE2 builds one automaton of them.

    Linear whatever is searched: about 0.1 ms for 64 KB. Without RE2 (no wheel for the platform) one after the other, the same
    answer in 1 to 4 ms.
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        """wanted: ASCII, lower case."""
        self.all = tuple(dict.fromkeys(wanted))
        self._known = frozenset(self.all)
        self._set = None
        try:
            import re2
        except ImportError:
            return
        self._set = re2.Set.SearchSet()
        for text in self.all:
            self._set.Add(re2.escape(text))
        self._set.Compile()

    def __contains__(self, text: str) -> bool:
        return text in self._known

    def found_in(self, data: bytes) -> frozenset[str]:
        """Those that are in it. data: ASCII, lower case."""
        if self._set is None:
            text = data.decode("ascii")
            return frozenset(wanted for wanted in self.all if wanted in text)
        return frozenset(self.all[number] for number in self._set.Match(data) or ())


class Words:
    """A text, in lower case, and which texts of the table are in it."""

    def __init__(self, text: str, texts: Texts) -> None:
        """The texts of the table are ASCII, so another character is none of theirs."""
        self._written = text
        data = text.encode("ascii", "replace").lower()
        self.text = data.decode("ascii")
        self._texts, self._found = texts, texts.found_in(data)

    @cached_property
    def written(self) -> str:
        """All of it, in lower case: a user's pattern may have any letter."""
        return self._written.lower()

    def __contains__(self, wanted: str) -> bool:
        return wanted in (self._found if wanted in self._texts else self.text)


def contains(text: Words, wanted: tuple[Text, ...]) -> bool:
    """Whether one of the texts is there; of a tuple, all in one line."""
    return any(one in text if isinstance(one, str) else _in_one_line(text, one) for one in wanted)


def _in_one_line(words: Words, parts: tuple[str, ...]) -> bool:
    if not all(part in words for part in parts):
        return False
    text, (rarest, *others) = words.text, parts
    at = text.find(rarest)
    while at >= 0:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[text.rfind("\n", 0, at) + 1 : end]
        if all(part in line for part in others):
            return True
        at = text.find(rarest, end)
    return False
