"""The errors of this package: a small family, one line each.

A message says what was seen, what was expected, and what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from elastic_ext.base.printable import shown

EX_CONFIG = 78  # sysexits.h: something was found in an unconfigured or misconfigured state


class ElasticExtError(Exception):
    """Base of everything that this package raises on purpose. Its text is one line that may go to any terminal."""

    def __str__(self) -> str:
        return shown(super().__str__())


class UsageError(ElasticExtError):
    """The user asked for something that cannot be: a setting, an option, a path. The command exits with 78, nothing starts."""


class BadCheckpoints(ElasticExtError):
    """There are checkpoints, and none may be used. Beginning from nothing would lose the work, so the job stops with 65."""


class SeamError(ElasticExtError):
    """This torch does not have the seam that the plug-in stands on. The command exits with 78, nothing is started."""


class RoundOver(ElasticExtError):
    """The round ended before all of its nodes knew what to resume from: no worker was started, the next round chooses again."""


class RanksMissing(ElasticExtError):
    """A health barrier was not passed in time. ranks: that did not come."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class NodeRefused(ElasticExtError):
    """This host was told to leave the job and may not come back yet."""


@contextmanager
def usage_errors_exit() -> Iterator[None]:
    """End the command with one line and EX_CONFIG, as argparse does with 2: nothing has been started yet."""
    try:
        yield
    except (UsageError, SeamError) as error:
        print(shown(f"elastic_ext: {error}"), file=sys.stderr)  # print takes a closed stderr, too
        raise SystemExit(EX_CONFIG) from error
