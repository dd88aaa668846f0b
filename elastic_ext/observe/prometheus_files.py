"""Files for Prometheus: one by which it finds this agent, and one with the agent's last metrics.

File-based service discovery (file_sd_configs), with one file per agent, names the port that was really taken, so several agents
on a host need no agreement on ports.

The textfile collector of the node exporter reads the last metrics. An agent ends at the verdict, mostly before the next scrape:
what it counted last would be lost, and that is the failure itself.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client.exposition import write_to_textfile
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

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


NOT_OURS = "process_"  # the node exporter has its own, and refuses a file with the same


class _Labelled(Collector):
    """Families of another registry, each sample with more labels. The node exporter refuses files that repeat a series."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            if not family.name.startswith(NOT_OURS):
                family.samples = [each._replace(labels={**self._labels, **each.labels}) for each in family.samples]
                yield family

    def describe(self) -> Iterable[Metric]:
        return ()


def write(path: str, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
    """Write the metrics, whole or not at all; a failure is logged.

    path: ends with .prom, in the collector's directory. labels: added to each sample; they tell agents of one host apart.
    """
    whole = CollectorRegistry()
    whole.register(_Labelled(registry, labels))
    try:
        write_to_textfile(path, whole)
    except Exception as error:  # noqa: BLE001 - a collector may raise anything, and the result of the job matters more
        logger.warning("metrics: cannot write metrics_file=%s: %s", path, error)


class TextFile:
    """Writes the file in a thread, for a file server that hangs must not hold up the end of an agent.

    For one thread: `begin`, then `wait`, and the same again if there is more.
    """

    def __init__(self, path: str, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        """See `write`."""
        self._path, self._registry, self._labels = path, registry, labels
        self._thread: threading.Thread | None = None
        self._again = self._warned = False

    def begin(self) -> None:
        """Begin to write what the metrics are now. Returns at once."""
        if self._thread is not None and self._thread.is_alive():
            self._again = True  # beside a write that hangs, another would, too
            return
        self._again = False
        thread = threading.Thread(
            target=write, args=(self._path, self._registry, self._labels), name="elastic_ext-textfile", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # a limit on threads
            logger.warning("metrics: cannot write metrics_file=%s: %s", self._path, error)
        else:
            self._thread = thread

    def wait(self, limit_s: float) -> None:
        """Wait until it is written, for limit_s seconds at most; log once if it is not."""
        by = time.monotonic() + limit_s
        while self._thread is not None:
            self._thread.join(max(0.0, by - time.monotonic()))
            if self._thread.is_alive():
                if not self._warned:
                    logger.warning("metrics: metrics_file=%s does not take the last metrics within %.1f s", self._path, limit_s)
                self._warned = True
                return
            if not self._again:
                return
            self.begin()
