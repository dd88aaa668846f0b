"""When the rounds of a job began and ended, by this agent's clock. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from elastic_ext.observe.families import RUNNING
from elastic_ext.observe.node_report import MAX_ROUNDS, MAX_WHY, RoundSpan


@dataclass(frozen=True)
class _Round:
    """A round. began, ended: monotonic; ended is None while its workers run."""

    round: int
    began: float
    ended: float | None = None
    why: str = ""


class RoundHistory:
    """The last MAX_ROUNDS rounds."""

    def __init__(self) -> None:
        self._rounds: deque[_Round] = deque(maxlen=MAX_ROUNDS)

    def entered(self, state: str, round_: int, now: float, why: str = "") -> None:
        """Note what the agent does from `now` on. state: one of families.STATES. why: the round that ran has ended."""
        last = self._rounds[-1] if self._rounds else None
        runs = last is not None and last.ended is None
        if last is not None and runs and (state != RUNNING or round_ != last.round):
            self._rounds[-1] = replace(last, ended=now, why=why[:MAX_WHY])
            runs = False
        if state == RUNNING and not runs:
            self._rounds.append(_Round(round_, now))

    def explain(self, round_: int, why: str) -> None:
        """Say why a round ended, if nobody has yet."""
        for number, each in enumerate(self._rounds):
            if each.round == round_ and each.ended is not None and not each.why:
                self._rounds[number] = replace(each, why=why[:MAX_WHY])

    def spans(self, now: float) -> tuple[RoundSpan, ...]:
        """Return the rounds, oldest first, with ages at `now`."""
        return tuple(
            RoundSpan(each.round, _age(now, each.began), _age(now, each.ended) if each.ended is not None else None, each.why)
            for each in self._rounds
        )


def _age(now: float, at: float) -> float:
    return round(max(0.0, now - at), 3)
