"""What the agent does now, and a signal when that changes."""

from __future__ import annotations

from collections.abc import Callable


class AgentState:
    """The state of one agent, one of families.STATES.

    Attributes:
        name: of the state.
        since: when it began, monotonic.
        on_change: called with name and time of each new state, by the agent's loop: it must return at once.
    """

    def __init__(self) -> None:
        self.name = ""
        self.since = 0.0
        self.on_change: Callable[[str, float], None] = lambda name, at: None

    def enter(self, name: str, now: float) -> None:
        """Enter a state at `now`; entering it again changes nothing."""
        if name != self.name:
            self.name, self.since = name, now
            self.on_change(name, now)
