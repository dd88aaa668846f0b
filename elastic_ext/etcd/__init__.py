"""A client for etcd v3 (3.4 and later): calls with deadlines over many endpoints, leases kept alive, watches that resume.

    with EtcdClient("etcd0:2379,etcd1:2379") as client:
        session = LeaseSession(client, ttl_s=10)
        client.txn([], [Put("/job/node", b"here", lease_id=session.lease_id)])
        with client.watch_with_snapshot("/job/") as watch:
            item = watch.get()

Nothing here depends on torch. Importing this package imports neither grpc nor etcd3; the first client does.

Importing it does not import the client either, before a name of it is used: a job on one machine needs the messages only.

Files import each other in one direction: errors, messages, values; vendor, endpoints; calls; lease; watch; client.
"""

import importlib
from typing import TYPE_CHECKING

# What `__getattr__` returns has no type. `X as X` says that it is exported: a type checker cannot work out `__all__`.
# ruff: noqa: I001 - one import for each module
if TYPE_CHECKING:
    from elastic_ext.etcd.calls import CallObserver as CallObserver
    from elastic_ext.etcd.client import EtcdClient as EtcdClient
    from elastic_ext.etcd.endpoints import Tls as Tls
    from elastic_ext.etcd.errors import (
        AuthError as AuthError,
        ClientClosed as ClientClosed,
        Compacted as Compacted,
        ConfigError as ConfigError,
        EtcdError as EtcdError,
        LeaseLost as LeaseLost,
        QuotaExceeded as QuotaExceeded,
        TlsError as TlsError,
        Unavailable as Unavailable,
        UnsupportedVersion as UnsupportedVersion,
    )
    from elastic_ext.etcd.lease import LeaseSession as LeaseSession
    from elastic_ext.etcd.values import (
        Compare as Compare,
        Delete as Delete,
        Event as Event,
        Get as Get,
        KeyValue as KeyValue,
        Put as Put,
        Reading as Reading,
        TxnResult as TxnResult,
        absent as absent,
        unchanged as unchanged,
    )
    from elastic_ext.etcd.watch import (
        FROM_NOW as FROM_NOW,
        Batch as Batch,
        Began as Began,
        Snapshot as Snapshot,
        SnapshotWatch as SnapshotWatch,
        Watch as Watch,
    )

_HOMES = {
    "calls": ("CallObserver",),
    "client": ("EtcdClient",),
    "endpoints": ("Tls",),
    "errors": (
        *("AuthError", "ClientClosed", "Compacted", "ConfigError", "EtcdError", "LeaseLost", "QuotaExceeded"),
        *("TlsError", "Unavailable", "UnsupportedVersion"),
    ),
    "lease": ("LeaseSession",),
    "values": ("Compare", "Delete", "Event", "Get", "KeyValue", "Put", "Reading", "TxnResult", "absent", "unchanged"),
    "watch": ("FROM_NOW", "Batch", "Began", "Snapshot", "SnapshotWatch", "Watch"),
}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> object:
    """Import a name of this package when it is first used (PEP 562)."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
