"""elastic_ext: a plug-in for stock torchrun that decides what a failure means before it restarts anything.

Importing this package does not import torch: every torchrun on the machine loads the entry point, selected or not.
"""

import importlib

TYPE_CHECKING = False  # as typing.TYPE_CHECKING, without importing typing, since helper programs import this package
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.2.0"

_LAZY = {
    "Checkpointer": "elastic_ext.checkpoints.writing.checkpointer",
    "ElasticSampler": "elastic_ext.training",
    "RanksMissing": "elastic_ext.base.errors",
    "accumulation": "elastic_ext.training",
    "health_barrier": "elastic_ext.training",
    "phase": "elastic_ext.training",
    "report": "elastic_ext.training",
    "report_flops": "elastic_ext.training",
    "report_progress": "elastic_ext.training",
    "report_save_failed": "elastic_ext.training",
    "report_saved": "elastic_ext.training",
    "report_tokens": "elastic_ext.training",
    "report_total_steps": "elastic_ext.training",
    "resume_from": "elastic_ext.training",
    "resume_step": "elastic_ext.training",
    "save_dir": "elastic_ext.training",
    "save_requested": "elastic_ext.training",
}
_MODULES = {"errors": "elastic_ext.errors"}  # used without an import of their own


def __getattr__(name: str) -> "Any":
    """Import a name for training scripts on first use. The return type Any makes type checkers accept calls of it."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module 'elastic_ext' has no attribute {name!r}")
    from elastic_ext.base import log_records  # imported here, because the workers' bootstrap imports nothing but itself

    log_records.install()
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
