"""What an observer of the client hears."""

from __future__ import annotations

from typing import Protocol


class CallObserver(Protocol):
    """Hears how etcd answers. The calling thread waits for it, so it must be quick; it must not raise."""

    def called(self, seconds: float, answered: bool, endpoint: str, /) -> None:
        """Note an attempt of a call, which took `seconds` with all that it needed first (a token, a look whether a member lives).

        answered: the member has served it, if only by a refusal; else there was no answer, or none that helps. endpoint: the
        member's address.
        """

    def reconnected(self) -> None:
        """Note that the stream of all watches was opened again: its connection was lost."""


class NoObserver:
    """Hears nothing."""

    def called(self, seconds: float, answered: bool, endpoint: str, /) -> None:
        pass

    def reconnected(self) -> None:
        pass
