"""What is decided after the table: history, nodes, budget, exit codes; and what the history says of progress. Pure."""

import itertools
from dataclasses import replace

import pytest

from elastic_ext.base.diagnosis import Response, Weight
from elastic_ext.failures.classify import classify, root_cause
from elastic_ext.failures.evidence import Evidence, Precedent, RaisedException
from elastic_ext.failures.history import ANSWERS, HISTORY, MAX_FREE_TRIES, Nodes, facts_of, of_a_node, overruled
from elastic_ext.failures.ledger import PastFailure, past_failure, precedents, progress
from elastic_ext.failures.policy import (
    EXIT_CODES,
    MOVED,
    NO_LIMIT,
    NODES_UNKNOWN,
    ONE_MORE_TRY,
    Action,
    Backoff,
    Budget,
    decide,
)
from elastic_ext.failures.rules import ELSEWHERE
from elastic_ext.failures.user_rules import UserRule


def of(type_=None, message="", frames=(), **more):
    exception = RaisedException(type_, message, frames) if type_ else None
    return classify(Evidence(0, **{"first_step_done": True, "node": "n1", "exception": exception, **more}))


def cut_of(*hosts, progress=False, **more):
    return Precedent(hosts == ("n1", "n2"), progress, "n1", cut=hosts, **more)


KEY, SEGV = of("KeyError"), of(signal="SIGSEGV")
CUT = of(hang=True, cuts=(("n1", "n2"),), first_step_done=False)
NETWORK, SILENT = of("ConnectionError"), of(exit_code=1, first_step_done=False)
OWN, OWN_LATER = of("my.Trouble", "x", first_step_done=False), of("my.Trouble", "x")
IN_S3TRANSFER = ("train.py:9 in save", ".../site-packages/s3transfer/upload.py:3 in submit")
NAN, ILLEGAL = of("FloatingPointError"), of("torch.AcceleratorError", "CUDA error: an illegal memory access was encountered")
MAKE = of("subprocess.CalledProcessError", "Command '['make']' returned non-zero exit status 2.", first_step_done=False)
PEERS, PEERS_LATER = (
    root_cause([of("torch.distributed.DistBackendError", "remote process exited", first_step_done=done)])
    for done in (False, True)
)
STALE, STALE_LATER = (of("OSError", "[Errno 116] Stale file handle", first_step_done=done) for done in (False, True))
DAMAGED = of("RuntimeError", "PytorchStreamReader failed reading zip archive", first_step_done=False)
BY_USER = [UserRule("license server", "network", Response.RESTART_FREE, exit_code=9)]
LICENSE = classify(Evidence(0, exit_code=9, first_step_done=True, node="n1"), BY_USER)
OTHER, TRAINED = Precedent(False, False, "n2"), Precedent(False, False, "n2", first_step_done=True)
SAME_HERE, SAME_THERE = Precedent(True, False, "n1", moved=True), Precedent(True, False, "n2", moved=True)
UNMOVED = replace(SAME_HERE, moved=False)


