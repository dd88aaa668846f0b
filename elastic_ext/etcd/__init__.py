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

if TYPE_CHECKING:
    from elastic_ext.etcd.calls import CallObserver
    from elastic_ext.etcd.client import EtcdClient
    from elastic_ext.etcd.endpoints import Tls
    from elastic_ext.etcd.errors import (
        AuthError,
        ClientClosed,
        Compacted,
        ConfigError,
        EtcdError,
        LeaseLost,
        QuotaExceeded,
        TlsError,
        Unavailable,
        UnsupportedVersion,
    )
    from elastic_ext.etcd.lease import LeaseSession
    from elastic_ext.etcd.values import Compare, Delete, Event, Get, KeyValue, Put, Reading, TxnResult, absent, unchanged
    from elastic_ext.etcd.watch import FROM_NOW, Batch, Began, Snapshot, SnapshotWatch, Watch

__all__ = [
    "FROM_NOW",
    "AuthError",
    "Batch",
    "Began",
    "CallObserver",
    "ClientClosed",
    "Compacted",
    "Compare",
    "ConfigError",
    "Delete",
    "EtcdClient",
    "EtcdError",
    "Event",
    "Get",
    "KeyValue",
    "LeaseLost",
    "LeaseSession",
    "Put",
    "QuotaExceeded",
    "Reading",
    "Snapshot",
    "SnapshotWatch",
    "Tls",
    "TlsError",
    "TxnResult",
    "Unavailable",
    "UnsupportedVersion",
    "Watch",
    "absent",
    "unchanged",
]

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


def __getattr__(name: str) -> object:
    """Import a name of this package when it is first used (PEP 562)."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
