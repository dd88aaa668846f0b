"""The watches that every node has, each on one key. Only the leader watches more."""

from __future__ import annotations

from collections.abc import Callable

from elastic_ext.etcd import FROM_NOW, Batch, Began, Watch
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous.etcd.context import NodeContext


class OwnWatches:
    """The watches of one node. For the rendezvous thread, which receives all events."""

    def __init__(self, context: NodeContext, on_began: Callable[[], None], read: Callable[[], None]) -> None:
        """
        Args:
            on_began: work to run each time the server has one more watch.
            read: reads the keys; called when events may have been missed.
        """
        self._context = context
        self._on_began = on_began
        self._read = read
        self._watches: list[Watch] = []
        self._began = 0  # number of watches that the server has

    @property
    def empty(self) -> bool:
        """Whether no watch has been added yet."""
        return not self._watches

    @property
    def all_began(self) -> bool:
        """Whether everything written from now on is delivered."""
        return self._began >= len(self._watches)

    def add(
        self,
        key: str,
        on_batch: Callable[[Batch], None],
        *,
        deletes_only: bool = False,
        on_gap: Callable[[], None] | None = None,
    ) -> None:
        """Call `on_batch` with all later events of the key. on_gap: called when events may have been missed."""

        def take(item: Item) -> None:
            if isinstance(item, Began):
                self._began += 1
                self._context.tasks.run(self._on_began)
            elif isinstance(item, Batch):
                on_batch(item)
            else:  # the watch has ended, perhaps because its history was compacted: read, then watch from there
                revision = self._context.client.revision(key)
                self._read()
                self._open(key, take, revision + 1, deletes_only)
                if on_gap is not None:
                    on_gap()

        self._open(key, take, FROM_NOW, deletes_only)

    def _open(self, key: str, take: Callable[[Item], None], start_revision: int, deletes_only: bool) -> None:
        tasks = self._context.tasks
        watch = Watch(
            self._context.client,
            key,
            start_revision=start_revision,
            callback=lambda item: tasks.post(lambda: take(item)),
            deletes_only=deletes_only,
        )
        self._watches.append(watch)

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