@pytest.mark.parametrize(
    ("diagnosis", "past", "nodes", "decision", "kind", "rule", "exit_code"),
    [
        # 1. a suspected bug that came back
        (KEY, (), None, "confirm", "code", "arguments", None),
        (KEY, (Precedent(False, False, "n2"),), None, "confirm", "code", "arguments", None),
        (KEY, (Precedent(True, True, "n2"),), None, "confirm", "code", "arguments", None),
        (KEY, (SAME_THERE,), None, "stop", "code", "repeated", 65),
        (KEY, (Precedent(True, False, None),), None, "stop", "code", "repeated", 65),
        (KEY, (SAME_HERE,), (1, 1), "stop", "code", "repeated", 65),  # alone: where it was says nothing
        (KEY, (SAME_HERE,), (3, 2), "stop", "code", "repeated", 65),  # a script raises it wherever it runs
        (of("FileNotFoundError"), (SAME_HERE,), (3, 2), "stop", "code", "repeated", 65),
        (of("RuntimeError", "size mismatch"), (SAME_HERE,), (3, 2), "stop", "code", "repeated", 65),
        (MAKE, (), None, "confirm", "code", "arguments", None),
        (MAKE, (SAME_HERE,), (3, 2), "stop", "code", "repeated", 65),
        (ILLEGAL, (SAME_HERE,), (3, 2), "replace_node", "code", "same-node", 69),
        (SEGV, (SAME_THERE,), None, "stop", "code", "repeated", 65),
        (of("MemoryError"), (SAME_THERE,), None, "stop", "host_memory", "repeated", 65),
        (of("torch.OutOfMemoryError"), (SAME_THERE,), None, "stop", "device_memory", "repeated", 65),
        (NAN, (SAME_THERE,), None, "stop", "numeric", "repeated", 65),
        (NAN, (replace(SAME_THERE, same_step=False),), None, "stop", "numeric", "repeated", 1),  # hardware, perhaps
        (SEGV, (replace(SAME_THERE, same_step=False),), None, "stop", "code", "repeated", 65),
        (of("OSError", "No space left on device"), (SAME_THERE,), None, "stop", "storage", "repeated", 65),
        # progress not known: one try more
        (KEY, (Precedent(True, None, "n2"),), None, "confirm", "code", "arguments", None),
        (KEY, (Precedent(True, None, "n2"),) * 2, None, "stop", "code", "repeated", 65),
        (of("KeyError", first_step_done=False), (), None, "stop", "code", "code-at-start", 65),
        (of("KeyError", first_step_done=False), (OTHER,), None, "stop", "code", "code-at-start", 65),
        (of("KeyError", first_step_done=False), (TRAINED,), None, "confirm", "code", "code-at-start", None),
        (of("KeyError", first_step_done=False), (TRAINED, SAME_THERE), None, "stop", "code", "repeated", 65),
        (of("KeyError", first_step_done=False), (TRAINED, SAME_HERE), (5, 4), "stop", "code", "repeated", 65),
        (of("KeyError", first_step_done=False), (TRAINED, SAME_HERE), (3, 2), "stop", "code", "repeated", 65),  # by chance
        (of("KeyError", first_step_done=False), (TRAINED, SAME_HERE), (5, 5), "stop", "code", "repeated", 65),
        (of("NameError"), (TRAINED,), None, "stop", "code", "code-always", 65),
        (of(exit_code=127), (TRAINED,), None, "stop", "code", "usage-exit", 65),
        # a script's own exit code, on all nodes: two of them, and no more, leave for it
        (of(exit_code=14), (SAME_THERE,), (7, 4), "replace_node", "hardware", "hardware-exit", 69),
        (of(exit_code=14), (SAME_THERE, Precedent(True, False, "n3")), (6, 4), "stop", "hardware", "ceiling", 1),
        (of(exit_code=14), (Precedent(True, False, None),) * 2, (6, 4), "stop", "hardware", "ceiling", 1),
        (
            of(exit_code=14),
            (Precedent(True, True, "n2"), Precedent(True, True, "n3")),
            (6, 4),
            "restart",
            "hardware",
            "hardware-exit",
            None,
        ),
        (of(exit_code=14, shared=True), (), (6, 4), "restart", "hardware", "hardware-exit", None),
        (of(exit_code=14, shared=True), (Precedent(True, False, None),) * 2, (6, 4), "stop", "hardware", "ceiling", 1),
        (of(xids=(79,)), (SAME_THERE, Precedent(True, False, "n3")), (6, 4), "replace_node", "hardware", "xid-replace", 69),
        # 2. the ceiling
        (NETWORK, (SAME_THERE,), None, "restart", "network", "network", None),
        (NETWORK, (SAME_THERE,) * 2, None, "stop", "network", "ceiling", 75),
        (NETWORK, (replace(SAME_THERE, same_step=False),) * 2, None, "stop", "network", "ceiling", 75),
        (of("ConnectionError", step=100), (replace(SAME_THERE, same_step=True),) * 2, None, "stop", "network", "ceiling", 1),
        (NETWORK, (Precedent(True, None, "n2"),) * 9, None, "restart", "network", "network", None),
        (NETWORK, (Precedent(True, True, "n2"),) * 9, None, "restart", "network", "network", None),
        (of(signal="SIGBUS"), (SAME_HERE,) * 2, (2, 2), "stop", "hardware", "ceiling", 69),
        (of(signal="SIGBUS"), (SAME_THERE,) * 2, None, "stop", "hardware", "ceiling", 1),  # it follows the rank
        (of(signal="SIGBUS", node=None), (Precedent(True, False, None),) * 2, (3, 2), "stop", "hardware", "ceiling", 1),  # where?
        (of("ConnectionError", first_step_done=False), (SAME_THERE,) * 2, None, "stop", "network", "ceiling", 1),
        (
            of("ConnectionError", first_step_done=False),
            (Precedent(False, None, first_step_done=True), *(SAME_THERE,) * 2),
            None,
            "stop",
            "network",
            "ceiling",
            75,
        ),
        (of("ImportError", "libc.so.1: No such file"), (SAME_THERE,) * 2, None, "stop", "storage", "ceiling", 1),
        # a script that asks for another try: charged after a few without progress, never stopped by the ceiling
        (of(exit_code=75), (SAME_THERE,) * 4, None, "restart_free", "preemption", "try-again", None),
        (of(exit_code=75), (SAME_THERE,) * 5, None, "restart", "preemption", "try-again", None),
        (of(exit_code=75), (SAME_HERE,) * 9, (3, 2), "restart", "preemption", "try-again", None),
        (of(exit_code=75), (Precedent(True, True, "n2"),) * 9, None, "restart_free", "preemption", "try-again", None),
        (of(exit_code=75), (Precedent(True, None, "n2"),) * 9, None, "restart_free", "preemption", "try-again", None),
        (of(exit_code=75), (Precedent(False, False, "n2"),) * 9, None, "restart_free", "preemption", "try-again", None),
        (of(agent_signal="SIGTERM"), (SAME_THERE,) * 9, None, "requeue", "preemption", "agent-terminated", 75),
        # one that asks for another try after it has logged a bug gets one
        (of("KeyError", exit_code=75, first_step_done=False), (), None, "confirm", "code", "code-at-start", None),
        (of("KeyError", exit_code=75, first_step_done=False), (SAME_THERE,), None, "stop", "code", "repeated", 65),
        (of("KeyboardInterrupt", exit_code=75), (), None, "stop", "user_stop", "keyboard-interrupt", 130),
        # as the user's own rule says, and no lost node
        (
            LICENSE,
            (replace(SAME_HERE, kind="network", charged=False),) * 9,
            None,
            "restart_free",
            "network",
            "license server",
            None,
        ),
        # 3. one node
        (SEGV, (SAME_HERE,), None, "replace_node", "crash", "same-node", 69),
        (SEGV, (SAME_HERE,), (3, 2), "replace_node", "crash", "same-node", 69),
        (SEGV, (SAME_HERE,), (2, 2), "confirm", "crash", "crash", None),
        (SEGV, (SAME_HERE,) * 2, (2, 2), "stop", "crash", "ceiling", 1),
        (SEGV, (SAME_HERE, SAME_THERE), (3, 2), "stop", "code", "repeated", 65),
        (NETWORK, (SAME_HERE,), (3, 2), "replace_node", "network", "same-node", 69),
        # an outage at the start, or the mount of one node: only the third time shows which
        (PEERS, (SAME_HERE,), (3, 2), "restart", "network", "peer-gone", None),
        (PEERS, (SAME_HERE,) * 2, (3, 2), "stop", "network", "ceiling", 75),  # the node that reports it lives
        (PEERS_LATER, (SAME_HERE,), (3, 2), "restart", "network", "peer-gone", None),
        (PEERS_LATER, (SAME_HERE,) * 2, (3, 2), "stop", "network", "ceiling", 75),
        (PEERS, (SAME_HERE,) * 2, (2, 2), "stop", "network", "ceiling", 75),
        (PEERS, (SAME_HERE,) * 2, (1, 1), "stop", "network", "ceiling", 1),  # all peers are on this host
        (PEERS_LATER, (SAME_HERE,) * 2, (1, 1), "stop", "network", "ceiling", 1),
        (PEERS, (SAME_HERE, SAME_THERE), (3, 2), "stop", "network", "ceiling", 75),
        (STALE, (SAME_HERE,), (3, 2), "restart", "storage", "file-system-ill", None),
        (STALE, (SAME_HERE,) * 2, (3, 2), "replace_node", "storage", "same-node", 69),
        (STALE_LATER, (SAME_HERE,), (3, 2), "replace_node", "storage", "same-node", 69),
        (of("ConnectionError", first_step_done=False), (SAME_HERE,) * 2, (3, 2), "stop", "network", "ceiling", 1),
        (DAMAGED, (SAME_HERE,), (3, 2), "restart", "storage", "checkpoint-broken", None),  # rank 0 alone may read it
        (DAMAGED, (SAME_HERE,) * 2, (3, 2), "stop", "storage", "ceiling", 1),
        (
            of("RuntimeError", "ckpt: checksum mismatch", checkpoint_load=True),
            (SAME_HERE,),
            (3, 2),
            "restart",
            "storage",
            "checkpoint-broken",
            None,
        ),
        (of(xids=(79,)), (), (3, 2), "replace_node", "hardware", "xid-replace", 69),
        (of(xids=(79,)), (), (2, 2), "restart", "hardware", "xid-replace", None),
        # replicas that differ: the odd one's node leaves if it can be spared; without a majority, one try
        (of(differs=("n1",)), (), (3, 2), "replace_node", "hardware", "replicas-differ", 69),
        (of(differs=("n1",)), (), (2, 2), "restart", "hardware", "replicas-differ", None),
        (of(differs=("n1", "n2")), (), (3, 2), "restart", "hardware", "replicas-differ", None),
        (of(differs=("n1", "n2")), (OTHER,), (3, 2), "restart", "hardware", "replicas-differ", None),
        (of(differs=("n1", "n2")), (Precedent(True, True, "n1"),), (3, 2), "stop", "hardware", "replicas-differ", 69),
        # no evidence at all
        (SILENT, (), None, "restart", "unknown", "no-evidence", None),
        (SILENT, (Precedent(True, False, "n2"),), None, "restart", "unknown", "no-evidence", None),
        (SILENT, (Precedent(True, False, "n2", True),), None, "restart", "unknown", "no-evidence", None),
        (SILENT, (Precedent(True, False, "n2"),) * 2, None, "stop", "unknown", "ceiling", 1),  # an exit code alone shows no bug
        (SILENT, (Precedent(False, False, "n2"),) * 2, None, "restart", "unknown", "no-evidence", None),
        # an exception that no rule knows: the third time it is a bug, because a service may have been down for a while
        (OWN, (), None, "restart", "unknown", "no-evidence", None),
        (OWN, (SAME_THERE,), None, "restart", "unknown", "no-evidence", None),
        (OWN, (SAME_THERE,) * 2, None, "stop", "code", "repeated", 65),
        (OWN, (Precedent(True, False, None),) * 2, None, "stop", "code", "repeated", 65),
        (OWN, (SAME_HERE,) * 2, (1, 1), "stop", "code", "repeated", 65),
        (OWN, (SAME_HERE,), (3, 2), "restart", "unknown", "no-evidence", None),  # the first to report it is often the fastest
        (SEGV, (SAME_HERE, UNMOVED), (3, 2), "replace_node", "crash", "same-node", 69),  # on other ranks
        (of(signal="SIGABRT"), (SAME_HERE, UNMOVED), (3, 2), "replace_node", "crash", "same-node", 69),
        (of(signal="SIGABRT"), (UNMOVED,) * 2, (3, 2), "stop", "crash", "ceiling", 1),
        (OWN, (SAME_HERE,), (2, 2), "restart", "unknown", "no-evidence", None),
        (OWN, (Precedent(False, False, "n2"),), None, "restart", "unknown", "no-evidence", None),
        # failures in a row without progress, of which none is the same as another
        (KEY, (OTHER,) * 6, None, "confirm", "code", "arguments", None),
        (KEY, (OTHER,) * 7, None, "stop", "code", "in-a-row", 1),
        (KEY, (replace(OTHER, kind="storage"),) * 7, None, "stop", "code", "in-a-row", 75),
        (
            NETWORK,
            (replace(OTHER, kind="code"),) * 4 + (replace(OTHER, kind="network"),) * 3,
            None,
            "stop",
            "network",
            "in-a-row",
            1,
        ),
        (KEY, (replace(OTHER, progress=True),) * 9 + (OTHER,) * 6, None, "confirm", "code", "arguments", None),
        (KEY, (replace(OTHER, progress=None),) * 9, None, "confirm", "code", "arguments", None),
        (KEY, (replace(OTHER, charged=False),) * 9, None, "confirm", "code", "arguments", None),
        (of(exit_code=75), (OTHER,) * 9, None, "restart_free", "preemption", "try-again", None),
        (OWN, (Precedent(True, True, "n2"),), None, "restart", "unknown", "no-evidence", None),
        (OWN, (Precedent(True, False, "n2", True),), None, "restart", "unknown", "no-evidence", None),
        (OWN_LATER, (SAME_THERE,), None, "restart", "unknown", "no-evidence", None),
        # two hosts that cannot reach each other
        (CUT, (), (3, 2), "restart", "network", "network-cut", None),
        (CUT, (cut_of("n1", "n2"),), (3, 2), "restart", "network", "network-cut", None),
        (CUT, (cut_of("n1", "n3"),), (3, 2), "restart", "network", "network-cut", None),
        (CUT, (cut_of("n1", "n2"),), (2, 2), "restart", "network", "network-cut", None),
        (CUT, (cut_of("n1", "n2"),) * 2, (2, 2), "stop", "network", "ceiling", 75),
        # decided by the table
        (of("NameError"), (), None, "stop", "code", "code-always", 65),
        (of(agent_signal="SIGTERM"), (), None, "requeue", "preemption", "agent-terminated", 75),
        (of(agent_signal="SIGINT"), (), None, "stop", "user_stop", "cancelled", 130),
        (of("RendezvousTimeoutError"), (), None, "requeue", "network", "not-enough-nodes", 75),
    ],
)
def test_after_the_table(diagnosis, past, nodes, decision, kind, rule, exit_code):
    running, least = nodes or (None, None)
    decided = decide(diagnosis, history=past, nodes=Nodes(running, least))
    assert (decided.response.value, decided.kind, decided.rule, decided.exit_code) == (decision, kind, rule, exit_code)
    assert (decided.action is Action.RESTART) == decision.startswith(("restart", "confirm"))
    assert decided.charged == (decision in ("restart", "confirm"))
    assert decided.reason.startswith(diagnosis.reason)


