"""Loads etcd3 0.12.0 with message classes that work on every protobuf, leaving no trace in the process.

etcd3's generated code fails on protobuf 4 and later, and the environment variable that cures it slows down all protobuf code in
the process. So this module imports etcd3 with `etcd3.etcdrpc` replaced by our own module, and removes it from sys.modules again:
a user's own `import etcd3` gets the same as without us.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import os
import sys
import threading
import types
from pathlib import Path

from elastic_ext.etcd import errors, messages

VERSION = "0.12.0"
_INSTALL = f"pip install --force-reinstall etcd3=={VERSION}"

_lock = threading.Lock()
_loaded: types.ModuleType | None = None


def etcd3() -> types.ModuleType:
    """Return etcd3, private to this package: Etcd3Client, Etcd3Exception. Load it at the first call.

    Raises ConfigError: etcd3 is not installed, has another version, or was replaced by another distribution.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            check_distribution()
            _use_the_systems_resolver()
            _loaded = _import()
        return _loaded


_RESOLVER = "GRPC_DNS_RESOLVER"


def _use_the_systems_resolver() -> None:
    """Have gRPC look names up as everything else here does, unless the user has chosen how, or gRPC was used before.

    Its own resolver also asks the name server about names that are in /etc/hosts, for an IPv6 address, and waits for the answer.
    gRPC reads the variable with its first channel; it is not for workers.
    """
    if _RESOLVER in os.environ:
        return
    os.environ[_RESOLVER] = "native"
    try:
        import grpc  # type: ignore[import-untyped, unused-ignore]

        grpc.insecure_channel("localhost:1").close()
    finally:
        del os.environ[_RESOLVER]


def _import() -> types.ModuleType:
    theirs = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_etcd3(name)}
    try:
        sys.modules["etcd3.etcdrpc"] = messages.etcdrpc()
        return importlib.import_module("etcd3")
    finally:
        for name in [name for name in sys.modules if _is_etcd3(name)]:
            del sys.modules[name]
        sys.modules.update(theirs)


def _is_etcd3(name: str) -> bool:
    return name == "etcd3" or name.startswith("etcd3.")


def check_distribution() -> None:
    """Raise ConfigError unless the top-level module `etcd3` belongs to the distribution etcd3 0.12.0.

    etcd3-py and some forks install a package of the same name, over it or before it on the path.
    """
    try:
        distribution = importlib.metadata.distribution("etcd3")
    except importlib.metadata.PackageNotFoundError:
        raise errors.ConfigError(f"the etcd client needs etcd3=={VERSION}, which is not installed: {_INSTALL}") from None
    if distribution.version != VERSION:
        raise errors.ConfigError(f"the etcd client needs etcd3=={VERSION}, found {distribution.version}: {_INSTALL}")
    expected = Path(str(distribution.locate_file("etcd3/client.py")))
    found = _module_folder()
    if found is None or not expected.exists() or not expected.parent.samefile(found):
        raise errors.ConfigError(
            f"the module etcd3 found at {found} is not that of etcd3=={VERSION} ({expected.parent}): "
            "another distribution of that name comes first; uninstall it, or move it to the end of the path"
        )
    if not _unchanged(distribution, expected):
        raise errors.ConfigError(
            f"{expected} is not the file that etcd3=={VERSION} installed: another distribution (etcd3-py?) wrote over it; "
            f"uninstall that one, then {_INSTALL}"
        )


def _module_folder() -> Path | None:
    # importlib.util.find_spec would look at a user's own module in sys.modules.
    spec = importlib.machinery.PathFinder.find_spec("etcd3")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _unchanged(distribution: importlib.metadata.Distribution, path: Path) -> bool:
    """Return False if the file differs from its checksum; True if it has none, as in packages of Linux distributions."""
    for entry in distribution.files or []:
        if entry.as_posix() == "etcd3/client.py" and entry.hash is not None:
            digest = hashlib.new(entry.hash.mode, path.read_bytes()).digest()
            return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == entry.hash.value
    return True
