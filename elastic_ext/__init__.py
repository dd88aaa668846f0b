"""elastic_ext: a plug-in for stock torchrun that decides what a failure means before it restarts anything.

Importing this package imports no torch: the entry point is loaded by every torchrun on the machine, selected or not.
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "resume_from": "elastic_ext.training",
    "resume_step": "elastic_ext.training",
    "save_requested": "elastic_ext.training",
    "report_saved": "elastic_ext.training",
    "report_save_failed": "elastic_ext.training",
    "Checkpointer": "elastic_ext.checkpoints.checkpointer",
    "report_progress": "elastic_ext.training",
    "phase": "elastic_ext.training",
    "health_barrier": "elastic_ext.barrier",
}


def __getattr__(name: str) -> object:
    """What training scripts use, imported when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'elastic_ext' has no attribute {name!r}")
    from elastic_ext.observe import log_records  # here: the bootstrap of workers imports nothing beside itself

    log_records.install()
    return getattr(importlib.import_module(_LAZY[name]), name)
