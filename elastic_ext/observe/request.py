"""What a client asks the agent's HTTP server: read from bytes that anyone may have sent. Pure."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from http import HTTPStatus

from elastic_ext.observe.pages import Page, text

MAX_REQUEST = 16 << 10  # bytes; as long as the longest record of TLS, so one read leaves nothing behind in its buffer


@dataclass(frozen=True)
class Request:
    """A whole request. line: its first line. path: without the query. accept, authorization: the values of headers, or ""."""

    line: str
    path: str
    accept: str
    authorization: str


def parse(received: bytes) -> Request | Page | None:
    """Return the request; the page that says what is wrong with it; None while it is incomplete."""
    head, end, _ = received.replace(b"\r\n", b"\n").partition(b"\n\n")
    if not end:
        too_long = len(received) > MAX_REQUEST
        return text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long") if too_long else None
    line, *fields = head.decode("latin-1").split("\n")
    method, _, target = line.partition(" ")
    target, _, protocol = target.partition(" ")
    if not protocol.startswith("HTTP/"):
        return text(HTTPStatus.BAD_REQUEST, "this is not HTTP")
    if method != "GET":
        return text(HTTPStatus.NOT_IMPLEMENTED, "expected GET")
    named: dict[str, str] = {}
    for field in fields:
        name, _, value = field.partition(":")
        named.setdefault(name.lower(), value.strip())
    return Request(line, target.partition("?")[0], named.get("accept", ""), named.get("authorization", ""))


def basic_login(authorization: str) -> tuple[str, bytes] | None:
    """Return user and password of basic authentication (RFC 7617); None if the header holds no such thing."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None
