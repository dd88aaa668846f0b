"""The certificates that the hosts of a job sign for themselves, with TLS for real."""

from __future__ import annotations

import socket
import ssl
import threading

from elastic_ext.own_etcd import certificates


def test_a_client_as_strict_as_python_3_13(tmp_path):
    """Else no keeper there sees that the others serve already, and an empty member begins in the place of one with data."""
    places = [tmp_path / "server", tmp_path / "client"]
    for place in places:
        place.mkdir()
    theirs, own = (certificates.write(b"x" * 32, "run", ["localhost"], place) for place in places)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(theirs.cert, theirs.key)
    server.load_verify_locations(theirs.ca)
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cafile=own.ca)
    client.load_cert_chain(own.cert, own.key)
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    here, there = socket.socketpair()

    def answer() -> None:
        with server.wrap_socket(there, server_side=True) as tls:
            tls.sendall(b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    with client.wrap_socket(here, server_hostname="localhost") as tls:
        assert tls.recv(1) == b"x"
    thread.join()
