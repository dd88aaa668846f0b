"""The members of a cluster: listed, added and removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_ext.etcd.calls import Caller
from elastic_ext.etcd.messages import etcdrpc
from elastic_ext.etcd.race import ask


@dataclass(frozen=True)
class Member:
    """A member. name, clients: "" and () until it has started. peers, clients: URLs."""

    member_id: int
    name: str
    peers: tuple[str, ...]
    clients: tuple[str, ...]

    @classmethod
    def parse(cls, member: Any) -> Member:
        return cls(member.ID, member.name, tuple(member.peerURLs), tuple(member.clientURLs))


class Membership:
    """The calls of etcd's Cluster service. Each raises EtcdError."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def members(self, *, timeout_s: float | None = None) -> tuple[Member, ...]:
        """Return all members, also those that have not started."""
        request = etcdrpc().MemberListRequest()

        def send(etcd: Any) -> tuple[Member, ...]:
            answer = etcd.clusterstub.MemberList(request, etcd.timeout, metadata=etcd.metadata)
            return tuple(map(Member.parse, answer.members))

        return ask(self._caller, "list the members", send, timeout_s=timeout_s)

    def add(self, peer: str, *, timeout_s: float | None = None) -> tuple[Member, ...]:
        """Add a member that has not started; return all members. peer: its URL. Refused by etcd where there is one with it."""
        request = etcdrpc().MemberAddRequest(peerURLs=[peer])

        def send(etcd: Any) -> tuple[Member, ...]:
            answer = etcd.clusterstub.MemberAdd(request, etcd.timeout, metadata=etcd.metadata)
            return tuple(map(Member.parse, answer.members))

        return self._caller.call(f"add the member {peer}", send, repeatable=False, timeout_s=timeout_s)

    def remove(self, member_id: int, *, timeout_s: float | None = None) -> tuple[Member, ...]:
        """Remove a member; return those that are left."""
        request = etcdrpc().MemberRemoveRequest(ID=member_id)

        def send(etcd: Any) -> tuple[Member, ...]:
            answer = etcd.clusterstub.MemberRemove(request, etcd.timeout, metadata=etcd.metadata)
            return tuple(map(Member.parse, answer.members))

        return self._caller.call(f"remove the member {member_id:x}", send, repeatable=False, timeout_s=timeout_s)
