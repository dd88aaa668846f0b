"""What failures look like, and what they are: the evidence that each leaves, and the truth, which the classifier does not know.

The shares of the looks of a cause are assumed, unless a comment names a source. A share of them lacks the kernel's log, as in a
container that may not read it: then no Xid is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elastic_ext.failures.evidence import WAITS, RaisedException
from elastic_ext.hangs.detector import LIKELY


class Truth(Enum):
    """What a failure is."""

    NODE = "the node is bad until it is repaired"
    GONE = "the node is gone"
    PASSES = "it passes: another start goes well"
    CODE = "a bug: each start ends the same way"
    LIMIT = "too little memory or disk: it comes back, sooner or later"
    TAKEN = "the platform takes the allocation"


class Shows(Enum):
    """How a job learns of a failure."""

    EXIT = "a worker ends"
    GONE = "a node's processes and connections end"
    SILENT = "a node no longer answers"
    HANG = "nothing moves"


@dataclass(frozen=True)
class Look:
    """One way in which a cause shows.

    Attributes:
        share: of the cause's failures.
        evidence: arguments of Evidence.
        truth: what such a failure is, if that differs from the cause's.
        missed: NCCL on two other nodes names the node with the cause, as a peer that does not answer.
        of_writer: one rank meets it, each time after its first step, as rank 0 does that saves and logs.
    """

    share: float
    evidence: Mapping[str, Any]
    shows: Shows = Shows.EXIT
    truth: Truth | None = None
    missed: bool = False
    of_writer: bool = False


@dataclass(frozen=True)
class Cause:
    """A cause of failures.

    Attributes:
        at_start: share of the failures that come before the first step of a job's first round.
        several: it may take several nodes at once.
        outage: it may last beyond the next start.
    """

    truth: Truth
    looks: tuple[Look, ...]
    at_start: float = 0.0
    several: bool = False
    outage: bool = False


def _raised(type_: str, message: str, **more: Any) -> dict[str, Any]:
    return {"exit_code": 1, "exception": RaisedException(type_, message, ("train.py:212 in train_step",)), "oom_kills": 0, **more}


def _killed(signal: str, **more: Any) -> dict[str, Any]:
    return {"signal": signal, "oom_kills": 0, **more}


def _bug(type_: str, message: str, at_start: float = 0.9) -> Cause:
    """at_start: of Acme's script errors, most fail within three minutes (arXiv 2403.07648, table 3)."""
    return Cause(Truth.CODE, (Look(1.0, _raised(type_, message)),), at_start)


_ACCELERATOR, _BACKEND = "torch.AcceleratorError", "torch.distributed.DistBackendError"
_LAUNCH = _raised(_ACCELERATOR, "CUDA error: unspecified launch failure")
_ECC = _raised(_ACCELERATOR, "CUDA error: uncorrectable ECC error encountered")
_ILLEGAL = _raised(_ACCELERATOR, "CUDA error: an illegal memory access was encountered")
_REMOTE = _raised(
    _BACKEND,
    "NCCL error in: ProcessGroupNCCL.cpp:2021, remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
)
_UNANSWERED = _raised(
    _BACKEND,
    "NCCL error in: ProcessGroupNCCL.cpp:2021, remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nNET/IB: Got completion from peer 10.0.0.2<54862> with status=12 opcode=0 len=0 vendor err 129",
)
_FLAP = {"links": ("mlx5_0 port 1",)}  # it is up again by the time of the report
_HANG: dict[str, Any] = {"signal": "SIGKILL", "hang": True, "hang_reason": "rank 0 waits in all_reduce; no worker makes progress"}
_GONE: dict[str, Any] = {}


def _hang(share: float, blame: bool, truth: Truth | None = None) -> Look:
    """blame: whether the stacks show which worker the others wait for."""
    return Look(share, {**_HANG, "hang_blame": (LIKELY if blame else WAITS, 0)}, Shows.HANG, truth)


