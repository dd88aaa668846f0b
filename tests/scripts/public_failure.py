"""One failure as public reports have it. Usage: public_failure.py KIND FOLDER. Each start adds a line to FOLDER/starts."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import torch

from elastic_ext import resume_from

kind, folder = sys.argv[1], Path(sys.argv[2])
with (folder / "starts").open("a") as file:
    file.write(f"{os.path.basename(resume_from() or '-')}\n")
tries = len((folder / "starts").read_text().splitlines())
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], 0.1)


class NoCredentialsError(Exception):
    __module__ = "botocore.exceptions"


class MailboxClosedError(Exception):
    __module__ = "wandb.sdk.mailbox.mailbox"


class RefreshError(Exception):
    __module__ = "google.auth.exceptions"


class InductorError(RuntimeError):
    __module__ = "torch._inductor.exc"


class ZeRORuntimeException(Exception):
    __module__ = "deepspeed.runtime.zero.utils"


class LicenseError(Exception):
    pass


class LocalEntryNotFoundError(FileNotFoundError, ValueError):
    __module__ = "huggingface_hub.errors"


def step() -> None:
    parameter.grad = torch.ones(1)
    optimizer.step()


def warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if kind == "unknown":
    raise LicenseError(f"the license server does not answer, request {uuid.uuid4()}")
if kind == "hub is away" and tries < 3:
    raise LocalEntryNotFoundError("we cannot find the requested files in the local cache. Please check your connection")
if kind == "no credentials":
    raise NoCredentialsError("Unable to locate credentials")
# Words that stand in a message, a path, a warning or a child's output, beside what has really failed.
if kind == "disk called sdc":
    raise ValueError("shape mismatch between /data/sdc/labels.npy and /data/sdc/images.npy")
if kind == "rates of learning":
    raise ValueError("learning rate limits must be increasing, got [0.1, 0.001]")
if kind == "child looks for a lost gpu":
    subprocess.run(["bash", "-xc", "grep -q 'gpu has fallen off the bus' /dev/null"], check=False)
    raise KeyError("labels")
if kind == "login is over":
    raise RefreshError("Reauthentication is needed. Please run `gcloud auth application-default login` to reauthenticate.")
if kind == "memory while profiling" and tries == 1:
    raise AssertionError("Error in memory profiling. Initial free memory 3, current free memory 4.")
if kind == "compile cache is busy" and tries == 1:
    raise InductorError("OSError: [Errno 16] Device or resource busy: '/root/.triton/cache/a.so' -> '/root/.triton/cache/b.so'")
if kind == "metadata is late" and tries == 1:
    raise FileNotFoundError(2, "No such file or directory", f"{folder}/step_300/.metadata")
if kind == "core went wrong" and tries == 1:
    raise RuntimeError("NPU function error: c10_npu::acl::AclrtSynchronizeStream, error code is 507035")
if kind == "other number of ranks":
    raise ZeRORuntimeException("The checkpoint being loaded used a DP world size of 32 but the current world size is 24.")
if kind == "crash on load" and (resume_from() or "").endswith("step_200.pt"):
    os.kill(os.getpid(), signal.SIGSEGV)
step()
if kind == "banner of a check":
    warn("INFO silent data corruption checks run every 500 steps")
    if os.environ["RANK"] != "0":
        signal.pause()
    raise MailboxClosedError
if kind == "plan without memory":
    warn("conv.py:456: UserWarning: Plan failed with an OutOfMemoryError: CUDA out of memory. Tried to allocate 1.29 GiB.")
    raise MailboxClosedError
if kind == "fonts are read-only":
    warn("font_manager.py:9: UserWarning: Matplotlib: [Errno 30] Read-only file system: '/root/.cache/matplotlib'")
    raise LicenseError("no seat is left")
if kind == "nan is ignored" and tries == 1:
    warn("Loss is nan, ignoring this batch")
    os.abort()
if kind == "other key each time":
    raise KeyError(uuid.uuid4().hex)
if kind == "other text each time":  # never the same shape
    raise RuntimeError(" ".join(["again"] * tries))
if kind == "nan as an assertion" and tries == 1:
    raise AssertionError("Rank 0: found NaN in local forward loss calculation. Device: 0, node: n0")
if kind == "leaves with a text":
    sys.exit("no shard is left in the bucket")
