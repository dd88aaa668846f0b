"""The parts that decide without doing: addresses, ranges, what an error means, when to renew a lease."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.base.errors import UsageError
from elastic_ext.etcd import ConfigError, UnsupportedVersion, errors
from elastic_ext.etcd.calls import Tokens, User, pause_s
from elastic_ext.etcd.endpoints import Endpoint, parse_endpoint, parse_endpoints
from elastic_ext.etcd.errors import ErrorKind
from elastic_ext.etcd.lease import LeaseState, plan
from elastic_ext.etcd.values import range_of_prefix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("etcd0", Endpoint("etcd0", 2379, None)),
        ("etcd0:1234", Endpoint("etcd0", 1234, None)),
        ("http://etcd-0.etcd.svc.cluster.local:2379/", Endpoint("etcd-0.etcd.svc.cluster.local", 2379, False)),
        ("https://10.0.0.1", Endpoint("10.0.0.1", 2379, True)),
        ("[::1]:4001", Endpoint("::1", 4001, None)),
        ("https://[fe80::1%eth0]", Endpoint("fe80::1%eth0", 2379, True)),
    ],
)
def test_forms_of_an_endpoint(text: str, expected: Endpoint):
    assert parse_endpoint(text) == expected


def test_a_list_of_endpoints():
    assert [str(e) for e in parse_endpoints("a:1, b:2,[::1]:3,a:1,")] == ["a:1", "b:2", "[::1]:3"]
    assert [str(e) for e in parse_endpoints(["a", "b"])] == ["a:2379", "b:2379"]


@pytest.mark.parametrize("text", ["", "a:b", "a:0", "a:70000", "::1", "ftp://a:1", "a b", "a:1/path", ","])
def test_what_is_no_endpoint(text: str):
    with pytest.raises(UsageError, match="expected host:port"):
        parse_endpoints(text)


def test_a_password_in_an_endpoint_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        parse_endpoint("https://ann:hunter2@etcd0:2379")
    assert "hunter2" not in str(caught.value)


def test_secrets_are_in_no_repr():
    assert "hunter2" not in repr(Tokens(User("ann", "hunter2")))


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (b"/a/", (b"/a/", b"/a0")),
        (b"a\xff", (b"a\xff", b"b")),
        (b"a\xff\xff", (b"a\xff\xff", b"b")),
        (b"\xff", (b"\xff", b"\0")),
        (b"", (b"\0", b"\0")),
    ],
)
def test_range_of_a_prefix(prefix: bytes, expected: tuple[bytes, bytes]):
    assert range_of_prefix(prefix) == expected


@given(prefix=st.binary(min_size=1, max_size=4), key=st.binary(min_size=1, max_size=6))
def test_a_key_is_in_its_prefixs_range(prefix: bytes, key: bytes):
    start, end = range_of_prefix(prefix)
    assert (start <= key and (end == b"\0" or key < end)) == key.startswith(prefix)


_TO = "failed to connect to all addresses; last error: UNKNOWN: "
_TCP, _TLS = f"{_TO}ipv4:127.0.0.1:1: Failed to connect to remote host", f"{_TO}ipv6:%5B::1%5D:1: Ssl handshake failed"
_NO_CA, _TWICE = "CERTIFICATE_VERIFY_FAILED", "duplicate key given in txn request"


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        ("UNAVAILABLE", f"{_TCP}: Connection refused", ErrorKind.NOT_TAKEN, "Connection refused"),
        ("UNAVAILABLE", f"{_TLS}: {_NO_CA}: OK", ErrorKind.TLS, f"Ssl handshake failed: {_NO_CA}"),
        ("UNAVAILABLE", "etcdserver: no leader", ErrorKind.NOT_TAKEN, "no leader"),
        ("UNAVAILABLE", "etcdserver: request timed out", ErrorKind.UNSURE, "request timed out"),
        ("UNAVAILABLE", "Socket closed", ErrorKind.UNSURE, "Socket closed"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", ErrorKind.UNSURE, "no answer in time"),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", ErrorKind.TOKEN, "invalid auth token"),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", ErrorKind.TOKEN, "revision of auth store is old"),
        ("INVALID_ARGUMENT", f"etcdserver: {_TWICE}", ErrorKind.REFUSED, _TWICE),
        ("PERMISSION_DENIED", "etcdserver: permission denied", ErrorKind.AUTH, "permission denied"),
        ("UNIMPLEMENTED", "", ErrorKind.VERSION, "UNIMPLEMENTED"),
        ("UNKNOWN", "anything\nat all", ErrorKind.REFUSED, "anything at all"),
    ],
)
def test_kind_of_an_error(code: str, details: str, kind: ErrorKind, text: str):
    failure = errors.classify(code, details, "etcd0:2379")
    assert (failure.kind, failure.text, failure.endpoint) == (kind, text, "etcd0:2379")


@pytest.mark.parametrize("kind", [kind for kind in ErrorKind if kind not in errors.TRANSIENT])
def test_each_error_is_one_line_with_advice(kind: ErrorKind):
    error = errors.fatal_error(errors.RpcFailure(kind, "etcd0:2379", "seen text"), "put /a", "ann")
    assert str(error).startswith("put /a: etcd at etcd0:2379 answered: seen text")
    assert "; " in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("version", ["3.4.0", "3.4.23", "3.5.1", "3.6.0-rc.1", "4.0.0", "", "unknown"])
def test_versions_that_do(version: str):
    errors.check_version(version, "etcd0:2379")


@pytest.mark.parametrize("version", ["2.3.8", "3.2.32", "3.3.27"])
def test_versions_too_old(version: str):
    with pytest.raises(UnsupportedVersion, match=f"is version {version}, expected 3.4 or later"):
        errors.check_version(version, "etcd0:2379")


def test_pauses_grow_and_are_capped():
    assert all(0.025 <= pause_s(0) <= 0.05 for _ in range(100))
    assert all(0.5 <= pause_s(tour) <= 1.0 for tour in (5, 50, 10**6))


def term(lease_id: int = 1, ttl_s: int = 9, sent_at: float = 0.0) -> LeaseState:
    return LeaseState(lease_id, ttl_s, sent_at + ttl_s / 3, sent_at + ttl_s)


@pytest.mark.parametrize(
    ("terms", "now", "expected"),
    [
        ([], 0.0, ((), None)),
        ([term()], 1.0, ((), 2.0)),
        ([term()], 3.0, ((1,), 0.0)),
        ([term()], 20.0, ((1,), 0.0)),
        ([term(1), term(2, sent_at=0.8), term(3, sent_at=2.0)], 3.0, ((1, 2), 0.0)),
        ([LeaseState(1, 9, 8.9, 9.0), term(2, sent_at=6.5)], 8.0, ((), 0.9)),
    ],
    ids=["none", "wait", "due", "overdue", "due soon comes along", "next of two"],
)
def test_plan_of_the_renewer(terms: list[LeaseState], now: float, expected: tuple):
    found = plan(terms, now)
    assert found.due == expected[0]
    assert found.wait_s == (None if expected[1] is None else pytest.approx(expected[1]))
