"""`elastic-ext doctor` on this machine, with what can be wrong made wrong: real etcd, another user, limits, a broken plug-in."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from elastic_ext.base.printable import redacted
from elastic_ext.base.settings import Settings
from elastic_ext.cli import FAIL, OK, WARN, Finding, doctor, rendered
from elastic_ext.rendezvous import address
from elastic_ext.rendezvous.address import Address, HostName
from tests.etcd_server import EtcdServer
from tests.jobs import environment
from tests.ports import free_port
from tests.until import LIMIT_S

PASSWORD = "a-secret-of-etcd"
DOCTOR = [sys.executable, "-m", "elastic_ext.cli", "doctor"]


def examined(*options: str, cwd: Path, **variables: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and state and detail of each check by name."""
    done = subprocess.run(
        [*DOCTOR, "--json", *options], cwd=cwd, env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert PASSWORD not in done.stdout
    told = json.loads(done.stdout)
    assert told["ok"] == (done.returncode == 0)
    return done.returncode, {check["name"]: (check["state"], check["detail"]) for check in told["checks"]}


@pytest.fixture
def guarded(server: EtcdServer) -> EtcdServer:
    """Its users need a password."""
    server.lock(PASSWORD)
    return server


@pytest.mark.seam
def test_where_all_is_well(tmp_path, guarded):
    checkpoints, temporary = tmp_path / "checkpoints", tmp_path / "tmp"
    checkpoints.mkdir()
    temporary.mkdir()
    torch.save({"step": 3}, checkpoints / "step_3.pt")
    port = free_port()
    code, checks = examined(
        f"--rdzv-endpoint={guarded.endpoint}", f"--rdzv-conf=checkpoint_dir={checkpoints},metrics_port={port},etcd_user=root",
        cwd=tmp_path, ELASTIC_EXT_ETCD_PASSWORD=PASSWORD, ELASTIC_EXT_STANDBY="on", TMPDIR=str(temporary),
    )  # fmt: skip
    assert code == 0, checks
    assert {name: state for name, (state, _) in checks.items() if state == FAIL} == {}
    assert checks["torch"][1].startswith(torch.__version__)
    for name in ("entry point", "other plug-ins", "agent", "etcd", "checkpoint_dir", "metrics"):
        assert checks[name][0] == OK, checks[name]
    assert checks["etcd"][1].startswith("version 3.")
    assert f"{checkpoints} is writable; newest complete: {checkpoints}/step_3.pt, step 3" in checks["checkpoint_dir"][1]
    assert [path.name for path in checkpoints.iterdir()] == ["step_3.pt"]
    assert list(temporary.iterdir()) == []


@pytest.mark.full
def test_what_is_wrong_is_told_and_78(tmp_path, guarded):
    """One run: it takes seconds to import torch."""
    plugin = tmp_path / "plugins" / "broken-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[torchrun.handlers]\nbroken = no_such_module:handler\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, checks = examined(
            f"--rdzv-endpoint={guarded.endpoint}", f"--rdzv-conf=metrics_port={taken.getsockname()[1]},etcd_user=root",
            cwd=tmp_path, ELASTIC_EXT_ETCD_PASSWORD="another", PYTHONPATH=str(plugin.parent),
        )  # fmt: skip
    assert code == 78
    assert checks["etcd"][0] == FAIL
    assert checks["other plug-ins"][0] == WARN
    assert "broken: ModuleNotFoundError" in checks["other plug-ins"][1]
    assert checks["agent"][0] == OK  # torch loads ours all the same
    assert checks["metrics"][0] == WARN
    assert "in use" in checks["metrics"][1]
    assert checks["standbys"] == (OK, "off, by the settings")


@pytest.mark.seam
def test_another_user_who_may_not_write():
    """Permission bits do not bind root. The interpreter may lie where nobody may read: then torch is what fails, too.

    Not in tmp_path: each other session of pytest that begins on this machine closes the directory above it to other users.
    """
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        assert_not_writable(Path(directory, "closed"))


