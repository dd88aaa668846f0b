"""The state of our job in Slurm, from the environment, and from `scontrol show job` if that is installed."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic_ext.base.settings import Settings
from elastic_ext.failures import commands, evidence

TIMEOUT_S = 2.0
TIME_LIMIT = "DUE TO TIME LIMIT"  # Slurm's own text in the job's output
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # what users choose for `sbatch --signal`
LIMIT_MARGIN_S = 5.0  # by its own clock, Slurm sends its signals at about the time of the limit

# From JobState to the reason; other states (RUNNING, COMPLETING, PENDING, ...) do not end a job.
_OTHER_ENDS = ("PREEMPTED", "NODE_FAIL", "CANCELLED", "OUT_OF_MEMORY", "BOOT_FAIL", "REQUEUED", "REVOKED", "STOPPED", "FAILED")
_ENDS = {"TIMEOUT": TIME_LIMIT, "DEADLINE": TIME_LIMIT, **{state: state for state in _OTHER_ENDS}}
_REASONS = {"TimeLimit": TIME_LIMIT, "Preempted": "PREEMPTED", "NodeDown": "NODE_FAIL"}
_FIELD = re.compile(r"(?:^|\s)(JobState|Reason|Restarts)=(\S*)")
_RECORD = re.compile(r"^(?=JobId=)", re.MULTILINE)
_TASK = re.compile(r"JobId=(\d+)\s+ArrayJobId=")


@dataclass(frozen=True)
class SlurmJob:
    """The job in the environment."""

    job_id: str
    # Unix time of the limit; None without a limit, or with Slurm before 23.02, unless the batch script sets it
    end_time: int | None = None
    restarts: int = 0  # how often Slurm has started it again


def job_id(environ: Mapping[str, str]) -> str:
    """Return the job's id; "" outside a job."""
    return environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", ""))


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a step of a job: Slurm does not start it again if its node is lost."""
    return bool(job_id(environ) and environ.get("SLURM_STEP_ID"))


def hosts(environ: Mapping[str, str]) -> int:
    """Return the number of hosts of this step; 1 outside a step, as in the shell of `salloc`."""
    return (_number(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")) or 1) if in_step(environ) else 1


def read_environment(environ: Mapping[str, str]) -> SlurmJob:
    """Return the job that this process belongs to."""
    restarts = _number(environ.get("SLURM_RESTART_COUNT")) or 0
    return SlurmJob(job_id(environ), _number(environ.get("SLURM_JOB_END_TIME")), restarts)


def hostnames(environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> tuple[str, ...]:
    """Return the hosts of the job in Slurm's order, the one of the batch script first; none if scontrol does not say.

    Only Slurm itself can read every list of hosts ("gpu[1-3,7],login-[a-c]2").
    """
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    hosts = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", ""))
    if scontrol is None or not hosts or hosts.startswith("-"):
        return ()
    return tuple((commands.output([scontrol, "show", "hostnames", hosts], timeout_s, environ) or "").split())


def location(environ: Mapping[str, str]) -> str:
    """Return the switches or the block of this node, as "spine.leaf1", the widest first; "" without a topology plugin. Pure.

    The address ends with the node's own name, which is no part of its location; the pattern says what the parts are. A node below
    several switches of the highest level may have an empty part for them.
    """
    pattern, node = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""), environ.get("SLURMD_NODENAME", "")
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    if not node or not pattern.endswith(".node") or not address.endswith(f".{node}"):
        return ""
    return address.removesuffix(f".{node}").strip(".")


def with_location(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return the settings, with the location that Slurm knows as `topology` if that is not set."""
    return settings if settings.topology is not None else replace(settings, topology=location(environ) or None)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


def query(environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> evidence.Platform:
    """Ask Slurm why the job of this process ends. timeout_s: seconds for scontrol."""
    job = read_environment(environ)
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    text = None
    if scontrol is not None and re.fullmatch(r"[0-9]+", job.job_id):  # never an option
        text = commands.output([scontrol, "--oneliner", "show", "job", job.job_id], timeout_s, environ)
    reason = parse_show_job(without_other_tasks(text or "", job.job_id), job.restarts)
    if not reason and job.end_time is not None and time.time() >= job.end_time - LIMIT_MARGIN_S:
        reason = TIME_LIMIT
    return evidence.Platform("slurm", reason)


def without_other_tasks(text: str, job_id: str) -> str:
    """Return the output of `scontrol show job` without other tasks of the array: the id of its last task shows all of them."""
    records = [(_TASK.match(each), each) for each in _RECORD.split(text)]
    return "".join(each for task, each in records if task is None or task[1] == job_id)


def parse_show_job(text: str, restarts: int | None = None) -> str:
    """Return why the job ends, from the output of `scontrol show job`; "" if that gives no reason.

    The output may show several jobs (a heterogeneous job, the run before a requeue): the first with a reason decides.

    Args:
        restarts: how often the job had been started again when this process began; None if unknown.
    """
    fields = _FIELD.findall(text)
    for name, value in fields:
        # "CANCELLED+" or "PREEMPTED,COMPLETING": flags follow the base state.
        for state in re.split(r"[,+]", value) if name == "JobState" else ():
            if state in _ENDS:
                return _ENDS[state]
    if reason := next((_REASONS[value] for name, value in fields if name == "Reason" and value in _REASONS), ""):
        return reason
    # While its processes end, a job that was cancelled has no other mark than that it is not to start again.
    ending = ("JobState", "COMPLETING") in fields and ("Restarts", str(restarts)) in fields
    return "CANCELLED" if ending else ""
