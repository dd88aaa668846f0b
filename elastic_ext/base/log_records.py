"""Makes each log record of this package fit to be shown before any handler that shows it gets it.

What others wrote (names of files and nodes, reasons, messages of exceptions) is in the arguments of the records. It may hold
escape sequences of a terminal, line ends that forge further records, credentials in a URL.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Mapping
from typing import Any

from elastic_ext.base.printable import Block, shown, shown_block

ROOT = "elastic_ext"


def install() -> None:
    """For all loggers of this package, in this process; once is enough."""
    logger = logging.getLogger(ROOT)
    if not any(isinstance(handler, _MakesFit) for handler in logger.handlers):
        logger.handlers.insert(0, _MakesFit())


class _MakesFit(logging.Handler):
    """Stands before the handlers that show: logging asks those of a logger first, and those of its parents afterwards."""

    def emit(self, record: logging.LogRecord) -> None:
        make_fit(record)
        # Nobody has configured logging: logging would ask its handler of last resort, were it not for this one.
        if _has_no_other(record.name) and logging.lastResort and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)


def _has_no_other(name: str) -> bool:
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, _MakesFit) for handler in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True


def make_fit(record: logging.LogRecord) -> None:
    """In place. The message's own text is ours, but may hold names where it was put together before."""
    record.msg = shown_block(record.msg if isinstance(record.msg, str) else str(record.msg))
    if isinstance(record.args, Mapping):
        record.args = {name: _fit(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_fit, record.args))
    if record.exc_info and not record.exc_text:
        record.exc_text = shown_block(logging.Formatter().formatException(record.exc_info))


def _fit(value: Any) -> Any:
    if isinstance(value, str):
        return shown_block(value) if isinstance(value, Block) else shown(value)
    return value if value is None or isinstance(value, numbers.Number) else _Shown(value)


class _Shown:
    """Stands for another object in a message."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return shown(str(self._value))

    def __repr__(self) -> str:
        return shown(repr(self._value))
