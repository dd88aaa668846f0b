"""`elastic-ext doctor`: whether a job could run here, and what it would know of its failures, before one is started.

Each look stands for itself, has a deadline and leaves nothing behind. torch, and the plug-ins of others, are looked at in a
process of its own (`doctor_probe.py`): they may hang, crash or print.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from elastic_ext.base import settings as settings_module
from elastic_ext.base.errors import EX_CONFIG, ElasticExtError
from elastic_ext.base.printable import printable, redacted
from elastic_ext.base.settings import ENV_PREFIX, Settings
from elastic_ext.checkpoints.choice import discovery
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.failures import sources, user_rules
from elastic_ext.failures.host import NVIDIA_DRIVER
from elastic_ext.failures.sources import commands, kubernetes, slurm
from elastic_ext.failures.sources.kernel_log import DEVICE
from elastic_ext.workers.standby import memory, rules

OK, WARN, FAIL = "ok", "warn", "fail"
PROBE_S = 120.0  # importing torch from a cold network file system takes a minute and more
LOOK_S = 30.0  # of any other look
SETTINGS_S = 10.0  # a file may be on a file server that is away
SHUTDOWN_TIMEOUT_S = 30.0  # torchrun's default
PROBE = str(Path(__file__).with_name("doctor_probe.py"))
PLUGINS = ("ext_c10d", "ext_etcd")
OUR_AGENT = "elastic_ext.agent.supervisor.Supervisor"
SHM = "/dev/shm"
SHM_BYTES = 64 << 20  # what containers have without a word about it; DataLoader workers need more
SHM_FILES = 64
DESCRIPTORS = 4096  # an agent of 32 workers needs some 300; rank 0's one more for each rank of the job
MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """One line of the screen. state: OK, WARN (a job runs, something is missing) or FAIL (no job runs so). advice: "": none."""

    name: str
    state: str
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Asked:
    """What all looks are given. environ: of the command."""

    settings: Settings
    endpoint: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


Look = Callable[[Asked], list[Check]]


def examine(rdzv_conf: str, endpoint: str, environ: Mapping[str, str]) -> list[Check]:
    """Look at everything; at most PROBE_S. Never raises for what it finds.

    Args:
        rdzv_conf: as torchrun's option. endpoint: of etcd; "": none is looked at.
    """
    read: list[Settings] = []
    first = _Running("settings", lambda: [_settings(rdzv_conf, environ, read)], SETTINGS_S).result()
    asked = Asked(read[0] if read else Settings(), endpoint, environ)
    looks = [_Running(name, functools.partial(look, asked), deadline_s) for name, look, deadline_s in LOOKS]
    return [*first, *(check for running in looks for check in running.result())]


def exit_code(checks: Sequence[Check]) -> int:
    return EX_CONFIG if any(check.state == FAIL for check in checks) else 0


def rendered(checks: Sequence[Check]) -> str:
    """The screen: one line a check, and one more where there is something to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:4}  {check.name:{width}}  {printable(check.detail)}")
        if check.advice:
            lines.append(f"{'':4}  {'':{width}}  -> {printable(check.advice)}")
    counts = {state: sum(check.state == state for check in checks) for state in (FAIL, WARN)}
    lines.append(f"\n{counts[FAIL]} failed, {counts[WARN]} with a warning, of {len(checks)}")
    return "\n".join(lines)


def as_json(checks: Sequence[Check]) -> str:
    return json.dumps({"ok": exit_code(checks) == 0, "checks": [asdict(check) for check in checks]}, indent=2)


