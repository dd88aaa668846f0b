"""Copies a node's part of each checkpoint from the local tier to the remote directory, in its own process beside the agent.

    elastic_ext.checkpoints.copying.replicate [--mb-s N]      (run by base/isolated.py)

`protocol` describes its input and output; `replicator` does the work. All its state is in the two directories, so a restarted
process resumes the interrupted file. Object stores do not report changes, so it polls with growing pauses.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable

from elastic_ext.base import log_records
from elastic_ext.base.checkpoint_variables import CHECKPOINT_DIR, LOCAL_DIR
from elastic_ext.checkpoints.copying.protocol import FINISH, UNFINISHED, Pulse, Report, encode, made_progress
from elastic_ext.checkpoints.copying.replicator import Replicator
from elastic_ext.checkpoints.copying.throttle import TokenBucket
from elastic_ext.checkpoints.storage import open_storage

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
FINISH_S = 60.0  # time without progress after which it no longer waits for the other nodes' files
NICE = 10  # training comes first


class _Orders:
    """The agent's orders, which a thread reads from standard input. finish: whether the agent has sent that order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._look = self.finish = False

    def read(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self._look = True
                self.finish = self.finish or line.strip() == FINISH
                self._changed.notify()
        if not self.finish:
            os._exit(0)  # the agent is gone: end at once; the next process resumes from the directories

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for an order. Return whether one came."""
        with self._changed:
            ordered = self._changed.wait_for(lambda: self._look, timeout_s)
            self._look = False
            return ordered


def run(replicator: Replicator, orders: _Orders, tell: Callable[[Report], None]) -> int:
    """Take turns until everything is copied after `finish`, or given up. Return the exit code."""
    pause, progress_at, last = FIRST_PAUSE_S, time.monotonic(), Report()
    while True:
        finish = orders.finish  # read before the turn, so that the turn sees what was saved before that order
        report = replicator.turn()
        tell(report)
        if made_progress(report, last) or not finish:
            progress_at = time.monotonic()
        if made_progress(report, last):
            pause = FIRST_PAUSE_S
        last = report
        if finish and not report.waiting and not report.failures:
            return 0
        if finish and time.monotonic() - progress_at > FINISH_S:
            return UNFINISHED
        if orders.wait(pause if report.waiting or report.failures else None):
            pause = FIRST_PAUSE_S
        else:
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _tell(message: Report | Pulse) -> None:
    print(encode(message), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb-s", type=float, default=0.0, help="maximum megabytes to send per second; 0: no limit")
    args = parser.parse_args()
    if absent := [name for name in (LOCAL_DIR, CHECKPOINT_DIR) if not os.environ.get(name)]:
        parser.error(f"{' and '.join(absent)} must be set: the directories to copy from and to")
    log_records.configure("WARNING")
    os.nice(NICE)
    orders = _Orders()
    threading.Thread(target=orders.read, name="orders", daemon=True).start()
    local, remote = (open_storage(os.environ[name]) for name in (LOCAL_DIR, CHECKPOINT_DIR))
    replicator = Replicator(local, remote, TokenBucket(args.mb_s * 1e6), lambda sent: _tell(Pulse(sent)))
    return run(replicator, orders, _tell)


if __name__ == "__main__":
    sys.exit(main())