EIGHT = Nodes(9, 8, 8)
TYPO, MISSING = of("NameError", first_step_done=False), of(exit_code=127, first_step_done=False)
MISSING_MODULE = of("ModuleNotFoundError", "No module named 'apex'", first_step_done=False)
TWO_DIFFER, OTHERS_DIFFER = of(differs=("n1", "n2")), of(differs=("n2", "n7"))
THREE_DIFFER = of(differs=("n1", "n2", "n3"))
LOST = replace(PEERS_LATER, kind="node_lost", response=Response.RESTART_FREE)
LOST_EARLY = replace(PEERS, kind="node_lost", response=Response.RESTART_FREE)
LOST_BEFORE = Precedent(False, False, "n3", True, lost_node=True, kind="node_lost")
ECC = of("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered", shared=True)
BUS = of(signal="SIGBUS")
STALE_AGAIN = replace(SAME_HERE, progress=True, of_node=True, kind="storage")
BAD_BEFORE = replace(SAME_HERE, same_fingerprint=False, progress=True, of_node=True, kind="hardware")
WAITS = of(hang=True, hang_blame=(2, 5), step=40)
STEP_AGAIN = replace(SAME_THERE, first_step_done=True, same_step=True)
NUMBER = of("FloatingPointError", "loss is nan")
AT_40 = of("torch.distributed.DistBackendError", "remote process exited", step=40)
AT_40 = root_cause([AT_40])
UNKNOWN = {"first_step_done": None}
NO_STEPS = Precedent(True, None, "n1")
NOT_LONG_AGO = replace(NO_STEPS, recent=True)
REFUSED = of("ConnectionError")
AWAY_BEFORE = replace(OTHER, kind="network")
LINK = of(links=("eth1",), link_failed=True)

