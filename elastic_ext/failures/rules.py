"""The table of failure rules as data. Tiers apply in order, as do the rules within a tier: the first match decides.

Where its evidence stands (`base.diagnosis.Weight`) bounds what a rule may answer. A job ends, or a node leaves, for what the
platform shows, for the class of an exception, or for its message by a rule of that class. The last lines of a library that aborts
the process may follow, confirm or restart. Anything else on stderr only names what was seen, and restarts.

A specific rule precedes a general one: "loss is nan" before ValueError. Texts are plain and lower case, `in` searches for them
one by one, and they match as whole words, outside of quotes and paths. No rule has a regular expression, and the time is linear
in the searched text. For 64 KB it takes 5 to 35 ms on a slow core. Pure.

To add a rule: one row here, and one row in `tests/failures/test_classify.py`, which fails without it.

Sources: K Kubeflow training-operator, D DLRover, N NVRx restart agent, P Philly (ATC'19), A Acme (NSDI'24), B ByteRobust
(SOSP'25), M Megatron-LM, U Unicron, X NVIDIA Xid catalogue, S Slurm, T torch; without a source: our own.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from elastic_ext.base.diagnosis import (
    CASCADE,
    CODE,
    CRASH,
    DATA,
    DEVICE_MEMORY,
    HANG,
    HARDWARE,
    HOST_MEMORY,
    NETWORK,
    NUMERIC,
    PREEMPTION,
    STORAGE,
    UNKNOWN,
    USER_STOP,
    Response,
    Weight,
)
from elastic_ext.failures import servers, torch_texts
from elastic_ext.failures.evidence import EvidenceView, SearchText, Text, contains
from elastic_ext.failures.fingerprints import library_of

# The tiers. User rules apply after STOP_REQUESTED.
USER_RULES, STOP_REQUESTED, HARDWARE_EVIDENCE, PROGRAM_OUTPUT, EXIT_STATUS = range(5)


Condition = Callable[[EvidenceView], bool]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Classes whose messages are those of torch's own libraries, of CUDA's and of NCCL's: all count as a RuntimeError.
NATIVE = _names(
    "RuntimeError SystemError AcceleratorError DistBackendError DistStoreError DistNetworkError CheckpointException "
    "ProcessRaisedException ProcessExitedException OutOfMemoryError"
)
STOP, CONFIRM, RESTART, REPLACE_NODE = Response.STOP, Response.CONFIRM, Response.RESTART, Response.REPLACE_NODE
TOO_STRONG = frozenset({STOP, REPLACE_NODE, Response.REQUEUE})  # for words which anything may have printed


GROUP = "elastic_ext.rules"  # of entry points, by which other packages add rules: see `user_rules`


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Where its texts may stand is where they mean what the row says: the message of one of the classes in `of`; the last lines of
    a library that aborts the process; and, for no more than a restart, anything else on stderr.
    """

    tier: int
    name: str
    kind: str
    response: Response
    because: str  # the end of the reason that users read
    source: str = ""
    exceptions: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    texts: tuple[Text, ...] = ()
    messages: tuple[Text, ...] = ()  # texts that count only in what an exception says: torch logs them, too, and goes on
    of: frozenset[str] = NATIVE  # the classes whose messages may hold the texts
    answers: frozenset[str] = frozenset()  # of a server, to its client
    exit_codes: frozenset[int] = frozenset()
    signals: frozenset[str] = frozenset()
    xids: frozenset[int] = frozenset()
    errnos: frozenset[int] = frozenset()
    when: Condition | None = None
    checkpoints_back: int = 0  # 1 to resume from the checkpoint before the newest

    def found(self, view: EvidenceView) -> Weight | None:
        """Return where the strongest evidence stands that matches; None: the rule does not match."""
        facts, said = self._has_names(view), view.place is not Weight.PLATFORM and self._is_said(view)
        if not (facts or said) or (self.when is not None and not self.when(view)):
            return None
        if not facts:
            return view.place if view.place is not Weight.CLASS else Weight.MESSAGE
        return view.place if view.exception_names else Weight.PLATFORM

    def answer(self, weight: Weight) -> Response:
        """Return the answer, as far as evidence of this weight allows it.

        Invariant: no job ends and no node leaves for words that the script could have printed.
        """
        if weight.certain:
            return self.response
        if self.response in TOO_STRONG:
            return CONFIRM if self.response is STOP and weight is Weight.ABORT_LINES else RESTART
        weak = weight is Weight.PRINTED and self.response in (CONFIRM, Response.FOLLOW)
        return RESTART if weak else self.response

    def _is_said(self, view: EvidenceView) -> bool:
        if not view.speakers:
            return contains(view.text, self.texts)
        speaks = not self.of.isdisjoint(view.speakers)
        return (speaks and contains(view.text, (*self.texts, *self.messages))) or not self.answers.isdisjoint(view.answers)

    def _has_names(self, view: EvidenceView) -> bool:
        evidence = view.evidence
        return (
            self._names_nothing
            or not self.exceptions.isdisjoint(view.exception_names)
            or (bool(self.packages) and any(name.startswith(self.packages) for name in view.exception_names))
            or evidence.exit_code in self.exit_codes
            or view.signal in self.signals
            or not self.xids.isdisjoint(evidence.xids)
            or view.errno in self.errnos
        )

    @cached_property
    def places(self) -> frozenset[Weight]:
        """Where its evidence may stand."""
        facts = self.exit_codes or self.signals or self.xids or self._names_nothing
        raised = self.exceptions or self.packages or self.errnos
        said = self.texts or self.messages or self.answers
        where = (
            (Weight.PLATFORM, facts), (Weight.CLASS, raised), (Weight.MESSAGE, said),
            (Weight.ABORT_LINES, self.texts and self.of >= NATIVE), (Weight.PRINTED, self.texts),
        )  # fmt: skip
        return frozenset(place for place, may in where if may)

    @property
    def _names_nothing(self) -> bool:
        """Whether the rule has no condition except `when`, which then decides alone."""
        named = (
            self.exceptions, self.packages, self.texts, self.messages, self.answers, self.exit_codes, self.signals, self.xids,
            self.errnos,
        )  # fmt: skip
        return not any(named)


