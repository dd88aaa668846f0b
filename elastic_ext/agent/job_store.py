"""The rendezvous of `ext_c10d`: on one machine without a store, on several through the store that one of them hosts."""

from __future__ import annotations

import os

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from elastic_ext.agent import own_etcd
from elastic_ext.agent.resume import newest_checkpoint
from elastic_ext.base.helper_process import HelperFailed
from elastic_ext.base.settings import Settings
from elastic_ext.embedded.hosting import EmbeddedStore
from elastic_ext.embedded.one_machine import OneMachine
from elastic_ext.rendezvous.connect import NoAnswer
from elastic_ext.rendezvous.handler import EtcdRendezvous


def rendezvous(params: RendezvousParameters, settings: Settings) -> RendezvousHandler:
    """Return the rendezvous of this agent.

    Raises:
        UsageError: the endpoint or a setting cannot be used.
        SystemExit: the store does not answer: the exit code says that it may be tried again.
    """
    if params.max_nodes == 1:
        return OneMachine(params, settings)
    try:
        store = EmbeddedStore(params, settings, os.environ)
    except HelperFailed as error:
        raise own_etcd.exit_for(error, settings) from error
    try:
        theirs, known = store.access()
        return EtcdRendezvous(theirs, known, lambda: newest_checkpoint(known), store)
    except NoAnswer as error:
        store.close()
        raise own_etcd.exit_for(HelperFailed(store.trouble(str(error))), settings) from error
    except BaseException:
        store.close()
        raise
