"""`python -m elastic_ext.cli`: the same as `elastic-ext`, even if the package is not installed."""

import sys

from elastic_ext.cli.main import main

sys.exit(main())
