"""From what the user gives to a client of etcd that has proved to work. Knows nothing of torch."""

from __future__ import annotations

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import redacted
from elastic_ext.base.settings import Settings
from elastic_ext.etcd import EtcdClient, EtcdError, Tls


def connect(endpoint: str, settings: Settings) -> EtcdClient:
    """Raises UsageError: no endpoint, or etcd cannot be used so; the message says why."""
    if not endpoint.strip():
        raise UsageError("ext_etcd needs --rdzv-endpoint=HOST:PORT[,HOST:PORT...]: the etcd servers")
    tls = None
    if settings.etcd_ca or settings.etcd_cert:
        tls = Tls(ca=settings.etcd_ca, cert=settings.etcd_cert, key=settings.etcd_key)
    try:
        client = EtcdClient(endpoint, tls=tls, user=settings.etcd_user, password=settings.etcd_password)
        client.get("/elastic_ext/")  # who may not, learns it now
    except EtcdError as error:
        raise UsageError(f"etcd at {redacted(endpoint)}: {error}") from error
    return client
