"""Torch's own c10d rendezvous decides which nodes are in the next round; here they learn where the round's store is.

Torch hands the same TCPStore to every round, with the keys of the last round in it; a restart then reads the addresses of dead
workers. So the node of rank 0 publishes a new store for each round, with the round's number.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import cast

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from elastic_ext.base import torch_private
from elastic_ext.rendezvous.address import listens_on
from elastic_ext.rendezvous.c10d import job_keys
from elastic_ext.rendezvous.c10d.backend import create
from elastic_ext.rendezvous.c10d.job_keys import PublishedRound
from elastic_ext.rendezvous.handler import Patience
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.round_server import serve

logger = logging.getLogger(__name__)


ROUND_TRIES = 3


class TorchRendezvous:
    """This node's side of torch's rendezvous.

    Invariant: two rounds never share a store.

    Attributes:
        store: the job's store, on a connection shared with torch's keep-alives.
        hosts_store: the store lives in this process.
        address: this machine's.
        patience: how long this node waits for others.
        launch: name of this launch of the job; the same on every node from the first round on.
    """

    def __init__(self, params: RendezvousParameters, address: str) -> None:
        """Connect to the store, or host it. address: this machine's. Raises what torch raises if that fails."""
        backend, self.store = create(params)
        self._handler = create_handler(self.store, backend, params)
        self._run_id = params.run_id
        self.patience = Patience.of(params)
        self.address = address
        self._reader = RecordReader()
        self._unreachable = False
        self.launch = secrets.token_hex(8)
        self.hosts_store = False
        if isinstance(self.store, TCPStore):
            self.hosts_store = listens_on(self.store.port)
            at = f"{self.store.host}:{self.store.port}"
            logger.info("the rendezvous store is at %s, %s", at, "in this agent" if self.hosts_store else "in another process")

    def next_round(self) -> tuple[RendezvousInfo, PublishedRound, TCPStore | None]:
        """Wait for the next round. Raises what torch raises.

        Returns:
            Torch's round info, with the job's store; the address of the round's own store; its server on rank 0.
        """
        for _ in range(ROUND_TRIES):
            joined = self._join()
            if joined.rank == 0:
                return joined, *self._publish(joined.store)
            if (published := self._published(joined.store)) is not None:
                self.launch = published.launch
                return joined, published, None
            # Try again: another round has another key, and the other nodes come to it when this node waits.
        raise RendezvousConnectionError(
            f"the round's address was unreadable {ROUND_TRIES} times in a row; "
            "check whether anything else writes to the rendezvous store"
        )

    def _join(self) -> RendezvousInfo:
        with _no_shared_store():
            return self._handler.next_rendezvous()

    def _publish(self, part: Store) -> tuple[PublishedRound, TCPStore]:
        """Serve the store of this round and tell the other nodes its address. part: the round's part of the job's store."""
        server = serve(self.address)
        number = self.store.add(job_keys.round_number(self._run_id), 1)
        self.launch = self.store.compare_set(job_keys.launch(self._run_id), "", self.launch).decode(errors="replace")
        published = PublishedRound(self.address, server.port, number, self.launch)
        part.set(job_keys.ROUND, json.dumps({"schema": job_keys.SCHEMA, **asdict(published)}))
        return published, server

    def _published(self, part: Store) -> PublishedRound | None:
        """Wait for what rank 0 publishes; return None if it is unreadable because somebody else has written there."""
        text = part.get(job_keys.ROUND).decode(errors="replace")
        return self._reader.read(PublishedRound, text, job_keys.ROUND, job_keys.SCHEMA)

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait to join; 0 if the store is gone."""
        try:
            waiting = cast(int, self._handler.num_nodes_waiting())
        except RendezvousConnectionError as error:
            # The store's host is gone. Nobody can join, but that is no reason to stop training.
            if not self._unreachable:
                logger.warning("the rendezvous store cannot be reached; training continues without it: %s", error)
            self._unreachable = True
            return 0
        self._unreachable = False
        return waiting

    def is_closed(self) -> bool:
        return cast(bool, self._handler.is_closed())

    def set_closed(self) -> None:
        self._handler.set_closed()

    def close(self) -> bool:
        """Close the job for all nodes; return False if the store is gone."""
        try:
            return cast(bool, self._handler.shutdown())
        except RendezvousConnectionError as error:
            logger.warning("could not close the rendezvous because its store is gone: %s", error)
            return False

    def step_out(self, timeout_s: float) -> None:
        """Take this node out without closing the job. Raises what torch raises if the store does not answer."""
        torch_private.leave_rendezvous(self._handler, timeout_s)


@contextmanager
def _no_shared_store() -> Iterator[None]:
    """Set torch's documented switch. With sharing, a joining node waits 60 s for an unpublished address; then the job dies."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
