"""The file by which Prometheus finds this agent: file-based service discovery (file_sd_configs), one file per agent.

It names the port that was really taken, so several agents on a host need no agreement on ports.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

from elastic_ext.base.files import write_whole

logger = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::")
_NAME = re.compile(r"elastic_ext_.*_(?P<where>[^_]*)_(?P<pid>\d+)\.json")


def target(address: str, port: int, host: str) -> str:
    """Return the endpoint as Prometheus writes it. address: what the server is bound to. host: this host's name to others."""
    reachable = host if address in WILDCARDS else address
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"


def announce(directory: str, endpoint: tuple[str, int], labels: dict[str, str]) -> Callable[[], None]:
    """Write the file of this agent; return what removes it. Also removes those that killed agents of this host have left.

    Args:
        directory: made if it is absent; Prometheus reads `*.json` in it, at once after a change.
        endpoint: address and port of the server.
        labels: of the target; they name the job and the node. Without them two jobs would mix.
    """
    folder = Path(directory)
    run_id = re.sub(r"[^A-Za-z0-9.-]", "-", labels.get("run_id", ""))[:100]
    path = folder / f"elastic_ext_{run_id}_{_where()}_{os.getpid()}.json"
    try:
        host = socket.getfqdn() if endpoint[0] in WILDCARDS else ""  # may ask a name server
        text = json.dumps([{"targets": [target(*endpoint, host)], "labels": labels}])
        folder.mkdir(parents=True, exist_ok=True)
        _remove_dead(folder)
        write_whole(path, text)  # Prometheus must never read half a file
    except (OSError, UnicodeError) as error:
        logger.warning("metrics: Prometheus will not find this agent in %s: %s", directory, error)
        return lambda: None
    return lambda: _remove(path)


def _where() -> str:
    """Return what tells apart the places in which the same pid may be another process: this host and its pid namespace."""
    return f"{socket.gethostname().replace('_', '-')}.{os.stat('/proc/self/ns/pid').st_ino}"


def _remove_dead(folder: Path) -> None:
    for path in folder.iterdir():
        found = _NAME.fullmatch(path.name)
        if found is not None and found["where"] == _where() and not os.path.exists(f"/proc/{found['pid']}"):
            _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("metrics: cannot remove %s: %s", path, error)
