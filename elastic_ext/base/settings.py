"""The settings of one agent: read once, validated, frozen.

Sources, first one wins: `--rdzv-conf key=value,...`, the environment (`ELASTIC_EXT_<KEY>`), the TOML file that
`ELASTIC_EXT_CONFIG` names. Standard library only.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from elastic_ext.base import name_pattern, user_files
from elastic_ext.base.errors import UsageError
from elastic_ext.base.kinds import KINDS
from elastic_ext.base.printable import literal
from elastic_ext.base.records import MOST_NAME, is_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "ELASTIC_EXT_"
SECRET_VARIABLES = frozenset({ENV_PREFIX + "ETCD_PASSWORD"})  # for the agent only, never for its workers

# Variables of ours that are no settings: the first names the file, the others are what the agent tells its workers (and
# a worker may start an agent of its own).
NOT_SETTINGS = frozenset({"CONFIG", "WORKER", "RESUME_STEP", "LAUNCH", "COPIER"})

# Keys of `--rdzv-conf` that torch's own c10d rendezvous reads (torch/distributed/elastic/rendezvous, 2.8 to 2.15). They are
# passed on untouched; `timeout` is put there by torchrun itself.
TORCH_KEYS = frozenset(
    {
        "timeout",
        "store_type",
        "read_timeout",
        "is_host",
        "join_timeout",
        "last_call_timeout",
        "close_timeout",
        "heartbeat_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
    }
)

# Kubernetes puts variables for every Service of the namespace into every pod; one of a Service called "elastic-ext" would
# look like a setting.
_KUBERNETES_SERVICE = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")

_KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://")  # METRICS_PORT is a setting, and what a Service "...-metrics" makes

MOST_BYTES = 1 << 20  # of the settings file
MOST_CHARACTERS = 200  # of a name, and of a bad value in a message

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")  # blanks and line ends may separate words

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def _boolean(text: str) -> bool:
    return _BOOLEANS[text.lower()]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _stall(text: str) -> float:
    value = _seconds(text)
    if value < 1:
        raise ValueError(text)
    return value


def _hang_timeout(text: str) -> float:
    value = _seconds(text)
    if value < 1:
        raise ValueError(text)
    return value


def _megabytes(text: str) -> float:
    return _seconds(text)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError(text)
    return value


def _restarts(text: str) -> int:
    value = int(text)
    if value < -1:
        raise ValueError(text)
    return value


def _lease(text: str) -> int:
    value = int(text)
    if value < 2:  # etcd cannot time less
        raise ValueError(text)
    return value


def _grow_at(text: str) -> str:
    if text not in ("now", "checkpoint"):
        raise ValueError(text)
    return text


def _preset(text: str) -> str:
    if text not in ("design", "stock", "kubeflow"):
        raise ValueError(text)
    return text


def _kind_limits(text: str) -> tuple[tuple[str, int], ...]:
    """ "hang:3 network:20": blanks between them, since --rdzv-conf cannot hold commas."""
    limits = {kind: int(count) for kind, _, count in (each.partition(":") for each in text.split())}
    if not limits or not limits.keys() <= set(KINDS) or min(limits.values()) < 0:
        raise ValueError(text)
    return tuple(limits.items())


def _verify(text: str) -> str:
    if text not in ("off", "sampled", "full"):
        raise ValueError(text)
    return text


def _pattern(text: str) -> str:
    try:
        name_pattern.compiled(text)
    except UsageError as error:
        raise ValueError(text) from error
    return text


def _modules(text: str) -> tuple[str, ...]:
    """ "numpy my_model.layers": blanks between them, since --rdzv-conf cannot hold commas."""
    names = tuple(text.split())
    if not names or not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(text)
    return names


def _text(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _name(text: str) -> str:
    """It becomes part of keys in etcd, with a number and a process id behind it."""
    if not is_name(text) or len(text) > MOST_NAME // 2:
        raise ValueError(text)
    return text


# What a bad value should have been, in the words of the error message.
_EXPECTED: dict[Callable[[str], Any], str] = {
    _boolean: "on or off",
    _seconds: "a number of seconds, 0 or more",
    _hang_timeout: "a number of seconds, 1 or more",
    _stall: "a number of seconds, 1 or more",
    _megabytes: "a number of megabytes a second, 0 or more",
    _port: "a port number, 0 to 65535",
    _restarts: "a whole number, or -1 for no limit",
    _lease: "a whole number of seconds, 2 or more",
    _grow_at: "now or checkpoint",
    _preset: "design, stock or kubeflow",
    _kind_limits: f"kinds with a number each, as in 'hang:3 network:20'; the kinds are {', '.join(KINDS)}",
    _verify: "off, sampled or full",
    _pattern: "a name, with * (4 at most) and ? as wildcards, and {step} and {epoch} for numbers, as in model_{step}.pt",
    _modules: "names of modules with blanks between them",
    _text: "a non-empty text",
    _name: f"1 to {MOST_NAME // 2} printable characters without a /",
}


def _setting(default: Any, parse: Callable[[str], Any], what: str) -> Any:
    return field(default=default, metadata={"parse": parse, "what": what})


@dataclass(frozen=True)
class Settings:
    """Every setting with its default. Times are in seconds."""

    backoff: float = _setting(
        1.0, _seconds, "wait before the second restart in a row without progress; doubles with each, with jitter; 0: never wait"
    )
    backoff_max: float = _setting(60.0, _seconds, "the longest such wait")
    bootstrap: bool = _setting(True, _boolean, "run Python workers through the bootstrap (error files, progress, stacks)")
    budget_window: int | None = _setting(
        None, _lease, "restarts longer ago than so many seconds no longer count against --max-restarts; default: all count"
    )
    checkpoint_dir: str | None = _setting(None, _text, "where the job's checkpoints are: a path or an fsspec URL")
    checkpoint_pattern: str = _setting(
        "",
        _pattern,
        "names of the job's checkpoints, `model_{step}.pt` or with * and ?; default: directories, .pt, .pth, .bin and .ckpt",
    )
    copy_mb_s: float = _setting(
        0.0, _megabytes, "megabytes a second at which a node may copy checkpoints from local_dir to checkpoint_dir; 0: no limit"
    )
    copy_stall: float = _setting(
        60.0, _stall, "how long copying to checkpoint_dir may make no progress at the end of a job; twice that, it is given up"
    )
    etcd_ca: str | None = _setting(None, _text, "ext_etcd: file of the CA that signed the servers' certificates")
    etcd_cert: str | None = _setting(None, _text, "ext_etcd: file of this client's certificate")
    etcd_key: str | None = _setting(None, _text, "ext_etcd: file of this client's private key")
    etcd_password: str | None = _setting(None, _text, "ext_etcd: password; give it by the environment or the file")
    etcd_user: str | None = _setting(None, _text, "ext_etcd: user")
    exit_codes: str = _setting(
        "design",
        _preset,
        "exit codes of the agent: by cause (see below), 1 as stock torchrun, or by cause with 128 added to those that "
        "Kubeflow's ExitCode policy shall retry",
    )
    grow_at: str = _setting(
        "now", _grow_at, "ext_etcd: a node joins a running job now, or at the next checkpoint (needs checkpoint_dir)"
    )
    hang: bool = _setting(
        True, _boolean, "end a round in which no worker of the job makes progress any more, and start it again; see below"
    )
    hang_timeout: float | None = _setting(
        None,
        _hang_timeout,
        "how long no progress may be made, 1 or more; ten times that before the first step, if nobody works; default: learned",
    )
    kind_limits: tuple[tuple[str, int], ...] | None = _setting(
        None, _kind_limits, "restarts at most for failures of a kind, within the budget: `hang:3 network:20`"
    )
    last_call: float = _setting(2.0, _seconds, "ext_etcd: how long the first round waits for more nodes once there are enough")
    ledger_file: str | None = _setting(
        None, _text, "ext_c10d: file that keeps the job's failures and its budget when the agents are killed and started again"
    )
    lease_ttl: int = _setting(10, _lease, "ext_etcd: after how long without a sign a node is taken for dead; 2 or more")
    local_dir: str | None = _setting(
        None,
        _text,
        "directory on a fast disk of each node that `elastic_ext.Checkpointer` saves to first; the agent copies it to "
        "checkpoint_dir in the background",
    )
    max_restarts: int | None = _setting(None, _restarts, "overrides --max-restarts; -1: no limit")
    metrics: bool = _setting(True, _boolean, "serve Prometheus metrics")
    metrics_host: str = _setting("127.0.0.1", _text, "address that the metrics endpoint is bound to")
    metrics_port: int = _setting(9401, _port, "port of the metrics endpoint; 0: any free one")
    node_name: str | None = _setting(
        None, _name, "what this node is called in verdicts, strikes and metrics; default: the host's name"
    )
    platform_grace: float | None = _setting(
        None,
        _seconds,
        "time between SIGTERM and SIGKILL that the platform grants the agent; --shutdown-timeout must be shorter; what "
        "`pod_file`, `pod_api` or Slurm says holds where that is less, and where this is not given",
    )
    pod_api: bool = _setting(False, _boolean, "Kubernetes: ask the API server about this pod when a worker has failed")
    pod_file: str | None = _setting(None, _text, "Kubernetes: file with this pod or its status as JSON, kept by somebody else")
    preload: tuple[str, ...] | None = _setting(
        None, _modules, "modules that warm standbys import besides torch and what they have learned; those beside the script too"
    )
    preload_exclude: tuple[str, ...] | None = _setting(
        None, _modules, "modules, with what lies in them, that warm standbys do not import"
    )
    refuse_node: int = _setting(3600, _lease, "seconds that a host that was told to leave may not come back")
    resume_from: str = _setting(
        "",
        _text,
        "checkpoint that the job begins with: a step, a name, a path or URL, or none to begin from nothing; later rounds of the "
        "same run go on from what it has saved since",
    )
    rules: str | None = _setting(None, _text, "TOML file with failure rules of your own, which come before the built-in ones")
    settle: float = _setting(
        0.5, _seconds, "how long after the first report of a failure the nodes that may have one too are waited for"
    )
    standby: bool = _setting(
        True,
        _boolean,
        "keep processes ready that have imported torch and wait for the next start of the workers (warm standbys)",
    )
    stderr_tail: bool = _setting(
        True, _boolean, "keep the last 64 KB of each worker's stderr as evidence; not where stderr is a terminal"
    )
    stop_grace: float | None = _setting(
        None,
        _seconds,
        "time that survivors of a failure get between SIGTERM and SIGKILL; default 5, or --shutdown-timeout if less",
    )
    topology: str | None = _setting(
        None, _text, "ext_etcd: where this node is (a rack, say); new nodes are numbered in its order"
    )
    verify: str = _setting(
        "sampled",
        _verify,
        "how much of a checkpoint is read before it is chosen: off, sampled (all sizes, the content of some files), or full",
    )
    verdict_file: str | None = _setting(None, _text, "file for the verdict that ends the job, as JSON")


DEFAULT_STOP_GRACE = 5.0

_FIELDS = {f.name: f for f in fields(Settings)}


def read(rdzv_conf: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Return the settings of this agent.

    Args:
        rdzv_conf: the keys and values of `--rdzv-conf`, torch's own among them.
        environ: the environment of the agent.

    Raises:
        UsageError: an unknown key (the nearest known one is named), a bad value, or a file that cannot be read.
    """
    values: dict[str, Any] = {}
    for origin, found in (
        _from_file(environ.get(ENV_PREFIX + "CONFIG")),
        ("the environment", _from_environ(environ)),
        ("--rdzv-conf", {key: value for key, value in rdzv_conf.items() if key not in TORCH_KEYS}),
    ):
        for key, value in found.items():
            values[key] = _parse(key, value, origin)
    return Settings(**values)