NO_EVIDENCE = "no-evidence"  # name of the last rule
HANG_RULE, CUT_RULE, REPLICAS_DIFFER = "hang", "network-cut", "replicas-differ"
ENDED_EARLY = "ended-early"  # of a verdict; see `judgement`
# What Megatron-LM's `--rerun-mode=validate_results` ends with: to have a step that gave a NaN or a spike computed on another GPU,
# or with what that, or a second computation on the same GPU, has shown. All ranks leave together; one has logged why.
RERUN, RERUN_DIFFERS, RERUN_UNSTEADY = "rerun-elsewhere", "rerun-differs", "rerun-unsteady"
RERUN_CORRECT = "rerun-correct"  # another GPU has confirmed it
RERUN_CODES = frozenset({16, 17})
_RERUN_TEXTS: dict[str, tuple[Text, ...]] = {
    RERUN: ("need to rerun on a different gpu", "got rescheduled on the same gpu"),
    RERUN_DIFFERS: (("possible persistent error!", "rank ", "node "),),
    RERUN_UNSTEADY: (("possible transient error!", "rank ", "node "),),  # without the rank, many programs log it and try again
}
_RERUN_AGREES: tuple[Text, ...] = (("correct result", "possible application error"),)
SERVICE, NETWORK_RULE, INTERFACE, REPLAY = "service-unreachable", "network", "interface", "replay-mismatch"
BUSY, STORAGE_CLIENT, STOPPED = "storage-busy", "storage-client", "stopped-by-agent"
TRY_AGAIN = "try-again"  # the script has ended with 75
GPU_DEAD = "gpu-dead"
BUG_MAYBE = "runtime-error"  # Python's own class for anything: other evidence says more
STATE_DICT, FILES, DISK_FULL = "state-dict", "files", "disk-full"
# The storage, or a file system, does not work now: no checkpoint is to blame, and another try may go well tomorrow.
ACCESS = frozenset({"access-expired", "access-refused"})
ILL_STORAGE = frozenset(
    {"shared-object", DISK_FULL, "file-system-ill", STORAGE_CLIENT, BUSY}
)  # fmt: skip
# What one host may cause: its disk, its mount, its limits, what other processes hold, its driver. All else comes from the script,
# its data or servers: twice on one node it is what it is on two, and the first to report it is often the fastest.
OF_HOSTS = frozenset(
    {"shared-object", DISK_FULL, "file-system-ill", "host-limit", "device-memory-held", "gpu-driver", "cache-race", "killed"}
)
LACKING = frozenset({FILES, "usage-exit"})  # before the first step, a node may lack a file or a command; or a module
HARDWARE_EXIT = "hardware-exit"  # a script may mean something else by the exit code
MOUNT = "file-system-ill"  # an outage causes it, or the mount of one node
ILLEGAL_ACCESS = frozenset({"xid-illegal-access", "gpu-access"})

_requested, _hardware = partial(Rule, STOP_REQUESTED), partial(Rule, HARDWARE_EVIDENCE)
_program, _exited = partial(Rule, PROGRAM_OUTPUT), partial(Rule, EXIT_STATUS)

# Classes of libraries that count as another one, where only their bare names are known. Python's own count as their bases.
COUNTS_AS = {
    **dict.fromkeys(
        ("RemoteDisconnected", "ConnectTimeout", "ReadTimeout", "ConnectTimeoutError", "ReadTimeoutError", "MaxRetryError",
         "NewConnectionError", "ServerDisconnectedError", "ClientConnectorError", "EndpointConnectionError"),
        "ConnectionError",
    ),
    **dict.fromkeys(("herror", "NameResolutionError"), "gaierror"),
    "PackageNotFoundError": "ModuleNotFoundError",
    "ZipImportError": "ImportError",
    "FrozenInstanceError": "AttributeError",
    **dict.fromkeys(
        ("JSONDecodeError", "YAMLError", "ScannerError", "ParserError", "ReaderError", "ComposerError", "ConstructorError",
         "TOMLDecodeError", "MisconfigurationException", "DeepSpeedConfigError"),
        "ValueError",
    ),
    **dict.fromkeys(("_ArrayMemoryError", "ArrowMemoryError"), "MemoryError"),  # of numpy and pyarrow
    "BadZipfile": "BadZipFile",
    "RendezvousConnectionError": "DistNetworkError",
    **dict.fromkeys(("DistNetworkError", "AcceleratorError"), "RuntimeError"),
}  # fmt: skip

