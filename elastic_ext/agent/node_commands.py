"""Commands of the user about this node: its health check before a round, and what to do when it turns out to be bad.

A shell runs them, so that they may be what a site runs elsewhere: Slurm's HealthCheckProgram, a prolog, `dcgmi diag -r 1`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ext.base.errors import NodeUnfit
from elastic_ext.base.printable import redacted, shown
from elastic_ext.base.settings import Settings

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 4096  # the end of what a command prints goes to the log
KILL_S = 1.0  # for a killed command; one that sleeps in the kernel is left behind
BAD_NODE_S = 10.0  # time for bad_node_command: the others wait for this node to leave


@dataclass(frozen=True)
class Ended:
    """The end of a command. code: as in subprocess; None if it ran out of time. output: the end of what it printed."""

    code: int | None
    output: str


def unfit(ended: Ended, timeout_s: float) -> str | None:
    """Return why the health check has failed; None if the node is fine. timeout_s: the time that it had."""
    if ended.code is None:
        return f"the health check had not ended after {timeout_s:g} s (health_timeout)"
    if ended.code < 0:
        return f"the health check was ended by {_name(-ended.code)}"
    if ended.code:
        return f"the health check ended with exit code {ended.code}"
    return None


def check_health(settings: Settings) -> None:
    """Run health_command, if there is one, and log what it printed. Raises NodeUnfit if it does not end with 0 in time."""
    if settings.health_command is None:
        return
    ended = run(settings.health_command, settings.health_timeout, os.environ)
    why = unfit(ended, settings.health_timeout)
    _log(logging.INFO if why is None else logging.WARNING, "health check", ended)
    if why is not None:
        raise NodeUnfit(why)


def tell_of_bad_node(settings: Settings, host: str, reason: str) -> None:
    """Run bad_node_command, if there is one: this node leaves because it is bad. Never raises OSError.

    Args:
        host: the name of this node.
        reason: why it leaves, in one line.
    """
    if settings.bad_node_command is None:
        return
    variables = {"ELASTIC_EXT_NODE": host, "ELASTIC_EXT_REASON": shown(reason)}
    ended = run(settings.bad_node_command, BAD_NODE_S, {**os.environ, **variables})
    _log(logging.INFO if ended.code == 0 else logging.WARNING, "bad_node_command", ended)


def run(command: str, timeout_s: float, environ: Mapping[str, str]) -> Ended:
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
            return Ended(127, f"cannot start a shell: {error}")
        code = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                _kill(process)
        output.seek(max(0, os.fstat(output.fileno()).st_size - OUTPUT_BYTES))
        return Ended(code, output.read().decode(errors="replace").strip())


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(KILL_S)
    except (OSError, subprocess.TimeoutExpired):
        pass


def _log(level: int, what: str, ended: Ended) -> None:
    logger.log(level, "%s: %s", what, "no end in time" if ended.code is None else f"exit code {ended.code}")
    for line in ended.output.splitlines():
        logger.log(level, "  %s", redacted(line))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
