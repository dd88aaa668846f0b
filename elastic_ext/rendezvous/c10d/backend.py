"""Torch's c10d rendezvous backend, made safe as far as that is possible from outside.

Its store takes writes from anybody who reaches its port, and torch unpickles the state it finds there, which would run a
stranger's code. So this module checks the state first: it may hold nothing but torch's own records. If the endpoint is the
loopback, the store listens on the loopback only.
"""

from __future__ import annotations

import errno
import io
import pickle
from datetime import timedelta
from typing import Any, cast

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from elastic_ext.base.torch_private import STATE_CLASSES
from elastic_ext.rendezvous.address import is_loopback
from elastic_ext.rendezvous.round_server import serve

MAX_STATE = 64 << 20  # bytes; a node takes about 200
READ_TIMEOUT_S = 60  # torch's default


def create(params: RendezvousParameters) -> tuple[RendezvousBackend, Store]:
    """Create the backend like torch's `create_backend`."""
    backend, store = _on_loopback(params) or create_backend(params)
    return CheckedBackend(backend), store


def _on_loopback(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store] | None:
    """Host the store if its endpoint is the loopback and this process is to host it; return None otherwise."""
    if params.get("store_type", "tcp").strip().lower() != "tcp":
        return None
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    timeout_s = params.get_as_int("read_timeout", READ_TIMEOUT_S) or 0
    if not is_loopback(host) or timeout_s <= 0:  # torch itself refuses such a timeout
        return None
    is_host = params.get_as_bool("is_host")
    if is_host is False:
        return None
    try:
        store = serve(host, port, timedelta(seconds=timeout_s), multi_tenant=True)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and is_host is None:  # another agent of this machine was faster
            params.config["is_host"] = "0"
        return None  # torch will report it
    return C10dRendezvousBackend(store, params.run_id), store


class CheckedBackend(RendezvousBackend):  # type: ignore[misc, unused-ignore]  # torch's types are not checked
    """Pass a state on only if torch has written it. Raises RendezvousConnectionError otherwise, as if there were no state."""

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return cast(str, self._backend.name)

    def get_state(self) -> tuple[bytes, Token] | None:
        found = cast("tuple[bytes, Token] | None", self._backend.get_state())
        if found is not None:
            check(found[0])
        return found

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = cast("tuple[bytes, Token, bool] | None", self._backend.set_state(state, token))
        if found is not None and not found[2]:
            check(found[0])
        return found


def check(state: bytes) -> None:
    """Raise RendezvousConnectionError unless torch has written this state."""
    try:
        if len(state) > MAX_STATE:
            raise pickle.UnpicklingError(f"{len(state)} bytes")
        _Reader(io.BytesIO(state)).load()
    except Exception as error:  # a forged pickle can raise anything
        raise RendezvousConnectionError(
            f"the rendezvous state was not written by torch ({type(error).__name__}: {error}); check whether "
            "anything else writes to this store"
        ) from error


class _Reader(pickle.Unpickler):
    """Unpickler that builds the records of torch's rendezvous state and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STATE_CLASSES:
            raise pickle.UnpicklingError(f"unexpected class {module[:100]}.{name[:100]}")
        return super().find_class(module, name)
