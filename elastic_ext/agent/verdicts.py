"""The way from a verdict to the end of this agent: exit code, verdict file, and the result for torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException

from elastic_ext.agent import exits, node_commands, report
from elastic_ext.base import kinds
from elastic_ext.base.errors import BadCheckpoints, NodeDrained, NodeUnfit, StorageAway
from elastic_ext.base.kinds import Kind, Response
from elastic_ext.base.printable import cut, printable
from elastic_ext.base.settings import Settings
from elastic_ext.base.torch_private import received
from elastic_ext.failures import ledger, policy
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.host import HostProbe
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.matching import STOP_REQUESTED
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.rendezvous.contract import Rendezvous

logger = logging.getLogger(__name__)

PLATFORM_S = 2.0  # time for the platform to say why the agent was told to stop


class Verdicts:
    """Makes the verdicts that no worker's failure causes, and ends this agent for any verdict.

    Invariants: a verdict is published where schedulers look before the agent leaves; the result is FAILED.
    """

    def __init__(self, settings: Settings, handler: Rendezvous) -> None:
        self._settings, self._handler = settings, handler

    # Verdicts of this node alone.

    def of_checkpoints(self, error: BadCheckpoints | StorageAway) -> JobVerdict:
        """Return a stop: all checkpoints are bad, or unknown as their storage is away. From nothing, the work would be lost."""
        bad = isinstance(error, BadCheckpoints)
        code, rule = (policy.EX_CODE, "no-checkpoint-left") if bad else (policy.EX_TRY_AGAIN, "storage-away")
        return self._node_stop(kinds.STORAGE, str(error), code, rule)

    def of_this_host(self, error: NodeUnfit | OSError) -> JobVerdict:
        """Return a stop because this host is ill, or lacks descriptors, processes, memory or room. Another host may be better."""
        if isinstance(error, NodeUnfit):
            return self._node_stop(kinds.HARDWARE, str(error), policy.EX_NODE, "node-check")
        reason = f"this host lacks what the next round needs: {error}"
        return self._node_stop(kinds.UNKNOWN, reason, policy.EX_TRY_AGAIN, "host-exhausted")

    def kernel_sleep(self) -> JobVerdict:
        """Return a stop because a worker has slept in the kernel for too long."""
        reason = "a worker slept in the kernel for longer than the limit; this host may need a reboot"
        return self._node_stop(kinds.HARDWARE, reason, policy.EX_NODE, "kernel-sleep")

    def of_agent(self, error: BaseException) -> JobVerdict:
        """Return a stop because this agent has failed. The others get its exit code: nobody else knows why the job ended."""
        code = error.code if isinstance(error, SystemExit) else None
        cause = error.__cause__ or error
        reason = cut(f"the agent on {self._handler.host} failed: {type(cause).__name__}: {cause}", ledger.MAX_TEXT)
        return self._node_stop(kinds.UNKNOWN, reason, policy.EX_CONFIG if code == policy.EX_CONFIG else policy.EX_FAILED, "agent")

    def _node_stop(self, kind: Kind, reason: str, code: int, rule: str) -> JobVerdict:
        """Return a stop of this node alone. code: the exit code of the preset "design"."""
        return self._job_verdict(Decision(Action.STOP, kind, reason, policy.exit_code_for(code, self._settings.exit_codes), rule))

    def _job_verdict(self, decision: Decision) -> JobVerdict:
        return JobVerdict(decision, self._handler.round, self._handler.node_id, self._handler.host)

    # The end of this agent.

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave the other nodes the verdict of an error that ends this agent, in case it closes the job."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self._handler.closing = self.of_agent(error)
            raise

    def stop(self, verdict: JobVerdict, decision: Decision, failures: Mapping[int, ProcessFailure]) -> RunResult:
        """Publish the verdict and return the result of the agent.

        Args:
            verdict: the verdict of the job.
            decision: the decision for this node.
            failures: torch's record of the failures, by global rank.
        """
        return RunResult(WorkerState.FAILED, failures=exits.FailuresWithCode(failures, self._publish(verdict, decision)))

    def stop_not_copied(self, left: tuple[str, ...]) -> RunResult:
        """Stop although training is done: these checkpoints are on this node only. A new agent on this node would copy them."""
        reason = f"training is done, but {', '.join(left)} could not be copied to checkpoint_dir and is on this node only"
        verdict = self._node_stop(kinds.STORAGE, reason, policy.EX_TRY_AGAIN, "not-copied")
        logger.error("elastic_ext: %s; exit code %s", printable(reason), verdict.decision.exit_code)
        return self.stop(verdict, verdict.decision, report.remote_failure(verdict))

    def publish_leaving(self, error: SignalException | NodeDrained, host: HostProbe) -> None:
        """Publish the verdict of what has this agent leave a job that goes on."""
        if isinstance(error, NodeDrained):
            self._publish_drain(error)
        else:
            self._publish_signal(error, host)

    def _publish_signal(self, error: SignalException, host: HostProbe) -> None:
        """Publish the verdict of a signal that ends this agent. The platform says who sent it, which decides the exit code."""
        if exits.verdict_code() is not None:
            return  # the job has already ended
        host.start_asking()
        platform = host.evidence(PLATFORM_S).platform
        diagnosis = classify(Evidence(rank=-1, agent_signal=received(error).name, node=self._handler.host, platform=platform))
        if diagnosis.tier == STOP_REQUESTED:
            decision = policy.decide(diagnosis, exit_codes=self._settings.exit_codes)
            self._publish(self._job_verdict(decision), decision)

    def _publish_drain(self, error: NodeDrained) -> None:
        """Publish that an operator has told this node to leave, and log it: its one line in place of a traceback."""
        verdict = self._node_stop(kinds.PREEMPTION, str(error), policy.EX_NODE, "drained")
        code = self._publish(verdict, verdict.decision)
        logger.warning("elastic_ext: %s; exit code %s", error, code)

    def _publish(self, verdict: JobVerdict, decision: Decision) -> int:
        """Write the verdict where schedulers look; return the exit code."""
        code = decision.exit_code or policy.EX_FAILED  # never 0: the job has not finished
        self._handler.closing = for_others(verdict, self._settings.exit_codes)
        exits.set_verdict_code(code)
        exits.publish(json.loads(ledger.encode_verdict(verdict)), self._settings.verdict_file)
        if verdict.node == self._handler.node_id and decision.kind == kinds.HARDWARE:
            node_commands.tell_of_bad_node(self._settings, self._handler.host, decision.reason)
        return code


def for_others(verdict: JobVerdict, preset: str) -> JobVerdict:
    """Return what the other nodes do if this one closes the job for its own verdict. preset: a key of policy.EXIT_CODES.

    Where only the host of this node is to be replaced, they are to be started again. Then the job's ledger is kept.
    """
    again = policy.exit_code_for(policy.EX_TRY_AGAIN, preset)
    ill = policy.exit_code_for(policy.EX_NODE, preset)
    if verdict.decision.response is not None or verdict.decision.exit_code not in (again, ill):
        return verdict
    return replace(verdict, decision=replace(verdict.decision, exit_code=again, response=Response.REQUEUE))
