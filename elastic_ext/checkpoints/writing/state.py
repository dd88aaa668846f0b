"""Split the training state for a checkpoint, and put it together again.

`capture` splits it into three parts: tensors, which torch.distributed.checkpoint shards and reshards; state that all ranks share;
and each rank's own state. Checkpoints hold the keys of all three, so the keys must not change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.writing import extra_state, optimizer_state, random_state
from elastic_ext.checkpoints.writing.optimizer_state import Names

logger = logging.getLogger(__name__)

# Components that wrappers add to a parameter's name: torch.compile, activation checkpointing.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

EXTRA = "extra_tensors"  # where the tensors of extra objects are

StateDict = dict[str, Any]


class Stateful(Protocol):
    """Any object that can be saved: a scheduler, a scaler, a data loader, an average of the weights."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class Objects:
    """The objects that the user trains with."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    dataloader: Stateful | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def shared_objects(self) -> tuple[tuple[str, Stateful | None], ...]:
        """(key in checkpoints, object) for each single object whose state all ranks share."""
        return ("scheduler", self.scheduler), ("scaler", self.scaler)


@dataclass(frozen=True)
class Saved:
    """The parts of a checkpoint's state that are not sharded.

    Attributes:
        shared: equal on all ranks.
        own_states: ranks' own state, by rank: only this rank's at an equal world size, else that of all ranks that saved.
    """

    shared: StateDict
    own_states: Mapping[int, StateDict]


@dataclass(frozen=True)
class Capture:
    """The split state. tensors: nested dict of live tensors, not yet copied. shared: equal on all ranks. own: this rank's."""

    tensors: StateDict
    shared: StateDict
    own: StateDict


def capture(objects: Objects, rank: int, accumulation: int) -> Capture:
    """Split the state.

    accumulation: micro-steps done toward the next optimizer step; above 0 the gradients are part of the state.

    Raises UsageError for gradients that cannot be reached, and for what no load could put together again.
    """
    tensors: StateDict = {"model": get_model_state_dict(objects.model)}
    # Versions that do not know extra_forms find no tensors for what is in extra_tensors, and refuse to load.
    shared: StateDict = {"optimizers": [], "extra": {}, "extra_tensors": [], "extra_forms": {}}
    own: StateDict = {}
    names = parameter_names(objects.model)
    for number, optimizer in enumerate(objects.optimizers):
        moments, form = optimizer_state.take(optimizer, names)
        tensors.setdefault("optimizer", {})[str(number)] = moments
        shared["optimizers"].append(form)
    for name, part in objects.shared_objects:
        if part is not None:
            shared[name] = part.state_dict()
    for name, part in objects.extra.items():
        state = part.state_dict()
        taken = extra_state.take(name, state)
        if taken is None:
            shared["extra"][name] = state
        else:
            tensors.setdefault(EXTRA, {})[name], shared["extra_forms"][name] = taken
            shared["extra_tensors"].append(name)
    if accumulation:
        sharded, local = _take_gradients(names)
        tensors["gradients"] = sharded
        tensors["rank_gradients"] = {str(rank): local}
        shared["gradients"] = sorted(sharded)
        own["gradients"] = sorted(local)
    if objects.dataloader is not None:
        own["dataloader"] = objects.dataloader.state_dict()
    own["generators"] = random_state.take()  # last: getting a data loader's state may draw from them
    return Capture(tensors, shared, own)


def template(objects: Objects, saved: Saved) -> StateDict:
    """Return the tensors to load into, in the layout that this world size and these wrappers need. Raises UsageError."""
    shared = saved.shared
    tensors: StateDict = {"model": get_model_state_dict(objects.model)}
    parameters = {name: parameter for parameter, name in parameter_names(objects.model).items()}
    if len(shared["optimizers"]) != len(objects.optimizers):
        raise UsageError(
            f"the checkpoint holds {len(shared['optimizers'])} optimizers, expected {len(objects.optimizers)}: "
            "pass the Checkpointer the optimizers that were saved"
        )
    for number, form in enumerate(shared["optimizers"]):
        tensors.setdefault("optimizer", {})[str(number)] = optimizer_state.template(form, parameters)
    _place_extra(objects, shared, tensors)
    if "gradients" in shared:
        tensors["gradients"] = {name: torch.zeros_like(parameters[name].detach()) for name in shared["gradients"]}
        tensors["rank_gradients"] = {
            str(rank): {name: torch.zeros_like(parameters[name].detach()) for name in own["gradients"]}
            for rank, own in saved.own_states.items()
        }
    return _without_empty(tensors)


