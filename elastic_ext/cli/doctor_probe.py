"""Started by `doctor.py` as a process of its own: what torchrun would find here, as JSON on standard output.

Run by path with the interpreter, the environment and so the PYTHONPATH of the command; torch is imported, and plug-ins of others.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
    del sys.path[0]  # the directory of this file: nothing may be imported from there by its short name
_AT_START = frozenset(sys.modules)

# ruff: noqa: E402
import json
import os
from importlib.metadata import entry_points

GROUP = "torchrun.handlers"
BACKEND = "ext_c10d"


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what plug-ins print is no answer
    found = {"torch": _guarded(_torch), "plugins": _plugins(), "site": _guarded(_site), "agent": _guarded(_agent)}
    with os.fdopen(answers, "w") as file:
        json.dump(found, file)
    os._exit(0)  # whatever threads and exit handlers plug-ins have left


def _guarded(look: "object") -> "dict[str, str]":
    """{"found": ...}, or {"error": ...} in one line: anything may be broken here."""
    try:
        return {"found": look()}  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 - the code of others; the doctor tells of it
        return {"error": f"{type(error).__name__}: {error}"}


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _plugins() -> "dict[str, dict[str, str]]":
    """Each entry point of the group, loaded as torch does it."""
    _guarded(_torch)
    return {point.name: _guarded(lambda point=point: repr(point.load()())) for point in entry_points(group=GROUP)}


def _site() -> str:
    """Why standbys could not stand for workers, "": nothing."""
    from elastic_ext.workers.standby import import_checks

    return import_checks.site_reads_variables(_AT_START) or ""


def _agent() -> str:
    """The class that torch's launcher constructs for our rendezvous: what `launch_agent` does, but for running it."""
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
