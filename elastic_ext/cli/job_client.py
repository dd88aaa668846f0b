"""A client of a job's etcd for the commands; also where the job has brought it (`--rdzv-endpoint=job:`), or its own store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_ext.base import settings
from elastic_ext.embedded.hosting import store_visitor
from elastic_ext.etcd import EtcdClient
from elastic_ext.own_etcd import bring, endpoint, keys
from elastic_ext.rendezvous.etcd.connect import connect


@contextmanager
def job_client(rdzv_endpoint: str, run_id: str) -> Iterator[EtcdClient]:
    """Give a client. TLS and user come from the settings, as for an agent: ELASTIC_EXT_ETCD_CA and so on.

    Raises:
        UsageError: etcd cannot be used; the message says why.
    """
    known = settings.read({}, os.environ)
    if not endpoint.is_job(rdzv_endpoint):
        with store_visitor(run_id, known) as with_tls, connect(rdzv_endpoint, with_tls) as client:
            yield client
        return
    with bring.visitor(rdzv_endpoint, run_id, known) as (endpoints, with_tls), connect(endpoints, with_tls) as client:
        if (now := client.get(keys.ENDPOINTS).kv) is not None:  # members were replaced
            client.follow(now.value.decode())
        yield client
