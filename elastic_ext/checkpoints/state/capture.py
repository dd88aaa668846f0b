"""Split the training state for a checkpoint, and put it together again.

`capture` splits it into three parts: tensors, which torch.distributed.checkpoint shards and reshards; state that all ranks share;
and each rank's own state. Checkpoints hold the keys of all three, so the keys must not change.

The state of an optimizer is split by parameter name. A load reads the names and shapes from the checkpoint. torch's own
`set_state_dict` instead takes a step with zero gradients to find out what the optimizer would hold. So here no untrained step is
counted, and an optimizer that was saved before its first step is restored as it was.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.state import Moment, extra

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
class UnshardedState:
    """The parts of a checkpoint's state that are not sharded."""

    shared: StateDict  # equal on all ranks
    # Ranks' own state, by rank: only this rank's at an equal world size, else that of all ranks that saved.
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
    shared: StateDict = {"optimizers": [], "extra": {}, "extra_forms": {}}
    own: StateDict = {}
    names = parameter_names(objects.model)
    for number, optimizer in enumerate(objects.optimizers):
        moments, form = take_optimizer(optimizer, names)
        tensors.setdefault("optimizer", {})[str(number)] = moments
        shared["optimizers"].append(form)
    for name, part in objects.shared_objects:
        if part is not None:
            shared[name] = part.state_dict()
    for name, part in objects.extra.items():
        state = part.state_dict()
        taken = extra.take(name, state)
        if taken is None:
            shared["extra"][name] = state
        else:
            tensors.setdefault(EXTRA, {})[name], shared["extra_forms"][name] = taken
    if accumulation:
        sharded, local = _take_gradients(names)
        tensors["gradients"] = sharded
        tensors["rank_gradients"] = {str(rank): local}
        shared["gradients"] = sorted(sharded)
        own["gradients"] = sorted(local)
    if objects.dataloader is not None:
        own["dataloader"] = objects.dataloader.state_dict()
    own["generators"] = take_generators()  # last: getting a data loader's state may draw from them
    return Capture(tensors, shared, own)


def template(objects: Objects, saved: UnshardedState) -> StateDict:
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
        tensors.setdefault("optimizer", {})[str(number)] = optimizer_template(form, parameters)
    forms = {name: form for name, form in shared["extra_forms"].items() if name in objects.extra}
    tensors[EXTRA] = extra.template(forms, {name: objects.extra[name].state_dict() for name in forms}, objects.model)
    if "gradients" in shared:
        tensors["gradients"] = {name: torch.zeros_like(parameters[name].detach()) for name in shared["gradients"]}
        tensors["rank_gradients"] = {
            str(rank): {name: torch.zeros_like(parameters[name].detach()) for name in own["gradients"]}
            for rank, own in saved.own_states.items()
        }
    return _without_empty(tensors)


def restore(objects: Objects, tensors: StateDict, saved: UnshardedState) -> None:
    """Restore all but the data loader and the random generators. Raises UsageError if the state does not fit."""
    shared = saved.shared
    set_model_state_dict(objects.model, tensors["model"])
    names = parameter_names(objects.model)
    for number, (optimizer, form) in enumerate(zip(objects.optimizers, shared["optimizers"], strict=True)):
        put_optimizer(optimizer, names, form, tensors.get("optimizer", {}).get(str(number), {}))
    for name, part in objects.shared_objects:
        if part is not None and name in shared:
            part.load_state_dict(shared[name])
    for name, part in objects.extra.items():
        if name in shared["extra"]:
            part.load_state_dict(shared["extra"][name])
        elif name in shared["extra_forms"]:
            part.load_state_dict(extra.put(shared["extra_forms"][name], tensors.get(EXTRA, {}).get(name, {})))
    for parameter in names:
        parameter.grad = None
    if "gradients" in shared:
        _put_gradients(names, tensors, saved.own_states)


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


# Optimizers.

Names = Mapping[nn.Parameter, str]
Moments = dict[str, dict[str, Tensor]]  # tensors of the state, by parameter name and key


