"""The errors of the etcd client, and the table that classifies errors of gRPC and etcd.

A message is one line: what was seen, what was expected, what to do. No message ever holds a password or a token.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

from elastic_ext.base.errors import ElasticExtError, UsageError


class EtcdError(ElasticExtError):
    """Base class of these errors. Raised itself if etcd refused a request as invalid (too large, too many operations)."""


class ConfigError(EtcdError, UsageError):
    """The client cannot be created from its inputs: endpoints, files, installed packages."""


class ClientClosed(EtcdError):
    """The client was closed before or during the call."""


class Unavailable(EtcdError):
    """No endpoint answered within the deadline; a later retry may help."""

    def __init__(self, message: str, maybe_applied: bool = False, silent: bool = False) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied  # the request may have reached a server and may have been carried out
        self.silent = silent  # there was no answer at all


class TlsError(Unavailable):
    """Every endpoint failed on a certificate: we refused the server's, or the server refused ours. It may be renewed on disk."""


class AuthError(EtcdError):
    """Wrong password, no user given although one is needed, or no permission for this key."""


class Compacted(EtcdError):
    """The requested history is gone: read the keys again, then watch from there."""


class LeaseLost(EtcdError):
    """The lease has expired or was revoked; the keys under it are gone."""


class QuotaExceeded(EtcdError):
    """etcd's database is full (NOSPACE alarm): until an operator acts, it answers only reads and deletes."""


class UnsupportedVersion(EtcdError):
    """The server does not speak etcd's v3 API as of 3.4."""


class ErrorKind(enum.Enum):
    """The meaning of a failed call for its caller. `_KINDS` decides it; the values are for people."""

    NOT_TAKEN = "the request was not taken: it may be repeated"
    UNSURE = "the request may have been carried out"
    TLS = "a certificate was refused"
    TOKEN = "the token is missing, expired or of an older state of the users"
    AUTH_OFF = "the server does not use authentication"
    AUTH = "refused"
    COMPACTED = "compacted"
    LEASE = "no such lease"
    QUOTA = "no space"
    VERSION = "unknown call"
    REFUSED = "refused as wrong"


# gRPC status code, part of its text (case-insensitive; "" matches all), kind. The first matching row counts. The texts are those
# of etcd's api/v3rpc/rpctypes/error.go (3.4, 3.5) and of gRPC's core, which has no code of its own for a failed handshake.
_KINDS: list[tuple[str, str, ErrorKind]] = [
    ("UNAVAILABLE", "ssl_error", ErrorKind.TLS),
    ("UNAVAILABLE", "ssl handshake failed", ErrorKind.TLS),  # the full text in grpcio before 1.60
    ("UNAVAILABLE", "certificate", ErrorKind.TLS),
    ("UNAVAILABLE", "hostname verification", ErrorKind.TLS),
    ("UNAVAILABLE", "tsi_data_corrupted", ErrorKind.TLS),  # TLS 1.3: the server refuses our certificate after the handshake
    ("UNAVAILABLE", "failed to connect to all addresses", ErrorKind.NOT_TAKEN),
    ("UNAVAILABLE", "connections to all backends failing", ErrorKind.NOT_TAKEN),
    ("UNAVAILABLE", "errors resolving", ErrorKind.NOT_TAKEN),
    ("UNAVAILABLE", "resolution failed", ErrorKind.NOT_TAKEN),
    ("UNAVAILABLE", "etcdserver: no leader", ErrorKind.NOT_TAKEN),
    ("UNAVAILABLE", "etcdserver: not capable", ErrorKind.NOT_TAKEN),
    ("UNAVAILABLE", "not supported for learner", ErrorKind.NOT_TAKEN),
    ("UNAVAILABLE", "", ErrorKind.UNSURE),
    ("DEADLINE_EXCEEDED", "", ErrorKind.UNSURE),
    ("CANCELLED", "", ErrorKind.UNSURE),
    ("ABORTED", "", ErrorKind.UNSURE),
    ("INTERNAL", "", ErrorKind.UNSURE),
    ("UNKNOWN", "context", ErrorKind.UNSURE),
    ("UNKNOWN", "stream removed", ErrorKind.UNSURE),
    ("RESOURCE_EXHAUSTED", "too many requests", ErrorKind.NOT_TAKEN),
    ("RESOURCE_EXHAUSTED", "space exceeded", ErrorKind.QUOTA),
    ("UNAUTHENTICATED", "", ErrorKind.TOKEN),
    ("INVALID_ARGUMENT", "revision of auth store is old", ErrorKind.TOKEN),
    ("INVALID_ARGUMENT", "user name is empty", ErrorKind.TOKEN),
    ("INVALID_ARGUMENT", "authentication failed", ErrorKind.AUTH),
    ("PERMISSION_DENIED", "", ErrorKind.AUTH),
    ("FAILED_PRECONDITION", "authentication is not enabled", ErrorKind.AUTH_OFF),
    ("OUT_OF_RANGE", "compacted", ErrorKind.COMPACTED),
    ("NOT_FOUND", "lease not found", ErrorKind.LEASE),
    ("UNIMPLEMENTED", "", ErrorKind.VERSION),
]

