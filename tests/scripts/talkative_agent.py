"""The agent that tells and keeps every second what an agent does every 15 and 30 s: a test sees in seconds what takes minutes."""

import sys

from elastic_ext.agent import observation
from elastic_ext.agent.__main__ import main

observation.POINT_S = observation.REPORT_S = 1.0

if __name__ == "__main__":
    sys.exit(main())
