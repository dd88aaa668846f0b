"""The errors of this package: a small family, one line each.

A message says what was seen, what was expected, and what to do.
"""

from __future__ import annotations

from typing import Any

EX_CONFIG = 78  # sysexits.h: something was found in an unconfigured or misconfigured state


class ElasticExtError(Exception):
    """Base of everything that this package raises on purpose."""


class UsageError(ElasticExtError):
    """The user asked for something that cannot be: a setting, an option, a path. The command exits with 78, nothing starts."""


class SeamError(ElasticExtError):
    """This torch does not have the seam that the plug-in stands on. The command exits with 78, nothing is started."""


class JobStopped(ElasticExtError):
    """The job has ended for all nodes. verdict: a `job.Verdict`, which says why."""

    def __init__(self, verdict: Any) -> None:
        super().__init__(verdict.decision.reason)
        self.verdict = verdict
