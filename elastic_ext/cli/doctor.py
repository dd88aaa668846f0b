"""`elastic-ext doctor`: checks, before a job starts, whether it could run here and what it would know about its failures.

The checks run in parallel, each in a thread with a deadline. Each is independent and leaves nothing behind. A child process
(`doctor_probe.py`) examines torch and foreign plug-ins, which may hang, crash or print.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_ext.base import name_lookup
from elastic_ext.base import settings as settings_module
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.printable import redacted
from elastic_ext.checkpoints.choice import hints, listing
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.cli import FAIL, OK, WARN, Finding, as_json, exit_code, one_line, rendered
from elastic_ext.failures import commands, kubernetes, slurm, user_rules
from elastic_ext.failures.host import DEVICE, NVIDIA_DRIVER, oom_counts, recovery_actions
from elastic_ext.rendezvous import address
from elastic_ext.workers.limits import memory_left
from elastic_ext.workers.standby import rules

PROBE_S = 120.0  # importing torch from a cold network file system may take more than a minute
CHECK_S = 30.0  # for any other check
SHUTDOWN_TIMEOUT_S = 30.0  # torchrun's default
PROBE = str(Path(__file__).with_name("doctor_probe.py"))
PLUGINS = ("ext_c10d", "ext_etcd")
OUR_AGENT = "elastic_ext.agent.supervisor.Supervisor"
SHM = "/dev/shm"
SHM_BYTES = 64 << 20  # the default size in containers; DataLoader workers need more
SHM_FILES = 64
DESCRIPTORS = 4096  # an agent with 32 workers needs about 300; the agent of rank 0 needs one more per rank of the job
MEMORY_BYTES = 1 << 30
GLOO = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Inputs:
    """The input of every check. endpoint: etcd's, or "". environ: the environment of the command."""

    settings: settings_module.Settings
    endpoint: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


CheckFunction = Callable[[Inputs], list[Finding]]
ProbeAnswer = Mapping[str, str]  # of `doctor_probe`: either `found` or `error`


def check_settings(rdzv_conf: str, environ: Mapping[str, str], read: list[settings_module.Settings]) -> Finding:
    """Read the settings and append them to `read`, unless they are invalid."""
    conf = {key.strip(): value for key, _, value in (pair.partition("=") for pair in rdzv_conf.split(",")) if key.strip()}
    try:
        settings = settings_module.read(conf, environ)
        settings_module.check_times(settings, conf, SHUTDOWN_TIMEOUT_S)
        user_rules.load(settings.rules)
    except ElasticExtError as error:
        return Finding("settings", FAIL, one_line(error), "the checks below use the defaults")
    read.append(settings)
    given = [name for name, value in vars(settings).items() if value != getattr(settings_module.Settings(), name)]
    return Finding("settings", OK, f"set: {', '.join(given)}" if given else "all have their defaults")


def check_torch(inputs: Inputs) -> list[Finding]:
    """Check torch, the entry points, the agent that torch would build, and warm standbys."""
    # The probe gets no settings and no secrets.
    environ = {name: value for name, value in inputs.environ.items() if not name.startswith(settings_module.ENV_PREFIX)}
    text = commands.output([sys.executable, PROBE], PROBE_S - 5, environ)
    try:
        answer = json.loads(text or "")
    except ValueError:
        why = f"a process that imports torch crashed, or took more than {PROBE_S - 5:.0f} s"
        return [Finding("torch", FAIL, why, f"run {sys.executable} {PROBE}")]
    if (error := answer["torch"].get("error")) is not None:
        return [Finding("torch", FAIL, f"cannot be imported: {one_line(error)}", f"install torch for {sys.executable}")]
    torch = Finding("torch", OK, f"{answer['torch']['found']}, Python {sys.version.split()[0]}")
    return [torch, *_plugins(answer["plugins"]), _agent(answer["agent"]), _standbys(inputs.settings, answer["site"])]


def _plugins(answers: Mapping[str, ProbeAnswer]) -> list[Finding]:
    """Check our entry points and those of others. If one fails to load, torch prints its traceback in every run."""
    errors = {name: one_line(answer["error"]) for name, answer in answers.items() if "error" in answer}
    absent = [name for name in PLUGINS if name not in answers]
    if absent:
        ours = Finding("entry point", FAIL, f"{', '.join(absent)} not found", f"install elastic_ext for {sys.executable}")
    elif bad := [name for name in PLUGINS if name in errors]:
        ours = Finding("entry point", FAIL, "; ".join(f"{name}: {errors[name]}" for name in bad), "install elastic_ext again")
    else:
        ours = Finding("entry point", OK, f"{', '.join(PLUGINS)} found")
    others = sorted(answers.keys() - set(PLUGINS))
    if bad := [name for name in others if name in errors]:
        detail = "; ".join(f"{name}: {errors[name]}" for name in bad)
        advice = "every torchrun here warns about it; repair or remove it"
        return [ours, Finding("other plug-ins", WARN, f"fail to load: {detail}", advice)]
    return [ours, Finding("other plug-ins", OK, ", ".join(others) or "none")]