# Errors that any call may raise on a network file system in trouble.
_FILE_SYSTEM_ILL: tuple[Text, ...] = (
    "stale file handle", "input/output error", "transport endpoint is not connected", "transport endpoint shutdown",
    "read-only file system", "disk i/o error", "communication error on send", "structure needs cleaning",
)  # fmt: skip
_NOT_REACHED = frozenset({errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET})
OUTAGE_ERRNOS = _NOT_REACHED | {
    errno.EIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESTALE, errno.EREMOTEIO, errno.EHOSTDOWN, errno.EBADMSG, errno.ECOMM,
    errno.EPROTO, errno.EUCLEAN,
}  # fmt: skip
_NO_CONNECTION = _names("DistNetworkError ConnectionError TimeoutError gaierror socket.timeout")
_FILE_SYSTEM_ERRNOS = (OUTAGE_ERRNOS - _NOT_REACHED) | {errno.EROFS, errno.EBUSY, errno.ENOLCK, errno.ENOTEMPTY}

# What is refused is refused again: credentials, a name, an address.
_REFUSED = _names(
    "NoCredentialsError PartialCredentialsError DefaultCredentialsError ClientAuthenticationError AuthenticationError Forbidden "
    "Unauthorized GatedRepoError DisabledRepoError RepositoryNotFoundError RevisionNotFoundError DatasetNotFoundError "
    "HFValidationError MissingSchema InvalidSchema InvalidURL UnsupportedProtocol ParamValidationError NoRegionError NotFound "
    "ProfileNotFound UnauthorizedSSOTokenError NoSuchBucket NoSuchKey Unauthenticated PermissionDenied ResourceNotFoundError"
)
_REFUSED_TEXTS: tuple[Text, ...] = (
    "unable to locate credentials", "no signing credentials found", "anonymous caller does not have",
    "not a valid model identifier", "does not appear to have a file named", "can't load tokenizer for",
    "can't load the configuration of", "error no file named", "api_key not configured", "no api key configured",
    "service error: the bucket does not exist", "service error: the key does not exist", "outgoing traffic has been disabled",
    "offline mode is enabled", "reauthentication is needed", "aws error access_denied",
)  # fmt: skip
_SERVICES = _names(
    "CommError HfHubHTTPError LocalEntryNotFoundError ChunkedEncodingError IncompleteRead ClientPayloadError ServerTimeoutError "
    "SSLError SSLEOFError URLError NoBrokersAvailable"
)
STORAGE_FAILED = "elastic_ext.checkpoints.ranks.StorageFailed"
OUTAGES = (_NO_CONNECTION | _SERVICES) - {"HfHubHTTPError"}
_SERVICE_TEXTS: tuple[Text, ...] = (
    "check your connection", "check your internet connection", "couldn't connect to", "couldn't reach", "max retries exceeded",
    "failed to establish a new connection",
)  # fmt: skip
_OS = _names("OSError")

_GPU_COUNT = "unexpected error from cudagetdevicecount"  # of torch; then "error N: ..."
_HELD = re.compile(r"process \d{1,10} has ([\d.]{1,12}) [gt]ib memory in use")


def held_by_another_process(text: str) -> str | None:
    """Return the part of torch's text (lower case) on another process with 1 GiB or more; less is a bare CUDA context."""
    held = _HELD.search(text)
    return held[0] if held and not held[1].startswith("0.") else None


def _reason(view: EvidenceView) -> str:
    return view.evidence.platform.reason.upper()


def _platform_says(*words: str) -> Condition:
    return lambda view: any(word in _reason(view) for word in words)


def _agent_got(*signals: str) -> Condition:
    return lambda view: view.evidence.agent_signal in signals


def says_why_all_leave(tail: str) -> bool:
    """Return whether a worker has logged why all ranks of the job are about to leave. tail: the end of its stderr."""
    text = SearchText(tail)
    return any(contains(text, texts) for texts in _RERUN_TEXTS.values())


def _left_with(code: int, texts: tuple[Text, ...]) -> Condition:
    """All ranks leave with this code, and one has logged why; the agent may have stopped those that take longest."""
    return lambda view: (view.evidence.exit_code == code or view.evidence.stopped_by_agent) and contains(view.text, texts)


def _raised_by_script(view: EvidenceView) -> bool:
    """Return whether no library has raised it: ranks that write the same modules of a cache may find them incomplete."""
    exception = view.evidence.exception
    of_library = exception is not None and library_of(exception.frames) != ""
    return not of_library and "in dataloader worker" not in view.text


def _before_first_step(view: EvidenceView) -> bool:
    return view.evidence.before_first_step


def _not_after_first_step(view: EvidenceView) -> bool:
    return view.evidence.first_step_done is not True


def _loading(view: EvidenceView) -> bool:
    return view.evidence.checkpoint_load is True


_DEVICE_CODES = ("cuda error: ", "cuda driver error: ", "hip error: ")


def _device_says(view: EvidenceView) -> bool:
    """Return whether the whole message is a device's error, and not a text of the script that holds one."""
    of_message = view.place is Weight.CLASS and "AcceleratorError" not in view.speakers
    known = "NVMLError_GpuIsLost" in view.exception_names or view.text.ascii.startswith(_DEVICE_CODES)
    return known or not of_message


def _illegal_access(view: EvidenceView) -> bool:
    return "illegal memory access" in view.text or "illegal address" in view.text


_NEVER_FITS: tuple[Text, ...] = (
    "undefined symbol", ("version", "not found"), "link time reference", "wrong elf class", "elf file os abi invalid",
    "in static tls block", "enable executable stack",
)  # fmt: skip


