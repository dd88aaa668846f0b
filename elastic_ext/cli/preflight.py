"""`elastic-ext doctor --preflight`: measures this node, and together with others the network between them; names the outlier.

A child process (`preflight_probe.py`) measures, because a device or a disk may hang.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from elastic_ext.base import isolated, names
from elastic_ext.base.errors import EX_UNAVAILABLE
from elastic_ext.base.settings import Settings
from elastic_ext.cli import FAIL, WARN, Finding, as_json, exit_code, one_line, rendered
from elastic_ext.cli.doctor import PROBE_S, check_settings
from elastic_ext.cli.preflight_figures import Figure, bad_node, judged
from elastic_ext.failures import slurm

PROBE = str(Path(__file__).with_name("preflight_probe.py"))
VARIABLE = "ELASTIC_EXT_PREFLIGHT"
IMPORTING = "importing torch"  # what the child does first; if it fails there, it is not for this node's hardware
HARDWARE = "preflight"  # the finding where the child hung or died while it measured; a warning where it was killed
ALONE_S, TOGETHER_S = 40.0, 110.0  # for the child once it has imported torch; a healthy node takes some seconds
END_S = 0.5  # for the child to end on its own, and then on SIGTERM
FIRST_PORT, PORTS = 32000, 768  # of the step of a Slurm job, below the ports that the kernel gives out


@dataclass(frozen=True)
class Task:
    """What the child measures, as JSON in the variable VARIABLE. Only the child looks into a directory, which may hang."""

    # Directories to write to, or to what is there above them, by the setting that names them; "": where temporary files go.
    disks: Mapping[str, str]
    storage: str  # checkpoint_dir, if it is there; "" to leave it out
    together: bool  # whether this is one of several processes that measure the network between their nodes
    node: str = ""  # what the processes of this node, and no others, have in common; "": the host's name
    workers: int = 0  # that a job starts on this node; 0: unknown


def party(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for the processes that measure together, and NODE; empty if this process is alone.

    They come from torchrun, or from a step of Slurm with several tasks (srun), not from a batch script.
    """
    if environ.get("WORLD_SIZE", "1") != "1" and "RANK" in environ and "MASTER_ADDR" in environ:
        return {"NODE": environ.get("GROUP_RANK", "")}
    if environ.get("SLURM_STEP_NUM_TASKS", "1") == "1" or "SLURM_PROCID" not in environ:
        return {}
    hosts = slurm.hostnames({**environ, "SLURM_JOB_NODELIST": environ.get("SLURM_STEP_NODELIST", "")})
    number = sum(int(text) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if (text := environ.get(name, "")).isdecimal())
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or (hosts[0] if hosts else ""),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(FIRST_PORT + number % PORTS),
        "NODE": environ.get("SLURM_NODEID", ""),
    }


def run(args: argparse.Namespace) -> int:
    """Measure, and print what was found; return 78 if something failed or is an outlier, else 0. Alone, as an agent's health
    check, 69 if that is the fault of this node's hardware.

    Of several processes that measure together rank 0 prints; another one prints only why it cannot take part.
    """
    read: list[Settings] = []
    first = check_settings(args.rdzv_conf, os.environ, read)
    if not read:
        return _print([first], args.json)
    variables = {} if args.alone else party(os.environ)
    if variables.get("MASTER_ADDR") == "":
        detail = "the hosts of this step are unknown (SLURM_STEP_NODELIST, scontrol)"
        return _print([Finding("processes", FAIL, detail, "set MASTER_ADDR to the host of task 0")], args.json)
    task = _task(read[0], args.alone, variables)
    environ = {names.OPTIONS: names.BRIEFLY, **os.environ, **variables, VARIABLE: json.dumps(asdict(task))}
    figures, failure = measure(environ, TOGETHER_S if task.together else ALONE_S)
    if task.together and environ["RANK"] != "0" and failure is None:
        return 0
    code = _print([*([failure] if failure else []), *judged(figures)], args.json, figures)
    ill = bad_node(figures) or (failure is not None and (failure.name, failure.state) == (HARDWARE, FAIL))
    return EX_UNAVAILABLE if args.alone and ill else code


def _print(findings: list[Finding], as_document: bool, figures: Sequence[Figure] = ()) -> int:
    """Print the findings; as JSON also each figure. Return the exit code."""
    more = {"figures": [asdict(figure) for figure in figures]}
    print(as_json(findings, more) if as_document else rendered(findings), flush=True)
    return exit_code(findings)


def _task(settings: Settings, alone: bool, variables: Mapping[str, str]) -> Task:
    """Return what to measure. Alone, as an agent's health check, a node does not answer for a storage that all nodes share."""
    disks = {"TMPDIR": ""}
    if settings.local_dir is not None and "://" not in settings.local_dir:
        disks["local_dir"] = settings.local_dir
    storage = "" if alone else settings.checkpoint_dir or ""
    workers = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Task(disks, storage, bool(variables), variables.get("NODE", ""), int(workers) if workers.isdecimal() else 0)


def measure(environ: Mapping[str, str], limit_s: float) -> tuple[list[Figure], Finding | None]:
    """Run the child; return its figures, and why it failed, if it did.

    limit_s: seconds from its first line, which comes once torch is imported.
    """
    figures: list[Figure] = []
    doing, ended = IMPORTING, False
    with os.fdopen(os.memfd_create("errors"), "w+b") as errors:  # a disk may be full
        process = subprocess.Popen(
            isolated.command(PROBE), env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )  # in this process group, with which the agent kills a health check
        assert process.stdout is not None
        try:
            for message in _messages(process.stdout, limit_s):
                doing, ended = message.get("doing", doing), message.get("end", ended)
                if "figure" in message:
                    figures.append(Figure.of(message["figure"]))
        except TimeoutError as error:
            return figures, Finding(HARDWARE, FAIL, f"{doing}: {error}")
        finally:
            _end(process)
        if ended:
            return figures, None
        if process.returncode == -signal.SIGKILL:  # not by `_end`, which waits for no process that it has killed
            why = "killed, by the kernel for want of memory, say; that shows nothing of this node's hardware"
            return figures, Finding(HARDWARE, WARN, f"{doing}: {why}")
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    name = "torch" if doing == IMPORTING else HARDWARE
    return figures, Finding(name, FAIL, f"{doing}: {one_line(last) or f'ended with code {process.returncode}'}")


def _messages(pipe: IO[bytes], limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield the child's messages until it ends. Raises TimeoutError."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    within_s, rest = PROBE_S, b""
    deadline = time.monotonic() + within_s
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        chunk = os.read(pipe.fileno(), 65536)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for message in filter(None, map(_message, lines)):
            if within_s != limit_s:  # the first one
                within_s, deadline = limit_s, time.monotonic() + limit_s
            yield message
    raise TimeoutError(f"no end within {within_s:g} s")


def _message(line: bytes) -> dict[str, Any]:
    """Return a message of the child; {} for a line that a library has printed while it was imported."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of the child; end it if that does not come. What sleeps in the kernel stays."""
    assert process.stdout is not None
    process.stdout.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            process.wait(END_S)
            return
        except subprocess.TimeoutExpired:
            process.send_signal(number)
