"""Settings: precedence, validation, contradictions. Pure."""

import dataclasses
import os
import re
import subprocess
import sys
import threading

import pytest

from elastic_ext.base import files, settings
from elastic_ext.base.errors import UsageError
from elastic_ext.embedded.snapshot import check_ledger_path
from elastic_ext.failures import user_rules
from tests.until import LIMIT_S


def test_defaults_need_nothing():
    assert settings.read({"timeout": 900}, {"PATH": "/bin"}) == settings.Settings()


def test_rdzv_conf_wins_then_environment_then_file(tmp_path):
    file = tmp_path / "conf.toml"
    file.write_text('metrics_port = 1\nlease_ttl = 2\ncheckpoint_dir = "/ckpt"\n')
    environ = {"ELASTIC_EXT_CONFIG": str(file), "ELASTIC_EXT_METRICS_PORT": "2", "ELASTIC_EXT_LEASE_TTL": "3"}
    read = settings.read({"metrics_port": "4"}, environ)
    assert (read.metrics_port, read.lease_ttl, read.checkpoint_dir) == (4, 3, "/ckpt")


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ("rel", "{cwd}/rel"),
        ("../rel/", "{up}/rel"),
        ("a:b", "{cwd}/a:b"),
        ("~/rel", "/home/me/rel"),
        ("/abs/x", "/abs/x"),
        ("file://rel", "file://{cwd}/rel"),
        ("file:///abs", "file:///abs"),
        ("s3://bucket/../rel", "s3://bucket/../rel"),
        ("simplecache::file://rel", "simplecache::file://rel"),
    ],
)
@pytest.mark.parametrize("key", ["checkpoint_dir", "local_dir"])
def test_a_relative_directory_is_that_of_the_agent(tmp_path, monkeypatch, key, given, read_as):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for read in (settings.read({key: given}, {}), settings.read({}, {f"ELASTIC_EXT_{key.upper()}": given})):
        assert getattr(read, key) == read_as.format(cwd=tmp_path, up=tmp_path.parent)


def test_a_relative_directory_without_a_working_directory(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match=r"checkpoint_dir='rel' .*absolute if the working directory has been removed"):
        settings.read({"checkpoint_dir": "rel"}, {})
    assert settings.read({"checkpoint_dir": "/abs"}, {}).checkpoint_dir == "/abs"


@pytest.mark.parametrize(
    ("conf", "environ", "said"),
    [
        ({"metrics_prt": "1"}, {}, "did you mean 'metrics_port'"),
        ({"chekpoint_dir": "/x"}, {}, "did you mean 'checkpoint_dir'"),
        ({"join_timeut": "1"}, {}, "did you mean 'join_timeout'"),
        ({}, {"ELASTIC_EXT_LEASETTL": "1"}, "did you mean 'lease_ttl'"),
        ({"metrics_port": "70000"}, {}, "0 to 65535"),
        ({"metrics_port": "x"}, {}, "port number"),
        ({"backoff": "-1"}, {}, "seconds"),
        ({"backoff": "nan"}, {}, "seconds"),
        ({"standby": "maybe"}, {}, "on or off"),
        ({"max_restarts": "-2"}, {}, "-1 for no limit"),
        ({"checkpoint_dir": ""}, {}, "non-empty"),
        ({}, {"ELASTIC_EXT_CONFIG": "/no/such/file"}, "/no/such/file"),
        ({}, {"ELASTIC_EXT_CONFIG": "/dev/zero"}, "longer than 1 MB"),
        ({}, {"ELASTIC_EXT_CONFIG": "/"}, "Is a directory"),
        ({"node_name": "a/b"}, {}, "printable characters without a /"),
        ({"node_name": "a" * 201}, {}, "1 to 100"),
        ({"node_name": "a\udcff"}, {}, "printable"),
        ({"node_name": "a\nb"}, {}, "printable"),
        ({"checkpoint_dir": "a\0b"}, {}, "control characters"),
        ({"lease_ttl": "9" * 5000}, {}, "2 or more"),
    ],
)
def test_bad_input_is_named_in_one_line(conf, environ, said):
    with pytest.raises(UsageError) as error:
        settings.read(conf, environ)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("conf", "environ"), [({"etcd_password": "hunter2\x01"}, {}), ({}, {"ELASTIC_EXT_ETCD_PASSWORD": "hunter2\x01"})]
)
def test_a_bad_password_is_not_shown(conf, environ):
    with pytest.raises(UsageError, match=r"etcd_password=\*\*\* in .*control characters") as error:
        settings.read(conf, environ)
    assert "hunter2" not in str(error.value)


def test_a_file_that_is_not_toml(tmp_path):
    file = tmp_path / "conf.toml"
    file.write_bytes(b"\xff\xfe not toml")
    with pytest.raises(UsageError, match=r"conf\.toml"):
        settings.read({}, {"ELASTIC_EXT_CONFIG": str(file)})


def test_files_that_never_end_or_nest_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WAIT_S", 0.2)
    fifo, deep, nul = tmp_path / "fifo", tmp_path / "deep.toml", tmp_path / "nul.toml"
    os.mkfifo(fifo)
    deep.write_text("topology = " + "[" * 5000)
    nul.write_text('topology = "a\\u0000b"')
    for file, said in ((fifo, "sent nothing"), (deep, "recursion"), (nul, "control characters")):
        with pytest.raises(UsageError) as error:
            settings.read({}, {"ELASTIC_EXT_CONFIG": str(file)})
        assert said in str(error.value)
        assert "\n" not in str(error.value)
    for file, said in ((fifo, "sent nothing"), (deep, "recursion")):
        with pytest.raises(UsageError, match=said):
            user_rules.load(str(file))


