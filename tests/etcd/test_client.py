"""Calls on real servers: keys, transactions, deadlines, failover, and one clear error for each kind of trouble."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest

from elastic_ext.etcd import (
    ClientClosed,
    Compacted,
    Compare,
    Delete,
    EtcdError,
    Get,
    LeaseLost,
    Put,
    QuotaExceeded,
    Unavailable,
    UnsupportedVersion,
    absent,
    calls,
    unchanged,
)
from elastic_ext.etcd.client import PAGE
from elastic_ext.etcd.endpoints import Endpoints, parse_endpoints
from elastic_ext.etcd.messages import etcdrpc
from elastic_ext.etcd.values import Alarm
from tests.etcd.call_proxy import CallProxy
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.ports import free_port
from tests.until import LIMIT_S, until


def nowhere() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.seam
def test_put_get_delete(client: EtcdClient, prefix: str):
    written = client.put(prefix + "a", "1")
    reading = client.get(prefix + "a")
    assert (reading.kv.key, reading.kv.value, reading.kv.version) == ((prefix + "a").encode(), b"1", 1)
    assert (reading.kv.create_revision, reading.kv.mod_revision, reading.revision) == (written.revision,) * 3
    assert client.revision(prefix) == written.revision

    again = client.put(prefix + "a", b"\0\xff")
    assert again.revision == written.revision + 1
    new = client.get(prefix + "a").kv
    assert (new.value, new.version) == (b"\0\xff", 2)
    assert client.get(prefix + "a", revision=written.revision).kv.value == b"1"

    assert client.delete(prefix + "a").deleted == 1
    assert client.get(prefix + "a").kv is None
    assert client.delete(prefix + "a").deleted == 0


@pytest.mark.seam
def test_a_prefix_that_ends_in_0xff(client: EtcdClient, prefix: str):
    base = prefix.encode() + b"\xff"
    for key in (base, base + b"\0", base + b"\xff\xff", prefix.encode() + b"\xfe", prefix.encode()[:-1] + b"0"):
        client.put(key, key)
    assert [kv.key for kv in client.get_prefix(base).kvs] == [base, base + b"\0", base + b"\xff\xff"]
    assert client.delete_prefix(base).deleted == 3
    assert client.get_prefix(base).kvs == ()
    assert client.get(prefix.encode() + b"\xfe").count == 1


@pytest.mark.seam
def test_a_long_prefix_is_read_in_pages_consistently(client: EtcdClient, prefix: str):
    keys = [f"{prefix}{number:05d}" for number in range(2 * PAGE + 1)]
    for start in range(0, len(keys), 128):
        client.txn([], [Put(key, "old") for key in keys[start : start + 128]])
    stop = threading.Event()

    def write() -> None:
        with EtcdClient([str(endpoint) for endpoint in client._endpoints.endpoints]) as other:
            while not stop.is_set():
                other.txn([], [Put(keys[0], "new"), Put(keys[-1], "new")])
                other.txn([], [Put(keys[0], "old"), Put(keys[-1], "old")])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        readings = [client.get_prefix(prefix) for _ in range(5)]
    finally:
        stop.set()
        writer.join()
    for reading in readings:
        assert [kv.key.decode() for kv in reading.kvs] == keys
        assert reading.kvs[0].value == reading.kvs[-1].value
        assert all(kv.mod_revision <= reading.revision for kv in reading.kvs)


@pytest.mark.seam
def test_transaction(client: EtcdClient, prefix: str):
    a, b = prefix + "a", prefix + "b"
    made = client.txn([absent(a)], [Put(a, "1"), Get(a), Put(b, "2")])
    assert made.succeeded
    assert made.revision == client.revision(prefix)
    assert [type(response).__name__ for response in made.responses] == ["Written", "Reading", "Written"]
    assert made.readings[0].kvs[0].mod_revision == made.revision

    late = client.txn([absent(a)], [Put(a, "3")], [Get(prefix, prefix=True)])
    assert not late.succeeded
    assert late.revision == made.revision
    assert [kv.value for kv in late.readings[0].kvs] == [b"1", b"2"]

    assert client.txn([unchanged(a, made.revision)], [Put(a, "4")]).succeeded
    assert not client.txn([unchanged(a, made.revision)], [Put(a, "5")]).succeeded
    gone = client.txn([Compare(a, "value", "=", "4"), Compare(b, "version", "<", 2)], [Delete(prefix, prefix=True)])
    assert gone.responses[0].deleted == 2


@pytest.mark.seam
@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare("k", "value", "=", "v"), True),
        (Compare("k", "value", "!=", "v"), False),
        (Compare("k", "value", ">", "a"), True),
        (Compare("k", "version", "=", 1), True),
        (Compare("k", "create", ">", 0), True),
        (Compare("k", "mod", "<", 2), False),
        (Compare("k", "lease", "=", 0), True),
        (Compare("none", "version", "=", 0), True),
        (Compare("none", "value", "!=", "v"), False),
    ],
)
def test_each_comparison(client: EtcdClient, prefix: str, compare: Compare, holds: bool):
    client.put(prefix + "k", "v")
    moved = Compare(prefix + str(compare.key), compare.target, compare.result, compare.operand)
    assert client.txn([moved]).succeeded is holds


@pytest.mark.seam
def test_a_compacted_revision(own_server: EtcdServer):
    with EtcdClient(own_server.endpoint) as client:
        revisions = [client.put("a", str(number)).revision for number in range(5)]
        client.compact(revisions[3])
        with pytest.raises(Compacted, match="read the keys again"):
            client.get("a", revision=revisions[0])


@pytest.mark.seam
def test_what_the_server_refuses_as_wrong(client: EtcdClient, prefix: str):
    with pytest.raises(EtcdError, match=r"transaction on .* and 199 more: .* too many operations"):
        client.txn([], [Put(f"{prefix}{number}", "") for number in range(200)])
    with pytest.raises(LeaseLost, match=r"lease not found; .*grant a new one"):
        client.put(prefix, "", lease_id=4711)


# No answer


@pytest.mark.full
def test_no_server():
    with EtcdClient([nowhere(), nowhere()], timeout_s=4) as client, pytest.raises(Unavailable) as caught:
        client.put("a", "1")
    assert str(caught.value).count("Connection refused") == 2
    assert "transaction on a: no endpoint answered within 4 s" in str(caught.value)
    assert not caught.value.maybe_applied


def test_a_name_that_does_not_resolve():
    with (
        EtcdClient("no-such-host.invalid", timeout_s=0.5) as client,
        pytest.raises(Unavailable, match=r"no-such-host\.invalid:2379"),
    ):
        client.get("a")


@pytest.mark.full
def test_frozen_server_meets_the_deadline(own_server: EtcdServer):
    with EtcdClient(own_server.endpoint, timeout_s=0.5) as client:
        client.put("a", "1", timeout_s=LIMIT_S)
        own_server.pause()
        client._endpoints.current().answered_at = math.inf  # just now: the write is sent at once
        with pytest.raises(
            Unavailable, match=r"transaction on a: the request was sent, but .*no answer in time.*may have been carried out"
        ) as caught:
            client.put("a", "2")
        assert caught.value.maybe_applied
        for call in (client.alarms, client.status, lambda: client.get("a"), lambda: client.lease_grant(5)):
            with pytest.raises(Unavailable):
                call()
        own_server.resume()
        # It was taken before the freeze ended it, or not: the reading decides.
        assert client.get("a", timeout_s=LIMIT_S).kv.value in (b"1", b"2")


@pytest.mark.seam
def test_a_write_avoids_a_server_that_is_silent(own_server: EtcdServer):
    """It goes out only on a connection that works, so here it can be said that it did not."""
    own_server.pause()
    with EtcdClient(own_server.endpoint, timeout_s=0.5) as client:
        with pytest.raises(Unavailable) as caught:
            client.put("a", "1")
        assert not caught.value.maybe_applied
        own_server.resume()
        assert client.get("a", timeout_s=LIMIT_S).kv is None


@pytest.mark.full
def test_first_good_call_soon_after_a_longer_outage(server: EtcdServer):
    """gRPC's own back-off would wait 13 s more at this point, and up to 120 s later on; ours waits 1 s at most."""
    with Proxy(server.client_port) as proxy, EtcdClient(proxy.endpoint) as client:
        client.get("a")
        proxy.stop()
        with pytest.raises(Unavailable):
            client.get("a", timeout_s=30)
        proxy.start()
        client.get("a", timeout_s=9)


