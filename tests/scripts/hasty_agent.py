"""The agent for tests of what takes minutes: it gives up copies after seconds, and has a straggler leave after one."""

import sys

from elastic_ext.agent import lateness
from elastic_ext.agent.__main__ import main
from elastic_ext.checkpoints.copying import copier

copier.STALL_S = 2.0
lateness.REPLACE_AFTER_S = 1.0

if __name__ == "__main__":
    sys.exit(main())