def _agent(answer: ProbeAnswer) -> Finding:
    if "error" in answer:
        return Finding("agent", FAIL, f"could not be built: {one_line(answer['error'])}")
    if answer["found"] != OUR_AGENT:
        return Finding("agent", FAIL, f"torch builds {answer['found']} instead", "another package has replaced torch's agent")
    return Finding("agent", OK, "torch's launcher builds elastic_ext's")


def _standbys(settings: settings_module.Settings, site: ProbeAnswer) -> Finding:
    if not settings.standby:
        return Finding("standbys", OK, "off, by the settings")
    why = site.get("error") or site.get("found") or rules.memory_shortage(memory_left(), 1, server_runs=False)
    if why:
        return Finding("standbys", WARN, f"not possible: {why}", "workers start cold, some seconds slower")
    return Finding("standbys", OK, "possible")


def check_etcd(inputs: Inputs) -> list[Finding]:
    """Check that etcd answers, its version and its alarms. Raises the errors of the client."""
    if not inputs.endpoint:
        return [Finding("etcd", OK, "not checked: no --rdzv-endpoint")]
    from elastic_ext.etcd import EtcdError
    from elastic_ext.own_etcd import endpoint, launch
    from elastic_ext.own_etcd.job import LOSES_WRITES
    from elastic_ext.rendezvous.running_job import connect

    if endpoint.is_job(inputs.endpoint):
        program, detail = launch.outlook(inputs.endpoint, inputs.settings, inputs.environ)
        if program is not None and program.may_lose_writes:
            return [Finding("etcd", WARN, detail, f"{LOSES_WRITES}: put etcd 3.5.3 or newer on PATH")]
        return [Finding("etcd", OK, detail)]
    with connect(inputs.endpoint, inputs.settings) as client:
        status = client.status()
        user = f", user {inputs.settings.etcd_user} may read" if inputs.settings.etcd_user else ""
        detail = f"version {status.version} at {redacted(inputs.endpoint)}{user}"
        try:
            alarms = [alarm.kind for alarm in client.alarms()]
        except EtcdError:
            alarms = []  # the user may lack permission to ask
    version = tuple(int(part) for part in status.version.split(".")[:2] if part.isdigit())
    if version < (3, 4):
        return [Finding("etcd", FAIL, detail, "elastic_ext needs etcd 3.4 or newer")]
    if alarms:
        advice = "after a failure the job waits until etcd accepts writes again"
        return [Finding("etcd", WARN, f"{detail}; alarms: {', '.join(alarms)}", advice)]
    return [Finding("etcd", OK, detail)]


def check_host_name(inputs: Inputs) -> list[Finding]:
    """Check where the name of this host leads: gloo has the workers of other hosts connect there."""
    host = address.host_of(inputs.endpoint.removeprefix("job:").split(",")[0])
    several = inputs.endpoint == "job:" or not address.is_loopback(host)
    reached_at = address.chosen(inputs.settings.address) or (address.address_towards(host) if host and several else "")
    found = address.look_up(reached_at)
    given = [f"{GLOO}={inputs.environ[GLOO]}"] if GLOO in inputs.environ else []
    detail = "; ".join([str(found), *given])
    if given or not found.loops:
        return [Finding("host name", OK, detail)]
    if not several or found.interface:  # `agent.round.gloo_interface`
        gives = f"with several nodes, the agent gives its workers {GLOO}={found.interface or 'the interface between them'}"
        return [Finding("host name", OK, f"{detail}; {gives}")]
    names = dict.fromkeys(each.interface for each in address.addresses() if not address.is_loopback(each.address))
    right = " or ".join(names) or "the interface of the network between the nodes"
    advice = f"set {GLOO}={right}, or mend /etc/hosts on each node"
    return [Finding("host name", WARN, f"{detail}, where workers of other nodes cannot reach this one", advice)]


def check_names(inputs: Inputs) -> list[Finding]:
    """Check how long the look-up of the name of this host's address takes: torch waits for it as it connects."""
    asked = address.chosen(inputs.settings.address) or next(iter(address.own_addresses()), address.loopback())
    took = name_lookup.seconds_for_name(asked)
    if took < name_lookup.LATE_S:
        return [Finding("names", OK, f"/etc/hosts or a name server answers for {asked} in {took * 1000:.0f} ms")]
    detail = f"the look-up of the name of {asked} takes {took:.1f} s: each worker's init_process_group waits for as long"
    lines = f"lines `::ffff:{asked} NAME` to /etc/hosts"
    advice = f"agents give their workers {name_lookup.OPTIONS}={name_lookup.BRIEFLY!r}; better add PTR records, or {lines}"
    return [Finding("names", WARN, detail, advice)]


