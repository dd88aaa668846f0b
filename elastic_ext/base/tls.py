"""TLS of a client whose server has a certificate of a private CA, as clusters have."""

from __future__ import annotations

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
