"""The private names of torch that this package uses, and what a job lacks in a torch that no longer has one of them.

`torch_private` uses those of the agent; the workers use the others. `check` runs as a job begins. It names what is missing, and
what is off without it. Without a name that is needed no job begins.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from elastic_ext.base.errors import UnsupportedTorch

logger = logging.getLogger(__name__)

NEWEST_RUN = (2, 15)
"""The newest series of torch on which the suite of `make matrix` has passed; a test compares it with the results."""

OLDEST = (2, 8)

_AGENT = "torch.distributed.elastic.agent.server.api"
_LOCAL_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
_PROCESSES = "torch.distributed.elastic.multiprocessing.api"
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler"
_C10D = "torch.distributed.distributed_c10d"


@dataclass(frozen=True)
class PrivateNames:
    """Names of one module that one part of this package needs.

    Attributes:
        names: functions, classes, methods, and attributes of objects of a class (`Class.name`). Of a module that only workers
            use: words that its file must have, as the names of functions in their stacks are.
        lost: what is off without them, and what happens instead.
        needed: no job begins without them.
        in_workers: the agent does not use them.
        since: the first series of torch that has them.
        beside: a name of the same module. A build of torch without it has none of these, rightly.
    """

    module: str
    names: tuple[str, ...]
    lost: str
    needed: bool = False
    in_workers: bool = False
    since: tuple[int, int] = OLDEST
    beside: str = ""


AGENT = PrivateNames(
    "torch.distributed.launcher.api",
    ("LocalElasticAgent",),
    "torch would run the job under its own agent",
    needed=True,
)
LOOP = PrivateNames(
    _AGENT,
    (
        "SimpleElasticAgent._invoke_run",
        "SimpleElasticAgent._rendezvous",
        "SimpleElasticAgent._assign_worker_ranks",
        "SimpleElasticAgent._start_workers",
        "SimpleElasticAgent._stop_workers",
        "SimpleElasticAgent._monitor_workers",
        "SimpleElasticAgent._initialize_workers",
        "SimpleElasticAgent._restart_workers",
    ),
    "torch would run its own loop in place of the agent's",
    needed=True,
)
WORKERS = PrivateNames(
    _LOCAL_AGENT, ("LocalElasticAgent._pcontext",), "the agent could not find the processes that torch has started", needed=True
)
RESTARTS = PrivateNames(
    _AGENT, ("SimpleElasticAgent._remaining_restarts",), "torch's own metrics and events show all restarts as left"
)
SHUTDOWN = PrivateNames(
    _AGENT,
    ("SimpleElasticAgent._shutdown_timeout",),
    "--shutdown-timeout is taken as torch's default of 30 s",
    since=(2, 12),
)
KERNEL_SLEEP = PrivateNames(
    _LOCAL_AGENT,
    ("LocalElasticAgent._uninterruptible_state_timeout", "LocalElasticAgent._check_uninterruptible_state_timeout"),
    "torch's check for workers that sleep in the kernel is off",
    since=(2, 13),
)
RESULTS = PrivateNames(
    _PROCESSES, ("MultiprocessContext._ret_vals",), "the agent looks once a second whether a function entrypoint has returned"
)
COMMANDS = PrivateNames(
    _PROCESSES, ("get_subprocess_handler",), "warm standbys are off, and each worker starts with the imports of its script"
)
HANDLER = PrivateNames(
    _HANDLER, ("SubprocessHandler._popen", "SubprocessHandler._stdout", "SubprocessHandler._stderr"), COMMANDS.lost
)
_RECORDER_LOST = "the flight recorder is not read: hangs are found by the stacks of the workers alone, and stragglers not at all"
_HOOKS_LOST = (
    "the recorders of backends that do not record themselves, such as nccl2, are not read: their hangs are found by the stacks "
    "of the workers alone"
)

NAMES = (
    *(AGENT, LOOP, WORKERS, RESTARTS, SHUTDOWN, KERNEL_SLEEP, RESULTS, COMMANDS, HANDLER),
    PrivateNames("torch._C._distributed_c10d", ("_dump_fr_trace_json",), _RECORDER_LOST, in_workers=True),
    PrivateNames(
        "torch._C._distributed_c10d",
        ("_dump_nccl_trace_json",),
        "the flight recorder of NCCL is not read: its hangs are found by the stacks of the workers alone",
        in_workers=True,
        beside="ProcessGroupNCCL",
    ),
    PrivateNames(_C10D, ("_world", "pg_names", "pg_group_ranks"), _RECORDER_LOST, in_workers=True),
    PrivateNames(_C10D, ("pg_flight_recorder_hooks",), _HOOKS_LOST, in_workers=True, since=(2, 15)),
    PrivateNames(
        "torch._C._distributed_c10d", ("ProcessGroup._get_backend", "ProcessGroup._device_types"), _HOOKS_LOST, in_workers=True
    ),
    PrivateNames(
        "torch._C._distributed_c10d", ("Backend.supports_completion_hooks",), _HOOKS_LOST, in_workers=True, since=(2, 15)
    ),
    PrivateNames(
        _C10D,
        (
            "_object_to_tensor",
            "_tensor_to_object",
            "_new_process_group_helper",
            "_create_process_group_wrapper",
            "_abort_process_group",
        ),
        "a rank that does its own part of a collective may be taken for one that waits for others",
        in_workers=True,
    ),
    PrivateNames(
        "torch.autograd.graph",
        ("_engine_run_backward",),
        "a rank that waits in the backward pass is not seen to wait for others",
        in_workers=True,
    ),
    PrivateNames(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        ("finalize_backward",),
        "a rank that waits for FSDP's gradients is not seen to wait for others",
        in_workers=True,
    ),
    PrivateNames(
        _C10D, ("_distributed_excepthook",), "tracebacks of the script also show the lines that started it", in_workers=True
    ),
    PrivateNames(
        "torch._compile", ("_disable_dynamo",), "torch.compile traces the function that counts optimizer steps", in_workers=True
    ),
    PrivateNames(
        "torch.distributed.checkpoint.state_dict",
        ("_init_optim_state",),
        "the step by which torch allocates an optimizer's state is counted as one of training",
        in_workers=True,
    ),
    PrivateNames(
        "torch.serialization",
        ("_open_zipfile_writer_file",),
        "the record of saves does not see what torch.save writes to a path: such checkpoints are found by their content and name",
        in_workers=True,
    ),
    PrivateNames(
        "torch.distributed.checkpoint._async_process_executor",
        ("_ProcessBasedAsyncCheckpointExecutor",),
        "the record of saves does not see what the process of DCP's `async_save` writes: it is found by its content",
        in_workers=True,
    ),
    PrivateNames(
        "torch.distributed.algorithms.join",
        ("_join_config",),
        "replicas are compared inside of `join`, too, where ranks differ rightly",
        in_workers=True,
    ),
    PrivateNames(
        "torch.utils.data.dataloader",
        ("_get_iterator",),
        "after a resume within an epoch, random numbers differ from those of a run without a failure",
        in_workers=True,
    ),
    PrivateNames(
        "torch._dynamo.eval_frame",
        ("_orig_mod",),
        "a checkpoint of a compiled model does not fit the model without torch.compile",
        in_workers=True,
    ),
    PrivateNames(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        ("_checkpoint_wrapped_module",),
        "a checkpoint of a model with activation checkpointing does not fit the model without it",
        in_workers=True,
    ),
)


def check() -> None:
    """Warn of a torch that is newer than any that was tested, and of what is off in it.

    Raises UnsupportedTorch: it lacks names that are needed. The names of the workers are looked up in a newer torch only.
    """
    import torch  # not at the top: the pages are written without it

    version = str(torch.__version__)
    newer = _series(version) > NEWEST_RUN
    if newer:
        newest = ".".join(map(str, NEWEST_RUN))
        logger.warning("elastic_ext: torch %s is newer than %s, the newest that elastic_ext was tested with", version, newest)
    found = {each: names for each in NAMES if (newer or not each.in_workers) and (names := missing(each))}
    needed = {each: names for each, names in found.items() if each.needed}
    for each, names in needed.items():
        raise UnsupportedTorch(
            f"torch {version} has no {_listed(each, names)}, which elastic_ext needs: {each.lost}; "
            "expected torch 2.8 or newer; use --rdzv-backend=c10d, or a newer elastic_ext"
        )
    for each, names in found.items():
        logger.warning("elastic_ext: torch %s has no %s: %s", version, _listed(each, names), each.lost)


def _listed(each: PrivateNames, names: Iterable[str]) -> str:
    return " and ".join(f"{each.module}.{name}" for name in names)


@cache
def missing(each: PrivateNames) -> tuple[str, ...]:
    """Return which of these names this torch should have and has not."""
    import torch

    if _series(str(torch.__version__)) < each.since:
        return ()
    if each.in_workers and each.module.split(".")[1] != "_C":
        words = _words_of(os.path.join(os.path.dirname(torch.__file__), *each.module.split(".")[1:]) + ".py")
        return tuple(name for name in each.names if name not in words)
    try:
        module = importlib.import_module(each.module)
    except ImportError:
        return each.names
    if each.beside and not _has(module, each.beside):
        return ()
    return tuple(name for name in each.names if not _has(module, name))


def _has(module: object, name: str) -> bool:
    first, _, attribute = name.partition(".")
    found = getattr(module, first, None)
    if not attribute or found is None:
        return found is not None
    return hasattr(found, attribute) or attribute in set(_attributes_set(found))


def _attributes_set(found: type) -> Iterator[str]:
    """Yield all names in the code of the methods of a class: those of the attributes of its objects are among them."""
    for base in found.__mro__:
        for method in vars(base).values():
            if isinstance(method, types.FunctionType):
                yield from method.__code__.co_names


def _words_of(path: str) -> frozenset[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return frozenset(re.findall(r"\w+", file.read()))
    except FileNotFoundError:
        return frozenset()


def _series(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found is not None else NEWEST_RUN
