"""Where workers were when they had to be killed, for the log and for the verdict."""

from __future__ import annotations

import logging

from elastic_ext.agent.companion import LocalWorkers
from elastic_ext.base.printable import Block
from elastic_ext.hangs import detector, process_stats, stacks

logger = logging.getLogger(__name__)

SHOWN_STACKS = 4000  # characters in the log; the rest is in stacks.txt beside the error file, where logs are kept
STACKS_KEPT = 1000  # characters for the verdict
KILLED_WAIT_S = 2.0  # for the stacks of all workers that are killed; a busy host needs more than `stacks.WAIT_S`


def show_stragglers(workers: LocalWorkers, local_ranks: list[int], grace_s: float) -> list[str]:
    """Log which workers did not end in time and where they were: only now can the reason be found.

    Returns one text for the verdict for each worker. One that was already ending got no SIGTERM, and comes last.
    """
    rows = {each: workers.progress.read(each) for each in local_ranks} if workers.progress is not None else {}
    pids = {each: workers.processes.pids[each] for each in local_ranks}
    stats = process_stats.read(pids.values())
    dumps = [each for each, row in rows.items() if pids[each] in stats and stacks.can_dump(row, stats[pids[each]])]
    found = stacks.dump_all({pids[each]: workers.stacks_files[each] for each in dumps}, KILLED_WAIT_S)
    ending = {each: row.ends_with for each, row in rows.items() if row.ends_with}
    texts = []
    for each in sorted(local_ranks, key=lambda one: one in ending):
        stack = found.get(pids[each], "")
        did_not = f"was to end with exit code {ending[each]}, but did not" if each in ending else "did not end on SIGTERM"
        position = f"; it was at:\n{detector.main_thread_first(stack, STACKS_KEPT)}" if stack else ""
        texts.append(f"rank {workers.ranks[each]} {did_not}{position}")
        logger.warning(
            "worker %s (pid %s) %s within %.2g s, and is killed%s", each, pids[each], did_not, grace_s, shown_stack(stack)
        )
    return texts


def shown_stack(stack: str) -> Block:
    """Return the end of a line of the log: the first of these stacks, the main thread's before others."""
    return Block(f"; it was at:\n{detector.main_thread_first(stack, SHOWN_STACKS)}" if stack else "")
