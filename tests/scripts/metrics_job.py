"""For the tests of a script's own metrics: each worker counts, and so do children that it forks; then it waits.

metrics_job.py LOADER     LOADER: fork, children of os.fork; torch, a DataLoader with processes
"""

import os
import signal
import sys

from elastic_ext import metrics

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
warm = "torch" in sys.modules
steps = metrics.counter("job_steps_total", "Steps.")
items = metrics.counter("job_items_total", "Items that children made.", labels=("split",))
loss = metrics.gauge("job_loss", "Loss of the last step.")
took = metrics.histogram("job_step_seconds", "Time of a step.", buckets=(0.1, 1))


class Items:
    """Eight of them, in the sense of a DataLoader."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        items.labels("train").inc()
        return index


def forked():
    for index in range(8):
        if not (pid := os.fork()):
            Items()[index]
            os._exit(0)
        os.waitpid(pid, 0)
        yield index


def loaded():
    from torch.utils.data import DataLoader

    yield from DataLoader(Items(), batch_size=None, num_workers=2, multiprocessing_context="fork")


for _ in {"fork": forked, "torch": loaded}[sys.argv[1]]():
    steps.inc()
    took.observe(0.5)
loss.set(attempt + rank / 10)
sys.stdout.write(f"counted {attempt} {rank} {os.getpid()} {warm}\n")
sys.stdout.flush()
signal.pause()
