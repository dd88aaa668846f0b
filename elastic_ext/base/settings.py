"""The settings of one agent: read once, validated and frozen. Standard library only.

First their types; then their three sources, of which the first one wins: `--rdzv-conf key=value,...`, the environment
(`ELASTIC_EXT_<KEY>`), the TOML file that `ELASTIC_EXT_CONFIG` names; then the table of settings.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from elastic_ext.base import files, records
from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import literal, printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SettingType:
    # makes the value from a text; raises ValueError, KeyError, OverflowError or RecursionError if it is invalid
    parse: Callable[[str], object]
    expected: str  # completes "expected ..." in the error message
    secret: bool = False  # messages must not show the value


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _bytes(text: str) -> int:
    number = text.lower().rstrip("kmgt")
    value = int(float(number) * _UNITS[text.lower().removeprefix(number)])
    if value < 0:
        raise ValueError(text)
    return value


_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def _float_from(least: float, most: float = sys.float_info.max) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return parse


def _int_within(least: int, most: float = float("inf")) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return parse


def _limit_or_off(text: str) -> float:
    return 0.0 if text.lower() in ("0", "off") else _float_from(1)(text)


def _port_or_off(text: str) -> int | None:
    return None if text.lower() == "off" else _int_within(0, 65535)(text)


def one_of(*choices: str) -> SettingType:
    """Return the type of a setting that takes one of these texts."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return SettingType(parse, f"{', '.join(choices[:-1])} or {choices[-1]}")


def _pattern(text: str) -> str:
    try:
        compile_pattern(text)
    except UsageError as error:
        raise ValueError(text) from error
    return text


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(text.split())
    if not names or not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(text)
    return names


