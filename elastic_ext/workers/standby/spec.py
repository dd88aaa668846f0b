"""The description of the program that an agent's warm standbys are kept for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StandbySpec:
    """The program that standbys are kept ready for.

    Attributes:
        python: the interpreter and its options.
        bootstrap: the file that a cold start runs with the interpreter.
        program: [SCRIPT, ...] or ["-m", MODULE, ...].
        workers: number of workers of this agent.
        preload, exclude: modules that the user names.
        environ: returns the environment of the workers, without the variables that differ between them.
        token: the agent's token, by which the reaper finds what the agent has started.
    """

    python: tuple[str, ...]
    bootstrap: str
    program: tuple[str, ...]
    workers: int
    preload: tuple[str, ...]
    exclude: tuple[str, ...]
    environ: Callable[[], dict[str, str]]
    token: str

    @property
    def folder(self) -> str:
        """Return the folder that the interpreter puts first on sys.path."""
        if self.program[0] == "-m":
            return os.getcwd()
        path = os.path.realpath(self.program[0])
        return path if os.path.isdir(path) else os.path.dirname(path)