# Three cases in which the row decides: diagnosis, earlier failures, nodes.
DECIDED_BY = {
    "trained-before": [
        (TYPO, (TRAINED,), NODES_UNKNOWN),
        (MISSING, (TRAINED, OTHER), EIGHT),
        (MISSING_MODULE, (TRAINED,), Nodes(1, 1)),
    ],
    "asks-again": [
        (of("NameError", exit_code=75), (), NODES_UNKNOWN),
        (of("NameError", exit_code=75, first_step_done=False), (), Nodes(1, 1)),
        (of("ModuleNotFoundError", exit_code=75), (SAME_HERE,), EIGHT),
    ],
    "not-everywhere": [(TYPO, (), EIGHT), (MISSING, (OTHER,), Nodes(2, 2)), (MISSING_MODULE, (SAME_HERE,), Nodes(3, 2))],
    "no-majority-again": [
        (TWO_DIFFER, (Precedent(True, True, "n1"),), EIGHT),
        (OTHERS_DIFFER, (OTHER, SAME_HERE), EIGHT),
        (THREE_DIFFER, (Precedent(True, None),), NODES_UNKNOWN),
    ],
    "no-majority": [(TWO_DIFFER, (), EIGHT), (OTHERS_DIFFER, (OTHER,), EIGHT), (THREE_DIFFER, (), Nodes(3, 3))],
    "lost-again": [
        (LOST, (LOST_BEFORE,) * 7, EIGHT),
        (LOST_EARLY, (OTHER, *(LOST_BEFORE,) * 7), EIGHT),
        (LOST, (LOST_BEFORE,) * 9, EIGHT),
    ],
    "at-once": [
        (ECC, (), EIGHT),
        (of(exit_code=14, shared=True), (), EIGHT),
        (of(exit_code=202, shared=True), (SAME_HERE,), Nodes(3, 3)),
    ],
    "exit-code": [
        (of(exit_code=14), (SAME_THERE, replace(SAME_THERE, node="n3")), EIGHT),
        (of(exit_code=201), (Precedent(True, True, "n2"),) * 2, EIGHT),
        (of(exit_code=202), (Precedent(True, False, None),) * 2, Nodes(3, 3)),
    ],
    "exit-code-needed": [
        (of(exit_code=14), (), Nodes(3, 3)),
        (of(exit_code=201), (SAME_HERE,), Nodes(1, 1)),
        (of(exit_code=202), (SAME_THERE,), Nodes(2, 2)),
    ],
    "needed": [
        (of(xids=(79,)), (), Nodes(3, 3)),
        (of(differs=("n1",)), (), Nodes(2, 2)),
        (of(gpu_recovery=("gpu_reset",)), (SAME_HERE,), Nodes(8, 8)),
    ],
    "asked-often": [
        (of(exit_code=75), (SAME_HERE,) * 5, EIGHT),
        (of(exit_code=75), (SAME_THERE,) * 9, Nodes(1, 1)),
        (of(exit_code=75), (OTHER, *(SAME_HERE,) * 5), NODES_UNKNOWN),
    ],
    "all-wait-again": [
        (WAITS, (STEP_AGAIN,), EIGHT),
        (WAITS, (replace(STEP_AGAIN, node="n1"),), EIGHT),
        (WAITS, (STEP_AGAIN, OTHER), NODES_UNKNOWN),
    ],
    "another-number": [
        (NUMBER, (replace(SAME_THERE, same_step=False),), EIGHT),
        (NUMBER, (replace(SAME_THERE, same_step=False), SAME_THERE), NODES_UNKNOWN),
        (NUMBER, (replace(SAME_HERE, same_step=False),), Nodes(1, 1)),
    ],
    "bug-elsewhere": [
        (TYPO, (SAME_THERE,), EIGHT),
        (SEGV, (SAME_THERE,), EIGHT),
        (of(signal="SIGABRT", step=10), (STEP_AGAIN,), EIGHT),
    ],
    "bug": [(KEY, (SAME_HERE,), EIGHT), (TYPO, (replace(SAME_HERE, moved=False),), EIGHT), (OWN, (SAME_HERE,) * 2, Nodes(1, 1))],
    "same-node": [(SEGV, (SAME_HERE,), EIGHT), (MISSING_MODULE, (SAME_HERE,), EIGHT), (LINK, (SAME_HERE,), NODES_UNKNOWN)],
    "peers-in-step": [
        (AT_40, (replace(SAME_THERE, same_step=True),) * 2, EIGHT),
        (AT_40, (replace(SAME_HERE, same_step=True),) * 2, Nodes(1, 1)),
        (AT_40, (replace(SAME_HERE, same_step=True),) * 3, NODES_UNKNOWN),
    ],
    "outage": [(PEERS, (SAME_HERE,) * 2, EIGHT), (REFUSED, (SAME_THERE,) * 2, EIGHT), (STALE, (SAME_THERE,) * 2, NODES_UNKNOWN)],
    "hardware": [
        (BUS, (SAME_HERE,) * 2, Nodes(2, 2)),
        (of(xids=(79,)), (SAME_THERE,) * 2, Nodes(2, 2)),
        (of(xids=(94,)), (SAME_THERE,) * 2, EIGHT),
    ],
    "ceiling": [(BUS, (SAME_THERE,) * 2, EIGHT), (SILENT, (SAME_HERE,) * 2, EIGHT), (PEERS, (SAME_HERE,) * 2, Nodes(1, 1))],
    "unseen": [
        (of(exit_code=1, **UNKNOWN), (NO_STEPS, NOT_LONG_AGO), Nodes(1, 1)),
        (of("ConnectionError", **UNKNOWN), (OTHER, NO_STEPS, NOT_LONG_AGO), EIGHT),
        (of(signal="SIGKILL", **UNKNOWN), (NO_STEPS, NO_STEPS, NOT_LONG_AGO), NODES_UNKNOWN),
    ],
    "row-outage": [
        (REFUSED, (AWAY_BEFORE,) * 7, EIGHT),
        (STALE, (AWAY_BEFORE,) * 7, NODES_UNKNOWN),
        (KEY, (*(AWAY_BEFORE,) * 5, *(OTHER,) * 2), EIGHT),
    ],
    "in-a-row": [
        (KEY, (OTHER,) * 7, EIGHT),
        (of(exit_code=1), (AWAY_BEFORE,) * 7, EIGHT),
        (REFUSED, (OTHER,) * 7, NODES_UNKNOWN),
    ],
    "bad-node": [
        (BUS, (BAD_BEFORE,) * 2, EIGHT),
        (SEGV, (BAD_BEFORE, OTHER, BAD_BEFORE), EIGHT),
        (STALE_LATER, (STALE_AGAIN,) * 2, EIGHT),
    ],
}


def test_each_row_has_three_cases():
    assert [row.name for row in (*ANSWERS, *HISTORY)] == list(DECIDED_BY)
    assert {len(cases) for cases in DECIDED_BY.values()} == {3}


@pytest.mark.parametrize(
    ("name", "diagnosis", "past", "nodes"), [(name, *case) for name, cases in DECIDED_BY.items() for case in cases]
)
def test_the_first_row_that_holds_decides(name, diagnosis, past, nodes):
    facts = facts_of(diagnosis, past, nodes)
    rows = ANSWERS
    if name in [row.name for row in HISTORY]:
        facts, rows = overruled(facts, ANSWERS), HISTORY
    row = next(row for row in rows if row.when(facts) and (row.response is not Response.REPLACE_NODE or nodes.one_may_leave))
    assert row.name == name
    answer = overruled(facts, rows).answer
    assert (answer.response, answer.rule) == (row.response, row.rule or diagnosis.rule)
    assert decide(diagnosis, history=past, nodes=nodes).reason.startswith(diagnosis.reason)


@pytest.mark.parametrize("first_step_done", [None, False, True])
@pytest.mark.parametrize(
    "evidence",
    [
        {"exit_code": 1},
        {"exit_code": 1, "stderr_tail": "No space left on device"},
        {"exit_code": 1, "stderr_tail": "Connection closed by peer, says gloo"},
        {"exit_code": 1, "stderr_tail": "CUDA error: unspecified launch failure"},
        {"exit_code": 1, "stderr_tail": "[Errno 116] Stale file handle"},
    ],
)
def test_printed_words_cost_no_node(evidence, first_step_done):
    """However often they come back, wherever, with progress or not."""
    diagnosis = root_cause([of(**evidence, first_step_done=first_step_done)])
    assert diagnosis.weight is Weight.PRINTED
    for progress_, node, times in itertools.product((None, False, True), ("n1", "n2"), range(10)):
        earlier = replace(
            SAME_HERE, progress=progress_, node=node, kind=diagnosis.kind, of_node=True, first_step_done=first_step_done
        )
        decided = decide(diagnosis, history=(earlier,) * times, nodes=EIGHT)
        assert decided.exit_code in (None, 1)
        assert decided.response.value in ("confirm", "restart", "stop")