def check_checkpoints(inputs: Inputs) -> list[Finding]:
    """Check that the checkpoint directories are writable, and find the checkpoint that a job would resume from."""
    directory = inputs.settings.checkpoint_dir
    if directory is None:
        why = "restarts start from nothing, unless the script resumes on its own"
        return [Finding("checkpoint_dir", WARN, f"not set: {why}", "set it with --rdzv-conf=checkpoint_dir=...")]
    choice = listing.newest_complete(directory, listing.Wanted(pattern=inputs.settings.checkpoint_pattern))
    if choice.resume is not None:
        newest = f"newest complete: {choice.resume.path}, step {choice.resume.step}"
    else:
        newest = f"no complete checkpoint, {len(choice.passed_over)} passed over"
        seen = choice.question or hints.seen_in(open_storage(directory), inputs.settings.checkpoint_pattern)
        newest += f"; {seen}" if seen else ""
    checks = [_writable("checkpoint_dir", directory, newest)]
    if choice.all_bad:
        advice = "run elastic-ext checkpoints ls"
        checks.append(Finding("newest checkpoint", FAIL, "checkpoints exist, but none is usable", advice))
    if inputs.settings.local_dir is not None:
        checks.append(_writable("local_dir", inputs.settings.local_dir, "saves go there first"))
    return checks


def _writable(name: str, directory: str, detail: str) -> Finding:
    """Check a directory by creating and removing a file. A missing local directory is not created."""
    shown, detail = redacted(directory), redacted(detail)
    storage = open_storage(directory)
    if os.path.isabs(storage.address) and not os.path.isdir(storage.address):
        path = Path(storage.address)
        parent = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if not parent.is_dir():
            return Finding(name, FAIL, f"{redacted(str(parent))} is not a directory; {detail}", "no job could save there")
        if parent != path.parent:  # a job would make them all, on the disk that holds the first
            advice = f"check its name and that its file system is mounted; if both are right, mkdir -p {redacted(str(path))}"
            seen = f"{shown} does not exist, nor does its parent {redacted(str(path.parent))}"
            return Finding(name, FAIL, f"{seen}; expected a directory, or a parent in which a job can make it", advice)
        able = os.access(parent, os.W_OK | os.X_OK)
        seen = f"{shown} does not exist yet, and {parent} {'is' if able else 'is not'} writable"
        return Finding(name, OK if able else FAIL, f"{seen}; {detail}")
    probe = f".elastic_ext_doctor_{os.urandom(16).hex()}"
    try:
        storage.put(probe, b"")
        storage.remove(probe)
    except OSError as error:
        return Finding(name, FAIL, f"{shown} is not writable: {one_line(error)}; {detail}", "no job could save there")
    return Finding(name, OK, f"{shown} is writable; {detail}")


def check_metrics(inputs: Inputs) -> list[Finding]:
    settings = inputs.settings
    if settings.metrics_port is None:
        return [Finding("metrics", OK, "off, by the settings")]
    where = f"{settings.metrics_host} port {settings.metrics_port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.metrics_host, settings.metrics_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except OSError as error:
        advice = "the agent would take any free port; set metrics_port or metrics_host"
        return [Finding("metrics", WARN, f"{where}: {one_line(error)}", advice)]
    return [Finding("metrics", OK, f"{where} is free")]


def check_evidence(inputs: Inputs) -> list[Finding]:
    """Check the sources of evidence outside the workers. Jobs can run without them."""
    counted = oom_counts()
    unread = "no cgroup of this process can be read: an out-of-memory kill counts as unknown"
    cgroup = Finding("memory kills", OK if counted else WARN, f"counted in {', '.join(counted)}" if counted else unread)
    return [cgroup, _kernel_log(), _gpu(), _platform(inputs)]