def _shared_object(view: EvidenceView) -> bool:
    """Return whether a shared object was unreadable. With an undefined symbol it was read, but its version never fits."""
    wrong_version = contains(view.text, _NEVER_FITS)
    # The loader names the file before a colon; a module (mypkg.solvers) may hold ".so", too.
    names = (word.rstrip(":").rstrip(".0123456789") for word in view.text.ascii.split() if word.endswith(":"))
    return any(name.endswith(".so") for name in names) and not wrong_version


def _shared_memory_left(view: EvidenceView) -> bool:
    """Return whether the names are those of mosaicml-streaming."""
    names = ("reused local directory", "_locals'", "_epoch_shape'", "_resume'")
    return any(name in view.text.ascii for name in names)


def _saved_by_a_launch(view: EvidenceView) -> bool:
    """Return whether others train there now. A launch that only loads may be an evaluation, which is soon over."""
    return contains(view.text, (("another launch", "saves to the directory"),))


def _of_checkpoint(view: EvidenceView) -> bool:
    """Return whether a broken file may be a checkpoint; a parser's "unexpected EOF while ..." is about a script."""
    read = view.evidence.first_step_done is not True and "unexpected eof while" not in view.text
    return _loading(view) or (read and not contains(view.text, _DAMAGED))


_PEER_TEXTS = ("connection closed by peer", "connection reset by peer", "broken pipe")
_STORE_CLOSED = "failed to recv, got 0 bytes"  # of a TCPStore's client
_PEER_OR_LAYER: tuple[Text, ...] = tuple(
    (text, layer) for text in _PEER_TEXTS for layer in ("/transport/tcp/", "nccl", "processgroupnccl", "processgroupgloo")
)

# slurmd logs "CANCELLED AT ... DUE TO TIME LIMIT" although no user cancelled the job.
_PREEMPTED = (
    "PREEMPT", "NODE_FAIL", "NODE FAILURE", "TIME LIMIT", "REQUEUE",  # Slurm
    "DELETIONBYTAINTMANAGER", "EVICTIONBYEVICTIONAPI", "DELETIONBYPODGC", "TERMINATIONBYKUBELET",  # of DisruptionTarget
    "EVICTED", "NODESHUTDOWN", "NODELOST", "TERMINATED", "SHUTDOWN", "DEADLINE", "REVOKED", "BOOT_FAIL",  # of a pod; of Slurm
)  # fmt: skip


def _platform_preempted(view: EvidenceView) -> bool:
    says = _reason(view) == "TIMEOUT" or _platform_says(*_PREEMPTED)(view)
    return says or view.evidence.platform.disruption_target is True


def _cancelled(view: EvidenceView) -> bool:
    return _platform_says("CANCELLED", "SCANCEL")(view) and not _platform_preempted(view)


# Debian's name for a host itself is 127.0.1.1; in a job on one machine, 127.0.0.1 is right.
_NOT_CONNECTED: tuple[Text, ...] = (
    "connectfullmesh failed", ("unable to find", "address for:"), ("unable to find", "interface for"),
    "no socket interface found", ("connect", "refused", "127.0.1.1"),
)  # fmt: skip

_PREEMPTED_BECAUSE = "the platform is taking the allocation away, so a restart inside it would not help"

TIER_1 = (
    _requested("cancelled", USER_STOP, STOP, "the user stopped the job", "S",
         when=lambda view: _agent_got("SIGINT", "SIGQUIT")(view) or _cancelled(view)),
    _requested("agent-terminated", PREEMPTION, Response.REQUEUE, "the agent was asked to stop: " + _PREEMPTED_BECAUSE, "S K",
         when=_agent_got("SIGTERM", "SIGUSR1", "SIGUSR2")),
    _requested("platform-preempted", PREEMPTION, Response.REQUEUE, _PREEMPTED_BECAUSE, "S N K", when=_platform_preempted),
    _requested(RERUN, HARDWARE, RESTART, "Megatron-LM asks for the step to be computed on another GPU", "M",
         when=_left_with(16, _RERUN_TEXTS[RERUN])),
    _requested(RERUN_DIFFERS, HARDWARE, REPLACE_NODE, "Megatron-LM got another result on this GPU than on the one before", "M",
         when=_left_with(17, _RERUN_TEXTS[RERUN_DIFFERS])),
    _requested(RERUN_UNSTEADY, HARDWARE, RESTART, "Megatron-LM got two results for one step on the same GPU", "M",
         when=_left_with(17, _RERUN_TEXTS[RERUN_UNSTEADY])),
    _requested(RERUN_CORRECT, NUMERIC, CONFIRM, "Megatron-LM got the same NaN or spike on two GPUs", "M", checkpoints_back=1,
         when=_left_with(17, _RERUN_AGREES)),
    _requested(STOPPED, CASCADE, Response.FOLLOW, "the agent stopped it because another worker had failed",
         when=lambda view: view.evidence.stopped_by_agent),
)  # fmt: skip

XIDS_REPLACE = frozenset(
    {46, 48, 54, 62, 64, 74, 78, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143, *range(144, 152), *range(154, 157), 158, 159}
)
XIDS_ILLEGAL = frozenset({13, 31})
XIDS_RESTART = frozenset(
    {8, 11, 25, 32, *range(39, 42), 60, *range(68, 73), *range(75, 78), 80, *range(82, 87), 88, 89, 94, *range(96, 106),
     *range(126, 136), 139}
)  # fmt: skip
XIDS_ANNOTATE = frozenset(
    {14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, *range(106, 109), 121, 137, 141, 152, 153, 157, 160, 161}
)  # added to the reason; the rest of the evidence decides

