"""For the tests of rendezvous: agents of one job, and what they agree through."""

from tests.rendezvous.test_etcd_jobs import nodes, stack, store

__all__ = ["nodes", "stack", "store"]
