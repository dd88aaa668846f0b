"""What torch's collective backends and NCCL say when a rank ends: each text, where it was read, and its rule. Pure.

Two backends of NCCL speak differently. Up to torch 2.14 `backend="nccl"` is the older one (`nccl-legacy` since then). From 2.15
on it is nccl2, whose log lines begin with "[TC]"; so do those of torchcomms, from which it stems. nccl2 says that it aborts, then
writes the flight recorder and waits 15 s (TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC) before it calls abort(): other threads may print
meanwhile. So only its own lines say why. Its exceptions are plain RuntimeErrors with NCCL's status and last error.

`test_torch_texts.py` classifies each row, and looks for its pieces in torch's libraries (those of NCCL in a CUDA build). So a
changed wording fails a test.

Read in the libraries of torch 2.13.0, 2.14.1 and 2.15.0 with NCCL 2.30.7, and in the sources of torch's main branch of November
2026 (c10d/ProcessGroupNCCL.cpp, c10d/nccl2/*.cpp, distributed/_watchdog.py) and of NCCL (init.cc, enqueue.cc).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastic_ext.failures.evidence import Text

PEER_GONE, MISUSE, GPU_LAUNCH = "peer-gone", "collective-misuse", "gpu-launch"


class How(Enum):
    """How a script's end shows the text."""

    ABORT = "a line that says that the backend aborts the process"
    LOG = "a line before that"
    RAISE = "the message of a RuntimeError"
    RAISE_OWN = "the message of a DistBackendError, which the rules know by its class"
    STATUS = "NCCL's own text for an error, in place of {status} in the others"


@dataclass(frozen=True)
class Wording:
    """One text. torch puts in numbers and names: {}; NCCL's texts: {status}; CUDA's errors: {cuda}. |: it joins two pieces."""

    text: str
    how: How
    rule: str  # "": that of the text in place of {status} or {cuda}
    key: Text | None = None  # what is searched for; None: the class of the exception, or the text inside, is enough
    printed: bool = False  # whether the key counts on stderr, too; else in an exception, and in lines of OWN_LINES
    since: str = "2.14.1"  # the first version of torch in whose library it was found; "": it was read in sources only
    library: str = "torch"  # for CUDA; "gloo": the one for CPUs; "nccl": NCCL's own; "python": a Python file of torch


ABORTS = ("aborting process", "[tc]")
ASYNC_ERROR = ("async error on rank", "[tc]")
QUERY_FAILED = ("event query: ", "[tc]")
CALLBACK = ("default timeout callback fired, calling os.abort()",)
STUCK_LOOP = ("-- aborting process", "watchdog event loop")
LAST_ERROR = "nccl last error: "
ABORTED: Text = "nccl communicator was aborted"
TERMINATED: tuple[Text, ...] = ("c10::distbackenderror", "nccl2::ncclexception")  # what no code has caught, by the C++ runtime
# NCCL calls it invalid usage or an invalid argument that this rank uses a group which another rank's failure had torch revoke or
# abort.
GROUP_GONE: tuple[Text, ...] = ("communicator was revoked", "comm argument is null")

_DUE = "[TC]{}Aborting process on rank {} due to |"
_STATUS = "|: {status} \nNCCL Last Error: {}"
_EACH_ONCE = " was already used; each reconfigure() requires a unique uuid"

