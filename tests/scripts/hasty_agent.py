"""The agent for tests of what takes minutes: it gives up copies after seconds, and has a straggler leave after one."""

import sys

from elastic_ext.agent.__main__ import main
from elastic_ext.checkpoints.copying import copier
from elastic_ext.features.stragglers import watch

copier.STALL_S = 2.0
watch.REPLACE_AFTER_S = 1.0

if __name__ == "__main__":
    sys.exit(main())
