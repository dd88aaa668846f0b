"""elastic_ext: a plug-in for stock torchrun that decides what a failure means before it restarts anything.

Importing this package imports no torch: the entry point is loaded by every torchrun on the machine, selected or not.
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "resume_from": "elastic_ext.training.saves",
    "resume_step": "elastic_ext.training.saves",
    "save_requested": "elastic_ext.training.saves",
    "report_saved": "elastic_ext.training.saves",
    "report_save_failed": "elastic_ext.training.saves",
    "Checkpointer": "elastic_ext.checkpoints.writing.checkpointer",
    "report_progress": "elastic_ext.training.saves",
    "phase": "elastic_ext.training.saves",
    "health_barrier": "elastic_ext.training.barrier",
}


def __getattr__(name: str) -> object:
    """What training scripts use, imported when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'elastic_ext' has no attribute {name!r}")
    from elastic_ext.base import log_records  # here: the bootstrap of workers imports nothing beside itself

    log_records.install()
    return getattr(importlib.import_module(_LAZY[name]), name)
