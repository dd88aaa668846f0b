"""TLS of a client: trust in a private CA, as clusters have one, and what its own certificate files hold."""

from __future__ import annotations

import _ssl
import ssl


def trusting(ca: str | None) -> ssl.SSLContext:
    """Return a context that trusts the CA in this PEM file alone; None or "": those of the system.

    From Python 3.13 on, the default refuses a CA without key usages or identifiers, as openssl's own commands and some clusters
    make them. gRPC takes these, and so does this, on each Python. Signatures, names and dates are checked. Raises OSError.
    """
    context = ssl.create_default_context(cafile=ca or None)
    if ca:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def fits(cert: str, key: str) -> bool:
    """Return False if the key is that of another certificate, as when one of the two files was renewed and the other was not."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except OSError as error:
        return "MISMATCH" not in (getattr(error, "reason", None) or "")  # what else is wrong with them, their user will say
    return True


def ends_at(cert: str) -> float | None:
    """Return the time, in seconds since the epoch, until which the first certificate of a PEM file is valid; None: unknown."""
    try:
        decoded = _ssl._test_decode_cert(cert)  # type: ignore[attr-defined, unused-ignore]
        return ssl.cert_time_to_seconds(decoded["notAfter"])
    except (AttributeError, OSError, KeyError, ValueError):  # AttributeError: it is Python's own, and no other library is here
        return None
