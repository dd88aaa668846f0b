"""Where the nodes of a job on ext_c10d meet, which of them hosts the store, and what torch's keys mean for it."""

from __future__ import annotations

import pytest

from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.embedded import hosting
from elastic_ext.embedded.hosting import DEFAULT_PORT, StoreEndpoint
from elastic_ext.embedded.plan import StorePlan


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("node1", "node1", DEFAULT_PORT, "node1:29400"),
        ("node1:", "node1", DEFAULT_PORT, "node1:29400"),
        ("node1:1234", "node1", 1234, "node1:1234"),
        (" node1.example:65535 ", "node1.example", 65535, "node1.example:65535"),
        ("10.0.0.1:1", "10.0.0.1", 1, "10.0.0.1:1"),
        ("fd00::1", "fd00::1", DEFAULT_PORT, "[fd00::1]:29400"),
        ("[fd00::1]", "fd00::1", DEFAULT_PORT, "[fd00::1]:29400"),
        ("[fd00::1]:1234", "fd00::1", 1234, "[fd00::1]:1234"),
        ("[fe80::1%eth0]:1234", "fe80::1%eth0", 1234, "[fe80::1%eth0]:1234"),
    ],
)
def test_forms_of_an_endpoint(text, host, port, shown):
    endpoint = hosting.parse(text, None)
    assert endpoint == StoreEndpoint(host, port)
    assert str(endpoint) == shown
    assert hosting.parse(str(endpoint), None) == endpoint


NONE = ["", " ", ":29400", "[]:29400", "node1:0", "node1:65536", "node1:-1", "node1:port", "node1:1.5", "node1:²", "a b"]
NONE += ["[fd00::1]x", "[fd00::1]:x", "[fd00::1]1", "[fd00::1", "node1/", "a,b,c:1", "http://node1:1", "user:pw@node1:29400"]
NONE += ["node1:\x1b[2J\n"]  # shown on one line


@pytest.mark.parametrize("text", NONE)
@pytest.mark.parametrize("local_addr", [None, "127.0.0.1"])
def test_what_is_no_endpoint(text, local_addr):
    expected = r"expected --rdzv-endpoint=HOST\[:PORT\], the same on all nodes.*a port from 1 to 65535"
    with pytest.raises(UsageError, match=expected) as caught:
        hosting.parse(text, local_addr)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["localhost", "localhost:1234", "127.0.0.1", "127.0.1.1:1234", "[::1]:1234", "LOCALHOST"])
def test_agents_of_one_machine_meet_at_the_loopback(text, caplog):
    endpoint = hosting.parse(text, None)
    assert hosting.own_address(endpoint, None, {}) == "127.0.0.1"
    assert f"--rdzv-endpoint={endpoint}: only agents on this machine can take part" in caplog.text
    assert hosting.own_address(endpoint, "127.0.0.1", SEVERAL) == "127.0.0.1", "a user says so"
    assert hosting.own_address(endpoint, None, {**SEVERAL, "SLURM_STEP_ID": ""}) == "127.0.0.1", "the shell of an allocation"
    with pytest.raises(UsageError, match=r"in a step on 2 hosts: .* is another machine on each of them"):
        hosting.own_address(endpoint, None, SEVERAL)


SEVERAL = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize("text", ["0.0.0.0", "[::]:1234"])
def test_no_address_to_reach(text):
    with pytest.raises(UsageError, match="is no address to reach"):
        hosting.parse(text, None)
    assert hosting.own_address(StoreEndpoint("node1", 29400), None, SEVERAL) is None


OWN = ["127.0.0.1", "10.0.0.1", "192.168.7.1", "::1", "fd00::1"]


@pytest.mark.parametrize(
    ("is_host", "resolved", "here", "reason"),
    [
        (None, ["10.0.0.1"], True, "node1 is this host, by its address 10.0.0.1"),
        (None, ["192.168.7.1", "fd00::1", "fe80::2%eth0"], True, "node1 is this host, by its address 192.168.7.1"),
        (None, ["fd00::1"], True, "node1 is this host, by its address fd00::1"),
        (None, ["127.0.1.1"], True, "node1 is this host, by its address 127.0.1.1"),  # on no interface
        (None, ["::1"], True, "node1 is this host, by its address ::1"),
        (None, ["10.0.0.2"], False, "node1 is another host: 10.0.0.2"),
        (None, ["10.0.0.2", "fd00::2"], False, "node1 is another host: 10.0.0.2, fd00::2"),
        (None, ["fe80::2%eth0"], False, "node1 is another host: fe80::2%eth0"),
        (None, [], False, "node1 is another host: it resolves to no address"),
        # What the user says counts alone: behind NAT an address may be this host's and be on no interface.
        (True, ["10.0.0.2"], True, "is_host=1"),
        (True, [], True, "is_host=1"),
        (False, ["10.0.0.1"], False, "is_host=0"),
    ],
)
def test_the_host_is_known_by_its_address(is_host, resolved, here, reason):
    decided = hosting.decide(StoreEndpoint("node1", 29400), is_host, resolved, OWN)
    assert (decided.here, decided.reason) == (here, reason)


def test_a_name_of_several_machines_is_refused():
    """As that of a headless Service: each of its pods would host a store of its own."""
    with pytest.raises(UsageError, match=r"names this host \(10.0.0.1\) and others \(10.0.0.2\).*is_host=1"):
        hosting.decide(StoreEndpoint("node1", 29400), None, ["10.0.0.2", "10.0.0.1"], OWN)
    assert hosting.decide(StoreEndpoint("node1", 29400), False, ["10.0.0.2", "10.0.0.1"], OWN).here is False


@pytest.mark.parametrize(
    ("conf", "lease_ttl"),
    [
        ({}, 10),
        ({"join_timeout": "600", "read_timeout": "60", "last_call_timeout": "30"}, 10),
        ({"keep_alive_interval": "4", "keep_alive_max_attempt": "5"}, 20),
        ({"keep_alive_interval": "4"}, 12),
        ({"keep_alive_max_attempt": "5"}, 25),
        ({"keep_alive_interval": "0.7"}, 3),  # whole seconds, and not less
        ({"keep_alive_interval": "0.1"}, 2),
    ],
)
def test_what_the_keys_of_torch_mean(conf, lease_ttl):
    settings = hosting.torch_settings(conf, Settings(backoff=0.25))
    assert settings == Settings(lease_ttl=lease_ttl, backoff=0.25)
    assert isinstance(settings.lease_ttl, int)


def test_our_own_settings_come_before_torchs():
    ours = Settings(lease_ttl=9)
    assert hosting.torch_settings({"keep_alive_interval": "4"}, ours) == ours


@pytest.mark.parametrize("key", ["keep_alive_interval", "keep_alive_max_attempt"])
@pytest.mark.parametrize("value", ["", "x", "inf", "nan", "-1"])
def test_a_key_of_torch_without_a_number(key, value):
    with pytest.raises(UsageError, match=f"{key}={value}: expected a number, 0 or more"):
        hosting.torch_settings({key: value}, Settings())


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.1", "10.0.0.1:29400"), ("::", "[::]:29400"), ("0.0.0.0", "0.0.0.0:29400")]
)
def test_a_plan_names_its_address(host, address):
    assert StorePlan(host, 29400).address == address
