"""What the agent needs of its host before workers start: a command that exists, room, descriptors, a healthy node.

The user's commands about this node are run by a shell, so that they may be what a site runs elsewhere: Slurm's
HealthCheckProgram, a prolog, `dcgmi diag -r 1`.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec

import elastic_ext
from elastic_ext.base import contracts, errors, files, isolated
from elastic_ext.base.printable import NO_RUN_IDS, printable, redacted, shown
from elastic_ext.base.settings import ENV_PREFIX, SECRET_VARIABLES, Settings
from elastic_ext.failures.evidence import exit_status
from elastic_ext.failures.policy import NO_LIMIT
from elastic_ext.rendezvous.configuration import WorkerProgram

if TYPE_CHECKING:
    from elastic_ext.workers.standby.modules import StandbySpec

logger = logging.getLogger(__name__)

BOOTSTRAP = str(Path(__file__).parents[1] / "workers" / "bootstrap" / "bootstrap.py")
UNLIMITED = 2**31 - 1  # torch counts down from this if there is no limit; its metrics divide by this + 1
# The agent's private directory: where, how its name begins, and the name of the lock in it, see `own_run_dir`.
IN_MEMORY, RUN_DIR, OWNER = "/dev/shm", "elastic_ext_", ".owner"
FILES, FILES_PER_WORKER = 16, 8  # at most, in the agent's private directory
# Descriptors that an agent opens during its run; measured on one node, plus a margin. Per worker: its pidfd and two connections
# to the store of the round. Extras: warm standbys, the pipes of stderr and the memory that keeps the last of their output.
DESCRIPTORS, DESCRIPTORS_PER_WORKER = 24, 3
EXTRAS, EXTRAS_PER_WORKER = 16, 5
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
OUTPUT_BYTES = 4096  # the end of what a command prints goes to the log
KILL_S = 1.0  # for a killed command; one that sleeps in the kernel is left behind
PREFLIGHT = "preflight"  # as health_command: our own check
BAD_NODE_S = 10.0  # time for bad_node_command: the others wait for this node to leave


@dataclass(frozen=True)
class PythonProgram:
    """`python -u [-m] program`, as torchrun builds it."""

    options: tuple[str, ...]
    is_module: bool
    program: str
    args: tuple[Any, ...]


def python_program(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> PythonProgram | None:
    """Return the Python program of a command line; None for functions, other programs and unknown interpreter options."""
    if not isinstance(entrypoint, str) or not (entrypoint == sys.executable or _PYTHON.fullmatch(os.path.basename(entrypoint))):
        return None
    rest = list(args)
    options = []
    if rest and rest[0] == "-u":
        options.append(rest.pop(0))
    is_module = bool(rest) and rest[0] == "-m"
    if is_module:
        rest.pop(0)
    if not rest or str(rest[0]).startswith("-"):
        return None
    return PythonProgram(tuple(options), is_module, str(rest[0]), tuple(rest[1:]))


def prepare(spec: WorkerSpec, settings: Settings) -> WorkerSpec:
    """Return the spec that the agent runs: with our restart budget and the bootstrap.

    Raises UsageError: the script or the command does not exist.
    """
    spec = copy.copy(spec)
    if settings.max_restarts is not None:
        spec.max_restarts = UNLIMITED if settings.max_restarts == NO_LIMIT else settings.max_restarts
    if isinstance(spec.entrypoint, str) and shutil.which(spec.entrypoint) is None:
        raise errors.UsageError(f"the command {spec.entrypoint!r} was not found or cannot be executed; nothing was started")
    program = python_program(spec.entrypoint, spec.args)
    if program is None:
        return spec
    # The worker looks up a module on its own sys.path; "${...}" is one of torch's macros.
    if not program.is_module and "${" not in program.program and not os.path.exists(program.program):
        raise errors.UsageError(f"the script {program.program!r} does not exist in {os.getcwd()}; nothing was started")
    module = ("-m",) if program.is_module else ()
    spec.args = (*program.options, BOOTSTRAP, *module, program.program, *program.args)
    return spec


def program_of(spec: WorkerSpec, settings: Settings) -> WorkerProgram:
    """Return what the workers run, to compare with other nodes. spec: as it was given to the agent."""
    program = python_program(spec.entrypoint, spec.args)
    script = program.program if program is not None else spec.entrypoint
    name = script if isinstance(script, str) else getattr(script, "__qualname__", "")
    versions = {"elastic_ext": elastic_ext.__version__, "torch": str(torch.__version__)}
    given = program.args if program is not None else spec.args if isinstance(script, str) else ()
    arguments = tuple(map(str, given))  # those of a function may be anything
    return WorkerProgram(name, spec.role, spec.local_world_size, max_restarts(spec, settings), versions, arguments)


def max_restarts(spec: WorkerSpec, settings: Settings) -> int:
    """Return the job's restart budget, or NO_LIMIT. spec: from `prepare`."""
    return int(spec.max_restarts) if settings.max_restarts is None else settings.max_restarts