def _kernel_log() -> Finding:
    try:
        os.close(os.open(DEVICE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        advice = "only GPU hosts need it: run as root, or set kernel.dmesg_restrict=0"
        return Finding("kernel log", WARN, f"{DEVICE}: {error.strerror}: the agent cannot see Xids", advice)
    return Finding("kernel log", OK, f"{DEVICE} is readable")


def _gpu() -> Finding:
    if not os.path.exists(NVIDIA_DRIVER):
        return Finding("NVML", OK, "no NVIDIA driver here")
    found = recovery_actions()
    if found is None:
        return Finding("NVML", WARN, "the driver's recovery actions cannot be read", "pip install nvidia-ml-py")
    return Finding("NVML", OK, f"{len(found)} GPUs: {', '.join(sorted({each.action or 'unknown' for each in found}))}")


def _platform(inputs: Inputs) -> Finding:
    environ = inputs.environ
    if slurm.job_id(environ):
        found = shutil.which("scontrol", path=environ.get("PATH"))
        what = "scontrol is installed" if found else "no scontrol: the agent cannot find out why Slurm ends the job"
        return Finding("platform", OK if found else WARN, f"Slurm job {slurm.job_id(environ)}; {what}")
    if kubernetes.HOST in environ:
        if kubernetes.get_pod(environ) is not None:
            return Finding("platform", OK, "Kubernetes; the pod is read from the API server")
        advice = "grant its account the permission to get pods"
        return Finding("platform", WARN, "Kubernetes; this pod cannot be read", advice)
    return Finding("platform", OK, "neither Slurm nor Kubernetes")


def check_limits(inputs: Inputs) -> list[Finding]:
    """Check the limits of descriptors, shared memory and memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    few = hard != resource.RLIM_INFINITY and hard < DESCRIPTORS
    advice = f"raise it to {DESCRIPTORS} or more: ulimit -n, LimitNOFILE=" if few else ""
    files = Finding("descriptors", WARN if few else OK, f"limit {soft}, hard limit {shown}", advice)
    left = memory_left()
    little = "training needs more" if left < MEMORY_BYTES else ""
    return [files, _shm(), Finding("memory", WARN if little else OK, f"{left >> 20} MB are available", little)]


def _shm() -> Finding:
    try:
        found = os.statvfs(SHM)
    except OSError as error:
        advice = "the agent uses the temporary directory; DataLoader workers need it"
        return Finding("shm", WARN, f"{SHM}: {error.strerror}", advice)
    room = found.f_bavail * found.f_frsize
    full = room < SHM_BYTES or (found.f_files > 0 and found.f_favail < SHM_FILES) or not os.access(SHM, os.W_OK)
    detail = f"{SHM}: {room >> 20} MB and {found.f_favail} files are free{'' if os.access(SHM, os.W_OK) else ', not writable'}"
    return Finding("shm", WARN if full else OK, detail, "docker run --shm-size, or an emptyDir in memory" if full else "")


CHECKS: tuple[tuple[str, CheckFunction, float], ...] = (
    ("torch", check_torch, PROBE_S),
    ("etcd", check_etcd, CHECK_S),
    ("host name", check_host_name, CHECK_S),
    ("names", check_names, CHECK_S),
    ("checkpoint_dir", check_checkpoints, CHECK_S),
    ("metrics", check_metrics, CHECK_S),
    ("evidence", check_evidence, CHECK_S),
    ("limits", check_limits, CHECK_S),
)

SETTINGS_S = 10.0  # the settings file may be on a file server that does not answer


def run(args: argparse.Namespace) -> int:
    findings = examine(args.rdzv_conf, args.rdzv_endpoint, os.environ)
    print(as_json(findings) if args.json else rendered(findings), flush=True)
    return exit_code(findings)


def examine(rdzv_conf: str, endpoint: str, environ: Mapping[str, str]) -> list[Finding]:
    """Run all checks, within PROBE_S. Never raises.

    rdzv_conf: as torchrun's option. endpoint: etcd's endpoint; "" to not check etcd.
    """
    read: list[settings_module.Settings] = []
    first = _RunningCheck("settings", lambda: [check_settings(rdzv_conf, environ, read)], SETTINGS_S).result()
    inputs = Inputs(read[0] if read else settings_module.Settings(), endpoint, environ)
    running = [_RunningCheck(name, functools.partial(check, inputs), deadline_s) for name, check, deadline_s in CHECKS]
    return [*first, *(finding for each in running for finding in each.result())]


class _RunningCheck:
    """A check in its own thread, which is abandoned if it does not end in time."""

    def __init__(self, name: str, check: Callable[[], list[Finding]], deadline_s: float) -> None:
        self._name, self._check = name, check
        self._limit_s, self._deadline = deadline_s, time.monotonic() + deadline_s
        self._found: list[Finding] | None = None
        self._thread = threading.Thread(target=self._run, name=f"elastic_ext-doctor-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._check()
        except (ElasticExtError, OSError) as error:
            self._found = [Finding(self._name, FAIL, one_line(error))]
        except Exception as error:  # noqa: BLE001 - the top of a thread; the finding reports it
            self._found = [Finding(self._name, FAIL, f"{type(error).__name__}: {one_line(error)}")]

    def result(self) -> list[Finding]:
        """Wait for the check, until its deadline at most; return its findings."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        found = self._found
        return [Finding(self._name, FAIL, f"no answer within {self._limit_s:g} s")] if found is None else found
