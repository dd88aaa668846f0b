"""What training is made of, taken apart for a checkpoint and put together again.

`capture` splits it three ways: tensors, which torch.distributed.checkpoint shards and reshards; what all ranks share; and what is
each rank's own. Optimizer state is kept by parameter name and read back by the names and shapes that the checkpoint tells. So a
load takes no step with zero gradients to find out what the optimizer would hold, as torch's own `set_state_dict` does: no step is
counted that was not trained, and an optimizer before its first step comes back as it was.

Private names that are touched: DataLoader._get_iterator, of torch and of torchdata alike, in `restore_after_iter`.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic_ext.base.errors import UsageError

# Components that wrappers add to a parameter's name: torch.compile, activation checkpointing.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class Stateful(Protocol):
    """Anything that can be saved: a scheduler, a scaler, a data loader, an average of the weights."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class Objects:
    """What the user trains with."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    dataloader: Stateful | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)


@dataclass(frozen=True)
class Capture:
    """tensors: nested dict of live tensors, not yet copied. shared: alike on all ranks. own: this rank's."""

    tensors: dict[str, Any]
    shared: dict[str, Any]
    own: dict[str, Any]


def capture(objects: Objects, rank: int, accumulation: int) -> Capture:
    """accumulation: micro-steps of the next optimizer step that are done; above 0 the gradients are part of the state.

    Raises UsageError for gradients that cannot be had.
    """
    tensors: dict[str, Any] = {"model": get_model_state_dict(objects.model)}
    shared: dict[str, Any] = {"optimizers": [], "extra": {}, "extra_tensors": []}
    own: dict[str, Any] = {}
    names = parameter_names(objects.model)
    for number, optimizer in enumerate(objects.optimizers):
        moments, form = _take_optimizer(optimizer, names)
        tensors.setdefault("optimizer", {})[str(number)] = moments
        shared["optimizers"].append(form)
    for name, part in (("scheduler", objects.scheduler), ("scaler", objects.scaler)):
        if part is not None:
            shared[name] = part.state_dict()
    for name, part in objects.extra.items():
        state = part.state_dict()
        if any(True for _ in _tensors(state)):
            tensors.setdefault("extra", {})[name] = state
            shared["extra_tensors"].append(name)
        else:
            shared["extra"][name] = state
    if accumulation:
        sharded, local = _take_gradients(names)
        tensors["gradients"] = sharded
        tensors["rank_gradients"] = {str(rank): local}
        shared["gradients"] = sorted(sharded)
        own["gradients"] = sorted(local)
    if objects.dataloader is not None:
        own["dataloader"] = objects.dataloader.state_dict()
    own["generators"] = generators()  # last: asking a data loader for its state may draw from them
    return Capture(tensors, shared, own)