@pytest.mark.parametrize(("weight", "exit_code"), [(Weight.CLASS, 75), (Weight.ABORT_LINES, 75), (Weight.PRINTED, 1)])
def test_last_words_of_peers_end_with_75(weight, exit_code):
    decided = decide(replace(PEERS_LATER, weight=weight), history=(SAME_HERE,) * 2, nodes=EIGHT)
    assert (decided.rule, decided.exit_code) == ("ceiling", exit_code)


@pytest.mark.parametrize(
    "type_", ["ConnectionError", "requests.exceptions.ConnectionError", "botocore.exceptions.EndpointConnectionError"]
)
@pytest.mark.parametrize(("weight", "exit_code"), [(Weight.MESSAGE, 75), (Weight.ABORT_LINES, 1), (Weight.PRINTED, 1)])
def test_an_outage_ends_with_75_if_certain(type_, weight, exit_code):
    decided = decide(replace(of(type_), weight=weight), history=(SAME_THERE,) * 2, nodes=EIGHT)
    assert (decided.rule, decided.exit_code) == ("ceiling", exit_code)


def test_what_another_rank_met_is_an_outage_too():
    """DCP raises what a rank has met on all; one that reports it is not the one that met it."""
    raised = "torch.distributed.checkpoint.api.CheckpointException"
    said = "CheckpointException ranks:dict_keys([9])\nTraceback (most recent call last): (RANK 9)\nOSError: [Errno {}]"
    stale, full = of(raised, said.format("116] Stale file handle")), of(raised, said.format("28] No space left on device"))
    assert decide(stale, history=(SAME_THERE,) * 2, nodes=EIGHT).exit_code == 75
    assert decide(full, history=(SAME_HERE,), nodes=EIGHT).response is not Response.REPLACE_NODE


@pytest.mark.parametrize(
    ("diagnosis", "exit_code"),
    [
        (of("botocore.exceptions.EndpointConnectionError"), 75),
        (of("botocore.exceptions.EndpointConnectionError", first_step_done=False), 1),  # its name may be wrong
        (of("botocore.exceptions.UnknownServiceError"), 1),
        (of("botocore.exceptions.ClientError", "An error occurred (NotWhatYouThink) when calling PutObject", step=100), 1),
        (of("wandb.errors.errors.Error", "You must call wandb.init() before wandb.log()"), 1),
        (of("wandb.errors.errors.CommError"), 75),
        (of("FileNotFoundError", "/out/model.bin", frames=IN_S3TRANSFER), 1),
        (of("botocore.exceptions.ClientError", "An error occurred (SlowDown) when calling PutObject", first_step_done=False), 75),
        (of("OSError", "[Errno 116] Stale file handle", first_step_done=False), 75),
        (of("OSError", "[Errno 30] Read-only file system", first_step_done=False), 1),
        (of("OSError", "[Errno 39] Directory not empty", step=100), 1),
    ],
)
def test_a_package_alone_shows_no_outage(diagnosis, exit_code):
    """A server that answers, a class or an errno does, once the job has trained: names may be wrong until then."""
    decided = decide(diagnosis, history=(replace(SAME_THERE, same_step=True, first_step_done=None),) * 2, nodes=EIGHT)
    assert (decided.rule, decided.exit_code) == ("ceiling", exit_code)


@pytest.mark.parametrize(
    ("evidence", "past", "decisions"),
    [
        ({"exit_code": 1}, NO_STEPS, ["restart", "restart", ("stop", 1)]),
        ({"exit_code": 1, "exception": RaisedException("KeyError", "'x'")}, NO_STEPS, ["confirm", ("stop", 65)]),
        ({"signal": "SIGKILL"}, NO_STEPS, ["restart", "restart", ("stop", 1)]),
        ({"exit_code": 75}, NO_STEPS, ["restart_free"] * 9),
        ({"exit_code": 1, "first_step_done": True}, NO_STEPS, ["restart"] * 9),  # it has trained since, as far as is known
        ({"exit_code": 1}, replace(NO_STEPS, first_step_done=True), ["restart"] * 9),
    ],
)
def test_a_job_without_known_progress_ends(evidence, past, decisions):
    """As under --no-python without checkpoints. A week later, by a checkpoint or `budget_window`, no failure is a recent one."""
    failed = of(**{"first_step_done": None, **evidence})
    for recent, expected in ((True, decisions), (False, [])):
        for number, answer in enumerate(expected or ["goes on"] * 2):
            earlier = (*(past,) * (number - 1), replace(past, recent=recent))[:number]
            decided = decide(failed, history=earlier, nodes=Nodes(1, 1))
            told = (decided.response.value, decided.exit_code) if decided.exit_code is not None else decided.response.value
            assert told == answer or (answer == "goes on" and decided.action is Action.RESTART)


@pytest.mark.parametrize(
    ("diagnosis", "nodes", "moves"),
    [
        (SEGV, (3, 2), True),
        (SEGV, (2, 2), True),
        (ILLEGAL, (3, 2), True),
        (of("torch.OutOfMemoryError"), (3, 2), False),  # its script needs it, wherever it is
        (of(signal="SIGABRT"), (3, 2), True),
        (of(hang=True, hang_blame=(1, 0)), (3, 2), True),
        (of(hang=True, hang_blame=(2, 0)), (3, 2), False),  # all wait: the first to report is named
        (NETWORK, (3, 2), True),  # rank 0 logs to a server, and saves: it meets their outages, wherever it is
        (of("my.QueueEmpty", "the queue is empty"), (3, 2), False),
        (of(exit_code=1), (3, 2), False),
        (of(signal="SIGKILL"), (3, 2), True),
        (SILENT, (3, 2), False),
        (STALE, (3, 2), True),
        (STALE_LATER, (3, 2), True),
        (of("ConnectionError", first_step_done=False), (3, 2), False),  # an outage: no node leaves for it before the first step
        (PEERS_LATER, (3, 2), False),  # the node that reports it lives
        (of(hang=True, links=("eth1",), link_failed=True), (3, 2), False),  # its link stays with the node
        (SEGV, (1, 1), False),
        (SEGV, None, False),
        (of(signal="SIGSEGV", node=None), (3, 2), False),
        (KEY, (3, 2), False),  # a script raises it wherever it runs
        (CUT, (3, 2), False),
        (NAN, (3, 2), False),  # all ranks see it, once gradients are reduced
        (of(signal="SIGSEGV", warm=True, first_step_done=False), (3, 2), True),
        (of("NameError"), (3, 2), False),
        (of(exit_code=75), (3, 2), False),
    ],
)
def test_restarts_move_ranks_where_node_or_code_failed(diagnosis, nodes, moves):
    decided = decide(diagnosis, nodes=Nodes(*nodes or (None, None)))
    assert (decided.moves_ranks, MOVED in decided.reason) == (moves, moves)


