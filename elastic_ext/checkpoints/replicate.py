"""Old name of `elastic_ext.checkpoints.copying.replicate` for `python -m`, kept for one release."""

import sys
import warnings

from elastic_ext.checkpoints.copying.replicate import main

__all__ = ["main"]

_MOVED = "elastic_ext.checkpoints.replicate is now elastic_ext.checkpoints.copying.replicate; the old name goes with release 0.2"

if __name__ == "__main__":
    warnings.warn(_MOVED, DeprecationWarning, stacklevel=1)
    sys.exit(main())
