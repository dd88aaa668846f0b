"""The agent for a busy machine: an hour for what takes milliseconds, and a standby server that is no slower than the workers."""

import sys

from elastic_ext.agent.__main__ import main
from elastic_ext.hangs import stacks
from elastic_ext.workers.standby import client, pool

client.PARK_S = client.RELEASE_S = pool.AWAIT_S = stacks.WAIT_S = 3600.0
client.NICE = 0

if __name__ == "__main__":
    sys.exit(main())
