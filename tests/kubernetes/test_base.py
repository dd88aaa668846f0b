"""What the jobs stand on: the commands of the README on a real etcd, the image's layer of pip, and that no file is forgotten."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.etcd_server import Certificates, EtcdServer, distro_binary
from tests.jobs import ROOT, SCRIPTS, TORCHRUN, Job
from tests.programs import needs

KUBERNETES = ROOT / "entrypoints" / "kubernetes"
README = (KUBERNETES / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ") for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL) for line in block.splitlines()
]


class ScriptCertificates(Certificates):
    """Those of etcd-certificates.sh."""


def test_each_file_is_in_the_readme():
    for path in KUBERNETES.rglob("*"):
        if path.is_file() and path.name != "README.md":
            shown = path.parent.name if path.parent.name == "chaos" else path.name
            assert shown in README, path


def test_commands_name_files_that_are_there():
    for command in COMMANDS:
        for word in shlex.split(command, comments=True):
            if re.search(r"\.(yaml|sh)$", word):
                assert (KUBERNETES / word).is_file(), command


def test_the_runtimes_address_is_that_of_etcd():
    _, _, statefulset = yaml.safe_load_all((KUBERNETES / "base" / "etcd.yaml").read_text())
    (container,) = statefulset["spec"]["template"]["spec"]["containers"]
    (cluster,) = (each for each in container["command"] if each.startswith("--initial-cluster="))
    members = re.findall(r"https://([\w.-]+):2380", cluster)
    assert len(members) == statefulset["spec"]["replicas"] == 3
    for name in ("runtime-2.1.yaml", "runtime-2.2.yaml"):
        assert ",".join(f"{member}:2379" for member in members) in (KUBERNETES / "trainer" / name).read_text()


@pytest.mark.seam
def test_the_certificate_covers_each_name_for_etcd(tmp_path):
    needs("openssl")
    subprocess.run([KUBERNETES / "base" / "etcd-certificates.sh", tmp_path], check=True, capture_output=True)
    called = {
        name
        for path in KUBERNETES.rglob("*.yaml")
        for name in re.findall(r"[\w.-]*\betcd\.elastic-ext\.svc[\w.]*", path.read_text())
    }
    assert {"etcd.elastic-ext.svc", "etcd-0.etcd.elastic-ext.svc"} <= called
    for name in called:
        check = ["openssl", "x509", "-noout", "-in", tmp_path / "server.crt", "-checkhost", name]
        assert "does match" in subprocess.run(check, check=True, capture_output=True, text=True).stdout, name


@pytest.mark.full
def test_the_users_commands_make_a_usable_etcd(tmp_path):
    """Certificates by the script, users by the commands of the README; then a job with the settings of the manifests."""
    needs("openssl")
    made = tmp_path / "certificates"
    subprocess.run([KUBERNETES / "base" / "etcd-certificates.sh", made], check=True, capture_output=True)
    assert sorted(path.name for path in made.iterdir() if path.suffix in (".crt", ".key")) == [
        *("ca.crt", "ca.key", "server.crt", "server.key"),
    ]
    with EtcdServer(tmp_path / "etcd", certificates=ScriptCertificates(made)) as server:
        endpoint = f"https://localhost:{server.client_port}"
        for command in COMMANDS:
            _, etcdctl, words = command.partition(" -- etcdctl ")
            if etcdctl:
                words = words.replace("/certificates/ca.crt", str(made / "ca.crt"))
                subprocess.run(
                    [distro_binary("etcdctl"), f"--endpoints={endpoint}", *shlex.split(words)],
                    check=True,
                    capture_output=True,
                    env={**os.environ, "ETCDCTL_API": "3"},
                )
        options = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint=localhost:{server.client_port}", "--rdzv-id=job"]
        user = {"ELASTIC_EXT_ETCD_CA": str(made / "ca.crt"), "ELASTIC_EXT_ETCD_USER": "elastic-ext"}
        with Job(
            [*TORCHRUN, *options, SCRIPTS / "pet_job.py"], tmp_path, **user, ELASTIC_EXT_ETCD_PASSWORD="JOB-PASSWORD"
        ) as job:
            done = job.finish()
        assert done.returncode == 0, done.err
        assert "pet 0 1" in done.out
        with Job([*TORCHRUN, *options, SCRIPTS / "pet_job.py"], tmp_path, **user, ELASTIC_EXT_ETCD_PASSWORD="wrong") as job:
            assert job.finish().returncode != 0


def dockerfile() -> list[str]:
    """Its instructions, each on one line."""
    text = re.sub(r"\\\n\s*", "", (KUBERNETES / "Dockerfile").read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_dockerfile():
    instructions = dockerfile()
    assert {line.split()[0] for line in instructions} <= {"ARG", "FROM", "RUN", "USER", "WORKDIR", "COPY", "ENV", "CMD"}
    assert [line for line in instructions if line.startswith("FROM")] == ["FROM ${BASE}"]
    user = instructions.index("USER 1000")
    assert not any(line.startswith("RUN") for line in instructions[user:]), "nothing runs as root after it"
    (copied,) = (line.split()[2] for line in instructions if line.startswith("COPY"))
    assert (ROOT / copied).is_file()


def run_layer(folder: Path, pip_options: str, changes: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the image's layer of pip, with the wheels of a folder, in this environment."""
    (layer,) = (line for line in dockerfile() if "pip install" in line)
    commands = layer.partition("target=/wheels ")[2]
    given = {
        "/tmp/torch.txt": f"{folder}/torch.txt",
        "/wheels": f"{folder}/wheels",
        "${PIP_OPTIONS}": pip_options,
        "${EXTRAS}": "s3",
        **changes,
    }
    for there, here in given.items():
        assert there in commands
        commands = commands.replace(there, here)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
    }  # not this machine's
    return subprocess.run(["sh", "-c", commands], capture_output=True, text=True, cwd=folder, env=env, check=False)


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        info, needs_ = f"{name}-{version}.dist-info", "".join(f"Requires-Dist: {each}\n" for each in requires)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs_}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.full
@pytest.mark.parametrize(("requires", "code"), [("torch>=2.8", 0), ("torch>=99", 1)])
def test_the_image_keeps_its_torch(tmp_path, requires, code):
    """Also where pip could have a newer one. Nothing is installed: this is the environment of the tests."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "torch", "99.0")
    write_wheel(wheels, "wanting", "1.0", requires)
    done = run_layer(tmp_path, "--no-index --dry-run", {'"elastic_ext[s3]" torchdata': "wanting"})
    assert done.returncode == code, done.stdout + done.stderr
    assert "torch-99" not in done.stdout


@pytest.mark.full
def test_the_wheel_alone_works_on_read_only_root(tmp_path):
    """The dependencies are there, as in an image that has them; no index is asked."""
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip"]
    stored = "--config-settings=--build-option=--compression=stored"
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", stored, "-w", wheels, ROOT], check=True, cwd=tmp_path
    )
    (wheel,) = wheels.iterdir()
    packed = tmp_path / "elastic_ext.tar.xz"
    subprocess.run(["tar", "--create", "--xz", f"--file={packed}", f"--directory={wheels}", "."], check=True)
    assert packed.stat().st_size < 1 << 20, "more than a ConfigMap holds"
    wheel.unlink()
    subprocess.run([sys.executable, "-m", "tarfile", "-e", packed, wheels], check=True)  # as the manifests do
    site = tmp_path / "site"
    done = run_layer(tmp_path, f"--no-index --no-deps --target={site}", {" torchdata": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    script = tmp_path / "job.py"
    script.write_text("import elastic_ext; print('in', elastic_ext.__file__)")
    # As the user of the tests: another one may not reach the Python of this machine.
    read_only = 'mount -o remount,bind,ro / && mount -t tmpfs none /dev/shm && cd / && exec "$@"'
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", read_only, "sh", *TORCHRUN]
    environ = {"PYTHONPATH": str(site), "TMPDIR": "/dev/shm", "PYTHONDONTWRITEBYTECODE": "1", "PET_RDZV_BACKEND": "ext_c10d"}
    with Job([*command, "--rdzv-endpoint=localhost:0", script], tmp_path, **environ) as job:
        done = job.finish()
    assert done.returncode == 0, done.all
    assert f"in {Path(site)}/elastic_ext/__init__.py" in done.out
