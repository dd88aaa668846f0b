"""The agent with points of goodput a second apart, if the page asks: a test sees in seconds what takes minutes."""

import sys

from elastic_ext.agent import own_node
from elastic_ext.agent.__main__ import main

own_node.POINT_S = 1.0

if __name__ == "__main__":
    sys.exit(main())
