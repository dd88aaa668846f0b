"""A CA that openssl's own commands make has no key usage: it is trusted on each Python, and no other is."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

import pytest

from elastic_ext.base.tls import trusting
from tests.etcd_server import Certificates

pytestmark = pytest.mark.seam


def greet(certificates: Certificates, context: ssl.SSLContext, name: str) -> None:
    """Make a client of this context greet the server, by its name."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates.path("server.crt"), certificates.path("server.key"))
    ours, theirs = socket.socketpair()

    def answer() -> None:
        with theirs, contextlib.suppress(OSError), server.wrap_socket(theirs, server_side=True) as accepted:
            accepted.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with ours, context.wrap_socket(ours, server_hostname=name):
            pass
    finally:
        thread.join(60)
    assert not thread.is_alive()


def test_a_ca_without_key_usage_is_trusted(certificates: Certificates) -> None:
    greet(certificates, trusting(certificates.path("ca.crt")), "localhost")


@pytest.mark.parametrize(("ca", "name"), [("other-ca.crt", "localhost"), ("ca.crt", "elsewhere"), (None, "localhost")])
def test_no_other_is_trusted(certificates: Certificates, ca: str | None, name: str) -> None:
    context = trusting(ca and certificates.path(ca))
    with pytest.raises(ssl.SSLCertVerificationError):
        greet(certificates, context, name)
