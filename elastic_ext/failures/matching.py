"""How a rule of the table is looked for in the evidence. Pure, standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.kinds import Verdict

Text = str | tuple[str, ...]
ASKED, HARDWARE_SAID, PROGRAM_SAID, EXIT_ONLY = 1, 2, 3, 4  # the tiers


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
    verdict: Verdict
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


# Words that many texts of the table share. A log that has none of them is searched some thirty times and not a hundred.
GATES = (
    "error", "memory", "device", "failure", "mismatch", "gradient", " of ", "uncorrectable", "nan", "state_dict", "dataloader",
    "status code", "failed", "file ", "quota", "unexpected", "slow", "invalid", "http", "nvlink", "peer", "shape", " not ",
    "connection", "remote process exited", "loss is", "collective",
)  # fmt: skip

LONG_LINE = 8192  # bytes; of a longer line both ends are searched
MOST_LINES = 2000  # to find equal lines among more of them takes longer than to search them all
_LINE_ENDS = bytes.maketrans(b"\r", b"\n")  # a progress bar is one line of many states


@lru_cache(maxsize=1024)
def _gate(text: str) -> str:
    return next((gate for gate in GATES if gate in text), text)


@lru_cache(maxsize=1024)
def _has_digits(text: str) -> bool:
    return any(character.isdigit() for character in text)


class Words:
    """A text that many others are looked for in. Of lines that differ in numbers only, as those of a training loop do, one is
    searched; and what was looked for once is remembered.
    """

    def __init__(self, text: str) -> None:
        """The texts of the table are ASCII, so another character is none of theirs; bytes are searched faster than wide text."""
        self._written = text
        data = text.encode("ascii", "replace").lower()
        self.text = data.decode("ascii")
        bare = data.translate(_LINE_ENDS, b"0123456789")
        if bare.count(b"\n") <= MOST_LINES:
            lines = bare.split(b"\n")
            if len(bare) > LONG_LINE:
                lines = [
                    line if len(line) <= LONG_LINE else line[: LONG_LINE // 2] + b"\n" + line[-LONG_LINE // 2 :] for line in lines
                ]
            bare = b"\n".join(dict.fromkeys(lines))
        self._lines = bare.decode("ascii")
        self._found: dict[str, bool] = {}

    @cached_property
    def written(self) -> str:
        """All of it, in lower case: a user's pattern may have any letter."""
        return self._written.lower()

    def __contains__(self, wanted: str) -> bool:
        gate = _gate(wanted)
        return self._has(gate) and (gate == wanted or self._has(wanted))

    def _has(self, wanted: str) -> bool:
        found = self._found.get(wanted)
        if found is None:
            found = self._found[wanted] = wanted in (self.text if _has_digits(wanted) else self._lines)
        return found


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
