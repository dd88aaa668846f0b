"""The steps that take a node out of its job after its agent was killed. The rendezvous writes them, the reaper runs them."""

from __future__ import annotations

from typing import TypedDict


class LastWill(TypedDict):
    """An etcd lease to revoke. It travels as JSON in the `will` message of the reaper's protocol and is part of its version.

    Keys:
        endpoints: URLs of etcd's members, tried in turn.
        lease: the lease's ID.
        ca, cert, key: paths of PEM files for TLS; None or "" if not used.
        user, password: for etcd's authentication; None or "" if not used. They go through the reaper's pipe only.
    """

    endpoints: list[str]
    lease: int
    ca: str | None
    cert: str | None
    key: str | None
    user: str | None
    password: str | None