class _Running:
    """A look in a thread, which is left behind where it does not end in time."""

    def __init__(self, name: str, look: Callable[[], list[Check]], deadline_s: float) -> None:
        self._name, self._look = name, look
        self._limit_s, self._deadline = deadline_s, time.monotonic() + deadline_s
        self._found: list[Check] | None = None
        self._thread = threading.Thread(target=self._run, name=f"elastic_ext-doctor-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._look()
        except (ElasticExtError, OSError) as error:
            self._found = [Check(self._name, FAIL, _line(error))]
        except Exception as error:  # noqa: BLE001 - the top of a thread; the doctor tells of it
            self._found = [Check(self._name, FAIL, f"{type(error).__name__}: {_line(error)}")]

    def result(self) -> list[Check]:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        found = self._found
        return [Check(self._name, FAIL, f"no answer within {self._limit_s:g} s")] if found is None else found


def _line(error: object) -> str:
    return redacted(" ".join(str(error).split()))[:300]


# The looks.


def _settings(rdzv_conf: str, environ: Mapping[str, str], read: list[Settings]) -> Check:
    """The settings are put into `read`, unless they are faulty."""
    conf = {key.strip(): value for key, _, value in (pair.partition("=") for pair in rdzv_conf.split(",")) if key.strip()}
    try:
        settings = settings_module.read(conf, environ)
        settings_module.check_times(settings, conf, SHUTDOWN_TIMEOUT_S)
        user_rules.load(settings.rules)
    except ElasticExtError as error:
        return Check("settings", FAIL, _line(error), "the checks below look at the defaults")
    read.append(settings)
    given = [name for name, value in vars(settings).items() if value != getattr(Settings(), name)]
    return Check("settings", OK, f"given: {', '.join(given)}" if given else "all are the defaults")


def _torch(asked: Asked) -> list[Check]:
    environ = {name: value for name, value in asked.environ.items() if not name.startswith(ENV_PREFIX)}  # no settings, no secrets
    text = commands.output([sys.executable, PROBE], PROBE_S - 5, environ)
    try:
        told = json.loads(text or "")
    except ValueError:
        why = f"a process that imports torch has crashed, or was not done in {PROBE_S - 5:.0f} s"
        return [Check("torch", FAIL, why, f"run {sys.executable} {PROBE}")]
    if (error := told["torch"].get("error")) is not None:
        return [Check("torch", FAIL, f"cannot be imported: {_line(error)}", f"install torch for {sys.executable}")]
    torch = Check("torch", OK, f"{told['torch']['found']}, Python {sys.version.split()[0]}")
    return [torch, *_plugins(told["plugins"]), _agent(told["agent"]), _standbys(asked.settings, told["site"])]


def _plugins(told: Mapping[str, Mapping[str, str]]) -> list[Check]:
    """Ours, and those of others: torch reports one that fails in each run, with a traceback."""
    errors = {name: _line(answer["error"]) for name, answer in told.items() if "error" in answer}
    absent = [name for name in PLUGINS if name not in told]
    if absent:
        ours = Check("entry point", FAIL, f"{', '.join(absent)} not found", f"install elastic_ext for {sys.executable}")
    elif bad := [name for name in PLUGINS if name in errors]:
        ours = Check("entry point", FAIL, "; ".join(f"{name}: {errors[name]}" for name in bad), "install elastic_ext again")
    else:
        ours = Check("entry point", OK, f"{', '.join(PLUGINS)} found")
    others = sorted(told.keys() - set(PLUGINS))
    if bad := [name for name in others if name in errors]:
        detail = "; ".join(f"{name}: {errors[name]}" for name in bad)
        return [ours, Check("other plug-ins", WARN, f"fail to load: {detail}", "every torchrun here warns of it; mend or remove")]
    return [ours, Check("other plug-ins", OK, ", ".join(others) or "none")]


def _agent(told: Mapping[str, str]) -> Check:
    if "error" in told:
        return Check("agent", FAIL, f"could not be built: {_line(told['error'])}")
    if told["found"] != OUR_AGENT:
        return Check("agent", FAIL, f"torch builds {told['found']} instead", "another package has replaced torch's agent")
    return Check("agent", OK, "torch's launcher builds elastic_ext's")


def _standbys(settings: Settings, site: Mapping[str, str]) -> Check:
    if not settings.standby or not settings.bootstrap:
        return Check("standbys", OK, "off, by the settings")
    why = site.get("error") or site.get("found") or rules.room(memory.available(), 1, server_runs=False)
    if why:
        return Check("standbys", WARN, f"not possible: {why}", "workers start cold, some seconds slower")
    return Check("standbys", OK, "possible")


def _etcd(asked: Asked) -> list[Check]:
    if not asked.endpoint:
        return [Check("etcd", OK, "not looked at: no --rdzv-endpoint")]
    from elastic_ext.etcd import EtcdError
    from elastic_ext.rendezvous.etcd.connect import connect

    with connect(asked.endpoint, asked.settings) as client:
        status = client.status()
        user = f", user {asked.settings.etcd_user} may read" if asked.settings.etcd_user else ""
        detail = f"version {status.version} at {redacted(asked.endpoint)}{user}"
        try:
            alarms = [alarm.kind for alarm in client.alarms()]
        except EtcdError:
            alarms = []  # a user of a job need not be allowed to ask
    version = tuple(int(part) for part in status.version.split(".")[:2] if part.isdigit())
    if version < (3, 4):
        return [Check("etcd", FAIL, detail, "elastic_ext needs etcd 3.4 or newer")]
    if alarms:
        return [Check("etcd", WARN, f"{detail}; alarms: {', '.join(alarms)}", "a failure waits until etcd takes writes again")]
    return [Check("etcd", OK, detail)]


def _checkpoints(asked: Asked) -> list[Check]:
    directory = asked.settings.checkpoint_dir
    if directory is None:
        why = "restarts begin from nothing, unless the script resumes by itself"
        return [Check("checkpoint_dir", WARN, f"not set: {why}", "give it by --rdzv-conf=checkpoint_dir=...")]
    choice = discovery.newest_complete(directory, discovery.Wanted(pattern=asked.settings.checkpoint_pattern))
    if choice.resume is not None:
        newest = f"newest complete: {choice.resume.path}, step {choice.resume.step}"
    else:
        newest = f"no complete checkpoint, {len(choice.passed_over)} passed over"
    checks = [_writable("checkpoint_dir", directory, newest)]
    if choice.all_bad:
        checks.append(Check("newest checkpoint", FAIL, "there are checkpoints, and none may be used", "see: checkpoints ls"))
    if asked.settings.local_dir is not None:
        checks.append(_writable("local_dir", asked.settings.local_dir, "saves go there first"))
    return checks


def _writable(name: str, directory: str, detail: str) -> Check:
    """Create and remove a file. A local directory that is not there yet is not made."""
    shown, detail = redacted(directory), redacted(detail)
    storage = open_storage(directory)
    if os.path.isabs(storage.address) and not os.path.isdir(storage.address):
        path = Path(storage.address)
        parent = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if not parent.is_dir():
            return Check(name, FAIL, f"{redacted(str(parent))} is not a directory; {detail}", "no job could save there")
        state = OK if os.access(parent, os.W_OK | os.X_OK) else FAIL
        return Check(
            name, state, f"{shown} is not there yet, and {parent} {'is' if state == OK else 'is not'} writable; {detail}"
        )
    probe = f".elastic_ext_doctor_{uuid.uuid4().hex}"
    try:
        storage.put(probe, b"")
        storage.remove(probe)
    except OSError as error:
        return Check(name, FAIL, f"{shown} is not writable: {_line(error)}; {detail}", "no job could save there")
    return Check(name, OK, f"{shown} is writable; {detail}")


def _metrics(asked: Asked) -> list[Check]:
    settings = asked.settings
    where = f"{settings.metrics_host} port {settings.metrics_port}"
    if not settings.metrics:
        return [Check("metrics", OK, "off, by the settings")]
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.metrics_host, settings.metrics_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except OSError as error:
        return [
            Check("metrics", WARN, f"{where}: {_line(error)}", "the agent takes a free port; set metrics_port or metrics_host")
        ]
    return [Check("metrics", OK, f"{where} is free")]


def _evidence(asked: Asked) -> list[Check]:
    """What tells of a failure besides the worker itself. None of it is needed for a job to run."""
    counted = sources.oom_counts()
    cgroup = (
        Check("memory kills", OK, f"counted in {', '.join(counted)}")
        if counted
        else Check("memory kills", WARN, "no cgroup of this process can be read: a kill for memory counts as unknown")
    )
    return [cgroup, _kernel_log(), _gpu(), _platform(asked)]


def _kernel_log() -> Check:
    try:
        os.close(os.open(DEVICE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        advice = "needed on GPU hosts only: run as root, or set kernel.dmesg_restrict=0"
        return Check("kernel log", WARN, f"{DEVICE}: {error.strerror}: Xids are not seen", advice)
    return Check("kernel log", OK, f"{DEVICE} is readable")


def _gpu() -> Check:
    if not os.path.exists(NVIDIA_DRIVER):
        return Check("NVML", OK, "no NVIDIA driver here")
    found = sources.recovery_actions()
    if found is None:
        return Check("NVML", WARN, "the driver's recovery actions cannot be read", "pip install nvidia-ml-py")
    return Check("NVML", OK, f"{len(found)} GPUs: {', '.join(sorted({each.action or 'not told' for each in found}))}")


def _platform(asked: Asked) -> Check:
    environ, settings = asked.environ, asked.settings
    if slurm.job_id(environ):
        found = shutil.which("scontrol", path=environ.get("PATH"))
        state, what = (OK, "scontrol is there") if found else (WARN, "no scontrol: why Slurm ends the job is not known")
        return Check("platform", state, f"Slurm job {slurm.job_id(environ)}; {what}")
    if kubernetes.HOST in environ or settings.pod_file:
        if settings.pod_file and kubernetes.read_pod(settings.pod_file) is not None:
            return Check("platform", OK, f"Kubernetes; the pod is read from {settings.pod_file}")
        if settings.pod_api and kubernetes.get_pod(environ) is not None:
            return Check("platform", OK, "Kubernetes; the pod is read from the API server")
        return Check(
            "platform", WARN, "Kubernetes; this pod cannot be read", "set pod_file, or pod_api and the right to get pods"
        )
    return Check("platform", OK, "neither Slurm nor Kubernetes")


def _limits(asked: Asked) -> list[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    few = hard != resource.RLIM_INFINITY and hard < DESCRIPTORS
    advice = f"raise it to {DESCRIPTORS} or more: ulimit -n, LimitNOFILE=" if few else ""
    files = Check("descriptors", WARN if few else OK, f"limit {soft}, hard limit {shown}", advice)
    left = memory.available()
    little = "training needs more" if left < MEMORY_BYTES else ""
    return [files, _shm(), Check("memory", WARN if little else OK, f"{left >> 20} MB are available", little)]


def _shm() -> Check:
    try:
        found = os.statvfs(SHM)
    except OSError as error:
        return Check(
            "shm", WARN, f"{SHM}: {error.strerror}", "the agent uses the temporary directory; DataLoader workers need it"
        )
    room = found.f_bavail * found.f_frsize
    full = room < SHM_BYTES or (found.f_files > 0 and found.f_favail < SHM_FILES) or not os.access(SHM, os.W_OK)
    detail = f"{SHM}: {room >> 20} MB and {found.f_favail} files are free{'' if os.access(SHM, os.W_OK) else ', not writable'}"
    return Check("shm", WARN if full else OK, detail, "docker run --shm-size, or an emptyDir in memory" if full else "")


LOOKS: tuple[tuple[str, Look, float], ...] = (
    ("torch", _torch, PROBE_S),
    ("etcd", _etcd, LOOK_S),
    ("checkpoint_dir", _checkpoints, LOOK_S),
    ("metrics", _metrics, LOOK_S),
    ("evidence", _evidence, LOOK_S),
    ("limits", _limits, LOOK_S),
)
