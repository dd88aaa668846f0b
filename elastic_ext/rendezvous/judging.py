"""What a judgement needs from this agent, and the ledger of a job that has no etcd."""

from __future__ import annotations

import json
import logging
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_ext.base import user_files
from elastic_ext.base.errors import UsageError
from elastic_ext.base.files import write_whole
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings
from elastic_ext.failures import judgement
from elastic_ext.failures import ledger as job
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.policy import Backoff

logger = logging.getLogger(__name__)

LEDGER_BYTES = 16 << 20


def rules(settings: Settings, max_restarts: int, **more: Any) -> judgement.Circumstances:
    """more: the other fields of judgement.Circumstances."""
    return judgement.Circumstances(
        max_restarts,
        settings.exit_codes,
        at=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        kind_limits=dict(settings.kind_limits or ()),
        backoff=Backoff(settings.backoff, settings.backoff_max),
        jitter=random.random(),
        **more,
    )


def report_of(text: str, order: int) -> job.Report:
    """A node's report; of one that cannot be read, that something failed. A job must not wait for ever for a verdict on it."""
    try:
        return job.decode_report(text, order)
    except RecordError as error:
        logger.warning("a node's report of its failure cannot be read, so the failure is unknown: %s", printable(str(error)))
        return job.Report("", replace(classify(Evidence(rank=-1)), order=order))


def ledger_of(text: str) -> job.Ledger:
    """A job's ledger; a new one where there is none, or none that can be read."""
    try:
        return job.decode_ledger(text) if text else job.Ledger()
    except RecordError as error:
        logger.warning("the job's ledger cannot be read and is begun anew: %s", printable(str(error)))
        return job.Ledger()


class LedgerFile:
    """A job's ledger on the local disk; without a path it lives as long as the agent.

    Invariant: the file is whole at any instant, the old one or the new one.
    """

    def __init__(self, path: str | None, run_id: str) -> None:
        """Raises UsageError: the path is of something else than a file."""
        self._path = Path(path) if path else None
        self._run_id = run_id
        if self._path is not None and self._path.exists() and not self._path.is_file():  # writing would put a file in its place
            raise UsageError(f"ledger_file={path}: expected a file, or none yet; this is a directory, a pipe or a device")
        self.ledger = self._read()

    def _read(self) -> job.Ledger:
        """Another run's ledger is none of ours, and neither is one of a job that ended for good: somebody has looked at it."""
        if self._path is None or not self._path.exists():
            return job.Ledger()
        if not self._path.is_file():  # reading a pipe would never end
            logger.warning("ledger_file %s cannot be used: it is no file", self._path)
            return job.Ledger()
        try:
            record = json.loads(user_files.text(str(self._path), LEDGER_BYTES))
            ledger = job.decode_ledger(record["ledger"]) if record["run_id"] == self._run_id else job.Ledger()
        except (OSError, ValueError, RecursionError, KeyError, TypeError, RecordError) as error:
            logger.warning("ledger_file %s cannot be used and is begun anew: %s", self._path, printable(str(error)))
            return job.Ledger()
        return job.Ledger() if ledger.verdicts and not ledger.verdicts[-1].keeps_ledger else ledger

    def write(self, ledger: job.Ledger) -> None:
        self.ledger = ledger
        if self._path is None:
            return
        try:
            write_whole(self._path, json.dumps({"run_id": self._run_id, "ledger": job.encode_ledger(ledger)}))
        except (OSError, ValueError) as error:  # ValueError: no name of a file
            logger.warning("ledger_file %s cannot be written; the budget would not outlive this agent: %s", self._path, error)

    def forget(self) -> None:
        """The job has ended well."""
        self.ledger = job.Ledger()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