# NVML's recovery actions that a worker restart cannot replace; "drain_p2p" and newer ones are only added to the reason.
_RECOVERY_REPLACE = frozenset({"gpu_reset", "node_reboot", "drain_and_reset", "gpu_reset_bus"})

TIER_2 = (
    _hardware(REPLICAS_DIFFER, HARDWARE, REPLACE_NODE,
         "replicas of the training state were equal and are not any more: the hardware computes wrongly, or keeps bits wrongly",
         when=lambda view: bool(view.evidence.differs)),
    _hardware("link-down", HARDWARE, REPLACE_NODE, "no link of another node went down",
         when=lambda view: view.evidence.link_failed and view.evidence.link_away),
    _hardware("link-flap", HARDWARE, RESTART, "no link of another node went down", when=lambda view: view.evidence.link_failed),
    _hardware("xid-replace", HARDWARE, REPLACE_NODE, "the driver reported an error that only maintenance can fix", "X",
         xids=XIDS_REPLACE),
    _hardware("gpu-recovery", HARDWARE, REPLACE_NODE, "the driver reports that a GPU of this node needs a reset", "X",
         when=lambda view: not _RECOVERY_REPLACE.isdisjoint(view.evidence.gpu_recovery)),
    _hardware("xid-illegal-access", CODE, CONFIRM, "an illegal access: user code causes it more often than hardware",
         "X B", xids=XIDS_ILLEGAL, when=_illegal_access),
    _hardware("xid-restart", HARDWARE, RESTART, "the driver reported an error that a restart fixes", "X",
         xids=XIDS_RESTART),
    _hardware("oom-killed", HOST_MEMORY, CONFIRM,
         "the kernel killed it because memory ran out", "P D",
         when=lambda view: (view.evidence.oom_kills or 0) > 0 or _platform_says("OOMKILLED", "OUT_OF_MEMORY")(view)),
    _hardware(HARDWARE_EXIT, HARDWARE, REPLACE_NODE,
         "this exit code means a broken InfoROM or driver, or leftovers of an earlier process", "D",
         exit_codes=frozenset({14, 201, 202})),
    _hardware("node-check", HARDWARE, REPLACE_NODE, "this node's health check failed before the start",
         when=lambda view: view.evidence.node_health_failed is True),
    _hardware(CUT_RULE, NETWORK, RESTART, "the network between these two hosts is cut",
         when=lambda view: bool(view.evidence.cut)),
    _hardware(HANG_RULE, HANG, RESTART, "the hang detector ended it",
         when=lambda view: view.evidence.hang is True),
)  # fmt: skip

# Of compilers, of readers of configuration and of data: what they refuse, they refuse again.
_LIBRARY_PACKAGES = (
    "torch._dynamo.", "torch._inductor.", "torch.fx.", "torch.export.", "torch.onnx.", "triton.", "hydra.", "omegaconf.",
    "pydantic.", "pydantic_core.", "jsonschema.", "jsonargparse.", "click.", "jinja2.", "datasets.exceptions.", "pyarrow.",
    "pandas.errors.", "pyo3_runtime.", "tokenizers.",
)  # fmt: skip
_CRASHES = ("segmentation fault", "sigsegv", "aborted", "sigabrt", "illegal instruction", "sigill", "floating point", "sigfpe")
_CUT_SHORT: tuple[Text, ...] = (
    "pytorchstreamreader failed", "unexpected eof", "central directory", "file is not a zip file",
    "error while deserializing header", "pickle data was truncated", "storage has wrong byte size",
)  # fmt: skip
_DAMAGED: tuple[Text, ...] = (("checksum", "mismatch"), "ran out of input", "invalid magic number", "invalid load key")
# Of compiled code (Triton, Inductor, extensions of torch), hubs and indexes of data: all ranks fill them at the first start.
_CACHES = (
    "/.triton/", "/torchinductor_", "/torch_extensions/", "/.cache/", ".incomplete", "/index-cache/", "_idx.npy", "_index.npy",
    "mmap length",
)  # fmt: skip
_MISUSE_OF_DDP: tuple[Text, ...] = (
    "expected to have finished reduction", "marked as ready twice", "mark a variable ready only once",
    ("params", "appears not to match"), "same model across all ranks",
)  # fmt: skip