def has_bootstrap(spec: WorkerSpec) -> bool:
    """Return whether the workers run through the bootstrap. spec: from `prepare`."""
    program = python_program(spec.entrypoint, spec.args)
    return program is not None and program.program == BOOTSTRAP


def standby_spec(spec: WorkerSpec, settings: Settings, token: str) -> StandbySpec | str:
    """Return the spec of the warm standbys, or the reason why there are none. spec: from `prepare`. token: the agent's."""
    if not settings.standby:
        return "off"
    program = python_program(spec.entrypoint, spec.args)
    if program is None or not has_bootstrap(spec):
        return "not a Python program"
    from elastic_ext.workers.standby.modules import StandbySpec

    return StandbySpec(
        python=(str(spec.entrypoint), *program.options),
        bootstrap=BOOTSTRAP,
        program=tuple(map(str, program.args)),
        workers=spec.local_world_size,
        exclude=settings.preload_exclude or (),
        environ=lambda: {**os.environ, **blanked_secrets(os.environ)},
        token=token,
    )


@contextmanager
def own_run_dir(workers: int) -> Iterator[tuple[str, Sequence[int]]]:
    """Make the agent's private directory, and own it within the context; first remove those that have no owner any more.

    Give its path, and descriptors for processes that own it, too: the reaper removes it if this agent is killed. If both are
    killed (a batch system ends a job), the next agent of this user does. The lock says whether an owner lives, also in another
    container: the kernel lets it go with the last process that has it. Raises UsageError.
    """
    path = make_run_dir(workers)
    remove_orphans(os.path.dirname(path))
    lock: Sequence[int] = ()
    try:
        lock = (files.own(path, OWNER),)
    except OSError as error:
        logger.info("%s stays if this agent and its reaper are killed: %s", path, error)
    try:
        yield path, lock
    finally:
        shutil.rmtree(path, ignore_errors=True)  # first, or another agent would take it for an orphan
        for descriptor in lock:
            os.close(descriptor)


def remove_orphans(parent: str) -> None:
    """Remove the private directories, with copies of the state, of agents of this user that live no more."""

    def say(folder: str) -> None:
        logger.warning("removing what an agent that was killed with all its helpers has left: %s", folder)

    files.remove_orphans(f"{parent}/{RUN_DIR}*", OWNER, say)


def make_run_dir(workers: int) -> str:
    """Make the agent's private directory: in memory if there is room for the files of this many workers, else on disk.

    Raises UsageError: neither has room.
    """
    troubles = []
    for parent in (IN_MEMORY, None):  # None: where Python puts temporary files
        try:
            parent = parent or tempfile.gettempdir()
            _check_room(parent, workers)
            return tempfile.mkdtemp(prefix=RUN_DIR, dir=parent)
        except OSError as error:
            troubles.append(f"{parent or 'temporary files'}: {error.strerror or error}")
        logger.info("cannot keep the agent's files in %s", troubles[-1])
    raise errors.UsageError(
        f"cannot create a directory for the agent's own small files ({'; '.join(troubles)}); expected a file system with "
        f"{_files(workers)} free inodes; free some, or set TMPDIR; nothing was started"
    )


def _files(workers: int) -> int:
    return FILES + workers * FILES_PER_WORKER


def _check_room(directory: str, workers: int) -> None:
    """Raise OSError if there is no room. A file system that does not count its inodes never runs out of them."""
    room = os.statvfs(directory)
    if room.f_files and room.f_favail < _files(workers):
        raise OSError(errno.ENOSPC, f"{room.f_favail} free inodes, {_files(workers)} needed")


def extras_fit(workers: int, left: int) -> bool:
    """Return whether enough descriptors are left for warm standbys and the tails of stderr.

    workers: number of workers of this agent. left: how many more files the agent may open.

    Raises UsageError: too few are left for the workers themselves.
    """
    needed = DESCRIPTORS + workers * DESCRIPTORS_PER_WORKER
    if left < needed:
        raise errors.UsageError(
            f"this agent may open {left} more files, but {workers} workers need {needed}: raise the hard limit on open files "
            "(ulimit -Hn, LimitNOFILE=, --ulimit nofile=) or start fewer workers here; nothing was started"
        )
    return left >= needed + EXTRAS + workers * EXTRAS_PER_WORKER