TRANSIENT = frozenset({ErrorKind.NOT_TAKEN, ErrorKind.UNSURE, ErrorKind.TLS})  # another endpoint or a later try may succeed


@dataclass(frozen=True)
class RpcFailure:
    """The failure of one call to one endpoint. text: one short line. silent: there was no answer at all."""

    kind: ErrorKind
    endpoint: str
    text: str
    silent: bool = False


def classify(code: str, details: str, endpoint: str) -> RpcFailure:
    """Return the failure for an error of gRPC. code: name of the status. details: its text."""
    text = details.lower()
    fits = (kind for row_code, part, kind in _KINDS if row_code == code and part in text)
    silent = code == "DEADLINE_EXCEEDED"
    return RpcFailure(
        next(fits, ErrorKind.REFUSED), endpoint, "no answer in time" if silent else short_text(details) or code, silent
    )


def short_text(details: str) -> str:
    """Return the informative part of an error text. etcd puts it after its own name, gRPC at the end, after the address."""
    text = " ".join(details.split())
    for lead in ("etcdserver: ", "last error: ", "Failed to connect to remote host: "):
        text = text.rpartition(lead)[2]
    text = re.sub(r"^(?:UNKNOWN|UNAVAILABLE|INTERNAL): |\bipv[46]:\S+: ", "", text)
    return text.removesuffix(": OK")[:300]


def fatal_error(failure: RpcFailure, what: str, user: str | None) -> EtcdError:
    """Return the error for a failure that neither another endpoint nor waiting will fix. what: the call, as in `get /a/b`."""
    seen = f"{what}: etcd at {failure.endpoint} answered: {failure.text}"
    who = f"user {user!r}" if user else "no user given"
    if failure.kind in (ErrorKind.AUTH, ErrorKind.TOKEN):
        return AuthError(f"{seen} ({who}); check the user and password, and that the user has a role for this key")
    if failure.kind is ErrorKind.COMPACTED:
        return Compacted(f"{seen}; read the keys again, then watch from there")
    if failure.kind is ErrorKind.LEASE:
        return LeaseLost(f"{seen}; the lease expired or was revoked: grant a new one and put its keys again")
    if failure.kind is ErrorKind.QUOTA:
        return QuotaExceeded(f"{seen}; compact and defragment etcd or raise --quota-backend-bytes, then `etcdctl alarm disarm`")
    if failure.kind is ErrorKind.VERSION:
        return UnsupportedVersion(f"{seen}; expected etcd 3.4 or later: check that the address is that of an etcd server")
    return EtcdError(f"{seen}; the request is invalid or exceeds the server's limits")


def unavailable(
    what: str,
    failures: list[RpcFailure],
    timeout_s: float,
    maybe_applied: bool,
    tls_advice: Callable[[], str],
    who_helps: str = "",
) -> EtcdError:
    """Return the error for a call that ran out of time, or whose certificates were refused everywhere.

    failures: the last one of each endpoint. timeout_s: of the whole call. tls_advice: returns what to do about certificates.
    who_helps: who starts the servers again; "": the user.
    """
    seen = "; ".join(f"{failure.endpoint}: {failure.text}" for failure in failures) or "no attempt completed"
    silent = bool(failures) and all(failure.silent for failure in failures)
    if failures and all(failure.kind is ErrorKind.TLS for failure in failures):
        return TlsError(f"{what}: no TLS connection to etcd ({seen}); {tls_advice()}")
    if maybe_applied:
        advice = "it may have been carried out: read the keys before you try again, or make the write conditional"
        return Unavailable(f"{what}: the request was sent, but etcd's answer did not arrive ({seen}); {advice}", True, silent)
    # A server with TLS answers a client without it like this, and vice versa; so does a server that is just stopping.
    cut_off = any(word in seen.lower() for word in ("socket closed", "connection reset", "handshake"))
    hint = ", http:// versus https://, the client certificate" if cut_off else ""
    advice = who_helps or f"check the addresses{hint} and that the server is running"
    return Unavailable(f"{what}: no endpoint answered within {round(timeout_s, 2):g} s ({seen}); {advice}", silent=silent)


def check_version(version: str, endpoint: str) -> None:
    """Raise UnsupportedVersion for a server older than 3.4, which introduced watch ids chosen by the client."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdigit() and minor.isdigit()):
        return  # an unreleased build; if a call is missing, it will fail
    if (int(major), int(minor)) < (3, 4):
        raise UnsupportedVersion(f"etcd at {endpoint} is version {version}, expected 3.4 or later: upgrade it")
