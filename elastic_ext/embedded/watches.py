"""The watches of one stream. Pure. A watch is no queue but a revision: what it has not had yet is read from the history."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic_ext.embedded.keyspace import Change, Keyspace, Message, covers
from elastic_ext.etcd.messages import etcdrpc

RESPONSE_BYTES = 1 << 20  # about; gRPC's clients take 4 MiB


@dataclass
class _Watch:
    """create: the WatchCreateRequest. next_revision: everything before it has been sent, or does not concern this watch."""

    create: Message
    next_revision: int

    def wants(self, change: Change) -> bool:
        # The numbers of FilterType are those of EventType: NOPUT, NODELETE and PUT, DELETE.
        return change.event.type not in self.create.filters and covers(
            self.create.key, self.create.range_end, change.event.kv.key
        )


class Watches:
    """What one stream watches, and what it is to be sent.

    Invariant: a watch gets each change once, whole revisions together and in order; or it is canceled, and says from where on
    the history is left.
    """

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._rpc: Any = etcdrpc()
        self._watches: dict[int, _Watch] = {}
        self._answers: list[Message] = []  # to what the client has asked for
        self._free_ids = itertools.count(1 << 32)  # for a client that names none

    def take(self, request: Message) -> None:
        """Take a WatchRequest."""
        if request.WhichOneof("request_union") == "cancel_request":
            watch_id = request.cancel_request.watch_id
            if self._watches.pop(watch_id, None) is not None:
                self._answers.append(self._response(watch_id, canceled=True))
        elif request.WhichOneof("request_union") == "create_request":
            self._create(request.create_request)

    def _create(self, create: Message) -> None:
        watch_id = create.watch_id or next(self._free_ids)
        create.key = create.key or b"\0"  # as etcd
        reason = ""
        if create.range_end not in (b"", b"\0") and create.range_end <= create.key:
            reason = "mvcc: watcher range is empty"
        elif watch_id in self._watches:
            reason = "mvcc: duplicate watch ID provided on the WatchStream"
        if reason:
            self._answers.append(self._response(-1, created=True, canceled=True, cancel_reason=reason))
            return
        self._watches[watch_id] = _Watch(create, create.start_revision or self._keyspace.revision + 1)
        self._answers.append(self._response(watch_id, created=True))

    def due(self) -> Iterator[Message]:
        """Return what is to be sent now: WatchResponses."""
        # Together: events of a watch that is created while an answer is on its way must not come before its own answer.
        answers, self._answers, watches = self._answers, [], list(self._watches.items())
        yield from answers
        for watch_id, watch in watches:
            yield from self._news(watch_id, watch)

    def _news(self, watch_id: int, watch: _Watch) -> Iterator[Message]:
        # While a response is on its way the store may change and forget, and this watch may be canceled.
        while self._watches.get(watch_id) is watch and (response := self._next(watch_id, watch)) is not None:
            yield response

    def _next(self, watch_id: int, watch: _Watch) -> Message | None:
        if watch.next_revision <= self._keyspace.compacted:
            del self._watches[watch_id]
            reason = "etcdserver: mvcc: required revision has been compacted"
            return self._response(watch_id, canceled=True, cancel_reason=reason, compact_revision=self._keyspace.compacted)
        events: list[Message] = []
        size, until = 0, self._keyspace.revision
        changes = self._keyspace.since(watch.next_revision)
        for revision, together in itertools.groupby(filter(watch.wants, changes), key=lambda change: change.revision):
            for change in together:
                events.append(change.event)
                size += change.size
            if size >= RESPONSE_BYTES:
                until = revision
                break
        watch.next_revision = max(watch.next_revision, until + 1)
        return self._response(watch_id, events=events) if events else None

    def progress(self) -> Iterator[Message]:
        """Return a notice for each watch that has asked for them: it has had everything up to this revision."""
        for watch_id, watch in list(self._watches.items()):
            if watch_id in self._watches and watch.create.progress_notify and watch.next_revision > self._keyspace.revision:
                yield self._response(watch_id)

    def _response(self, watch_id: int, **fields: object) -> Message:
        return self._rpc.WatchResponse(header=self._keyspace.header(), watch_id=watch_id, **fields)
