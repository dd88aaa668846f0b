"""The errors of this package. A message is one line: what was seen, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from elastic_ext.base import log_records, printable

# Exit codes of the agent, from sysexits.h if possible; `failures.policy` says when it leaves with which.
EX_FAILED = 1  # the budget is spent, or the cause is unknown
EX_CODE = 65  # a bug in the code or the data: do not retry
EX_NODE = 69  # this node is bad: replace it
EX_USER = 130  # the user stopped it
EX_UNAVAILABLE = 69  # sysexits.h: a service is unavailable
EX_TRY_AGAIN = 75  # sysexits.h, EX_TEMPFAIL: another try may help
EX_REFUSED = 77  # sysexits.h, EX_NOPERM: the job does not allow it
EX_CONFIG = 78  # sysexits.h: something was found in an unconfigured or misconfigured state
_PUBLIC = "elastic_ext.errors"  # the public module of some errors, which tracebacks, evidence and the users' rules show


class ElasticExtError(Exception):
    """Base of all errors that this package raises on purpose. Its text is one line, safe for any terminal."""

    __module__ = _PUBLIC

    def __str__(self) -> str:
        return printable.shown(super().__str__())


class UsageError(ElasticExtError):
    """A setting, option or path is wrong. The command exits with 78 before anything starts."""

    __module__ = _PUBLIC


class BadCheckpoints(ElasticExtError):
    """Checkpoints exist, but none is usable. Starting from nothing would lose the work, so the job stops with 65."""


class StorageAway(ElasticExtError):
    """The storage of the checkpoints does not answer. Another try later may go well, so the job stops with 75."""


class UnsupportedTorch(ElasticExtError):
    """This torch lacks a private name that the plug-in needs. The command exits with 78 before anything starts."""


class RoundOver(ElasticExtError):
    """The round ended before all nodes knew their checkpoint. No worker was started; the next round chooses again."""


class RanksMissing(ElasticExtError):
    """Some ranks did not reach a health barrier in time. ranks: the missing ones, if known."""

    __module__ = _PUBLIC

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class NodeUnfit(ElasticExtError):
    """The health check of this node has failed. by_settings: not for its hardware, but for how the job is configured."""

    def __init__(self, message: str, by_settings: bool = False) -> None:
        super().__init__(message)
        self.by_settings = by_settings


class NodeRefused(ElasticExtError):
    """This host had to leave the job and may not come back yet."""


class NodeDrained(NodeRefused):
    """An operator has this node leave the job (`elastic-ext drain`)."""

    def __init__(self, reason: str, refused_s: int, step: int | None) -> None:
        """refused_s: for how long this host may not come back."""
        saved = f" after the checkpoint of step {step}" if step is not None else ""
        super().__init__(f"asked to leave the job{saved}: {reason}; this host may not come back for {refused_s} s")
        self.reason = reason  # of the operator
        self.step = step  # of the checkpoint that was saved before; None: unknown, or none was


def say_end(why: str, code: int) -> None:
    """Print the last line of a command that ends with this exit code, however logging is configured."""
    log_records.say(f"elastic_ext: {why}; exit code {code}")


@contextmanager
def usage_errors_exit() -> Iterator[None]:
    """Turn usage errors into one line on stderr and exit code EX_CONFIG. Use this only where nothing has been started yet."""
    try:
        yield
    except (UsageError, UnsupportedTorch) as error:
        say_end(str(error), EX_CONFIG)
        raise SystemExit(EX_CONFIG) from error
