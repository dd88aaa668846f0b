"""Connects to etcd with the user's settings and checks that it works. Knows nothing of torch."""

from __future__ import annotations

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import redacted
from elastic_ext.base.settings import Settings
from elastic_ext.etcd import EtcdClient, EtcdError, Tls
from elastic_ext.rendezvous.etcd.keys import ROOT


def connect(endpoint: str, settings: Settings) -> EtcdClient:
    """Return a working client. Raises UsageError: no endpoint, or etcd is unusable with these settings; the message says why."""
    if not endpoint.strip():
        raise UsageError("ext_etcd needs --rdzv-endpoint=HOST:PORT[,HOST:PORT...]: the etcd servers")
    tls = None
    if settings.etcd_ca or settings.etcd_cert:
        tls = Tls(ca=settings.etcd_ca, cert=settings.etcd_cert, key=settings.etcd_key)
    try:
        client = EtcdClient(endpoint, tls=tls, user=settings.etcd_user, password=settings.etcd_password)
        client.get(ROOT)  # so that a user without permission learns of it now
    except EtcdError as error:
        raise UsageError(f"etcd at {redacted(endpoint)}: {error}") from error
    return client