TIER_3 = (
    _program("keyboard-interrupt", USER_STOP, STOP, "the user stopped it", exceptions=_names("KeyboardInterrupt")),
    _program("shared-object", STORAGE, RESTART, "a shared object could not be read, which points to a network file system",
         exceptions=_names("ImportError OSError"), when=_shared_object),
    _program("directory-taken", CODE, STOP,
         "the checkpoints belong to another launch now, and a restart would take them from it: give each its own checkpoint_dir",
         exceptions=_names("elastic_ext.checkpoints.directory.generations.StaleGroup"), when=_saved_by_a_launch),
    _program("usage", CODE, STOP, "elastic_ext cannot do what the script asks it for",
         exceptions=_names("elastic_ext.errors.UsageError")),
    _program(GPU_DEAD, HARDWARE, REPLACE_NODE, "the GPU or its link is broken", "U D",
         exceptions=_names("NVMLError_GpuIsLost"),
         texts=("uncorrectable ecc error encountered", "uncorrectable nvlink error", "cuda_error_ecc_uncorrectable",
                "gpu is lost"),
         when=_device_says),
    _program("shared-memory", HOST_MEMORY, CONFIRM,
         "the usual cause is that /dev/shm is full or too small for what is shared there (docker: --shm-size)",
         texts=(("dataloader worker", "exited unexpectedly"), ("dataloader worker", "killed by signal: bus error"),
                ("shared memory", "no space left"), "unable to allocate shared memory",
                "error while creating shared memory segment", "insufficient shared memory"), of=NATIVE | _OS),
    _program("shared-memory-left", HOST_MEMORY, RESTART, "an earlier process on this host has left its shared memory",
         messages=(("reused local directory:", "] vs ["), "file exists"), of=_names("ValueError FileExistsError"),
         when=_shared_memory_left),
    _program(DISK_FULL, STORAGE, CONFIRM, "the disk or the quota is full",
         texts=("no space left on device", "disk quota exceeded", ("pytorchstreamwriter", "failed writing"),
                ("unexpected pos", "vs"), "not enough free space to write", "basic_ios::clear"),
         errnos=frozenset({errno.ENOSPC, errno.EDQUOT}), of=NATIVE | _OS),
    _program(MOUNT, STORAGE, RESTART, "a network file system does not work properly", texts=_FILE_SYSTEM_ILL,
         errnos=_FILE_SYSTEM_ERRNOS, of=NATIVE | _OS | _names("ImportError OperationalError")),
    _program(BUSY, STORAGE, RESTART, "the server asked the client to try again later",
         answers=frozenset({servers.BUSY}),
         texts=("rate limit exceeded", "server is busy", "s3 client error", "reqwest error", "aws error network_connection",
                ("consistency check failed", "file should be of size")), of=servers.CLIENT_ERRORS),
    _program("access-expired", CODE, CONFIRM, "the credentials have expired", answers=servers.EXPIRED,
         texts=(("token", "expired"), ("credentials", "expired")), of=servers.CLIENT_ERRORS),
    _program("access-refused", CODE, CONFIRM, "a server or its client refuses the request",
         exceptions=_REFUSED, texts=_REFUSED_TEXTS, of=servers.CLIENT_ERRORS, answers=frozenset({servers.REFUSED})),
    _program(STORAGE_CLIENT, STORAGE, RESTART, "the object store or its client failed",
         exceptions=frozenset({STORAGE_FAILED}), packages=servers.STORAGE_CLIENTS),
    _program(SERVICE, NETWORK, RESTART, "a server could not be reached", exceptions=_SERVICES, packages=servers.SERVICE_CLIENTS,
         texts=_SERVICE_TEXTS, of=servers.CLIENT_ERRORS, answers=servers.UNREACHABLE),
    _program("checkpoint-broken", STORAGE, RESTART, "the checkpoint cannot be read; the previous one is tried",
         exceptions=_names("BadZipFile"), checkpoints_back=1, when=_of_checkpoint, texts=(*_CUT_SHORT, *_DAMAGED),
         of=NATIVE | _OS | _names("EOFError UnpicklingError SafetensorError ValueError")),
    _program("host-memory", HOST_MEMORY, CONFIRM, "the host ran out of memory",
         exceptions=_names("MemoryError ray.exceptions.OutOfMemoryError"),
         texts=(("defaultcpuallocator:", "allocate memory"), ("defaultcpuallocator:", "not enough memory"), "oom_kill event",
                ("dataloader worker", "killed by signal: killed"),
                ("terminated with signal", "sigkill"), "std::bad_alloc"),
         errnos=frozenset({errno.ENOMEM})),
    _program("device-memory-held", DEVICE_MEMORY, RESTART, "another process held GPU memory",
         exceptions=_names("OutOfMemoryError"), texts=("out of memory",),
         when=lambda view: held_by_another_process(view.text.ascii) is not None),
    _program("device-memory", DEVICE_MEMORY, CONFIRM, "the GPU ran out of memory",
         exceptions=_names("OutOfMemoryError"),
         texts=("cuda out of memory", "error: out of memory", ("out of memory", "tried to allocate"),
                (_GPU_COUNT, "error 2:"), "cublas_status_alloc_failed", "cublas_status_not_initialized",
                "cudnn_status_alloc_failed", "[cuda]: out of memory", "failed to cuda calloc", ("cuda failure", "out of memory"),
                "cuda_error_out_of_memory", "error out of memory at line", "unable to find a valid cudnn algorithm",
                ("module:pt_devmem", "allocation failed"), "ur_result_error_out_of_device_memory",
                "hsa_status_error_out_of_resources", "resource_exhausted: out of memory")),
    _program("host-limit", HOST_MEMORY, CONFIRM, "a limit of the host is reached: open files, threads or locked memory (ulimit)",
         texts=("too many open files", "can't start new thread", "rlimit_memlock", "received 0 items of ancdata",
                ("ibv_", "cannot allocate memory")),
         errnos=frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN})),
    _program("child-crash", CRASH, CONFIRM, "native code crashed in a process that the script had started",
         texts=("killed by signal:", "terminated with signal"), when=lambda view: contains(view.text, _CRASHES)),
    _program(REPLAY, HARDWARE, REPLACE_NODE, "the same computation gave another result: the hardware computes wrongly",
         exceptions=_names("SDCReplayMismatch")),
    _program("numeric", NUMERIC, CONFIRM,
         "the loss or a gradient became NaN or infinite",
         exceptions=_names("FloatingPointError"), checkpoints_back=1,
         messages=("loss is nan", "loss is inf", "nan loss", "returned nan values", "is non-finite", "found nan in",
                "found inf in", "loss scale already at minimum", "minimum loss scale",
                *(("not finite", what) for what in ("loss", "grad", "norm")), "gradient is nan", "gradients are nan",
                "gradient is inf", "gradients are inf", ("nan/inf", "loss"), "nan or inf", "inf or nan",
                "probability tensor contains either", "unexpected result nan",
                "cannot convert float infinity", "cannot convert float nan"),
         of=NATIVE | _names("Exception ValueError AssertionError ArithmeticError")),
    _program("gpu-launch", HARDWARE, RESTART, "a GPU call failed in a way that hardware causes",
         texts=("unspecified launch failure", "cudnn_status_internal_error", "cudnn_status_execution_failed",
                "cublas_status_execution_failed", "cublas_status_internal_error", "cusolver_status_internal_error",
                "cufft_internal_error", "hw exception by gpu", "nvlink or a hardware error",
                "cudnn_status_mapping_error", "error containment", "ur_result_error_device_lost",
                ("nccl error", "unhandled cuda error"),
                *torch_texts.keys(torch_texts.GPU_LAUNCH, printed=True)), when=lambda view: not _illegal_access(view)),
    _program("gpu-not-ready", HARDWARE, RESTART, "the GPU is held by another process, or its driver is not ready",
         texts=("busy or unavailable", "no cuda-capable device is detected", "no rocm-capable device is detected",
                "no cuda gpus are available", "no hip gpus are available", "found no nvidia driver", "system not yet initialized",
                "error 804", "mps client failed", "nvml/rm version mismatch", "failed to initialize nvml",
                "cuda error: unknown error", "cuda unknown error", "cuda driver initialization failed",
                "forward compatibility was attempted",
                *((_GPU_COUNT, f"error {code}:") for code in (3, 101, 304, 999)),
                "exclusive-thread device already in use")),
    _program("gpu-driver", CODE, CONFIRM, "the GPU's driver, or the number of GPUs, does not fit this script or its torch",
         texts=("driver on your system is too old", "driver version is insufficient", "error 803", "hiperrornobinaryforgpu",
                *((_GPU_COUNT, f"error {code}:") for code in (34, 36, 500))),
         messages=("no gpus found", "no supported gpu backend found", "but your machine only has", "no available device found",
                   ("device < num_gpus", "assert"), "your setup doesn't support"),
         of=NATIVE | _names("ValueError AssertionError MisconfigurationException")),
    _program("gpu-access", CODE, CONFIRM, "the GPU reported an illegal access, a failed assertion or an invalid call", "B",
         exceptions=_names("torch.AcceleratorError AcceleratorError"),
         texts=("an illegal memory access", "device-side assert triggered", "illegal address", "cuda error:", "hip error:",
                "cuda driver error:", "triton error [cuda]", "memory access fault by gpu",
                "hsa_status_error_memory_aperture_violation")),
    _program(torch_texts.MISUSE, CODE, CONFIRM,
         "the ranks did not call the same collectives in the same way, or the library refuses how they use it",
         texts=(*_MISUSE_OF_DDP, *torch_texts.keys(torch_texts.MISUSE, printed=True), "ncclinvalidusage", "ncclinvalidargument",
                ("nccl error", "invalid usage"), "mismatch between collectives", "mismatched nccl version", "op.preamble.length"),
         messages=torch_texts.keys(torch_texts.MISUSE, printed=False),
         when=lambda view: contains(view.text, _MISUSE_OF_DDP) or not contains(view.text, torch_texts.GROUP_GONE)),
    _program(INTERFACE, CASCADE, Response.FOLLOW,
         "if no other worker failed, the workers cannot connect to each other: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
         "to the interface of the "
         "network between the nodes", texts=_NOT_CONNECTED, when=_not_after_first_step),
    _program(torch_texts.PEER_GONE, CASCADE, Response.FOLLOW,
         "a peer disappeared during a collective, or did not come in time; the cause is elsewhere", "T",
         exceptions=_names("DistBackendError DistStoreError"),
         messages=torch_texts.keys(torch_texts.PEER_GONE, printed=False),
         texts=(*torch_texts.keys(torch_texts.PEER_GONE, printed=True), *torch_texts.TERMINATED,
                ("remote process exited", "nccl"), "store based barrier", "monitoredbarrier", "watchdog hang",
                "heartbeat monitor timed out", "transport retry count exceeded", "hccl function error",
                "connectfullmesh failed", ("deepep error", "timeout"),
                ("ei0002", "notify register"), ("ei0006", "getting socket times out"))),  # HCCL: a peer did not answer in time
    _program("peer-connection", CASCADE, Response.FOLLOW, "a peer closed its connection; the cause is elsewhere", "T",
         texts=_PEER_OR_LAYER, messages=(*_PEER_TEXTS, _STORE_CLOSED)),
    _program("not-enough-nodes", NETWORK, Response.REQUEUE, "not enough nodes joined",
         exceptions=_names("RendezvousTimeoutError")),
    _program(NETWORK_RULE, NETWORK, RESTART, "the network failed",
         exceptions=_NO_CONNECTION, errnos=_NOT_REACHED | {errno.EADDRINUSE, errno.EADDRNOTAVAIL},
         texts=("name or service not known", "temporary failure in name resolution", "address already in use",
                "connection refused", "connection timed out", "no route to host", "network is unreachable", "socket timeout",
                "cannot assign requested address"), of=NATIVE | _OS),
    _program("cache-race", STORAGE, CONFIRM,
         "processes that fill a cache at the same time may find its files incomplete, and the next try finds them whole",
         messages=("mmap length is greater than file size", "no such file or directory", "failed to open local file",
                   "file exists"), when=lambda view: any(sign in view.text.ascii for sign in _CACHES),
         of=NATIVE | _OS | _names("ValueError InductorError")),
    _program("data-broken", DATA, CONFIRM, "a file of the data cannot be read",
         exceptions=_names("UnidentifiedImageError BadGzipFile BadZipFile ArrowInvalid LZMAError ZstdError InvalidDataError "
                           "zlib.error tarfile.ReadError DECORDError TiffFileError LibsndfileError DecompressionBombError "
                           "lmdb.CorruptedError"),
         messages=("image file is truncated", "cannot identify image file", "broken data stream", "parquet magic bytes not found",
                ("jpeg", "truncated"), "end-of-stream marker", "deserializing page header", "_src.empty()", "truncated file:",
                "inflate() failed", *_CUT_SHORT), of=NATIVE | _OS | _names("ValueError SyntaxError EOFError error"),
         when=lambda view: "unexpected eof while" not in view.text),
    _program(STATE_DICT, CODE, CONFIRM, "checkpoint and model, or checkpoint and number of ranks, do not match", "P",
         exceptions=_names("ZeRORuntimeException"),
         messages=("missing key(s) in state_dict", "unexpected key(s) in state_dict", "error(s) in loading state_dict")),
    _program("code-always", CODE, STOP, "an error of this type would recur on every try", "A",
         exceptions=_names("NameError ModuleNotFoundError"), when=_raised_by_script),
    _program(FILES, CODE, CONFIRM, "the input is missing or wrong, or this node lacks it", "P",
         exceptions=_names("FileNotFoundError PermissionError IsADirectoryError NotADirectoryError ImportError")),
    _program("code-at-start", CODE, STOP, "raised before the first optimizer step: it would recur on every try", "N B",
         exceptions=_names("SyntaxError AttributeError KeyError TypeError"), when=_before_first_step),
    _program("arguments", CODE, CONFIRM, "an error like this is usually a bug, or wrong input", "N B P",
         exceptions=_names("TypeError ValueError LookupError AssertionError ArithmeticError NotImplementedError NameError "
                           "SyntaxError AttributeError ModuleNotFoundError "
                           "RecursionError PanicException PicklingError"),
         packages=_LIBRARY_PACKAGES,
         messages=tuple(f"returned non-zero exit status {code}." for code in (2, 126, 127)), of=_names("CalledProcessError")),
    _program(BUG_MAYBE, CODE, CONFIRM, "its message is unknown; an exception of Python's own class is usually a bug", "",
         exceptions=_names("RuntimeError Exception")),
)  # fmt: skip