# Many endpoints


@pytest.mark.full
@pytest.mark.usefixtures("patient_grpc")
def test_one_endpoint_has_all_of_the_time(proxy: Proxy, prefix: str, monkeypatch: pytest.MonkeyPatch):
    """Its first connection answers when the spare has taken part for a while."""
    monkeypatch.setattr(calls, "SPARE_SHARE", 0.01)
    with EtcdClient(proxy.endpoint) as client, ThreadPoolExecutor(1) as pool:
        client.put(prefix, "1")
        first = client._endpoints.current()
        proxy.hold(but=0, new=True)
        reading = pool.submit(client.get, prefix)
        until(lambda: proxy.accepted == 2, "the spare connection")
        proxy.hold(but=1, new=True)
        assert reading.result(LIMIT_S).kv is not None
        assert client._endpoints.current() is first


CALLS: dict[str, Callable[[EtcdClient, str], object]] = {
    "get": lambda client, key: client.get(key),
    "read-only transaction": lambda client, key: client.txn([absent(key)], [], [Get(key)]),
    "grant": lambda client, key: client.lease_grant(60),
    "status": lambda client, key: client.status(),
    "write": lambda client, key: client.put(key, "2"),
}


@pytest.mark.full
@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.usefixtures("patient_grpc")
def test_a_call_moves_to_the_spare_connection(proxy: Proxy, prefix: str, monkeypatch: pytest.MonkeyPatch, call: str):
    monkeypatch.setattr(calls, "SPARE_SHARE", 0.05)  # the rest is for the spare; of a write, which does not race, it is a third
    with EtcdClient(proxy.endpoint, timeout_s=12) as client:
        client.put(prefix, "1")
        first = client._endpoints.current()
        first.answered_at = -math.inf  # long ago: a write looks whether the connection works
        proxy.hold(but=0, new=False)
        CALLS[call](client, prefix)
        assert client._endpoints.current() is not first
        proxy.release()
        assert client.get(prefix).kv.version == (2 if call == "write" else 1)


