"""Input for judging a failure: the rules, from settings; other nodes' records; the ledger of a job without etcd."""

from __future__ import annotations

import json
import logging
import random
import time
from dataclasses import replace
from pathlib import Path

from elastic_ext.base import user_files
from elastic_ext.base.errors import UsageError
from elastic_ext.base.files import write_whole
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.judgement import Circumstances, Lost
from elastic_ext.failures.ledger import Ledger, Report, decode_ledger, decode_report, encode_ledger
from elastic_ext.failures.policy import Backoff

logger = logging.getLogger(__name__)

LEDGER_BYTES = 16 << 20


def circumstances(
    settings: Settings,
    max_restarts: int,
    *,
    nodes: int | None = None,
    min_nodes: int | None = None,
    lost: tuple[Lost, ...] = (),
) -> Circumstances:
    """Return the current circumstances of a judgement."""
    return Circumstances(
        max_restarts,
        settings.exit_codes,
        at=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        kind_limits=dict(settings.kind_limits or ()),
        backoff=Backoff(settings.backoff, settings.backoff_max),
        jitter=random.random(),
        nodes=nodes,
        min_nodes=min_nodes,
        lost=lost,
    )


def report_of(text: str, order: int) -> Report:
    """Decode a node's report. An unreadable one is an unknown failure: the job must not wait forever for a verdict."""
    try:
        return decode_report(text, order)
    except RecordError as error:
        logger.warning("a node's failure report cannot be read, so the failure counts as unknown: %s", printable(str(error)))
        return Report("", replace(classify(Evidence(rank=-1)), order=order))


def ledger_of(text: str) -> Ledger:
    """Decode a job's ledger; return a new one if it is missing or unreadable."""
    try:
        return decode_ledger(text) if text else Ledger()
    except RecordError as error:
        logger.warning("the job's ledger cannot be read; starting a new one: %s", printable(str(error)))
        return Ledger()


def check_ledger_path(path: str) -> None:
    """Raise UsageError if `ledger_file` names something other than a file, which writing would replace."""
    if Path(path).exists() and not Path(path).is_file():
        raise UsageError(
            f"ledger_file={printable(path)}: expected a regular file or a new path; this is a directory, a pipe or a device"
        )


class LedgerFile:
    """A job's ledger on the local disk, or in memory if no path is given.

    Invariant: at any instant the file holds the whole old ledger or the whole new one.

    Attributes:
        ledger: a new one, if the file held that of a job that ended for good.
        job_ended: whether it did. Somebody has looked at that job then, and what else it left counts no more, either.
    """

    def __init__(self, path: str | None, run_id: str) -> None:
        """Raise UsageError if the path names something other than a file."""
        self._path = Path(path) if path else None
        self._run_id = run_id
        if path:
            check_ledger_path(path)
        found = self._read()
        self.job_ended = bool(found.verdicts) and not found.verdicts[-1].keeps_ledger
        self.ledger = Ledger() if self.job_ended else found

    def _read(self) -> Ledger:
        """Read the ledger. Ignore one of another run."""
        if self._path is None or not self._path.exists():
            return Ledger()
        if not self._path.is_file():  # reading a pipe would never end
            logger.warning("ledger_file %s cannot be used: it is not a regular file", self._path)
            return Ledger()
        try:
            record = json.loads(user_files.read_text(str(self._path), LEDGER_BYTES))
            return decode_ledger(record["ledger"]) if record["run_id"] == self._run_id else Ledger()
        except (OSError, ValueError, RecursionError, KeyError, TypeError, RecordError) as error:
            logger.warning("ledger_file %s cannot be used; starting a new ledger: %s", self._path, printable(str(error)))
            return Ledger()

    def write(self, ledger: Ledger) -> None:
        """Replace the ledger. If the file cannot be written, log that and keep the ledger in memory."""
        self.ledger = ledger
        if self._path is None:
            return
        try:
            write_whole(self._path, json.dumps({"run_id": self._run_id, "ledger": encode_ledger(ledger)}))
        except (OSError, ValueError) as error:  # ValueError: not a valid file name
            logger.warning(
                "ledger_file %s cannot be written; the restart budget will not outlive this agent: %s", self._path, error
            )

    def forget(self) -> None:
        """Delete the file: the job has ended well. Whoever asks this agent still hears of its failures."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