def _place_extra(objects: Objects, shared: StateDict, tensors: StateDict) -> None:
    """Add to `tensors` those of the extra objects to load into."""
    forms = {name: form for name, form in shared.get("extra_forms", {}).items() if name in objects.extra}
    present = {name: objects.extra[name].state_dict() for name in shared["extra_tensors"] if name in objects.extra}
    for name, state in present.items():
        if name not in forms:
            logger.warning("an earlier version has saved extra %r: only what the object has now is loaded, in its types", name)
            tensors.setdefault("extra", {})[name] = state
    tensors[EXTRA] = extra_state.template(forms, present, objects.model)


def restore(objects: Objects, tensors: StateDict, saved: Saved) -> None:
    """Restore all but the data loader and the random generators. Raises UsageError if the state does not fit."""
    shared = saved.shared
    set_model_state_dict(objects.model, tensors["model"])
    names = parameter_names(objects.model)
    for number, (optimizer, form) in enumerate(zip(objects.optimizers, shared["optimizers"], strict=True)):
        optimizer_state.put(optimizer, names, form, tensors.get("optimizer", {}).get(str(number), {}))
    for name, part in objects.shared_objects:
        if part is not None and name in shared:
            part.load_state_dict(shared[name])
    for name, part in objects.extra.items():
        if name in shared["extra"]:
            part.load_state_dict(shared["extra"][name])
        elif name in shared.get("extra_forms", {}):
            part.load_state_dict(extra_state.put(shared["extra_forms"][name], tensors.get(EXTRA, {}).get(name, {})))
        elif name in shared["extra_tensors"]:
            part.load_state_dict(_of_earlier_version(name, tensors))
    for parameter in names:
        parameter.grad = None
    if "gradients" in shared:
        _put_gradients(names, tensors, saved.own_states)


def _of_earlier_version(name: str, tensors: StateDict) -> Any:
    if name not in tensors.get("extra", {}):
        raise UsageError(
            f"the state of extra {name!r} was saved by an earlier version and is loaded into tensors that the object has: it has "
            "none, expected those that were saved; make them before the load"
        )
    return tensors["extra"][name]


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return parameter names without the parts that DDP, torch.compile and activation checkpointing add."""
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        parameter: ".".join(each for each in name.split(".") if each not in _WRAPPERS)
        for name, parameter in whole.named_parameters()
    }


# Gradients of an incomplete optimizer step.


def _take_gradients(names: Names) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (sharded, this rank's own) gradients. Under DDP's no_sync(), gradients differ between ranks."""
    sharded: dict[str, Tensor] = {}
    local: dict[str, Tensor] = {}
    for parameter, name in names.items():
        if isinstance(parameter, DTensor) and parameter.requires_grad and parameter.grad is None:
            # With set_requires_gradient_sync(False), FSDP2 keeps them unsharded, unreachable, and as large as the whole model.
            raise UsageError(
                f"accumulation is above 0 and {name} has no gradient yet: gradients that FSDP2 keeps unsharded cannot be saved; "
                "save between optimizer steps, or accumulate with set_requires_gradient_sync(True)"
            )
        if parameter.grad is not None:
            (sharded if isinstance(parameter.grad, DTensor) else local)[name] = parameter.grad
    return sharded, local


def _put_gradients(names: Names, tensors: StateDict, own_states: Mapping[int, StateDict]) -> None:
    """Restore gradients. At another world size each rank gets the saved ranks' mean, which preserves the mean over ranks."""
    for parameter, name in names.items():
        if name in tensors.get("gradients", {}):
            parameter.grad = tensors["gradients"][name]
            continue
        found = [
            tensors["rank_gradients"][str(rank)][name] for rank, own in sorted(own_states.items()) if name in own["gradients"]
        ]
        if found:
            parameter.grad = found[0] if len(own_states) == 1 else torch.stack(found).sum(0) / len(own_states)


def _without_empty(tensors: StateDict) -> StateDict:
    """Drop empty dicts, because torch.distributed.checkpoint treats one as a value that it should find."""
    found = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in tensors.items()}
    return {key: value for key, value in found.items() if not (isinstance(value, dict) and not value)}
