"""A client of a job's etcd for the commands; also where the job has brought it (`--rdzv-endpoint=job:`), or its own store."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_ext.base import settings
from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.embedded.hosting import has_secret, store_visitor
from elastic_ext.etcd import EtcdClient
from elastic_ext.own_etcd import bring, endpoint, keys
from elastic_ext.rendezvous.connect import connect

logger = logging.getLogger(__name__)


@contextmanager
def job_client(rdzv_endpoint: str, run_id: str) -> Iterator[EtcdClient]:
    """Give a client. TLS and user come from the settings, as for an agent: ELASTIC_EXT_ETCD_CA and so on.

    Raises:
        UsageError: etcd cannot be used; the message says why.
    """
    known = settings.read({}, os.environ)
    if not endpoint.is_job(rdzv_endpoint):
        with contextlib.ExitStack() as stack:
            yield stack.enter_context(_client(rdzv_endpoint, run_id, known, stack))
        return
    with bring.visitor(rdzv_endpoint, run_id, known) as (endpoints, with_tls), connect(endpoints, with_tls) as client:
        if (now := client.get(keys.ENDPOINTS).kv) is not None:  # members were replaced
            client.follow(now.value.decode())
        yield client


def _client(rdzv_endpoint: str, run_id: str, known: Settings, stack: contextlib.ExitStack) -> EtcdClient:
    """Return a client of etcd's servers, or of a job's own store: that has other certificates if the job has a secret."""
    if has_secret(known):
        try:
            return connect(rdzv_endpoint, stack.enter_context(store_visitor(run_id, known)))
        except UsageError as error:
            logger.debug("%s is no store with this secret: %s", rdzv_endpoint, error)
    return connect(rdzv_endpoint, known)
