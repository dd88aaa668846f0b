"""`python -m elastic_ext.cli` is `elastic-ext`, also where the package is not installed."""

import sys

from elastic_ext.cli.main import main

sys.exit(main())
