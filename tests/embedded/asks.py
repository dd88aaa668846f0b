"""Requests of etcd's API in few words."""

from __future__ import annotations

from typing import Any

from elastic_ext.etcd.messages import etcdrpc

rpc: Any = etcdrpc()


def put(key: bytes, value: bytes = b"", lease: int = 0) -> Any:
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes, end: bytes = b"") -> Any:
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key, range_end=end))


def get(key: bytes, end: bytes = b"", **more: Any) -> Any:
    return rpc.RequestOp(request_range=ask(key, end, **more))


def ask(key: bytes, end: bytes = b"", **more: Any) -> Any:
    return rpc.RangeRequest(key=key, range_end=end, **more)


def compare(key: bytes, result: str, end: bytes = b"", **wanted: Any) -> Any:
    """wanted: one of version, create_revision, mod_revision, value and lease, with what it is compared with."""
    (name,) = wanted
    return rpc.Compare(key=key, range_end=end, result=result, target=name.removesuffix("_revision").upper(), **wanted)


def txn(*success: Any, compare: Any = (), failure: Any = ()) -> Any:
    return rpc.TxnRequest(success=success, compare=compare, failure=failure)


def grant(lease: int, ttl_s: int = 10) -> Any:
    return rpc.LeaseGrantRequest(ID=lease, TTL=ttl_s)


def revoke(lease: int) -> Any:
    return rpc.LeaseRevokeRequest(ID=lease)


def watch(key: bytes, end: bytes = b"", **more: Any) -> Any:
    return rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=key, range_end=end, **more))


def cancel(watch_id: int) -> Any:
    return rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=watch_id))