def test_ranks_move_only_for_the_same_checkpoint():
    assert not decide(SEGV, Budget(0), nodes=Nodes(3, 2)).moves_ranks  # it stops
    assert not decide(SEGV, history=(SAME_HERE,), nodes=Nodes(3, 2)).moves_ranks  # the node leaves
    early = of(signal="SIGABRT", first_step_done=False)
    loaded = replace(SAME_THERE, first_step_done=False, same_checkpoint=True)
    blamed = decide(early, history=(loaded,), nodes=Nodes(3, 2))
    assert (blamed.checkpoints_back, blamed.moves_ranks) == (1, False)


@pytest.mark.parametrize(
    ("diagnosis", "charged", "limit", "action"),
    [
        (NETWORK, 0, 3, Action.RESTART),
        (NETWORK, 2, 3, Action.RESTART),
        (NETWORK, 3, 3, Action.STOP),
        (NETWORK, 0, 0, Action.STOP),
        (NETWORK, 10_000, NO_LIMIT, Action.RESTART),
        (KEY, 3, 3, Action.STOP),
        (of(exit_code=75), 3, 3, Action.RESTART),
        (of("NameError"), 0, NO_LIMIT, Action.STOP),
    ],
)
def test_the_budget(diagnosis, charged, limit, action):
    decided = decide(diagnosis, Budget(limit, charged))
    assert decided.action is action
    if action is Action.STOP and charged:
        assert (decided.rule, decided.exit_code) == ("budget", 1)
        assert f"the budget of {limit} restart" in decided.reason


@pytest.mark.parametrize(
    ("decided", "promised"),
    [
        (decide(KEY), True),
        (decide(SEGV), True),
        (decide(NETWORK), False),
        (decide(KEY, history=(SAME_THERE,)), False),
        (decide(KEY, history=(SAME_HERE,), nodes=Nodes(3, 1)), False),
        (decide(KEY, Budget(3, 3)), False),
        (decide(of("NameError", warm=True, first_step_done=False)), False),  # it has words of its own: one cold start
    ],
)
def test_one_more_try_is_promised_only_if_true(decided, promised):
    assert (ONE_MORE_TRY in decided.reason) == promised, decided.reason
    assert "one more try" not in decided.reason.replace(ONE_MORE_TRY, "")


def test_the_evidences_history_is_the_default():
    assert decide(of("KeyError", history=(SAME_THERE,))).rule == "repeated"
    assert decide(of("KeyError", history=(SAME_THERE,)), history=()).rule == "arguments"


WARM = {"warm": True, "first_step_done": False}


@pytest.mark.parametrize(
    ("diagnosis", "charged", "decision", "rule", "cold"),
    [
        (of("SyntaxError", **WARM), 0, "confirm", "warm-start", True),
        (of("KeyError", **WARM), 0, "confirm", "warm-start", True),
        (of("KeyError", **{**WARM, "warm": False}), 0, "stop", "code-at-start", False),
        (of("KeyError", **{**WARM, "first_step_done": True}), 0, "confirm", "arguments", False),
        (of("KeyError", **WARM), 3, "stop", "code-at-start", False),  # no restart is left
        (of(signal="SIGSEGV", **WARM), 0, "confirm", "crash", True),
        (of(exit_code=1, **WARM), 0, "restart", "no-evidence", True),
        (of(hang=True, **WARM), 0, "restart", "hang", True),
        (of("ConnectionError", **WARM), 0, "restart", "network", False),
        (of(hang=True, cuts=(("a", "b"),), **WARM), 0, "restart", "network-cut", False),
        (of(signal="SIGKILL", **WARM), 0, "restart", None, False),
        (of(agent_signal="SIGINT", **WARM), 0, "stop", None, False),
    ],
)
def test_a_warm_start_proves_no_bug(diagnosis, charged, decision, rule, cold):
    decided = decide(diagnosis, Budget(3, charged))
    assert (decided.response.value, decided.cold) == (decision, cold), decided
    assert rule is None or decided.rule == rule


def test_a_usual_start_failing_alike_clears_the_warm():
    warm = of("my.Trouble", "x", **WARM)
    for was_warm, rule in ((False, "repeated"), (True, "warm-start"), (None, "warm-start")):
        assert decide(warm, Budget(3, 1), (Precedent(True, False, "n1", warm=was_warm),) * 2, Nodes(1)).rule == rule
    after_steps = Precedent(True, False, "n1", first_step_done=True, warm=True)  # no warm start caused that
    assert decide(of("KeyError", **WARM), Budget(3, 1), (after_steps,), Nodes(1)).rule == "repeated"


@pytest.mark.parametrize(
    ("diagnosis", "past", "least_s", "most_s"),
    [
        (OWN, (), 30, 45),
        (OWN, (SAME_THERE,), 90, 135),
        (of("requests.exceptions.ChunkedEncodingError", first_step_done=False), (), 30, 45),
        (of("ConnectionError", first_step_done=False), (), 0, 0),
        (of("ConnectionError", first_step_done=False), (SAME_THERE,), 90, 135),
        (PEERS, (), 0, 0),
        (PEERS, (SAME_HERE,), 90, 135),
        (STALE, (SAME_HERE,), 90, 135),
        (STALE_LATER, (), 0, 0),
        (STALE_LATER, (SAME_THERE,), 90, 135),
        (STALE_LATER, (SAME_HERE,), 0, 0),  # its node leaves
        (OWN, (SAME_HERE,), 90, 135),  # too, but perhaps it was only the first to see an outage
        (NETWORK, (SAME_THERE,), 90, 135),
        (NETWORK, (Precedent(True, None, "n2"),), 0, 0),  # it may have trained for a week since
        (OWN_LATER, (), 0, 0),
        (OWN_LATER, (SAME_THERE,), 90, 135),
        (KEY, (SAME_HERE,), 0, 0),
        (SILENT, (), 30, 45),
        (of("FloatingPointError", first_step_done=False), (), 0, 0),
        (OWN, (SAME_THERE,) * 2, 0, 0),  # the job ends
    ],
)
def test_tries_of_a_possible_outage_are_spread(diagnosis, past, least_s, most_s):
    for jitter, delay_s in ((0.0, least_s), (1.0, most_s)):
        assert decide(diagnosis, history=past, backoff=Backoff(), jitter=jitter).delay_s == delay_s
    assert decide(diagnosis, history=past).delay_s == 0  # backoff=0: the user does not want to wait


def test_exit_codes_of_the_presets():
    node, again, bug = of(xids=(79,)), of(agent_signal="SIGTERM"), of("NameError")
    user = of(agent_signal="SIGINT")
    codes = {preset: [decide(one, exit_codes=preset).exit_code for one in (bug, node, again, user)] for preset in EXIT_CODES}
    assert codes == {"design": [65, 69, 75, 130], "stock": [1, 1, 1, 1], "kubeflow": [65, 197, 203, 2]}
    assert decide(NETWORK, exit_codes="kubeflow").exit_code is None


def test_a_cut_says_nothing_of_the_checkpoint():
    loaded = (Precedent(True, False, "n1", False, same_checkpoint=True),)
    for diagnosis, back in ((of("RuntimeError", "who knows", first_step_done=False), 1), (CUT, 0)):
        assert decide(diagnosis, history=loaded, nodes=Nodes(2, 2)).checkpoints_back == back


