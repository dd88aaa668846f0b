"""Connects to etcd with the user's settings and checks that it works. Knows nothing of torch."""

from __future__ import annotations

import logging
import threading
import time

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import redacted
from elastic_ext.base.settings import Settings
from elastic_ext.etcd import EtcdClient, EtcdError, Tls, TlsError, Unavailable
from elastic_ext.rendezvous.keys import ROOT

logger = logging.getLogger(__name__)

RETRY_S = 0.5  # after an answer that nobody listens there


class NoAnswer(EtcdError):
    """No etcd has answered for as long as this node waits for one."""


class Unreachable(UsageError):
    """A command has reached no etcd: nothing was asked and nothing changed."""


def connect(endpoint: str, settings: Settings, wait_s: float = 0.0, own: bool = False) -> EtcdClient:
    """Return a working client.

    Args:
        wait_s: how long to wait for an etcd that does not answer: it may be about to start, as may the name server.
        own: it is the job's own, so that one with other certificates is that of an earlier job, and about to end.

    Raises:
        UsageError: no endpoint, or etcd is unusable with these settings.
        Unreachable: without a wait, it does not answer.
        NoAnswer: it has not answered within wait_s.
    """
    if not endpoint.strip():
        raise UsageError("ext_etcd needs --rdzv-endpoint=HOST:PORT[,HOST:PORT...]: the etcd servers")
    what = f"{'the store of the job' if own else 'etcd'} at {redacted(endpoint)}"
    tls = None
    if settings.etcd_ca or settings.etcd_cert:
        tls = Tls(ca=settings.etcd_ca, cert=settings.etcd_cert, key=settings.etcd_key)
    try:
        client = EtcdClient(endpoint, tls=tls, user=settings.etcd_user, password=settings.etcd_password)
        _await_answer(client, what, wait_s, (Unavailable, TlsError) if own else (Unavailable,))
    except NoAnswer:
        raise
    except EtcdError as error:
        kind = Unreachable if isinstance(error, Unavailable) else UsageError
        raise kind(f"{what}: {error}") from error
    return client


def _await_answer(client: EtcdClient, what: str, wait_s: float, passing: tuple[type[EtcdError], ...]) -> None:
    """Read once, so that a user without permission learns of it now."""
    deadline, warned = time.monotonic() + wait_s, False
    while True:
        try:
            client.get(ROOT)
            return
        except passing as error:
            if wait_s <= 0:
                raise
            if time.monotonic() >= deadline:
                client.close()
                raise NoAnswer(f"{what} has not answered for {wait_s:g} s: {error}") from error
            if not warned:
                logger.warning("%s does not answer; trying for %g s: %s", what, wait_s, error)
                warned = True
            threading.Event().wait(RETRY_S)
