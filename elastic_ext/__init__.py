"""elastic_ext: a plug-in for stock torchrun that decides what a failure means before it restarts anything.

Importing this package does not import torch: every torchrun on the machine loads the entry point, selected or not.
"""

import importlib

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from elastic_ext.base.errors import RanksMissing as RanksMissing
    from elastic_ext.checkpoints.writing.checkpointer import Checkpointer as Checkpointer
    from elastic_ext.training import (
        health_barrier as health_barrier,
    )
    from elastic_ext.training import (
        phase as phase,
    )
    from elastic_ext.training import (
        report_progress as report_progress,
    )
    from elastic_ext.training import (
        report_save_failed as report_save_failed,
    )
    from elastic_ext.training import (
        report_saved as report_saved,
    )
    from elastic_ext.training import (
        resume_from as resume_from,
    )
    from elastic_ext.training import (
        resume_step as resume_step,
    )
    from elastic_ext.training import (
        save_requested as save_requested,
    )

__version__ = "0.1.0"

_LAZY = {
    "Checkpointer": "elastic_ext.checkpoints.writing.checkpointer",
    "RanksMissing": "elastic_ext.base.errors",
    "health_barrier": "elastic_ext.training",
    "phase": "elastic_ext.training",
    "report_progress": "elastic_ext.training",
    "report_save_failed": "elastic_ext.training",
    "report_saved": "elastic_ext.training",
    "resume_from": "elastic_ext.training",
    "resume_step": "elastic_ext.training",
    "save_requested": "elastic_ext.training",
}


def __getattr__(name: str) -> object:
    """Import a name that training scripts use when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'elastic_ext' has no attribute {name!r}")
    from elastic_ext.base import log_records  # here: the bootstrap of workers imports nothing but itself

    log_records.install()
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