@pytest.mark.parametrize(
    ("budget", "past", "rule"),
    [
        (Budget(0), (), "budget"),
        (Budget(), (OTHER,) * 7, "in-a-row"),
    ],
)
@pytest.mark.parametrize(("evidence", "exit_code"), [({"xids": (79,)}, 69), ({"exit_code": 14}, 1), ({"xids": (94,)}, 1)])
def test_a_broken_node_is_named_without_budget(budget, past, rule, evidence, exit_code):
    decided = decide(of(**evidence), budget, past, Nodes(4, 4))
    assert (decided.rule, decided.exit_code) == (rule, exit_code)


@pytest.mark.parametrize(
    "failed",
    [
        NAN,
        of("torch.OutOfMemoryError"),
        of("my.Trouble", "x"),
        of("PIL.UnidentifiedImageError", "cannot identify image file"),
        of("botocore.exceptions.ClientError", "An error occurred (AccessDenied) when calling GetObject"),
        of("botocore.exceptions.ClientError", "An error occurred (SlowDown) when calling PutObject"),
        *(of(bug, first_step_done=False) for bug in ("NameError", "TypeError", "SyntaxError")),
    ],
)
@pytest.mark.parametrize("nodes", [(2, 1), (3, 2), (9, 8)])
def test_what_any_node_meets_costs_none(failed, nodes):
    """All of them do, and the fastest one reports it first, each time."""
    for times in (1, 2):
        assert decide(failed, history=(SAME_HERE,) * times, nodes=Nodes(*nodes)).response is not Response.REPLACE_NODE


LOAD_FAILED = "elastic_ext.checkpoints.ranks.StorageFailed", "s3://b/step_00000002.g0001 cannot be read: Errno 16"
BEFORE_ITS_FIRST_STEP = [
    (of("RuntimeError", "who knows", first_step_done=False), 1),
    (of(signal="SIGSEGV", first_step_done=False), 1),
    (of(hang=True, first_step_done=False), 0),
    (of(*LOAD_FAILED, first_step_done=False), 0),
    (of("OSError", "[Errno 5] Input/output error", first_step_done=False), 0),
    (of("OSError", "[Errno 28] No space left on device", first_step_done=False), 0),
    (of("botocore.exceptions.ClientError", "SlowDown", first_step_done=False), 0),
    (of("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", first_step_done=False), 0),
    (of("RuntimeError", "The NVIDIA driver on your system is too old", first_step_done=False), 0),
    (of("RuntimeError", "Detected mismatch between collectives on ranks", first_step_done=False), 0),
    (of("PIL.UnidentifiedImageError", "cannot identify image file 'a.jpg'", first_step_done=False), 0),
    (of("ValueError", "--gpus=8, but your machine only has 7", first_step_done=False), 0),
    (of(exit_code=75, first_step_done=False), 0),
    (of(signal="SIGKILL", xids=(79,), first_step_done=False), 0),
    (of("torch.distributed.DistBackendError", "remote process exited or there was a network error", first_step_done=False), 0),
    (replace(of("ConnectionError", first_step_done=False), kind="node_lost", response=Response.RESTART_FREE), 0),
]


@pytest.mark.parametrize(("diagnosis", "back"), BEFORE_ITS_FIRST_STEP)
def test_a_checkpoint_is_blamed_only_for_possible_effects(diagnosis, back):
    """Else an outage of the storage, or two lost nodes while the workers load, quarantine one good checkpoint after another."""
    loaded = (Precedent(True, False, "n1", False, same_checkpoint=True),)
    for nodes in (Nodes(2, 2), Nodes(1, 1)):
        assert decide(diagnosis, history=loaded, nodes=nodes).checkpoints_back == back
    for other in (replace(loaded[0], same_fingerprint=False), replace(loaded[0], first_step_done=True)):
        assert decide(diagnosis, history=(other,), nodes=Nodes(2, 2)).checkpoints_back == 0


def test_an_early_outage_three_times_blames_no_node():
    for known, rule in ((False, "ceiling"), (None, "network")):
        refused = Precedent(True, known, "n1", False)
        assert decide(of("ConnectionError", first_step_done=False), Budget(5, 2), (refused, refused), Nodes(3, 2)).rule == rule


@pytest.mark.parametrize("diagnosis", [of(signal="SIGSEGV", first_step_done=False), OWN, of("EOFError", first_step_done=False)])
def test_a_chosen_checkpoint_is_blamed_before_the_code(diagnosis):
    """Twice after step_200: step_100 is tried, also if it was twice on one node. If that one fails too, it is the code."""
    once = (Precedent(True, False, "n1", False, same_checkpoint=True),)
    for nodes in (Nodes(1, 1), Nodes(3, 2)):
        second = decide(diagnosis, Budget(5, 1), once, nodes)
        assert (second.action, second.checkpoints_back) == (Action.RESTART, 1)
        assert "the one before it is tried" in second.reason
    with_the_older_one = (replace(once[0], same_checkpoint=False),) * 2
    third = decide(diagnosis, Budget(5, 2), with_the_older_one, Nodes(1, 1))
    assert (third.rule, third.exit_code, third.checkpoints_back) == ("repeated", 65, 0)
    assert "is tried" not in third.reason
    without_an_older_one = once * 2
    assert decide(diagnosis, Budget(5, 2), without_an_older_one, Nodes(1, 1)).exit_code == 65
    no_budget = decide(diagnosis, Budget(1, 1), once, Nodes(1, 1))
    assert (no_budget.rule, "is tried" in no_budget.reason) == ("budget", False)


def test_storage_that_stays_away_means_try_again():
    """Not as a failure of the script: a platform that tries again later finds everything in place."""
    again = (Precedent(True, False, "n1", False, same_checkpoint=True), Precedent(True, False, "n2", False, same_checkpoint=True))
    decided = decide(of(*LOAD_FAILED, first_step_done=False), history=again, nodes=Nodes(2, 2))
    assert (decided.rule, decided.kind, decided.exit_code) == ("ceiling", "storage", 75)


def test_a_broken_checkpoint_is_skipped_on_restarts_only():
    broken = of("RuntimeError", "PytorchStreamReader failed reading zip archive", first_step_done=False)
    assert decide(broken).checkpoints_back == 1
    assert decide(broken, Budget(3, 3)).checkpoints_back == 0
    assert decide(NETWORK).checkpoints_back == 0