@pytest.mark.full
def test_a_sent_write_uses_no_other_connection(proxy: Proxy, prefix: str):
    with EtcdClient(proxy.endpoint) as client:
        client.status()
        first = client._endpoints.current()
        first.answered_at = math.inf  # just now: the write is sent at once
        proxy.hold(but=0, new=False)
        with pytest.raises(Unavailable) as caught:
            client.put(prefix, "1", timeout_s=2)
        assert caught.value.maybe_applied
        assert client.get(prefix).kv is None  # over the other connection
        proxy.release()


@pytest.mark.seam
@pytest.mark.parametrize("call", [name for name in CALLS if name != "write"])
def test_an_error_uses_the_spare_connection_at_once(server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch, call: str):
    """As of a member without a leader. The share of the time, and the grace, are for a connection that is silent."""
    monkeypatch.setattr(calls, "SPARE_SHARE", 2.0)  # of the time: never
    monkeypatch.setattr(calls, "GRACE_S", math.inf)  # who waits for this fails
    with CallProxy(server.client_port) as proxy, EtcdClient(proxy.endpoint) as client:
        client.put(prefix, "1")
        first, silent = client._endpoints.current(), []
        client._endpoints.observe(silent.append)
        proxy.refuse_connection(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
        CALLS[call](client, prefix)
        assert client._endpoints.current() is not first
        assert silent == []  # the watches' stream is left alone
        assert client._caller.threads.join(LIMIT_S)  # the loser asks no more: it might grant a second lease


@pytest.mark.seam
def test_errors_after_the_spares_answer_are_no_silence(server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "SPARE_SHARE", 0.001)
    monkeypatch.setattr(calls, "GRACE_S", LIMIT_S)  # until the error comes
    answers_soon = calls._answers_soon
    with CallProxy(server.client_port) as proxy, EtcdClient(proxy.endpoint) as client:
        monkeypatch.setattr(calls, "_answers_soon", lambda *given: (proxy.release(), answers_soon(*given))[1])
        client.put(prefix, "1")
        first, silent = client._endpoints.current(), []
        client._endpoints.observe(silent.append)
        proxy.refuse_late(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
        assert client.get(prefix).kv is not None
        assert client._endpoints.current() is not first
        assert silent == []


@pytest.mark.full
def test_a_connection_found_silent_is_known_as_that(proxy: Proxy):
    """The watches' stream then leaves it, long before gRPC's pings would notice."""
    with EtcdClient(proxy.endpoint, timeout_s=1) as client:
        client.status(timeout_s=LIMIT_S)
        first, silent = client._endpoints.current(), []
        client._endpoints.observe(silent.append)
        proxy.deaf()
        with pytest.raises(Unavailable, match=r"answered within [01][.\d]* s .*no answer in time"):
            client.get("a")
        assert silent == [first]
        assert client._endpoints.current() is not first


@pytest.mark.seam
def test_rotation_over_endpoints(server: EtcdServer, prefix: str):
    with EtcdClient([nowhere(), nowhere(), server.endpoint], first=0) as client:
        client.put(prefix + "a", "1")  # not taken by the first two: a write may go on as well
        assert client.get(prefix + "a").kv is not None


@pytest.mark.full
@pytest.mark.parametrize("deaf", ["from-the-start", "later"])
def test_calls_go_on_past_a_deaf_endpoint(server: EtcdServer, proxy: Proxy, prefix: str, deaf: str):
    with EtcdClient([proxy.endpoint, server.endpoint], first=0, timeout_s=10) as client:  # half of it each
        if deaf == "from-the-start":
            proxy.deaf()
        client.put(prefix + "a", "1")
        proxy.deaf()
        assert client.get(prefix + "a").kv is not None
        client.put(prefix + "a", "2")


@pytest.mark.seam
def test_ipv6_and_names(server: EtcdServer):
    with EtcdClient(f"http://localhost:{server.client_port}") as client:
        client.status()
    try:
        proxy = Proxy(server.client_port, host="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with proxy, EtcdClient(proxy.endpoint) as client:
        client.status()


@pytest.mark.seam
def test_http_proxy_of_the_environment_is_not_used(client: EtcdClient, server: EtcdServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", f"http://{nowhere()}")
    with EtcdClient(server.endpoint) as other:
        other.status()


# The rest


@pytest.mark.seam
def test_quota(tmp_path: Path):
    with EtcdServer(tmp_path / "quota", args=["--quota-backend-bytes=1000000"]) as server, EtcdClient(server.endpoint) as client:
        client.put("before", "1")

        def fill() -> None:
            for number in range(2000):
                client.put(f"a{number}", "x" * 100_000)

        with pytest.raises(QuotaExceeded, match="database space exceeded; compact and defragment etcd"):
            fill()
        until(client.alarms, "the alarm")  # it goes through the log of all members, and may be raised after the error
        assert client.alarms() == (Alarm(client.status().member_id, "NOSPACE"),)
        with pytest.raises(QuotaExceeded):
            client.txn([absent("b")], [Put("b", "1")])
        assert client.get("before").kv is not None
        assert server.etcdctl("del", "before") == "1\n"


@pytest.mark.seam
def test_closing_ends_calls_at_once(own_server: EtcdServer):
    client = EtcdClient(own_server.endpoint, timeout_s=300)
    client.get("a")
    own_server.pause()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "a")
        client.close()
        assert isinstance(waiting.exception(LIMIT_S), ClientClosed)
    with pytest.raises(ClientClosed):
        client.get("a")
    with pytest.raises(ClientClosed):
        client.watch("a", start_revision=1)
    client.close()


@pytest.mark.seam
def test_closing_waits_for_the_losers_of_races(server: EtcdServer, monkeypatch: pytest.MonkeyPatch):
    """One that returns from gRPC's C++ code during process exit could abort the process."""
    monkeypatch.setattr("elastic_ext.etcd.client._JOIN_S", LIMIT_S)
    late, ended = threading.Event(), []
    with EtcdClient(server.endpoint) as client:
        turn = itertools.count()

        def send(etcd: object) -> int:
            if (number := next(turn)) == 0:
                assert client._closed.wait(LIMIT_S)
                later = threading.Timer(0.3, late.set)  # the time that it takes to come back from gRPC, exaggerated
                later.start()
                assert late.wait(LIMIT_S)
                ended.append(number)
            return number

        assert calls.race(client._caller, "ask", send, timeout_s=LIMIT_S, beside_s=0.2) == 1
        assert ended == []
    assert ended == [0]


@pytest.mark.seam
def test_a_process_ends_with_its_client_open(server: EtcdServer):
    """Nothing that runs in the background keeps it, or its exit code, up."""
    code = (
        "import sys; from elastic_ext.etcd import EtcdClient, LeaseSession, Put, Watch\n"
        "client = EtcdClient(sys.argv[1]); session = LeaseSession(client, 60)\n"
        "watch = Watch(client, 'a', start_revision=1, callback=lambda item: None)\n"
        "client.txn([], [Put('b', '', lease_id=session.lease_id)]); print(client.status().version)"
    )
    done = subprocess.run([sys.executable, "-c", code, server.endpoint], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# Servers that are no etcd of today. A 3.3 is not to be had any more, so a gRPC server plays it.


@contextmanager
def grpc_server(*handlers: grpc.GenericRpcHandler) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_server_too_old():
    rpc = etcdrpc()
    status = grpc.unary_unary_rpc_method_handler(
        lambda request, context: rpc.StatusResponse(version="3.3.27"),
        request_deserializer=rpc.StatusRequest.FromString,
        response_serializer=rpc.StatusResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("etcdserverpb.Maintenance", {"Status": status})
    with grpc_server(handler) as endpoint, EtcdClient(endpoint) as client:
        with pytest.raises(UnsupportedVersion, match=r"is version 3\.3\.27, expected 3\.4 or later: upgrade it"):
            client.put("a", "1")
        with pytest.raises(UnsupportedVersion):
            client.watch("a", start_revision=1).get(LIMIT_S)


def test_a_grpc_server_that_is_no_etcd():
    message = "check that the address is that of an etcd server"
    with grpc_server() as endpoint, EtcdClient(endpoint) as client, pytest.raises(UnsupportedVersion, match=message):
        client.put("a", "1")


def test_an_outage_is_reported_once_an_endpoint(caplog: pytest.LogCaptureFixture):
    with closing(Endpoints(parse_endpoints("127.0.0.1:1,127.0.0.1:2"), None, first=0)) as endpoints, caplog.at_level("INFO"):
        endpoints.current().answered_at = time.monotonic()
        for _ in range(10):
            endpoints.failed(endpoints.current(), silent=False)
    assert caplog.messages == ["etcd endpoint 127.0.0.1:1 failed, 127.0.0.1:2 is next"]
