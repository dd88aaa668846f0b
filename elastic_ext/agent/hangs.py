"""Hangs of one round: whether the workers of this node stall, where each one is when the whole job hangs, and NCCL's records."""

from __future__ import annotations

import errno
import logging
import os
import select
import tempfile
import time
from collections.abc import Iterable, Mapping

from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.base.diagnosis import Collective, Response
from elastic_ext.base.printable import Block
from elastic_ext.failures.classify import Diagnosis
from elastic_ext.failures.joint_evidence import NOTHING_KNOWN, Reach, Silent, unanswered
from elastic_ext.hangs import detector, process_stats, stacks
from elastic_ext.hangs.watch import HangWatch
from elastic_ext.rendezvous import topics
from elastic_ext.rendezvous.address import own_addresses
from elastic_ext.rendezvous.contract import Rendezvous

logger = logging.getLogger(__name__)

PIPE_FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
WAIT_S = 4.0  # the monitor thread checks once a second
CHECK_S = 0.1
SHOWN_STACKS = 4000  # characters in the log; the rest is in stacks.txt beside the error file, where logs are kept
STACKS_KEPT = 1000  # characters for the verdict
KILLED_WAIT_S = 2.0  # for the stacks of all workers that are killed; a busy host needs more than `stacks.WAIT_S`


class FlightRecorder:
    """Makes torch dump NCCL's flight recorder: the last collectives of each rank of this node.

    Written from torch's headers (ProcessGroupNCCL.hpp, FlightRecorder.hpp of 2.13), and seen to work on a GPU with 2.11. Torch's
    monitor thread creates a named pipe TORCH_NCCL_DEBUG_INFO_PIPE_FILE<rank>.pipe and checks it about once a second. On any byte
    it writes the last TORCH_NCCL_TRACE_BUFFER_SIZE (2000) collectives to TORCH_NCCL_DEBUG_INFO_TEMP_FILE<rank>, which newer
    versions call TORCH_FR_DUMP_TEMP_FILE. That file is a pickle. This class never opens it;
    `python -m torch.distributed.flight_recorder.fr_trace` reads it.

    In torch 2.15 `nccl` is ProcessGroupNCCL2, which has no such thread in 2.15.0, and so no pipe: `dump` asks no process. Later
    sources have one, with the same pipe and file (nccl2/HeartbeatMonitor.cpp, read only). Both write the file without being asked
    when a collective fails or exceeds torch's timeout (FlightRecorderHook::onAbort in 2.15.0).
    """

    def __init__(self, run_dir: str, environ: Mapping[str, str]) -> None:
        """Choose the paths. run_dir: the agent's private directory, for the pipes. environ: the agent's environment.

        People read the dumps after the job, so they do not go to run_dir. They go to a directory that only this user may enter,
        since torch would follow a link planted by another user.
        """
        chosen = next((environ[name] for name in DUMP_FILES if environ.get(name)), None)
        self._own = tempfile.mkdtemp(prefix="elastic_ext_flight_") if chosen is None else None
        self._dumps: str = os.path.join(self._own, "rank_") if self._own is not None else str(chosen)
        self._pipes = environ.get(PIPE_FILE) or os.path.join(run_dir, "flight_")
        wanted = {PIPE_FILE: self._pipes, **dict.fromkeys(DUMP_FILES, self._dumps)}
        # additions to the workers' environment; without those that the user has set
        self.variables = {name: value for name, value in wanted.items() if not environ.get(name)}

    def close(self) -> None:
        """Remove the directory of the dumps if it holds none; else say where it is: torch may have written some unasked."""
        if self._own is not None:
            try:
                os.rmdir(self._own)
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    logger.warning("elastic_ext: NCCL's flight records are in %s", self._own)
                elif error.errno != errno.ENOENT:
                    raise

    def dump(self, ranks: Iterable[int]) -> str:
        """Make these ranks dump their records; return a sentence that says where, "" if none did. Takes WAIT_S at most."""
        begin = time.time()
        asked = [rank for rank in ranks if _ask(f"{self._pipes}{rank}.pipe")]
        deadline = time.monotonic() + WAIT_S
        while not all(_written(f"{self._dumps}{rank}", begin) for rank in asked) and time.monotonic() < deadline:
            select.select([], [], [], CHECK_S)  # another process writes the files: no event reports it
        found = [f"{self._dumps}{rank}" for rank in asked if _written(f"{self._dumps}{rank}", begin)]
        return f"NCCL's flight records are in {', '.join(found)}" if found else ""