@pytest.mark.parametrize(
    ("then", "now", "got_further"),
    [
        (PastFailure("f", 812, 0, True), PastFailure("f", 0, 800, False), False),
        (PastFailure("f", 812, 0, True), PastFailure("f", 12, 800, True), False),
        (PastFailure("f", 0, 0, False), PastFailure("f", 0, 800, False), True),  # steps are not counted, checkpoints are
        (PastFailure("f", 0, 800, False), PastFailure("f", 0, 800, False), False),
        (PastFailure("f", 0, None, False), PastFailure("f", 0, None, False), False),
        (PastFailure("f", 12, 800, True), PastFailure("f", 12, 800, True), False),
        (PastFailure("f", 12, 800, True), PastFailure("f", 13, 800, True), True),
        (PastFailure("f", 12, 800, True), PastFailure("f", 11, 800, True), False),
        (PastFailure("f", 12, 800, True), PastFailure("f", 13, 900, True), True),
        (PastFailure("f", 5000, 3, True), PastFailure("f", 2000, 4, True), None),  # checkpoints numbered by epochs
        (PastFailure("f", 812, None, True), PastFailure("f", 812, None, True), False),
        (PastFailure("f", 812, None, True), PastFailure("f", 900, None, True), True),
        (PastFailure("f", 812, None, True), PastFailure("f", 700, None, True), None),  # a job may resume by itself
        # Checkpoints without a step: the record of saves knows which was saved later.
        (PastFailure("f", 40, None, True, save_number=7), PastFailure("f", 40, None, True, save_number=9), True),
        (PastFailure("f", 40, None, True, save_number=7), PastFailure("f", 12, None, True, save_number=9), None),
        (PastFailure("f", 40, None, True, save_number=9), PastFailure("f", 40, None, True, save_number=7), False),
        (PastFailure("f", 40, None, True, save_number=7), PastFailure("f", 12, None, True, save_number=7), False),
        (PastFailure("f", 40, 0, True, save_number=0), PastFailure("f", 40, None, True, save_number=9), True),
        (PastFailure("f", 0, None, False, save_number=7), PastFailure("f", 0, None, False, save_number=9), True),
        (
            PastFailure("f", 40, 800, True, save_number=7),
            PastFailure("f", 40, 800, True, save_number=9),
            False,
        ),  # steps are known
        (PastFailure("f"), PastFailure("f"), None),
    ],
)
def test_progress(then, now, got_further):
    assert progress(then, now) is got_further


def test_progress_in_between_counts():
    """A failure that lies before a better try is no reason to stop, whatever came after that try."""
    earlier = [PastFailure("f", 10, 0, True), PastFailure("g", 50, 0, True)]
    past = precedents(PastFailure("f", 10, 0, True), earlier)
    assert [(one.same_fingerprint, one.progress) for one in past] == [(True, True), (False, False)]
    recorded = PastFailure(KEY.fingerprint, 7, 3, True, "n1", kind="code", rank=0, rule="arguments")
    assert past_failure(of("KeyError", step=7), 3) == recorded


def test_two_steps_are_compared_only_if_known():
    for then, now, same in (((7, 10), (17, 0), True), ((7, 10), (18, 0), False), ((7, None), (18, 0), None)):
        (found,) = precedents(PastFailure("f", *now), [PastFailure("f", *then)])
        assert found.same_step is same


AGAIN_THERE = replace(SAME_THERE, first_step_done=True, same_step=True)
WAIT, ABORT = {"hang": True, "hang_blame": (2, 5)}, {"signal": "SIGABRT"}


@pytest.mark.parametrize(
    ("now", "earlier", "rule"),
    [
        (WAIT, AGAIN_THERE, "repeated"),
        (WAIT, replace(AGAIN_THERE, node="n1"), "repeated"),  # who is named says nothing: all wait
        (WAIT, replace(AGAIN_THERE, same_step=None), "hang"),
        (WAIT, replace(AGAIN_THERE, same_step=False), "hang"),
        (WAIT, replace(AGAIN_THERE, first_step_done=False), "hang"),
        (WAIT, replace(AGAIN_THERE, progress=None), "hang"),
        ({**WAIT, "step": 9}, AGAIN_THERE, "hang"),  # a link that is down, say
        ({**WAIT, "hang_blame": (1, 5)}, AGAIN_THERE, "hang"),  # one rank waits for a storage, say
        ({**WAIT, "cuts": (("n1", "n3"),)}, AGAIN_THERE, "network-cut"),
        (ABORT, AGAIN_THERE, "repeated"),
        (ABORT, replace(AGAIN_THERE, node="n1"), "same-node"),
        (ABORT, replace(AGAIN_THERE, same_step=False, same_rank=True), "abort"),
        ({**ABORT, "step": 1}, AGAIN_THERE, "abort"),  # with copies at each step any two failures may be at one
        ({"signal": "SIGBUS"}, AGAIN_THERE, "bus-error"),
        ({"signal": "SIGKILL"}, AGAIN_THERE, "killed"),  # of somebody else
    ],
)
def test_what_repeats_as_only_bugs_do_is_one(now, earlier, rule):
    decided = decide(of(**{"step": 10, **now}), history=(earlier,), nodes=Nodes(3, 2))
    codes = {"repeated": 1 if now is WAIT else 65, "same-node": 69}  # of a hang, less is known
    assert (decided.rule, decided.exit_code) == (rule, codes.get(rule))
    assert (" at the same step without progress" in decided.reason) == (rule == "repeated" and now is WAIT)


def test_a_cause_elsewhere_costs_no_node():
    """Whatever the rule, the step and the history."""
    for rule, done, times in itertools.product(sorted(ELSEWHERE), (None, False, True), range(10)):
        follows = replace(PEERS, rule=rule, evidence=replace(PEERS.evidence, first_step_done=done))
        for further in (None, False, True):
            earlier = (replace(SAME_HERE, progress=further, of_node=True, kind="network"),) * times
            decided = decide(follows, history=earlier, nodes=Nodes(65, 64, 64))
            assert decided.response.value in ("restart", "stop"), (rule, done, times, further)


BLAMED, WAITING = {"hang": True, "hang_blame": (1, 5)}, {"hang": True, "hang_blame": (2, 5)}


@pytest.mark.parametrize(
    ("diagnosis", "of_node"),
    [
        (SEGV, True),
        (ILLEGAL, True),
        (of(exit_code=1, xids=(94,)), True),
        (of(signal="SIGBUS"), True),
        (of("RuntimeError", "CUDA error: unspecified launch failure"), True),
        (of(**BLAMED), True),
        (of(**WAITING), False),  # any rank may be named
        (of(hang=True), False),
        (of(differs=("n1",)), True),
        (of(differs=("n1", "n2")), False),
        (of(**BLAMED, cuts=(("n1", "n2"),)), False),
        (KEY, False),
        (NAN, False),  # all ranks get the same gradient
        (PEERS, False),  # the first to notice is not the cause
        (STALE_LATER, False),  # rank 0 alone may use it
        (of(signal="SIGKILL"), False),
        (of(signal="SIGKILL", oom_kills=1), False),
        (of(exit_code=1), False),
    ],
)
def test_what_a_bad_node_causes(diagnosis, of_node):
    assert of_a_node(diagnosis) is of_node


def test_only_the_last_charged_failure_is_recent():
    failures = [PastFailure("f")] * 3
    assert [one.recent for one in precedents(PastFailure("f"), failures, charged=1)] == [False, False, True]
    assert not any(one.recent for one in precedents(PastFailure("f"), failures, charged=0))


@pytest.mark.parametrize(("times", "delay_s"), [(0, 0), (1, 1), (2, 2), (4, 8), (5, 16), (9, 60)])
def test_a_program_that_asks_repeatedly_waits_ever_longer(times, delay_s):
    """Without progress it would restart as fast as it can, at first at no price."""
    decided = decide(of(exit_code=75), Budget(3), (SAME_THERE,) * times, backoff=Backoff(1.0))
    assert (decided.charged, decided.delay_s) == (times >= MAX_FREE_TRIES, delay_s)
    with_progress = (Precedent(True, True, "n2"),) * times
    assert decide(of(exit_code=75), Budget(3), with_progress, backoff=Backoff(1.0)).delay_s == 0