def blanked_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that hide secrets from a worker, which inherits every variable that is not set for it."""
    return dict.fromkeys(SECRET_VARIABLES & environ.keys(), "")


def start_line(backend: str, run_id: str, metrics: str | None, settings: Settings, resumed: contracts.Resumption) -> str:
    """Return the first log line of the agent. metrics: address of the metrics; None if they are not served."""
    if settings.checkpoint_dir is None:
        begins = "starts from nothing: no checkpoint_dir is set"
    elif resumed.path:
        begins = f"resumes from {redacted(resumed.path)}, step {'unknown' if resumed.step is None else resumed.step}"
    else:
        begins = f"starts from nothing: {redacted(resumed.reason)}"
    known = "no --rdzv-id" if run_id in NO_RUN_IDS else f"run id {run_id}"
    served = metrics or ("not served" if settings.metrics_port is not None else "off")
    return printable(f"elastic_ext {elastic_ext.__version__} supervises this run: {backend}, {known}, metrics {served}, {begins}")


@dataclass(frozen=True)
class CommandEnd:
    """The end of a command. code: as in subprocess; None if it ran out of time. output: the end of what it printed."""

    code: int | None
    output: str


def unfit(ended: CommandEnd, timeout_s: float) -> str | None:
    """Return why the health check has failed; None if the node is fine. timeout_s: the time that it had."""
    if ended.code is None:
        return f"the health check had not ended after {timeout_s:g} s (health_timeout)"
    if ended.code < 0:
        return f"the health check was ended by {exit_status(ended.code)[1]}"
    if ended.code:
        return f"the health check ended with exit code {ended.code}"
    return None


def check_health(settings: Settings, workers: int) -> None:
    """Run health_command, if there is one, and log what it printed. Raises NodeUnfit if it does not end with 0 in time.

    workers: that start on this node.
    """
    if settings.health_command is None:
        return
    command, environ = settings.health_command, dict(os.environ)
    if command == PREFLIGHT:
        command, environ = own_check(settings, environ, workers)
    ended = run_command(command, settings.health_timeout, environ)
    why = unfit(ended, settings.health_timeout)
    _log_command(logging.INFO if why is None else logging.WARNING, "health check", ended)
    if why is not None:
        raise errors.NodeUnfit(why, by_settings=settings.health_command == PREFLIGHT and ended.code == errors.EX_CONFIG)


def own_check(settings: Settings, environ: Mapping[str, str], workers: int) -> tuple[str, dict[str, str]]:
    """Return the shell command of our own health check, and its environment.

    That has no other setting than the check needs. This agent has accepted all of them together with --rdzv-conf and torchrun's
    options; those of its environment alone may contradict each other, which would make the node unfit.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    directory = {f"{ENV_PREFIX}LOCAL_DIR": settings.local_dir} if settings.local_dir else {}
    command = shlex.join([*isolated.command("elastic_ext.cli"), "doctor", "--preflight", "--alone"])
    return command, {**kept, **directory, "LOCAL_WORLD_SIZE": str(workers)}


def report_bad_node(settings: Settings, host: str, reason: str) -> None:
    """Run bad_node_command, if there is one: this node leaves because it is bad. Never raises OSError.

    host: the name of this node. reason: why it leaves, in one line.
    """
    if settings.bad_node_command is None:
        return
    variables = {"ELASTIC_EXT_NODE": host, "ELASTIC_EXT_REASON": shown(reason)}
    ended = run_command(settings.bad_node_command, BAD_NODE_S, {**os.environ, **variables})
    _log_command(logging.INFO if ended.code == 0 else logging.WARNING, "bad_node_command", ended)


def run_command(command: str, timeout_s: float, environ: Mapping[str, str]) -> CommandEnd:
    """Run a shell command; kill it, with what it has started, if it has not ended in time, or if a signal ends the wait."""
    with tempfile.TemporaryFile() as output:  # a pipe might stay open in what outlives the command
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return CommandEnd(127, f"cannot start a shell: {error}")
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            if code is None:
                with suppress(OSError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(KILL_S)
        output.seek(max(0, os.fstat(output.fileno()).st_size - OUTPUT_BYTES))
        return CommandEnd(code, output.read().decode(errors="replace").strip())


def _log_command(level: int, what: str, ended: CommandEnd) -> None:
    logger.log(level, "%s: %s", what, "no end in time" if ended.code is None else f"exit code {ended.code}")
    for line in ended.output.splitlines():
        logger.log(level, "  %s", redacted(line))