def template(objects: Objects, shared: Mapping[str, Any], owns: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The tensors to fill in, in the shape that this world size and these wrappers want them.

    owns: by rank of the group that saved; their gradients are read where they are not sharded.
    """
    tensors: dict[str, Any] = {"model": get_model_state_dict(objects.model)}
    parameters = {name: parameter for parameter, name in parameter_names(objects.model).items()}
    if len(shared["optimizers"]) != len(objects.optimizers):
        raise UsageError(
            f"the checkpoint holds {len(shared['optimizers'])} optimizers, expected {len(objects.optimizers)}: "
            "give the Checkpointer as many as at the save"
        )
    for number, form in enumerate(shared["optimizers"]):
        moments = {
            name: {key: _empty(of, parameters[name]) for key, of in kinds.items() if isinstance(of, Moment)}
            for name, kinds in form["state"].items()
            if _known(name, parameters)
        }
        tensors.setdefault("optimizer", {})[str(number)] = moments
    for name in shared["extra_tensors"]:
        if name in objects.extra:
            tensors.setdefault("extra", {})[name] = objects.extra[name].state_dict()
    if "gradients" in shared:
        tensors["gradients"] = {name: torch.zeros_like(parameters[name].detach()) for name in shared["gradients"]}
        tensors["rank_gradients"] = {
            str(rank): {name: torch.zeros_like(parameters[name].detach()) for name in own["gradients"]}
            for rank, own in owns.items()
        }
    return _pruned(tensors)


def restore(
    objects: Objects, tensors: Mapping[str, Any], shared: Mapping[str, Any], owns: Mapping[int, Mapping[str, Any]]
) -> None:
    """Put the shared state in place. owns: this rank's own alone at an equal world size, else those of all who saved."""
    set_model_state_dict(objects.model, tensors["model"])
    names = parameter_names(objects.model)
    for number, (optimizer, form) in enumerate(zip(objects.optimizers, shared["optimizers"], strict=True)):
        _put_optimizer(optimizer, names, form, tensors.get("optimizer", {}).get(str(number), {}))
    for name, part in (("scheduler", objects.scheduler), ("scaler", objects.scaler)):
        if part is not None and name in shared:
            part.load_state_dict(shared[name])
    for name, part in objects.extra.items():
        if name in shared["extra"]:
            part.load_state_dict(shared["extra"][name])
        elif name in shared["extra_tensors"]:
            part.load_state_dict(tensors["extra"][name])
    for parameter in names:
        parameter.grad = None
    if "gradients" in shared:
        _put_gradients(names, tensors, owns)


# Names.


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's name without what DDP, torch.compile and activation checkpointing add: alike under all of them."""
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        parameter: ".".join(each for each in name.split(".") if each not in _WRAPPERS)
        for name, parameter in whole.named_parameters()
    }


def _known(name: str, parameters: Mapping[str, nn.Parameter]) -> bool:
    if name not in parameters:
        raise UsageError(
            f"the checkpoint has optimizer state of {name}, which the model does not have: build the model it was saved of"
        )
    return True


# Optimizers.


@dataclass(frozen=True)
class Moment:
    """One tensor of an optimizer's state. Checkpoints hold it: neither its name nor its fields may change.

    like_parameter: of the parameter's shape and sharded as it is.
    """

    like_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


