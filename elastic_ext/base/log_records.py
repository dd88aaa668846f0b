"""The lines of this package's log: what they look like where logging is not configured, and that they are safe to show.

    TIME NODE LEVEL message        (the output of several nodes often goes to one file)

The arguments of records (names of files and nodes, reasons, exception messages) come from outside. They may hold terminal escape
sequences, line breaks that forge records, or credentials in a URL.
"""

from __future__ import annotations

import logging
import numbers
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from elastic_ext.base.printable import Block, shown, shown_block

ROOT = "elastic_ext"
NODE_NAME = "ELASTIC_EXT_NODE_NAME"  # the setting; the agent also sets it for what it starts
_WORKER = "ELASTIC_EXT_WORKER"  # which the agent sets for its workers
MARK = "elastic_ext: "
"""In each line that this package logs on a worker's stderr: it begins the message, in any format that the script has configured.
Also in the lines of `workers.bootstrap`. Such lines are no evidence about the script."""

_node = ""


def install(plain: bool = False) -> None:
    """Clean the records of all loggers of this package in this process; further calls do nothing. In a worker, also mark them.

    plain: for a user at a terminal: where logging is not configured, a line is the message alone.
    """
    logger = logging.getLogger(ROOT)
    if not any(isinstance(handler, _Cleaner) for handler in logger.handlers):
        logger.handlers.insert(0, _Cleaner(plain))


def set_node(name: str) -> None:
    """Set the name of this node in all lines of this process."""
    global _node
    _node = name


def node() -> str:
    """Return the name of this node; where none is set, what the agent has given to this process, else the host's name."""
    return _node or shown(os.environ.get(NODE_NAME) or platform.node())


def configure(level: str) -> None:
    """Show the records of all libraries from this level up as lines on stderr, unless logging is configured already."""
    install()
    logging.basicConfig(handlers=[_Lines()], level=level)


def say(text: str, level: int = logging.ERROR) -> None:
    """Print a line on stderr, however logging is configured: for what a command says as it ends."""
    record = logging.LogRecord(ROOT, level, "", 0, shown(text), None, None)
    print(LineFormatter().format(record), file=sys.stderr)  # print() works even if stderr is closed


class LineFormatter(logging.Formatter):
    """The one format of our lines. Those of other libraries also name their logger.

    Each line of a block begins like its first one: the output of several nodes may be mixed in one file.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        origin = "" if record.name.partition(".")[0] == ROOT else f"{record.name}: "
        return f"{_beginning(record)}{origin}{record.message}"

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", f"\n{_beginning(record)}")


def _beginning(record: logging.LogRecord) -> str:
    return f"{record.asctime} {node()} {record.levelname} "


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines to stderr, and leaves it to the caller to handle a signal that comes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())

    def handleError(self, record: logging.LogRecord) -> None:
        if hasattr(sys.exc_info()[1], "sigval"):  # torch's SignalException
            raise
        super().handleError(record)


class _Cleaner(logging.Handler):
    """Cleans each record before other handlers show it: logging calls the handlers of a logger before those of its parents."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self._plain, self._lines = plain, _Lines()

    def emit(self, record: logging.LogRecord) -> None:
        clean(record)
        if _WORKER in os.environ:  # read only now: on import, a warm standby does not know yet which worker it will be
            mark(record)
        # If logging is not configured, this handler would keep logging from using its handler of last resort.
        last = logging.lastResort
        if last and record.levelno >= last.level and _has_no_other(record.name):
            if last.formatter is None and not self._plain:
                last, self._lines.stream = self._lines, sys.stderr  # as it is now: a script may replace it
            last.handle(record)


def _has_no_other(name: str) -> bool:
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, _Cleaner) for handler in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True


def clean(record: logging.LogRecord) -> None:
    """Clean a record in place. Its message is ours, but may contain names from outside."""
    record.msg = shown_block(record.msg if isinstance(record.msg, str) else str(record.msg))
    if isinstance(record.args, Mapping):
        record.args = {name: _cleaned(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_cleaned, record.args))
    if record.exc_info and not record.exc_text:
        record.exc_text = shown_block(logging.Formatter().formatException(record.exc_info))


def mark(record: logging.LogRecord) -> None:
    """Mark each line of a clean record in place, once. Only the message, a `Block` in it and the traceback have more than one."""
    if str(record.msg).startswith(MARK):
        return
    record.msg = MARK + _marked(record.msg)
    if isinstance(record.args, Mapping):
        record.args = {name: _marked(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_marked, record.args))
    if record.exc_text:
        record.exc_text = MARK + _marked(record.exc_text)


def _marked(value: Any) -> Any:
    return value.replace("\n", f"\n{MARK}") if isinstance(value, str) else value


def _cleaned(value: object) -> object:
    if isinstance(value, str):
        return shown_block(value) if isinstance(value, Block) else shown(value)
    return value if value is None or isinstance(value, numbers.Number) else _Shown(value)


class _Shown:
    """A stand-in for any other object in a message."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return shown(str(self._value))

    def __repr__(self) -> str:
        return shown(repr(self._value))