class OptimizerForm(TypedDict):
    """The optimizer state in checkpoints, except the tensors. The keys must not change."""

    groups: list[StateDict]  # the parameter groups, with names instead of parameters
    state: dict[str, StateDict]  # by parameter name and key: a Moment instead of each tensor, other values as they are


def take_optimizer(optimizer: Optimizer, names: Names) -> tuple[Moments, OptimizerForm]:
    """Return the tensors, uncopied, and the form. Raises UsageError for state that cannot be saved."""
    parameters = _in_order(optimizer)
    packed = optimizer.state_dict()
    try:
        by_index = [names[parameter] for parameter in parameters]
    except KeyError:
        raise UsageError(
            "the optimizer has a parameter that the model does not have: pass the Checkpointer the model that it optimizes"
        ) from None
    groups = [{**group, "params": [by_index[index] for index in group["params"]]} for group in packed["param_groups"]]
    moments: Moments = {}
    form: dict[str, StateDict] = {}
    for index, state in packed["state"].items():
        name, parameter = by_index[index], parameters[index]
        moments[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        form[name] = {
            key: _moment(name, key, value, parameter) if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in state.items()
        }
    return moments, {"groups": copy.deepcopy(groups), "state": form}


def optimizer_template(form: OptimizerForm, parameters: Mapping[str, nn.Parameter]) -> Moments:
    """Return tensors to load into. Raises UsageError for a parameter that the model does not have."""
    moments: Moments = {}
    for name, state in form["state"].items():
        if name not in parameters:
            raise UsageError(
                f"the checkpoint has optimizer state for {name}, which the model does not have: build the model that was saved"
            )
        like = parameters[name].detach()
        moments[name] = {
            key: torch.zeros_like(like, dtype=each.dtype) if each.like_parameter else torch.zeros(each.shape, dtype=each.dtype)
            for key, each in state.items()
            if isinstance(each, Moment)
        }
    return moments


def put_optimizer(optimizer: Optimizer, names: Names, form: OptimizerForm, moments: Moments) -> None:
    """Restore a saved state. Raises UsageError if the optimizer's groups are not those that were saved."""
    index_of = {names[parameter]: index for index, parameter in enumerate(_in_order(optimizer))}
    saved = [group["params"] for group in form["groups"]]
    present = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if saved != present:
        raise UsageError(
            f"the optimizer's groups have {[len(group) for group in present]} parameters, those in the checkpoint "
            f"{[len(group) for group in saved]}, or others: build the optimizer as it was at the save"
        )
    groups = [{**group, "params": [index_of[name] for name in group["params"]]} for group in form["groups"]]
    state = {
        index_of[name]: {key: moments[name][key] if isinstance(each, Moment) else each for key, each in kinds.items()}
        for name, kinds in form["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _moment(name: str, key: str, value: Tensor, parameter: nn.Parameter) -> Moment:
    like = value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(parameter, DTensor)
    if isinstance(value, DTensor) and not like:
        raise UsageError(
            f"the optimizer's {key} of {name} is sharded but does not have its parameter's shape: such state cannot be saved"
        )
    return Moment(like, tuple(value.shape), value.dtype)


def _in_order(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order of their indices in `Optimizer.state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# The random generators of this process: python, numpy if loaded, torch on the CPU and on this rank's CUDA device.

Generators = Mapping[str, Any]


def take_generators() -> Generators:
    """Return the state of all generators that training may draw from."""
    state: StateDict = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: Generators) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def restore_after_iter(loader: Any, state: Generators) -> None:
    """Restore the state again after the loader makes its next iterator, whose seed was already drawn before the save.

    This uses one private name of torch, DataLoader._get_iterator, which torchdata also has.
    """
    make = getattr(loader, "_get_iterator", None)
    if make is None:
        return

    def once() -> object:
        del loader._get_iterator  # exposes the class's method again
        iterator: object = make()
        restore_generators(state)
        return iterator

    loader._get_iterator = once


def seed_generators(*parts: object) -> None:
    """Seed all generators of a rank without a saved state. The seed depends only on `parts`, not on the machine."""
    number = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")  # numpy takes 32 bits
    random.seed(number)
    torch.manual_seed(number)  # also seeds CUDA
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