TIER_4 = (
    _exited("interrupted", USER_STOP, STOP, "the user stopped it", exit_codes=frozenset({130}), signals=_names("SIGINT")),
    _exited("killed", UNKNOWN, RESTART, "who sent the signal is unknown, and no out-of-memory kill was reported", "D",
         signals=_names("SIGKILL SIGTERM")),
    _exited("crash", CRASH, CONFIRM, "native code crashed", "N", signals=_names("SIGSEGV SIGILL SIGFPE")),
    _exited("bus-error", HARDWARE, RESTART, "memory or a mapped file could not be read", signals=_names("SIGBUS")),
    _exited("abort", CRASH, RESTART, "it aborted without a message", signals=_names("SIGABRT")),
    _exited("slurm-notice", PREEMPTION, Response.REQUEUE,
         "Slurm gave notice of the end of the allocation (sbatch --signal), and the script has no handler for it", "S",
         signals=_names("SIGUSR1 SIGUSR2"), when=lambda view: view.evidence.platform.name == "slurm"),
    _exited("no-handler", CODE, STOP, "the signal was meant for a handler that the script has not installed",
         signals=_names("SIGUSR1 SIGUSR2")),
    _exited("usage-exit", CODE, STOP,
         "this exit code means that a retry would fail: wrong usage, no such command, or one of sysexits.h; 93: no progress", "N",
         exit_codes=frozenset({2, 126, 127, *range(64, 75), 76, 77, 78, 93})),
    _exited(TRY_AGAIN, PREEMPTION, Response.RESTART_FREE, "EX_TEMPFAIL: the program asks to be restarted",
         exit_codes=frozenset({75})),
    _exited(NO_EVIDENCE, UNKNOWN, RESTART, "nothing suggests that another try would fail", when=lambda view: True),
)  # fmt: skip

RULES: tuple[Rule, ...] = (*TIER_1, *TIER_2, *TIER_3, *TIER_4)
ELSEWHERE = frozenset(rule.name for rule in RULES if rule.response is Response.FOLLOW)  # the node that reports it lives
PEERS = ELSEWHERE - {INTERFACE, STOPPED}
