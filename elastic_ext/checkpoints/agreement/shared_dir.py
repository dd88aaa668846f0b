"""A script's saves in the local directories of all nodes: node 0 sees them as one directory, and each node gets what it lacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elastic_ext.checkpoints.agreement.messages import Agreement
from elastic_ext.checkpoints.directory.tiers import use_alone
from elastic_ext.checkpoints.sharing.all_nodes import AllNodes
from elastic_ext.checkpoints.sharing.catalogue import NOTHING_KEPT, Catalogue, KeptParts, catalogue_of
from elastic_ext.checkpoints.sharing.fetching import fetch
from elastic_ext.checkpoints.sharing.part_requests import PartPlace
from elastic_ext.checkpoints.sharing.part_server import PartServer
from elastic_ext.checkpoints.sharing.peers import NodePeer
from elastic_ext.checkpoints.storage import LocalStorage, Storage, open_parent, thread_pool

CATALOGUE_S = 30.0  # for all nodes to list their directories: 20,000 files on a busy host take a second


class SharedDir:
    """This node's local directory, which other nodes can read while this object is open. It lives as long as the agent."""

    def __init__(
        self, local: LocalStorage, host: str, secret: str = "", kept_in: Callable[[LocalStorage], KeptParts] | None = None
    ) -> None:
        """
        Args:
            host: by which other nodes reach this one.
            secret: of the job; "": it has none.
            kept_in: returns what the directory keeps of other nodes; None: nothing.

        Raises OSError: it cannot listen; UsageError: another agent has this directory, too.
        """
        self._local, self._secret, self._kept_in = local, secret, kept_in
        self._lock = use_alone(local)
        try:
            self._server = PartServer(local, host, secret, look=self._catalogue)
        except BaseException:
            self._lock.close()
            raise
        self._has_failed = False  # the last fetch: a node did not answer
        self.servers: Sequence[PartPlace | None] = ()  # of the nodes of the round, by group rank

    @property
    def place(self) -> PartPlace:
        return self._server.place

    def offered(self) -> PartPlace | None:
        """Return where others can read this directory; None once after a fetch that has failed.

        Then all nodes resume from `checkpoint_dir`, so a node that can never reach another one does not try for ever.
        """
        failed, self._has_failed = self._has_failed, False
        return None if failed else self.place

    def close(self) -> None:
        self._server.close()
        self._lock.close()

    def kept(self) -> KeptParts:
        """Return what this directory keeps of other nodes. Raises OSError."""
        return self._kept_in(self._local) if self._kept_in is not None else NOTHING_KEPT

    def peer(self, node: int) -> NodePeer | None:
        """Return another node of the round, by its group rank; None: its directory is not served."""
        place = self.servers[node] if node < len(self.servers) else None
        return NodePeer(place, self._secret, node) if place is not None else None

    def all_nodes(self, own_node: int, servers: Sequence[PartPlace | None]) -> AllNodes:
        """Return what all nodes of a round have. servers: by group rank. Raises OSError: a node does not answer."""
        peers, deadline = self._peers(own_node, servers), time.monotonic() + CATALOGUE_S

        def look(node: int) -> Catalogue:
            if node == own_node:
                return self._catalogue(self._local)
            if node not in peers:
                raise ConnectionError(f"node {node} does not serve its local_dir")
            return peers[node].catalogue(deadline)

        with thread_pool(min(len(servers), 32)) as pool:
            found = list(pool.map(look, range(len(servers))))
        return AllNodes(self._local, own_node, dict(enumerate(found)), peers)

    def fetch(self, agreement: Agreement, own_node: int, ranks: Sequence[int]) -> Storage:
        """Return a directory with all that this node needs of what was agreed. ranks: of its workers. Raises OSError."""
        own = {each.name for each in agreement.rank_files if each.rank in ranks}
        only = own if own and len({each.rank for each in agreement.rank_files if each.rank in ranks}) == len(ranks) else None
        peers = self._peers(own_node, agreement.servers)
        try:
            path = fetch(self._local, agreement.name, agreement.number, agreement.files, own_node, peers, only)
        except (ConnectionError, TimeoutError):
            self._has_failed = True
            raise
        return open_parent(path)[0]

    def _catalogue(self, local: LocalStorage) -> Catalogue:
        kept = self.kept()
        return replace(catalogue_of(local), directory=kept.directory, mirrored=kept.parts)

    def _peers(self, own_node: int, servers: Sequence[PartPlace | None]) -> Mapping[int, NodePeer]:
        found = enumerate(servers)
        return {node: NodePeer(place, self._secret, node) for node, place in found if place is not None and node != own_node}