def _text(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


_LOCAL_URLS = ("file://", "local://")  # of fsspec, which also takes relative paths in them


def _directory(text: str) -> str:
    """Make a path absolute, once for the agent and all it starts: a script may change its directory. URLs stay as they are."""
    scheme = next((scheme for scheme in _LOCAL_URLS if text.startswith(scheme)), "")
    path = text.removeprefix(scheme)
    if not path or "://" in path:
        return _text(text)
    try:
        return scheme + os.path.abspath(os.path.expanduser(path))
    except FileNotFoundError as error:
        raise ValueError(text) from error


def _name(text: str) -> str:
    """Check a name that becomes part of etcd keys, followed by a number and a process id."""
    if not records.is_name(text) or len(text) > records.MAX_NAME // 2:
        raise ValueError(text)
    return text


BOOLEAN = SettingType(lambda text: _BOOLEANS[text.lower()], "on or off")
SECONDS = SettingType(_float_from(0), "a number of seconds, 0 or more")
SECONDS_OR_OFF = SettingType(_limit_or_off, "a number of seconds, 1 or more, or off")
SECONDS_FROM_1 = SettingType(_float_from(1), "a number of seconds, 1 or more")
# Prometheus itself forgets an agent 5 minutes after its last scrape; a node that ends holds its place in the cluster meanwhile.
LINGER_SECONDS = SettingType(_float_from(0, 300), "a number of seconds, 0 to 300")
WHOLE_SECONDS = SettingType(_int_within(2), "a whole number of seconds, 2 or more")  # etcd's leases cannot be shorter
STEPS = SettingType(_int_within(0), "a whole number of steps, 0 or more")
BYTES = SettingType(_bytes, "a number of bytes, or of K, M, G or T (powers of 1024), e.g. 4G")
MB_PER_SECOND = SettingType(_float_from(0), "a number of megabytes per second, 0 or more")
PORT_OR_OFF = SettingType(_port_or_off, "a port number, 0 to 65535, or off")
RESTARTS = SettingType(_int_within(-1), "a whole number, or -1 for no limit")
# The items of lists are separated by spaces, since --rdzv-conf cannot hold commas.
MODULES = SettingType(_modules, "names of modules, separated by spaces")
PATTERN = SettingType(
    _pattern, "a name, with * (4 at most) and ? as wildcards, and {step} and {epoch} for numbers, e.g. model_{step}.pt"
)
TEXT = SettingType(_text, "a non-empty text")
DIRECTORY = SettingType(
    _directory, "a non-empty text: a URL or a path, which must be absolute if the working directory has been removed"
)
SECRET = SettingType(_text, "a non-empty text", secret=True)
NAME = SettingType(_name, f"1 to {records.MAX_NAME // 2} printable characters without a /")

STEP, EPOCH = "{step}", "{epoch}"
_WILD = {"*": ".*", "?": ".", STEP: "(?P<step>[0-9]{1,18})", EPOCH: "(?P<epoch>[0-9]{1,18})"}
_PARTS = re.compile(r"(\*+|\?|\{step\}|\{epoch\})")


@functools.lru_cache(maxsize=16)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a `checkpoint_pattern` as a regular expression. Raises UsageError if it is invalid."""
    if not pattern or "/" in pattern or any(pattern.count(field) > 1 for field in (STEP, EPOCH)) or pattern.count("*") > 4:
        raise UsageError(
            f"checkpoint_pattern {pattern!r}: expected a name, with * (4 at most) and ? as wildcards, and {STEP} and {EPOCH} for "
            "numbers, e.g. model_{step}.pt"
        )
    parts = (part[0] if part.startswith("*") else part for part in _PARTS.split(pattern) if part)
    return re.compile("".join(_WILD.get(part, re.escape(part)) for part in parts), re.DOTALL)


ENV_PREFIX = "ELASTIC_EXT_"

# Our variables that are not settings: CONFIG names the file, and the agent sets the others for its workers (a worker may start an
# agent of its own).
NOT_SETTINGS = frozenset({"CONFIG", "WORKER", "RESUME_STEP", "MEMORY_DIR", "MEMORY_DOMAIN", "MEMORY_MB_S", "LAUNCH", "COPIER"})

# Keys of `--rdzv-conf` that torch's own c10d rendezvous reads (torch/distributed/elastic/rendezvous, 2.8 to 2.15). They are
# passed on unchanged; torchrun itself adds `timeout`.
TORCH_KEYS = frozenset(
    {
        *("timeout", "store_type", "read_timeout", "is_host", "join_timeout", "last_call_timeout", "close_timeout"),
        *("heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
    }
)

# Kubernetes sets variables in every pod for every Service of the namespace. Those of a Service named "elastic-ext" would look
# like settings.
_KUBERNETES_SERVICE = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")

# METRICS_PORT is a setting, but also a variable of a Service named "...-metrics".
_KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://")

MAX_BYTES = 1 << 20  # of the settings file
MAX_CHARACTERS = 200  # of an invalid value in a message

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")  # spaces and line breaks may separate words


def _from_file(path: str | None) -> tuple[str, Mapping[str, object]]:
    if not path:
        return "", {}
    try:
        return path, tomllib.loads(files.read_text(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the settings file {path} (ELASTIC_EXT_CONFIG) cannot be read as TOML: {error}") from error


def _from_environ(environ: Mapping[str, str], keys: Collection[str]) -> Mapping[str, str]:
    found = {}
    for name, value in environ.items():
        key = name.removeprefix(ENV_PREFIX)
        if key == name or key in NOT_SETTINGS or (key == "RESUME_FROM" and ENV_PREFIX + "WORKER" in environ):
            continue
        if _KUBERNETES_SERVICE.search(key) and (key.lower() not in keys or _KUBERNETES_ADDRESS.match(value)):
            continue
        found[key.lower()] = value
    return found


def _parsed(key: str, value: object, origin: str) -> object:
    if key not in _TYPES:
        if key[:1] in ("'", '"'):
            raise UsageError(f"{origin} has quotes around {literal(key, MAX_CHARACTERS)}: they are for a shell, leave them out")
        if key in GONE:
            raise UsageError(f"setting {key!r} in {origin} is gone: {GONE[key]}")
        near = difflib.get_close_matches(key, [*_TYPES, *TORCH_KEYS], n=1, cutoff=0.0)
        raise UsageError(f"unknown setting {key!r} in {origin}: did you mean {near[0]!r}?")
    shown = "***" if _TYPES[key].secret else literal(value, MAX_CHARACTERS)
    try:
        text = str(value).strip()
        if _CONTROL.search(text):
            raise UsageError(f"setting {key}={shown} in {origin}: expected a text without control characters")
        return _TYPES[key].parse(text)
    except (ValueError, KeyError, OverflowError, RecursionError) as error:  # a file may hold a number or a table of any size
        raise UsageError(f"setting {key}={shown} in {origin}: expected {_TYPES[key].expected}") from error


# For the agent only, never for its workers.
SECRET_VARIABLES = frozenset({ENV_PREFIX + "ETCD_PASSWORD", ENV_PREFIX + "JOB_SECRET"})


def _setting(default: Any, type_: SettingType, help_: str) -> Any:
    return field(default=default, metadata={"type": type_, "help": help_})


@dataclass(frozen=True)
class Settings:
    """All settings with their defaults. Times are in seconds."""

    # fmt: off
    address: str | None = _setting(None, TEXT,
        "interface (`eth1`) or network (`10.1.0.0/16`) whose address this node gives to the other nodes; default: the address "
        "from which this host reaches the host of --rdzv-endpoint; --local-addr overrides it")
    backoff: float = _setting(1.0, SECONDS,
        "delay before the second restart in a row without progress; doubles with each further restart, with jitter; 0: no "
        "delay. Before the first step, a failure that may be an outage is tried again after 30, then after 90 times this delay")
    bad_node_command: str | None = _setting(None, TEXT,
        "shell command that the agent runs, for 10 s at most, as its node leaves to be replaced for a failure of kind hardware; "
        "$ELASTIC_EXT_NODE and $ELASTIC_EXT_REASON say which node leaves, and why")
    budget_window: int | None = _setting(None, WHOLE_SECONDS,
        "a restart counts against --max-restarts for this many seconds; default: for the whole job")
    checkpoint_dir: str | None = _setting(None, DIRECTORY, "where the job's checkpoints are: a path or an fsspec URL")
    checkpoint_pattern: str = _setting("", PATTERN,
        "pattern of checkpoint names, e.g. `model_{step}.pt`, or with * and ?; the files may be of unknown formats; default: "
        "every checkpoint of a known format")
    copy_mb_s: float = _setting(0.0, MB_PER_SECOND,
        "limit for copying from local_dir to checkpoint_dir, and for sending copies in memory to another node, each in "
        "megabytes per second and node; 0: no limit")
    etcd_ca: str | None = _setting(None, TEXT, "ext_etcd: file of the CA that signed the servers' certificates")
    etcd_cert: str | None = _setting(None, TEXT, "ext_etcd: file of this client's certificate")
    etcd_key: str | None = _setting(None, TEXT, "ext_etcd: file of this client's private key")
    etcd_password: str | None = _setting(None, SECRET, "ext_etcd: password; set it in the environment or the file")
    etcd_user: str | None = _setting(None, TEXT, "ext_etcd: user")
    events_file: str | None = _setting(None, TEXT,
        "file to which events are appended, one JSON object per line; agents of a host may share it; or `stdout`")
    exit_codes: str = _setting("design", one_of("design", "stock", "kubeflow"),
        "exit codes of the agent: `design`, by cause (see [exit codes](failures.md#exit-codes)); `stock`, 1 for every "
        "verdict (wrong usage stays 78); `kubeflow`, by cause, with 128 added to those that Kubeflow's ExitCode policy should "
        "retry")
    grow_at: str = _setting("now", one_of("now", "checkpoint"),
        "when a new node joins a running job: now, or at the next checkpoint (needs checkpoint_dir)")
    health_command: str | None = _setting(None, TEXT,
        "shell command that the agent runs before each round; unless it exits with 0, this node leaves with 69; the log shows "
        "its output; `preflight`: a [check of our own](operations.md#preflight) of devices, memory and disks; a "
        "wrong setting then is 78")
    health_timeout: float = _setting(60.0, SECONDS_FROM_1,
        "how long health_command may take; a node on which it hangs is bad")
    hang_timeout: float | None = _setting(None, SECONDS_OR_OFF,
        "seconds without progress that count as a hang; before the first step, ten times this, and at least half an hour while a "
        "worker is busy; default: learned from the job; `off` or 0: no hang is looked for. When no worker of the job makes "
        "progress, the round ends, and starts again")
    integrity_every: int = _setting(0, STEPS,
        "N: after every N optimizer steps, workers hash parameters and optimizer state that other ranks hold too, and the agents "
        "compare the hashes (see [wrong results](failures.md#wrong-results)); 0: never")
    job_secret: str | None = _setting(None, SECRET,
        "`job:`, ext_c10d: secret of the job, 16 characters or more, the same on all hosts; set it in the environment or the "
        "file")
    job_secret_file: str | None = _setting(None, TEXT,
        "`job:`, ext_c10d: file that holds the secret, with mode 0600; on a disk that all hosts share, it is created if it does "
        "not exist")
    ledger_file: str | None = _setting(None, TEXT,
        "ext_c10d, `job:`: file that keeps the job's failures, restart budget, refused hosts and goodput, in case all agents "
        "are killed and started again. ext_c10d with several nodes: only the file on the store's host counts. `job:`: each host "
        "with a member of etcd writes one beside it, and the newest counts; on a disk that all hosts share, or on local disks "
        "if the same hosts come back")
    lease_ttl: int = _setting(10, WHOLE_SECONDS, "a node that is silent for this long counts as dead; 2 or more")
    local_dir: str | None = _setting(None, DIRECTORY,
        "directory on a fast disk of each node, or in its memory; `elastic_ext.Checkpointer` saves there first, as do scripts "
        "that save in `elastic_ext.save_dir()`; the agent copies to checkpoint_dir in the background")
    local_saves: str = _setting("one_machine", one_of("one_machine", "all"),
        "where `elastic_ext.save_dir()` is local_dir: in jobs on one machine, or in all. On several nodes this is new: nodes "
        "fetch each other's files, and [some ways to save](trainers.md) do not count yet")
    max_restarts: int | None = _setting(None, RESTARTS, "overrides --max-restarts; -1: no limit")
    memory_every: int | None = _setting(None, STEPS,
        "steps from one copy in memory by `Checkpointer.snapshot` to the next; 0: no copies; default: as often as possible while "
        "the copies hold up training for less than 1 % of the time, and ever more rarely while nothing fails, down to 0.03 %")
    memory_limit: int | None = _setting(None, BYTES,
        "the most memory for these copies on a node, e.g. `64G`, two for each worker; with several nodes, half of it is for "
        "another node's copies; default: a quarter of the memory that is free when a round starts")
    metrics_certfile: str | None = _setting(None, TEXT,
        "PEM file of the certificate with which the metrics endpoint serves HTTPS; read again when it changes")
    metrics_client_cafile: str | None = _setting(None, TEXT,
        "PEM file of a CA: only clients with a certificate that it has signed may read the metrics")
    metrics_discovery_dir: str | None = _setting(None, TEXT,
        "directory for a file that names this endpoint to Prometheus (file_sd_configs), as long as the agent runs")
    metrics_host: str = _setting("127.0.0.1", TEXT, "address of the metrics endpoint")
    metrics_keyfile: str | None = _setting(None, TEXT, "PEM file of the private key of metrics_certfile, without a password")
    metrics_linger: float = _setting(0.0, LINGER_SECONDS,
        "how long an agent that has left the job waits for one more scrape of its metrics; 300 or less")
    metrics_port: int | None = _setting(9401, PORT_OR_OFF, "port of the metrics endpoint; 0: any free port; `off`: serve none")
    mirror: bool = _setting(False, BOOLEAN,
        "with local_saves=all: each node also keeps, in its local_dir, what the next node has there of your script's newest "
        "save. So a save outlives the loss of one node before it is copied. Takes room for one more save, two at times")
    node_name: str | None = _setting(None, NAME, "name of this node in verdicts and metrics; default: the host's name")
    platform_grace: float | None = _setting(None, SECONDS,
        "time between SIGTERM and SIGKILL that the platform grants the agent, at least --shutdown-timeout (30 s); Kubernetes "
        "or Slurm can shorten it, or provide it if it is not set")
    preload_exclude: tuple[str, ...] | None = _setting(None, MODULES,
        "modules that warm standbys do not import, with their submodules")
    refuse_node: int = _setting(3600, WHOLE_SECONDS, "how long a host that had to leave the job may not come back")
    rejoin_timeout: float | None = _setting(None, SECONDS,
        "how long the job waits for lost nodes to come back once fewer than the minimum are left; then it ends with 75, to be "
        "requeued; default: as long as join_timeout; in a step of Slurm, where a lost node cannot come back, lease_ttl and 5 s")
    resume_from: str = _setting("", TEXT,
        "the checkpoint that the job starts from: a step, a name, a path or a URL, or `none` to start from nothing; later rounds "
        "resume from what this run has saved")
    rules: str | None = _setting(None, TEXT, "TOML file with your own failure rules, which come before the built-in ones")
    stragglers: str = _setting("auto", one_of("auto", "all", "replace", "off"),
        "whether [stragglers](hangs.md#stragglers) are looked for: `auto`: not with NCCL before torch 2.15, nor with "
        "nccl-legacy, as their recorder asks the device, which may break the capture of a CUDA graph (not yet run on GPUs); "
        "`all`: with these, too; `replace`: as `all`, and a node that has been late by 10 % of a step or more for 5 minutes "
        "leaves with 69 at the next checkpoint, as after `elastic-ext drain`, while a spare waits; `off`")
    standby: bool = _setting(True, BOOLEAN,
        "keep warm standbys: processes that have imported torch and wait for the next start of the workers")
    stderr_tail: bool = _setting(True, BOOLEAN,
        "keep the last 64 KB of each worker's stderr as evidence; not where stderr is a terminal")
    topology: str | None = _setting(None, TEXT,
        "location of this node, e.g. its rack; new nodes get ranks in the order of their locations; default: in Slurm with a "
        "topology plugin, the node's switches or its block")
    unsafe_etcd: bool = _setting(False, BOOLEAN,
        "`job:` on three hosts: accept etcd 3.5.0 to 3.5.2, although a member that is killed may lose writes for good")
    verify: str = _setting("sampled", one_of("off", "sampled", "full"),
        "how much of a checkpoint is read before it is chosen: off, sampled (all sizes, the content of some files), or full")
    verdict_file: str | None = _setting(None, TEXT, "file for the verdict that ends the job, as JSON")
    # fmt: on

    @property
    def hang(self) -> bool:
        """Whether hangs are looked for."""
        return self.hang_timeout != 0

    @property
    def copies_to_memory(self) -> bool:
        """Whether workers may copy their state to the agent's memory."""
        return self.checkpoint_dir is not None and self.memory_every != 0 and self.memory_limit != 0

    @property
    def mirrors_saves(self) -> bool:
        """Whether nodes keep parts of each other's saves. Without, nothing of that is imported."""
        return self.mirror and self.local_saves == "all" and self.local_dir is not None and self.checkpoint_dir is not None


STOP_GRACE_S = 5.0  # from SIGTERM to SIGKILL for workers that are stopped because another one failed

# What to do instead of a setting that is gone.
GONE = {
    "bootstrap": "to run a script without the bootstrap, give torchrun `--no-python python SCRIPT`",
    "etcd_data_dir": "set ledger_file to a file in that directory",
    "metrics": "set metrics_port=off",
    "pod_api": "leave it out, the API server is asked wherever the pod's account may",
    "preload": "leave it out, standbys learn the modules from the workers",
    "stop_grace": f"leave it out, it is {STOP_GRACE_S:g} s, or --shutdown-timeout if that is less",
}

_TYPES: dict[str, SettingType] = {each.name: each.metadata["type"] for each in fields(Settings)}


def read(rdzv_conf: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Return the settings of this agent.

    rdzv_conf: the keys and values of `--rdzv-conf`, including torch's own. environ: the environment of the agent.

    Raises:
        UsageError: an unknown key (the message names the nearest known one), an invalid value, or an unreadable file.
    """
    found: dict[str, Any] = {}
    for origin, given in (
        _from_file(environ.get(ENV_PREFIX + "CONFIG")),
        ("the environment", _from_environ(environ, _TYPES.keys())),
        ("--rdzv-conf", {key: value for key, value in rdzv_conf.items() if key not in TORCH_KEYS}),
    ):
        for key, value in given.items():
            found[key] = _parsed(key, value, origin)
    return Settings(**found)


# (a time, the time that it must not exceed, why)
_CONTRADICTIONS = (
    ("--shutdown-timeout", "platform_grace", "the platform would kill the agent first"),
    ("last_call_timeout", "join_timeout", "no round could ever be complete"),
    ("keep_alive_interval", "join_timeout", "no round could ever be complete"),
    ("lease_ttl", "join_timeout", "a dead node would outlast every attempt to form a round without it"),
)


def check_times(settings: Settings, rdzv_conf: Mapping[str, object], shutdown_timeout: float) -> None:
    """Refuse times that contradict each other.

    settings: the settings from `read`. rdzv_conf: may hold torch's own times. shutdown_timeout: torchrun's `--shutdown-timeout`
    in seconds.

    Raises UsageError: names both times and why one must be less than the other.
    """
    times = {
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
    """Return one of torch's own times; None if torch's default applies (torch itself reports an invalid value)."""
    try:
        return float(rdzv_conf[key])
    except (KeyError, TypeError, ValueError):
        return None


def torch_number(conf: Mapping[str, Any], key: str, default: float) -> float:
    """Return one of torch's own keys of --rdzv-conf. Raises UsageError: it is no number, or less than 0."""
    try:
        value = float(conf.get(key, default))
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"--rdzv-conf={key}={printable(str(conf[key]))}: expected a number, 0 or more")
    return value
