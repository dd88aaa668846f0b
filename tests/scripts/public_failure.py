"""One failure as public reports have it. Usage: public_failure.py KIND FOLDER. Each start adds a line to FOLDER/starts."""

import os
import signal
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


class LocalEntryNotFoundError(FileNotFoundError, ValueError):
    __module__ = "huggingface_hub.errors"


def step() -> None:
    parameter.grad = torch.ones(1)
    optimizer.step()


if kind == "unknown":
    raise RuntimeError(f"the license server does not answer, request {uuid.uuid4()}")
if kind == "hub is away" and tries < 3:
    raise LocalEntryNotFoundError("we cannot find the requested files in the local cache. Please check your connection")
if kind == "no credentials":
    raise NoCredentialsError("Unable to locate credentials")
if kind == "crash on load" and (resume_from() or "").endswith("step_200.pt"):
    os.kill(os.getpid(), signal.SIGSEGV)
step()
if kind == "other key each time":
    raise KeyError(uuid.uuid4().hex)
if kind == "other text each time":  # never the same shape
    raise RuntimeError(" ".join(["again"] * tries))
if kind == "nan as an assertion" and tries == 1:
    raise AssertionError("Rank 0: found NaN in local forward loss calculation. Device: 0, node: n0")
if kind == "leaves with a text":
    sys.exit("no shard is left in the bucket")