def assert_not_writable(closed):
    closed.mkdir(mode=0o755)
    code = (
        "import os, sys, encodings.ascii, encodings.idna, encodings.latin_1\n"
        "import fsspec.implementations.local, elastic_ext.workers.standby.import_checks\n"
        "from elastic_ext.cli import main as cli\n"
        "from elastic_ext.cli import doctor\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"sys.exit(cli.main(['doctor', '--rdzv-conf=checkpoint_dir={closed}']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 78, done
    assert f"{closed} is not writable" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert list(closed.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_where_a_directory_is_to_be(tmp_path, below):
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    settings = Settings(checkpoint_dir=str(tmp_path / "there"), local_dir=f"{tmp_path}/file{below}")
    found = {check.name: check for check in doctor.check_checkpoints(doctor.Inputs(settings))}
    assert found["checkpoint_dir"].state == OK
    assert found["local_dir"].state == FAIL
    assert f"{tmp_path}/file is not a directory" in found["local_dir"].detail


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(("below", "state"), [("new", OK), ("typo/new", FAIL), ("a/typo/new", FAIL)])
def test_a_directory_whose_parent_does_not_exist_either(tmp_path, scheme, below, state):
    """As root, who may make it anywhere: the file system that should hold it is perhaps not mounted."""
    directory = tmp_path / below
    (check,) = doctor.check_checkpoints(doctor.Inputs(Settings(checkpoint_dir=f"{scheme}{directory}")))
    assert (check.name, check.state) == ("checkpoint_dir", state)
    assert f"{scheme}{directory} does not exist" in check.detail
    assert (f"nor does its parent {directory.parent}; expected a directory" in check.detail) == (state == FAIL)
    assert (f"mkdir -p {directory}" in check.advice) == (state == FAIL)
    assert not directory.exists()


LOOPS = HostName("n1", ("127.0.1.1",), True, "ib0")
NOWHERE = dataclasses.replace(LOOPS, interface="")


@pytest.mark.parametrize(
    ("found", "endpoint", "environ", "state", "advice"),
    [
        (LOOPS, "10.1.0.1:2379,10.1.0.2:2379", {}, OK, ""),
        (LOOPS, "job:10.1.0.1", {}, OK, ""),
        (LOOPS, "localhost:2379", {}, OK, ""),
        (NOWHERE, "job:localhost", {}, OK, ""),
        (NOWHERE, "", {}, OK, ""),
        (NOWHERE, "10.1.0.1:2379", {}, WARN, "set GLOO_SOCKET_IFNAME=eth0 or ib0, or mend /etc/hosts"),
        (NOWHERE, "job:", {}, WARN, "GLOO_SOCKET_IFNAME=eth0 or ib0"),
        (LOOPS, "10.1.0.1:2379", {"GLOO_SOCKET_IFNAME": "eth1"}, OK, ""),
        (dataclasses.replace(LOOPS, loops=False), "10.1.0.1:2379", {}, OK, ""),
    ],
)
def test_a_host_name_that_leads_to_the_loopback(monkeypatch, found, endpoint, environ, state, advice):
    reached_at = []
    monkeypatch.setattr(address, "look_up", lambda address: (reached_at.append(address), found)[1])
    monkeypatch.setattr(address, "address_towards", lambda host: f"towards {host}")
    own = [Address("lo", "127.0.0.1"), Address("eth0", "10.0.0.5"), Address("ib0", "10.1.0.5")]
    monkeypatch.setattr(address, "addresses", lambda: own)
    (told,) = doctor.check_host_name(doctor.Inputs(Settings(), endpoint, environ))
    assert (told.name, told.state) == ("host name", state)
    assert told.detail.startswith("the host name n1 resolves to 127.0.1.1")
    gives = "the agent gives its workers GLOO_SOCKET_IFNAME=" in told.detail
    assert gives is (found.loops and not environ and not advice)
    assert advice in told.advice
    assert bool(advice) == bool(told.advice)
    assert reached_at == ["towards 10.1.0.1" if "10.1.0.1" in endpoint else ""]


@pytest.mark.full
def test_settings_that_cannot_be_and_few_descriptors(tmp_path):
    def fewer() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    done = subprocess.run(
        [*DOCTOR, "--rdzv-conf=checkpoint_dri=x"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, preexec_fn=fewer, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (78, "")
    assert any(line.startswith("fail  settings") and "did you mean 'checkpoint_dir'" in line for line in lines), lines
    assert any(line.startswith("warn  descriptors") and "hard limit 256" in line for line in lines), lines
    assert len(lines) < 40  # one screen


def test_a_check_that_fails_costs_only_itself():
    gate = doctor.threading.Event()
    stuck = doctor._RunningCheck("stuck", lambda: gate.wait() and [], 0.2).result()
    assert stuck == [Finding("stuck", FAIL, "no answer within 0.2 s")]
    gate.set()
    (failed,) = doctor._RunningCheck("failed", lambda: [][0], LIMIT_S).result()
    assert (failed.state, failed.detail) == (FAIL, "IndexError: list index out of range")


def test_the_settings_file_may_be_a_silent_pipe(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "SETTINGS_S", 0.2)
    monkeypatch.setattr(doctor, "CHECKS", ())
    os.mkfifo(tmp_path / "settings.toml")
    (check,) = doctor.examine("", "", {"ELASTIC_EXT_CONFIG": str(tmp_path / "settings.toml")})
    assert check.state == FAIL


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("u:pw@127.0.0.1:1,other:2379", "***@127.0.0.1:1,other:2379"),
        ("https://u:p@w@etcd0:2379", "https://***@etcd0:2379"),
        ("s3://key:secret@bucket/a?versionId=7&token=abc", "s3://***@bucket/a?versionId=7&token=***"),
        ("/data/step_7/a:b", "/data/step_7/a:b"),
        ("etcd0:2379,etcd1:2379", "etcd0:2379,etcd1:2379"),
    ],
)
def test_no_secret_of_an_address_is_shown(address, shown):
    assert redacted(address) == shown
    inputs = doctor.Inputs(Settings(), address)
    if "@" in address and "s3" not in address:
        (check,) = doctor._RunningCheck("etcd", lambda: doctor.check_etcd(inputs), LIMIT_S).result()
        assert check.state == FAIL
        assert "pw" not in check.detail
        assert "p@w" not in check.detail


def test_nothing_that_others_wrote_reaches_the_terminal_raw():
    shown = rendered([Finding("other plug-ins", WARN, "bad\x1b[2Jname\nok    etcd  forged", "run \x9b1m")])
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert sum(line.startswith(("ok", "warn", "fail")) for line in shown.splitlines()) == 1