def _from_file(path: str | None) -> tuple[str, Mapping[str, Any]]:
    if not path:
        return "", {}
    try:
        return path, tomllib.loads(user_files.text(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the settings file {path} (ELASTIC_EXT_CONFIG) cannot be read as TOML: {error}") from error


def _from_environ(environ: Mapping[str, str]) -> Mapping[str, str]:
    found = {}
    for name, value in environ.items():
        key = name.removeprefix(ENV_PREFIX)
        if key == name or key in NOT_SETTINGS or (key == "RESUME_FROM" and ENV_PREFIX + "WORKER" in environ):
            continue
        if _KUBERNETES_SERVICE.search(key) and (key.lower() not in _FIELDS or _KUBERNETES_ADDRESS.match(value)):
            continue
        found[key.lower()] = value
    return found


def _parse(key: str, value: Any, origin: str) -> Any:
    if key not in _FIELDS:
        near = difflib.get_close_matches(key, [*_FIELDS, *TORCH_KEYS], n=1, cutoff=0.0)
        raise UsageError(f"unknown setting {key!r} in {origin}: did you mean {near[0]!r}?")
    parse = _FIELDS[key].metadata["parse"]
    try:
        text = str(value).strip()
        if _CONTROL.search(text):
            raise UsageError(f"setting {key}={_shown(value)} in {origin}: expected a text without control characters")
        return parse(text)
    except (ValueError, KeyError, OverflowError, RecursionError) as error:  # of a file: a number or a table of any size
        raise UsageError(f"setting {key}={_shown(value)} in {origin}: expected {_EXPECTED[parse]}") from error


def _shown(value: Any) -> str:
    return literal(value, MOST_CHARACTERS)


# (a time, the time that it must not exceed, why)
_CONTRADICTIONS = (
    ("stop_grace", "--shutdown-timeout", "a failure must not wait longer than a signal"),
    ("--shutdown-timeout", "platform_grace", "the platform would kill the agent first"),
    ("last_call_timeout", "join_timeout", "no round could ever be complete"),
    ("keep_alive_interval", "join_timeout", "no round could ever be complete"),
    ("lease_ttl", "join_timeout", "a dead node would outlast every attempt to form a round without it"),
)


def check_times(settings: Settings, rdzv_conf: Mapping[str, Any], shutdown_timeout: float) -> None:
    """Refuse times that contradict each other.

    Args:
        settings: what `read` returned.
        rdzv_conf: torch's own times are among its keys.
        shutdown_timeout: torchrun's `--shutdown-timeout` in seconds.

    Raises:
        UsageError: names both times and why one must be less than the other.
    """
    if settings.hang_timeout is not None and not (settings.hang and settings.bootstrap):
        switch = "bootstrap" if settings.hang else "hang"
        raise UsageError(
            f"hang_timeout={settings.hang_timeout:g} with {switch}=off: nothing would look at it; leave one of them out"
        )
    times = {
        "stop_grace": settings.stop_grace,
        "platform_grace": settings.platform_grace,
        "--shutdown-timeout": shutdown_timeout,
        "lease_ttl": settings.lease_ttl,
        **{key: _torch_time(rdzv_conf, key) for key in ("join_timeout", "last_call_timeout", "keep_alive_interval")},
    }
    for less, more, why in _CONTRADICTIONS:
        small, large = times[less], times[more]
        if small is not None and large is not None and small > large:
            raise UsageError(f"{less}={small:g} must not be more than {more}={large:g}: {why}")


def _torch_time(rdzv_conf: Mapping[str, Any], key: str) -> float | None:
    """One of torch's own times, or None where torch's default holds (torch has its own error for a bad value)."""
    try:
        return float(rdzv_conf[key])
    except (KeyError, TypeError, ValueError):
        return None


def stop_grace(settings: Settings, shutdown_timeout: float) -> float:
    """Seconds that the survivors of a failure get between SIGTERM and SIGKILL."""
    return settings.stop_grace if settings.stop_grace is not None else min(DEFAULT_STOP_GRACE, shutdown_timeout)
