"""The time at which a run began at `resume_from`. Checkpoints written after it are the run's own progress.

Without this record, each restart would throw away that progress. The record is a file in the directory of checkpoints,
`.elastic_ext/resume_from/RUN.json`, with one field: {"resume_from": the setting, without credentials}. Its modification time, by
the clock of the storage, is when the run began. If the user changes the setting, the run begins again.
"""

from __future__ import annotations

import json
import logging

from elastic_ext.base.printable import redacted
from elastic_ext.checkpoints.directory import MARKERS
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

FOLDER = f"{MARKERS}/resume_from"


def run_began_at(storage: Storage, run_id: str, resume_from: str) -> float:
    """Return when this run began at `resume_from`. If it has not begun yet, it begins now.

    The time is in seconds since the epoch by the clock of the storage; infinity if the storage keeps no times. Raises OSError.
    """
    name = f"{FOLDER}/{_file_name(run_id)}.json"
    record = {"resume_from": redacted(resume_from)}
    try:
        same = json.loads(redacted(storage.read(name).decode())) == record  # older versions wrote it unredacted
    except (FileNotFoundError, ValueError):
        same = False
    if not same:
        storage.put(name, json.dumps(record).encode())
    found = storage.stat(name)
    if found is None or found.mtime is None:
        logger.warning("%s keeps no file times: every restart of this run resumes from %s", storage.address, resume_from)
        return float("inf")
    return found.mtime


def _file_name(run_id: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else f"%{ord(letter):x}" for letter in run_id)