WORDINGS = (
    # nccl2. Newer versions may have other reasons behind "due to".
    Wording(_DUE + "timeout - timeout watchdog detected operation timeout", How.ABORT, PEER_GONE, ABORTS),
    Wording(_DUE + "error - timeout watchdog detected operation error", How.ABORT, PEER_GONE, ABORTS),
    Wording(_DUE + "timeout - collective operation timed out", How.ABORT, PEER_GONE, ABORTS),
    Wording(_DUE + "error - nccl hit async error: |{status}", How.ABORT, PEER_GONE, ABORTS),
    Wording(_DUE + "error - |NCCL Async Error" + _STATUS, How.ABORT, PEER_GONE, ABORTS),
    Wording("[TC]{}nccl hit async error on rank {}: {status}", How.LOG, PEER_GONE, ASYNC_ERROR),
    Wording("[TC]{}Async error on rank {}: {status} (reconfigurable mode)", How.LOG, PEER_GONE, ASYNC_ERROR),
    Wording("[TC]{}CUDA error during start event query: {cuda}", How.LOG, ""),
    Wording("[TC]{}CUDA error during end event query: {cuda}", How.LOG, ""),
    # ... of torchcomms, and of nccl2 before its first release
    Wording("[TC]{}Aborting process due to timeout on rank {} - timeout watchdog detected operation timeout", How.ABORT,
            PEER_GONE, ABORTS, since=""),
    Wording("[TC]{}Aborting process due to error on rank {} - timeout watchdog detected operation error. ", How.ABORT,
            PEER_GONE, ABORTS, since=""),
    # ... its exceptions, with NCCL's last error where a call of NCCL has failed
    *(Wording(f"{what}{_STATUS}", How.RAISE, PEER_GONE, LAST_ERROR)
      for what in ("NCCL Async Error", "NCCL AllReduce failed", "NCCL GroupEnd failed", "NCCL split failed",
                   "NCCL commShrink failed", "Failed to initialize NCCL communicator")),
    *(Wording(f"{what}{_STATUS}", How.RAISE, PEER_GONE, LAST_ERROR, since="2.15.0")
      for what in ("NCCL commShrink failed during reconfigure", "NCCL commGrow failed during reconfigure")),
    Wording("Failed to initialize NCCL communicator: |{status}", How.RAISE, ""),
    Wording("Failed to get NCCL unique ID: |{status}", How.RAISE, ""),
    Wording("NCCL operation timed out", How.RAISE, PEER_GONE, "nccl operation timed out"),
    Wording("NCCL communicator was aborted after a previous error", How.RAISE, PEER_GONE, ABORTED, printed=True),
    Wording("Work timed out during finalize", How.RAISE, PEER_GONE, "work timed out during finalize"),
    Wording("WorkQ finalize returned in progress or not started state", How.RAISE, PEER_GONE,
            "workq finalize returned in progress"),
    Wording("Watchdog caught collective operation timeout: NCCL operation timed out", How.RAISE_OWN, PEER_GONE, since="2.15.0"),
    Wording("NCCL operation failed", How.RAISE_OWN, PEER_GONE),
    Wording("NCCL AllReduce failed| timed out after |{} ms", How.RAISE_OWN, PEER_GONE),
    Wording("NCCL commRevoke did not complete during reconfigure within |{} ms", How.RAISE_OWN, PEER_GONE, since="2.15.0"),
    Wording("nccl2 reconfigure uuid |{}|" + _EACH_ONCE, How.RAISE, MISUSE, ("nccl2 reconfigure uuid", "was already used")),
    Wording("Local nccl2 reconfigure handle is not part of the new communicator", How.RAISE, MISUSE,
            "nccl2 reconfigure handle is not part of the new"),
    Wording("Invalid nccl2 reconfigure handle: {}", How.RAISE, MISUSE, "invalid nccl2 reconfigure handle"),
    Wording("nccl2 reconfigure quorum has ranks outside communicator |{}", How.RAISE, MISUSE,
            "nccl2 reconfigure quorum has ranks outside", since="2.15.0"),
    Wording("ProcessGroupNCCL has not been initialized. Call reconfigure() before issuing collectives when "
            "enable_reconfigure=True.", How.RAISE, MISUSE, "call reconfigure() before issuing"),
    Wording("ProcessGroupNCCL is being reconfigured; collective submissions are not accepted during the communicator transition",
            How.RAISE, MISUSE, "is being reconfigured; collective submissions", since=""),
    Wording("NCCL communicator cannot shrink while work is pending", How.RAISE, MISUSE,
            "nccl communicator cannot shrink while work is pending"),
    # The older backend.
    Wording("Watchdog caught collective operation timeout: |WorkNCCL({}|)| ran for |{} milliseconds before timing out.",
            How.ABORT, PEER_GONE, "watchdog caught collective operation timeout", printed=True),
    Wording("Terminating the process after attempting to dump debug info, due to |collective timeout or exception", How.ABORT,
            PEER_GONE, "terminating the process after attempting to dump debug info", printed=True),
    Wording("ProcessGroupNCCL's watchdog got stuck for {} seconds", How.LOG, PEER_GONE, "watchdog got stuck for", printed=True),
    Wording("Received a dump signal due to a collective timeout from {}", How.LOG, PEER_GONE,
            "dump signal due to a collective timeout", printed=True),
    Wording("NCCL communicator was aborted on rank {}", How.RAISE_OWN, PEER_GONE, ABORTED, printed=True),
    # gloo.
    *(Wording(f"Timed out waiting |{{}}|ms for {what} operation to complete", How.RAISE, PEER_GONE,
              ("timed out waiting", f"ms for {what} operation"), printed=True, since="2.13.0", library="gloo")
      for what in ("recv", "send")),
    # ... in each operation after one that has timed out
    Wording("Application timeout caused pair closure", How.RAISE, PEER_GONE, "application timeout caused pair closure",
            printed=True, since="2.13.0", library="gloo"),
    Wording("Gloo reconfigure uuid |{}|" + _EACH_ONCE, How.RAISE, MISUSE, ("gloo reconfigure uuid", "was already used"),
            library="gloo"),
    Wording("Invalid Gloo reconfigure handle: {}", How.RAISE, MISUSE, "invalid gloo reconfigure handle", library="gloo"),
    Wording("Local Gloo reconfigure handle is not part of the new communicator", How.RAISE, MISUSE,
            "gloo reconfigure handle is not part of the new", library="gloo"),
    # torch's watchdog for groups that are written in Python (nccl4py), and for symmetric memory
    Wording("Default timeout callback fired, calling os.abort()", How.ABORT, PEER_GONE, CALLBACK, since="2.15.0",
            library="python"),
    Wording("Watchdog event loop appears stuck |(no response within |{}|s)| -- aborting process", How.ABORT, PEER_GONE,
            STUCK_LOOP, since="2.15.0", library="python"),
    # NCCL. Any other status is a peer's, too.
    Wording("remote process exited or there was a network error", How.STATUS, PEER_GONE, "remote process exited or there was",
            printed=True, library="nccl"),
    Wording("unhandled system error (run with NCCL_DEBUG=INFO for details)", How.STATUS, PEER_GONE,
            "unhandled system error (run with nccl_debug=", library="nccl"),
    Wording("internal error - please report this issue to the NCCL developers", How.STATUS, PEER_GONE,
            "report this issue to the nccl developers", library="nccl"),
    Wording("{}: communicator was revoked", How.STATUS, PEER_GONE, GROUP_GONE[0], library="nccl"),
    Wording("unhandled cuda error (run with NCCL_DEBUG=INFO for details)", How.STATUS, GPU_LAUNCH,
            "unhandled cuda error (run with nccl_debug=", printed=True, library="nccl"),
    Wording("invalid usage (run with NCCL_DEBUG=WARN for details)", How.STATUS, MISUSE, "invalid usage (run with nccl_debug=",
            library="nccl"),
    Wording("invalid argument (run with NCCL_DEBUG=WARN for details)", How.STATUS, MISUSE,
            "invalid argument (run with nccl_debug=", library="nccl"),
    Wording("Multiple Ranks are using the same GPU/Partition.", How.STATUS, MISUSE, "multiple ranks are using the same gpu",
            printed=True, library="nccl"),
    Wording("Duplicate GPU detected : rank {} and rank {} both on CUDA device {}", How.STATUS, MISUSE, "duplicate gpu detected",
            printed=True, since="", library="nccl"),
)  # fmt: skip


def keys(rule: str, printed: bool) -> tuple[Text, ...]:
    """Return what a rule of this name searches for. printed: also on stderr, or in exceptions only."""
    of_rule = [each for each in WORDINGS if each.rule == rule and each.printed == printed]
    return tuple(dict.fromkeys(each.key for each in of_rule if each.key is not None))


# Lines by which a backend aborts the process, and others by which it says why: the parts that one line holds, the rarest first.
OWN_LINES: tuple[tuple[str, ...], ...] = (ABORTS, CALLBACK, STUCK_LOOP, ASYNC_ERROR, QUERY_FAILED)
