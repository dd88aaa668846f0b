"""The child process of `doctor.py`. It prints what torchrun would find on this machine.

It runs by path, with the interpreter and environment (thus PYTHONPATH) of the command, and imports torch and all plug-ins.

Output, one JSON object: {"torch": ANSWER, "plugins": {NAME: ANSWER}, "site": ANSWER, "agent": ANSWER}, where ANSWER is
{"found": TEXT} or {"error": TEXT}, on one line.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
    del sys.path[0]  # the directory of this file: its modules must not be importable by their short names
_AT_START = frozenset(sys.modules)

# ruff: noqa: E402
import functools
import json
import os
from importlib.metadata import entry_points

TYPE_CHECKING = False  # as typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

GROUP = "torchrun.handlers"
BACKEND = "ext_c10d"


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # plug-ins may print
    found = {"torch": _guarded(_torch), "plugins": _plugins(), "site": _guarded(_site), "agent": _guarded(_agent)}
    with os.fdopen(answers, "w") as file:
        json.dump(found, file)
    os._exit(0)  # skip the threads and exit handlers of plug-ins


def _guarded(probe: "Callable[[], str]") -> "dict[str, str]":
    """Return {"found": ...} or {"error": ...}, because anything here may be broken."""
    try:
        return {"found": probe()}
    except BaseException as error:  # noqa: BLE001 - other people's code; the doctor reports it
        return {"error": f"{type(error).__name__}: {error}"}


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _plugins() -> "dict[str, dict[str, str]]":
    """Load each entry point of the group as torch does."""
    _guarded(_torch)
    return {point.name: _guarded(functools.partial(_loaded, point)) for point in entry_points(group=GROUP)}


def _loaded(point: "EntryPoint") -> str:
    return repr(point.load()())


def _site() -> str:
    """Return why warm standbys could not replace workers; "" if they can."""
    from elastic_ext.workers.standby import import_checks

    return import_checks.site_reads_variables(_AT_START) or ""


def _agent() -> str:
    """Return the class that torch's launcher constructs for our rendezvous, as in `launch_agent` without the run."""
    import torch.distributed.launcher.api as launcher
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    handler = get_rendezvous_handler(RendezvousParameters(BACKEND, "localhost:0", "doctor", 1, 1, timeout=900))
    spec = WorkerSpec("default", 1, handler, entrypoint=sys.executable, args=("-c", "pass"))
    agent = launcher.LocalElasticAgent(spec=spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull), start_method="spawn")
    return f"{type(agent).__module__}.{type(agent).__qualname__}"


if __name__ == "__main__":
    main()
