"""The old name of `elastic_ext.training.huggingface`, kept for one release."""

import warnings

from elastic_ext.training.huggingface import SaveOnDemand

__all__ = ["SaveOnDemand"]

_MOVED = (
    "elastic_ext.integrations.huggingface is now elastic_ext.training.huggingface; the old name will be removed in release 0.2"
)
warnings.warn(_MOVED, DeprecationWarning, stacklevel=2)