def _ask(pipe: str) -> bool:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # that rank has no NCCL process group, or its monitor thread has ended
        return False
    try:
        return os.write(descriptor, b"1\n") > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _written(path: str, since: float) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return found.st_size > 0 and found.st_mtime >= since - 1


class HangHandling(Companion):
    """Claims that all workers of this node stall, and withdraws the claim. The job hangs when all nodes claim a stall."""

    def __init__(self, watch: HangWatch, handler: Rendezvous, recorder: FlightRecorder | None) -> None:
        """recorder: NCCL's flight recorder; None without NCCL."""
        self.hung: Mapping[int, detector.Stuck] = {}  # the workers that the others waited for, by local rank; set by `examine`
        self.reach: Reach | None = None  # the hosts that did not answer them then
        self.collectives: tuple[Collective, ...] = ()  # those in which the workers waited then
        self._watch, self._handler, self._recorder = watch, handler, recorder
        self._waiting = False  # this node claims a stall by the limit of a wait only

    @property
    def stalled(self) -> bool:
        """Whether all workers of this node stall, as of the last check: the job may hang."""
        return self._watch.stalled

    def next_check_s(self) -> float:
        return self._watch.next_check_s()

    def check(self, workers: LocalWorkers) -> None:
        stalled_before, imminent_before = self._watch.stalled, self._watch.imminent
        assessment = self._watch.check(workers.running_pids(), workers.stacks_files)
        if assessment is None:
            return
        if assessment.imminent and not imminent_before:
            progress = workers.read_progress()
            if progress and all(each.asks_for_saves for each in progress):
                logger.info("asking for a checkpoint because the workers may hang: %s", assessment.reason)
                self._handler.part.request_save()
        if assessment.stalled or stalled_before:
            claim = topics.Stalled(len(workers.ranks)) if assessment.stalled else None
            self._handler.part.post(topics.STALLED, claim)
        if (assessment.stalled, assessment.waiting) != (stalled_before, self._waiting):
            # While a rank of another node does its own part, the others wait for it. That is not news for users.
            level = logging.INFO if assessment.waiting or (self._waiting and not assessment.stalled) else logging.WARNING
            logger.log(level, "elastic_ext: %s%s", "" if assessment.stalled else "the workers have resumed: ", assessment.reason)
        self._waiting = assessment.waiting

    def examine(self, workers: LocalWorkers) -> list[str]:
        """Find out and log where each worker is when the whole job hangs; return one text per worker for the verdict."""
        silent = self._watch.silent_hosts(workers.running_pids())
        self.reach = Reach(own_addresses(), tuple(Silent(each.rank, each.address, each.for_s) for each in silent))
        stuck = self._watch.examine(workers.running_pids(), workers.stacks_files)
        self.collectives = tuple(each.collective for each in stuck.values() if each.collective is not None)
        culprits = detector.culprits(list(stuck.values()))
        self.hung = {local_rank: each for local_rank, each in stuck.items() if each in culprits}
        records = self._recorder.dump(each.rank for each in stuck.values()) if self._recorder is not None else ""
        texts = []
        for each in sorted(stuck.values(), key=lambda one: one.blame):
            logger.warning("elastic_ext: %s%s", each.reason, _shown(each.stack))
            texts.append(f"{each.reason}\n{detector.main_thread_first(each.stack, STACKS_KEPT)}".rstrip())
        texts += [each.text for each in silent]
        if records:
            logger.warning("elastic_ext: %s", records)
            texts.append(records)
        return texts


def reach_by(diagnosis: Diagnosis) -> Reach:
    """Return which peers no longer acknowledged what a worker sent, by NCCL's words, if another worker's failure ended it."""
    if diagnosis.response is not Response.FOLLOW:
        return NOTHING_KNOWN
    raised = diagnosis.evidence.exception
    texts = (raised.message if raised is not None else "", diagnosis.evidence.stderr_tail)
    return Reach(own_addresses(), unanswered(texts, diagnosis.evidence.rank))


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
        logger.warning("worker %s (pid %s) %s within %.2g s, and is killed%s", each, pids[each], did_not, grace_s, _shown(stack))
    return texts


def _shown(stack: str) -> Block:
    return Block(f"; it was at:\n{detector.main_thread_first(stack, SHOWN_STACKS)}" if stack else "")