CAUSES: Mapping[str, Cause] = {
    "gpu": Cause(
        Truth.NODE,
        (
            Look(0.40, _killed("SIGABRT", xids=(79,))),
            Look(0.15, {**_LAUNCH, "xids": (62,)}),
            Look(0.10, {**_ILLEGAL, "xids": (31,)}),
            Look(0.15, _LAUNCH),
            Look(0.10, _raised(_ACCELERATOR, "CUDA error: GPU is lost. Reboot the system to recover this GPU")),
            _hang(0.10, blame=True),
        ),
    ),
    "gpu memory": Cause(
        Truth.NODE,
        (
            Look(0.45, {**_ECC, "xids": (48, 63)}),
            Look(0.15, {**_ECC, "xids": (94,)}, truth=Truth.PASSES),  # contained, and the row is remapped at the next start
            Look(0.10, {**_ECC, "xids": (95,)}),
            Look(0.30, _ECC),
        ),
    ),
    "gpu processor": Cause(
        Truth.NODE, (Look(0.6, {**_LAUNCH, "xids": (119,)}), Look(0.2, _killed("SIGABRT", xids=(120,))), _hang(0.2, blame=True))
    ),
    "gpu hot": Cause(Truth.NODE, (Look(0.5, _LAUNCH), _hang(0.5, blame=False))),
    "gpu not ready": Cause(Truth.NODE, (Look(1.0, _raised("RuntimeError", "No CUDA GPUs are available")),), at_start=1.0),
    "nvlink": Cause(
        Truth.NODE,
        (
            Look(0.5, {**_raised(_ACCELERATOR, "CUDA error: uncorrectable NVLink error detected"), "xids": (74,)}),
            Look(0.2, {**_REMOTE, "xids": (74,)}),
            Look(0.1, _raised(_ACCELERATOR, "CUDA error: uncorrectable NVLink error detected")),
            _hang(0.2, blame=False),  # NVLink often stalls without an error (arXiv 2510.20171)
        ),
    ),
    # Of illegal accesses in jobs of over 2,000 GPUs 21 were of the infrastructure and 41 of code (arXiv 2509.16293).
    "cuda error": Cause(
        Truth.NODE,
        (
            Look(0.25, _killed("SIGABRT", xids=(79,))),
            Look(0.15, {**_ECC, "xids": (48,)}),
            Look(0.10, _LAUNCH),
            Look(0.5 * 21 / 62, {**_ILLEGAL, "xids": (31,)}),
            Look(0.5 * 41 / 62, {**_ILLEGAL, "xids": (31,)}, truth=Truth.CODE),
        ),
    ),
    "illegal access of code": Cause(Truth.CODE, (Look(0.5, {**_ILLEGAL, "xids": (31,)}), Look(0.5, _killed("SIGSEGV")))),
    "core dump": Cause(Truth.CODE, (Look(0.7, _killed("SIGSEGV")), Look(0.3, _killed("SIGABRT")))),
    "network": Cause(Truth.PASSES, (Look(0.6, _REMOTE), _hang(0.4, blame=False)), several=True, outage=True),
    # That in half of them the link goes down, as Linux counts, is assumed. NCCL's last error ("port error") shows it in some.
    "nic": Cause(
        Truth.NODE,
        (
            Look(0.175, _REMOTE),
            Look(0.175, {**_REMOTE, **_FLAP}),
            Look(0.175, _UNANSWERED, missed=True),
            Look(0.175, {**_UNANSWERED, **_FLAP}, missed=True),
            _hang(0.15, blame=False),
            Look(0.15, {**_hang(1.0, blame=False).evidence, **_FLAP}, Shows.HANG),
        ),
    ),
    "hang": Cause(Truth.PASSES, (_hang(1.0, blame=False),)),
    # Of hangs in such jobs 21 were of the infrastructure and 5 of code (arXiv 2509.16293).
    "hang, some of code": Cause(
        Truth.PASSES,
        (_hang(16 / 26, blame=False), _hang(5 / 26, blame=True, truth=Truth.NODE), _hang(5 / 26, blame=False, truth=Truth.CODE)),
    ),
    "node gone": Cause(Truth.GONE, (Look(0.7, _GONE, Shows.GONE), Look(0.3, _GONE, Shows.SILENT)), several=True),
    "power": Cause(Truth.GONE, (Look(1.0, _GONE, Shows.SILENT),), several=True),
    "host ill": Cause(Truth.NODE, (Look(0.5, _killed("SIGBUS")), Look(0.5, _GONE, Shows.SILENT, Truth.GONE))),
    "disk ill": Cause(
        Truth.NODE,
        (
            Look(
                1.0,
                _raised(
                    "OSError",
                    "[Errno 5] Input/output error: '/local/cache/shard'",
                ),
            ),
        ),
    ),
    "wrong numbers": Cause(Truth.NODE, (Look(1.0, _raised("FloatingPointError", "loss is nan at step 9000")),)),
    "diverged": Cause(Truth.CODE, (Look(1.0, _raised("FloatingPointError", "loss is nan at step 9000")),)),
    "service": Cause(
        Truth.PASSES,
        (
            Look(
                0.7,
                _raised(
                    "requests.exceptions.ConnectionError", "HTTPConnectionPool(host='metrics', port=80): Max retries exceeded"
                ),
                of_writer=True,
            ),
            Look(0.3, _raised("ConnectionRefusedError", "[Errno 111] Connection refused")),
        ),
        at_start=0.5,
        outage=True,
    ),
    "object store": Cause(
        Truth.PASSES,
        (
            Look(
                0.6,
                _raised("botocore.exceptions.ClientError", "An error occurred (SlowDown) when calling the PutObject operation"),
                of_writer=True,
            ),
            Look(0.4, _raised("OSError", "[Errno 107] Transport endpoint is not connected: '/data/checkpoints'")),
        ),
        at_start=0.2,
        outage=True,
    ),
    "file system": Cause(
        Truth.NODE,
        (
            Look(0.6, _raised("OSError", "[Errno 116] Stale file handle: '/data'")),
            Look(0.4, _raised("OSError", "[Errno 5] Input/output error")),
        ),
    ),
    "cpu overload": Cause(Truth.PASSES, (Look(0.5, _killed("SIGKILL")), _hang(0.5, blame=True))),
    "host out of memory": Cause(Truth.LIMIT, (Look(1.0, {"signal": "SIGKILL", "oom_kills": 1}),), at_start=0.3),
    "gpu out of memory": Cause(
        Truth.LIMIT,
        (Look(1.0, _raised("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")),),
        at_start=0.5,
    ),
    "loader killed": Cause(
        Truth.LIMIT, (Look(1.0, _raised("RuntimeError", "DataLoader worker (pid 190781) is killed by signal: Killed. ")),)
    ),
    "disk full": Cause(Truth.LIMIT, (Look(1.0, _raised("OSError", "[Errno 28] No space left on device")),)),
    "preempted": Cause(Truth.TAKEN, (Look(1.0, {"signal": "SIGTERM", "agent_signal": "SIGTERM"}),)),
    # Llama 3 went on after most of its 54 software bugs; that a fifth of them needs a mended script is assumed.
    "software bug": Cause(
        Truth.PASSES,
        (
            Look(0.30, _raised("RuntimeError", "step failed: the queue is empty")),
            Look(0.25, _killed("SIGSEGV")),
            Look(0.25, _hang(1.0, blame=True).evidence, Shows.HANG),
            Look(0.10, _raised("AssertionError", "micro batch 3 has no tokens"), truth=Truth.CODE),
            Look(0.10, _raised("KeyError", "'input_ids'"), truth=Truth.CODE),
        ),
    ),
    "arguments": Cause(
        Truth.CODE,
        (Look(1.0, {"exit_code": 2, "stderr_tail": "usage: train.py [-h]\ntrain.py: error: unrecognized arguments"}),),
        at_start=1.0,
    ),
    "AttributeError": _bug("AttributeError", "'Model' object has no attribute 'norm'"),
    "shapes": _bug("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (8x512 and 1024x16)"),
    "AssertionError": _bug("AssertionError", "global batch size is not divisible"),
    "ValueError": _bug("ValueError", "num_heads must divide hidden_size"),
    "ZeroDivisionError": _bug("ZeroDivisionError", "division by zero"),
    "model loading": _bug("RuntimeError", "Error(s) in loading state_dict for Model: Missing key(s) in state_dict", 1.0),
    "dataset loading": _bug("datasets.exceptions.DatasetNotFoundError", "Dataset 'corpus' doesn't exist on the Hub", 1.0),
    "FileNotFoundError": _bug("FileNotFoundError", "[Errno 2] No such file or directory: '/data/train.idx'"),
    "OSError of a path": _bug("OSError", "Can't load tokenizer for '/models/llm'. Make sure that it is the correct path", 1.0),
    "TypeError": _bug("TypeError", "forward() got an unexpected keyword argument 'mask'"),
    "NameError": _bug("NameError", "name 'lr' is not defined"),
    "PermissionError": _bug("PermissionError", "[Errno 13] Permission denied: '/data/out'"),
    "ImportError": _bug("ImportError", "cannot import name 'flash_attn' from 'ops'", 1.0),
    "KeyError": _bug("KeyError", "'input_ids'"),
    "SyntaxError": _bug("SyntaxError", "invalid syntax", 1.0),
    "CalledProcessError": _bug("subprocess.CalledProcessError", "Command '['make']' returned non-zero exit status 2.", 1.0),
    "IndexError": _bug("IndexError", "list index out of range"),
    "driver too old": _bug("RuntimeError", "The NVIDIA driver on your system is too old (found version 11040)", 1.0),
}


def truth_of(cause: Cause, look: Look) -> Truth:
    """Return what a failure is that looks like this."""
    return look.truth or cause.truth
