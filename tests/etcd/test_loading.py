"""The wire tables and the private copy of etcd3: right, lazy, and without a trace in the process."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from elastic_ext.etcd import messages


def upstream() -> dict[str, descriptor_pb2.DescriptorProto]:
    """The messages of etcd3's generated code, which does not import on modern protobuf but holds the descriptors as text."""
    found = {}
    for name in ("kv_pb2", "rpc_pb2"):
        path = importlib.metadata.distribution("etcd3").locate_file(f"etcd3/etcdrpc/{name}.py")
        text = re.search(r"serialized_pb=_b\(('.*?')\)\n", Path(str(path)).read_text(), re.DOTALL)
        file = descriptor_pb2.FileDescriptorProto.FromString(ast.literal_eval(text[1]).encode("latin1"))
        found.update({message.name: message for message in file.message_type})
    return found


def oneof(message: descriptor_pb2.DescriptorProto, field: descriptor_pb2.FieldDescriptorProto) -> str | None:
    return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None


def test_every_field_is_that_of_etcd():
    theirs = upstream()
    newer = {("WatchCreateRequest", "watch_id")}  # etcd 3.4; etcd3's code is of 3.3
    compared = 0
    for message in messages.file_descriptor().message_type:
        fields = {field.name: field for field in theirs[message.name].field}
        for field in message.field:
            if (message.name, field.name) in newer:
                continue
            their = fields[field.name]
            assert (field.number, field.type, field.label) == (their.number, their.type, their.label), (message.name, field.name)
            assert field.type_name.rpartition(".")[2] == their.type_name.rpartition(".")[2]
            assert oneof(message, field) == oneof(theirs[message.name], their)
            compared += 1
        enums = {enum.name: enum for enum in theirs[message.name].enum_type}
        for enum in message.enum_type:
            assert [(v.name, v.number) for v in enum.value] == [(v.name, v.number) for v in enums[enum.name].value]
    assert compared > 90


def python(code: str, **environment: str) -> str:
    """What the code prints in a fresh interpreter."""
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.seam
def test_importing_the_package_imports_neither_grpc_nor_torch():
    loaded = python(
        "import sys, elastic_ext.etcd; print([m for m in ('grpc', 'google.protobuf', 'etcd3', 'torch') if m in sys.modules])"
    )
    assert loaded == "[]"


@pytest.mark.seam
def test_a_client_leaves_protobuf_and_the_environment_alone():
    printed = python(
        "import os, sys; before = dict(os.environ)\n"
        "from elastic_ext.etcd import EtcdClient; EtcdClient('127.0.0.1:1').close()\n"
        "from google.protobuf.internal import api_implementation\n"
        "print(api_implementation.Type(), dict(os.environ) == before, [m for m in sys.modules if m.startswith('etcd3')])"
    )
    assert printed in ("upb True []", "cpp True []")  # cpp: protobuf 3


@pytest.mark.seam
def test_a_users_own_etcd3_stays_the_users():
    printed = python(
        "import sys, types; own = sys.modules['etcd3'] = types.ModuleType('etcd3'); sub = sys.modules['etcd3.sub'] = own\n"
        "from elastic_ext.etcd import EtcdClient; EtcdClient('127.0.0.1:1').close()\n"
        "import etcd3; print(etcd3 is own, sys.modules['etcd3.sub'] is own, 'etcd3.etcdrpc' in sys.modules)"
    )
    assert printed == "True True False"


@pytest.mark.seam
def test_a_clash_in_the_descriptor_pool_is_harmless():
    """As with aetcd, pyetcd or the user's own etcd3: a file `auth.proto` that defines the same messages."""
    printed = python(
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "file = descriptor_pb2.FileDescriptorProto(name='rpc.proto', package='etcdserverpb')\n"
        "file.message_type.add(name='PutRequest'); descriptor_pool.Default().AddSerializedFile(file.SerializeToString())\n"
        "from elastic_ext.etcd import messages; print(messages.etcdrpc().PutRequest(key=b'a').key)"
    )
    assert printed == "b'a'"


@pytest.mark.seam
def test_another_distributions_etcd3_is_refused(tmp_path: Path):
    """etcd3-py installs a package of the same name."""
    (tmp_path / "etcd3").mkdir()
    (tmp_path / "etcd3" / "__init__.py").touch()
    code = (
        "from elastic_ext.etcd import EtcdClient, ConfigError\ntry: EtcdClient('a:1')\nexcept ConfigError as error: print(error)"
    )
    path = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    printed = python(code, PYTHONPATH=path)
    assert str(tmp_path / "etcd3") in printed
    assert "another distribution" in printed
    assert "\n" not in printed


def test_a_file_overwritten_by_other_distributions_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from elastic_ext.etcd import vendor
    from elastic_ext.etcd.errors import ConfigError

    vendor.check_distribution()
    changed = tmp_path / "client.py"
    changed.write_text("# etcd3-py")
    distribution = importlib.metadata.distribution("etcd3")
    has_checksums = any(entry.hash for entry in distribution.files or [])  # not where setup.py install put it
    assert vendor._unchanged(distribution, changed) is not has_checksums
    monkeypatch.setattr(vendor, "VERSION", "0.13.0")
    with pytest.raises(ConfigError, match=r"needs etcd3==0\.13\.0, found 0\.12\.0"):
        vendor.check_distribution()