def _take_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its tensors by name, and the form: groups, and what each parameter's state consists of."""
    parameters = _in_order(optimizer)
    packed = optimizer.state_dict()
    try:
        by_index = [names[parameter] for parameter in parameters]
    except KeyError:
        raise UsageError(
            "the optimizer has a parameter that the model does not have: give the Checkpointer the model it steps"
        ) from None
    groups = [{**group, "params": [by_index[index] for index in group["params"]]} for group in packed["param_groups"]]
    moments: dict[str, Any] = {}
    form: dict[str, Any] = {}
    for index, state in packed["state"].items():
        name, parameter = by_index[index], parameters[index]
        moments[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        form[name] = {
            key: _moment(name, key, value, parameter) if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in state.items()
        }
    return moments, {"groups": copy.deepcopy(groups), "state": form}


def _moment(name: str, key: str, value: Tensor, parameter: nn.Parameter) -> Moment:
    like = value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(parameter, DTensor)
    if isinstance(value, DTensor) and not like:
        raise UsageError(
            f"the optimizer's {key} of {name} is sharded but not shaped as its parameter: such state cannot be saved"
        )
    return Moment(like, tuple(value.shape), value.dtype)


def _empty(moment: Moment, parameter: nn.Parameter) -> Tensor:
    if moment.like_parameter:
        return torch.zeros_like(parameter.detach(), dtype=moment.dtype)
    return torch.zeros(moment.shape, dtype=moment.dtype)


def _put_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], form: Mapping[str, Any], moments: Mapping[str, Any]
) -> None:
    index_of = {names[parameter]: index for index, parameter in enumerate(_in_order(optimizer))}
    saved = [group["params"] for group in form["groups"]]
    present = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if saved != present:
        raise UsageError(
            f"the optimizer's groups have {[len(group) for group in present]} parameters, in the checkpoint "
            f"{[len(group) for group in saved]}, or others: build the optimizer as at the save"
        )
    groups = [{**group, "params": [index_of[name] for name in group["params"]]} for group in form["groups"]]
    state = {
        index_of[name]: {key: moments[name][key] if isinstance(of, Moment) else of for key, of in kinds.items()}
        for name, kinds in form["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _in_order(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """By the index that `Optimizer.state_dict` gives them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# Gradients of an optimizer step that is not complete.


def _take_gradients(names: Mapping[nn.Parameter, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(sharded, this rank's own): DDP under no_sync() has gradients that differ from rank to rank."""
    sharded: dict[str, Tensor] = {}
    local: dict[str, Tensor] = {}
    for parameter, name in names.items():
        if isinstance(parameter, DTensor) and parameter.requires_grad and parameter.grad is None:
            # FSDP2 with set_requires_gradient_sync(False) keeps them unsharded, out of reach, and as large as the whole model.
            raise UsageError(
                f"accumulation is above 0 and {name} has no gradient yet: gradients that FSDP2 keeps unsharded cannot be saved; "
                "save between optimizer steps, or accumulate with set_requires_gradient_sync(True)"
            )
        if parameter.grad is not None:
            (sharded if isinstance(parameter.grad, DTensor) else local)[name] = parameter.grad
    return sharded, local


def _put_gradients(names: Mapping[nn.Parameter, str], tensors: Mapping[str, Any], owns: Mapping[int, Mapping[str, Any]]) -> None:
    """At another world size each rank gets the mean of the saved ranks': the mean over the new ranks is then the old one."""
    for parameter, name in names.items():
        if name in tensors.get("gradients", {}):
            parameter.grad = tensors["gradients"][name]
            continue
        found = [tensors["rank_gradients"][str(rank)][name] for rank, own in sorted(owns.items()) if name in own["gradients"]]
        if found:
            parameter.grad = found[0] if len(owns) == 1 else torch.stack(found).sum(0) / len(owns)


# Random generators.


def generators() -> dict[str, Any]:
    """All that training may draw from: python, numpy if it is loaded, torch on CPU and on this rank's CUDA device."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generators(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def restore_after_iter(loader: Any, generators: Mapping[str, Any]) -> None:
    """Restore them once more when the loader's next iterator is made: that draws a seed, which at the save was drawn already."""
    make = getattr(loader, "_get_iterator", None)
    if make is None:
        return

    def once() -> Any:
        del loader._get_iterator  # the class's own shows again
        iterator = make()
        set_generators(generators)
        return iterator

    loader._get_iterator = once


def seed_generators(*parts: object) -> None:
    """For a rank whose saved generators there are not: unlike for unlike parts, and the same on every machine."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")  # numpy takes 32 bits
    random.seed(seed)
    torch.manual_seed(seed)  # CUDA too
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


# Copies.


class Stager:
    """Copies tensors to memory of its own, which the next save uses again: page faults cost more than the copy."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Tensor] = {}

    def stage(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """A copy that training does not change. The last one must not be in use any more."""
        kept: dict[tuple[str, ...], Tensor] = {}
        staged: dict[str, Any] = self._copy(tensors, (), kept)
        self._kept = kept
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the copies from the device were only queued
        return staged

    def _copy(self, value: Any, path: tuple[str, ...], kept: dict[tuple[str, ...], Tensor]) -> Any:
        if isinstance(value, Tensor):
            kept[path] = self._copy_tensor(value.detach(), self._kept.get(path))
            return kept[path]
        if isinstance(value, Mapping):
            return {key: self._copy(each, (*path, str(key)), kept) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._copy(each, (*path, str(number)), kept) for number, each in enumerate(value)]
        return copy.deepcopy(value)

    @staticmethod
    def _copy_tensor(value: Tensor, room: Tensor | None) -> Tensor:
        fits = room is not None and type(room) is type(value) and room.shape == value.shape and room.dtype == value.dtype
        if not fits or (isinstance(room, DTensor) and room.placements != value.placements):
            room = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        assert room is not None
        return room.copy_(value, non_blocking=value.is_cuda)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for each in value:
            yield from _tensors(each)


def _pruned(tensors: dict[str, Any]) -> dict[str, Any]:
    """Without empty branches: torch.distributed.checkpoint takes an empty dict for a value that it should find."""
    found = {key: _pruned(value) if isinstance(value, dict) else value for key, value in tensors.items()}
    return {key: value for key, value in found.items() if not (isinstance(value, dict) and not value)}