def test_a_pipe_with_a_writer_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WAIT_S", LIMIT_S)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    threading.Thread(target=fifo.write_text, args=('topology = "rack 3"',)).start()
    assert settings.read({}, {"ELASTIC_EXT_CONFIG": str(fifo)}).topology == "rack 3"


@pytest.mark.parametrize("what", ["fifo", "folder"])
def test_a_ledger_that_is_no_file_is_refused(tmp_path, what):
    path = tmp_path / what
    os.mkfifo(path) if what == "fifo" else path.mkdir()
    with pytest.raises(UsageError, match="expected a regular file"):
        check_ledger_path(str(path))


@pytest.mark.parametrize("text", ["on", "TRUE", "1", "yes", True])
def test_switches(text):
    assert settings.read({"standby": text}, {"ELASTIC_EXT_STANDBY": "off"}).standby is True
    assert settings.read({}, {"ELASTIC_EXT_STANDBY": "off"}).standby is False


@pytest.mark.seam
def test_a_typo_is_found_without_importing_torch():
    """Which may take a minute, when `doctor` has ten seconds for the settings."""
    read = (
        "import sys\nfrom elastic_ext.base import errors, settings\n"
        "try: settings.read({'checkpoint_dri': 'x'}, {})\nexcept errors.UsageError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert re.fullmatch(r"unknown setting 'checkpoint_dri'.*'checkpoint_dir'.*\nFalse\n", done.stdout)


def test_quotes_from_a_yaml_list_are_named():
    with pytest.raises(UsageError, match="they are for a shell, leave them out"):
        settings.read({"'lease_ttl": "10'"}, {})


@pytest.mark.parametrize(("text", "seconds", "looks"), [("off", 0.0, False), ("0", 0.0, False), ("7", 7.0, True)])
def test_hang_timeout_may_be_off(text, seconds, looks):
    read = settings.read({"hang_timeout": text}, {})
    assert (read.hang_timeout, read.hang) == (seconds, looks)


@pytest.mark.parametrize("text", ["0.5", "-1", "nan", "no"])
def test_a_hang_timeout_below_a_second_is_refused(text):
    with pytest.raises(UsageError, match="expected a number of seconds, 1 or more, or off"):
        settings.read({"hang_timeout": text}, {})


@pytest.mark.parametrize(("text", "port"), [("off", None), ("OFF", None), ("0", 0), ("9401", 9401)])
def test_metrics_may_be_off(text, port):
    assert settings.read({"metrics_port": text}, {}).metrics_port == port


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("bootstrap", "--no-python python SCRIPT"),
        ("etcd_data_dir", "set ledger_file to a file in that directory"),
        ("metrics", "set metrics_port=off"),
        ("pod_api", "leave it out"),
        ("preload", "leave it out"),
        ("stop_grace", "it is 5 s, or --shutdown-timeout"),
    ],
)
def test_a_setting_that_is_gone_is_explained(key, instead):
    for conf, environ in (({key: "1"}, {}), ({}, {f"ELASTIC_EXT_{key.upper()}": "1"})):
        with pytest.raises(UsageError, match=f"setting '{key}' in .* is gone: .*{instead}"):
            settings.read(conf, environ)


def test_what_is_no_setting_is_left_alone():
    environ = {
        "ELASTIC_EXT_WORKER": "{}",
        "ELASTIC_EXT_RESUME_FROM": "/x",  # what the agent above has told this worker
        "ELASTIC_EXT_RESUME_STEP": "1",
        # a Kubernetes Service called "elastic-ext-store"
        "ELASTIC_EXT_STORE_SERVICE_HOST": "10.0.0.1",
        "ELASTIC_EXT_STORE_SERVICE_PORT": "2379",
        "ELASTIC_EXT_STORE_PORT": "tcp://10.0.0.1:2379",
        "ELASTIC_EXT_STORE_PORT_2379_TCP_ADDR": "10.0.0.1",
        # and one called "elastic-ext-metrics", whose variable is a setting's
        "ELASTIC_EXT_METRICS_PORT": "tcp://10.0.0.7:9401",
        "ELASTIC_EXT_METRICS_SERVICE_HOST": "10.0.0.7",
    }
    assert settings.read({}, environ) == settings.Settings()
    del environ["ELASTIC_EXT_WORKER"]
    assert settings.read({}, environ) == settings.Settings(resume_from="/x")


HUGE = {"number": "0x" + "f" * 5000, "table": "{a" + ".a" * 2000 + " = 1}"}


@pytest.mark.parametrize("value", HUGE.values(), ids=HUGE)
def test_a_value_that_python_refuses_to_write(value, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(f"metrics_port = {value}")
    with pytest.raises(UsageError, match=r"metrics_port=.*expected a port number"):
        settings.read({}, {"ELASTIC_EXT_CONFIG": str(path)})


@pytest.mark.parametrize(
    ("own", "conf", "shutdown", "said"),
    [
        ({"platform_grace": 20.0}, {}, 30, "--shutdown-timeout=30 must not be more than platform_grace=20"),
        ({}, {"last_call_timeout": 60, "join_timeout": "30"}, 30, "last_call_timeout=60"),
        ({}, {"keep_alive_interval": "40", "join_timeout": "30"}, 30, "keep_alive_interval=40"),
    ],
)
def test_contradictory_times(own, conf, shutdown, said):
    with pytest.raises(UsageError) as error:
        settings.check_times(settings.Settings(**own), conf, shutdown)
    assert said in str(error.value)


def test_times_that_agree():
    settings.check_times(settings.Settings(platform_grace=30), {"join_timeout": 600, "last_call_timeout": "5"}, 20)


def test_every_setting_says_what_it_is_and_expects():
    for field in dataclasses.fields(settings.Settings):
        assert field.metadata["help"]
        assert field.metadata["type"].expected
