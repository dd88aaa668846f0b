"""The training state: how it is split for a checkpoint and pickled, and how it is put together again.

`capture` splits it into three parts: tensors, which torch.distributed.checkpoint shards and reshards; state that all ranks share;
and each rank's own state. Checkpoints hold the keys of all three, so the keys must not change. Nor may the names of this module
and of Moment, which checkpoints hold pickled, or one version could no longer read the checkpoints of another, including an older
version after a downgrade. No part of a sharded tensor may be in state of which one rank's is kept for all: all ranks would get
that part.

The state of an optimizer is split by parameter name. A load reads the names and shapes from the checkpoint. torch's own
`set_state_dict` instead takes a step with zero gradients to find out what the optimizer would hold. So here no untrained step is
counted, and an optimizer that was saved before its first step is restored as it was.

The state of an extra object is split into tensors and their form: a pickle of the whole state with a key in place of each tensor.
So a load gives back what was saved, containers, keys and types, as torch.save and torch.load would, with any object that loads
it. That object only shows how tensors of the same shape are placed: on which device, how sharded, and in which memory, if nothing
else uses that memory. Tensors that torch.distributed.checkpoint cannot write (sparse, quantized), and those inside other objects
than dicts, lists and tuples, are pickled with the form. Two tensors that share memory come back apart, unless they are one
object.
"""

from __future__ import annotations

import copy
import copyreg
import io
import logging
import pickle
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypedDict, cast

import torch
import torch.distributed.tensor as distributed
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.directory.own_files import checksum_of
from elastic_ext.training import generators

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moment:
    """One tensor of an optimizer's state. The field names must not change either."""

    like_parameter: bool  # whether it has the shape and sharding of its parameter
    shape: tuple[int, ...]
    dtype: torch.dtype


def _refuse(value: object) -> NoReturn:
    raise UsageError(
        f"the state to save holds a {type(value).__name__}, of which this rank has a part, where one rank's state is kept for "
        "all: pass the object as extra, with the tensor in dicts, lists or tuples of its state_dict(), or return a whole tensor"
    )


class Pickler(pickle.Pickler):
    """Raises UsageError for what is sharded."""

    dispatch_table: Mapping[type, Callable[[Any], Any]] = ChainMap({DTensor: _refuse}, copyreg.dispatch_table)


class _PickleModule:
    """The part of a pickle module that torch.save uses."""

    Pickler = Pickler


def torch_dumps(value: object, common: bool) -> bytes:
    """Return the bytes that torch.save writes for a value. common: one rank's is kept for all."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_PickleModule if common else pickle)
    return buffer.getvalue()


def dumps(value: object) -> bytes:
    """Return the bytes that pickle writes for a value, in its newest form."""
    buffer = io.BytesIO()
    Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy."""
    return cast(Tensor, tensor.to_local()).detach() if isinstance(tensor, DTensor) else tensor.detach()


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
        taken = take_extra(name, state)
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
    own["generators"] = generators.take()  # last: getting a data loader's state may draw from them
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
    tensors[EXTRA] = extra_template(forms, {name: objects.extra[name].state_dict() for name in forms}, objects.model)
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
            part.load_state_dict(_Reader(shared["extra_forms"][name], tensors.get(EXTRA, {}).get(name, {})).load())
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


Tensors = dict[str, Tensor]  # of one object, by key
PROTOCOL = 4  # of the pickles: known to all versions of Python that may read them

_TYPES = (Tensor, nn.Parameter, DTensor)  # exactly these


class Kind(TypedDict):
    """What a tensor was when it was saved. The keys must not change."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str  # type of its device
    parameter: bool
    requires_grad: bool
    # Of a DTensor, for each dimension of its mesh, the dimension of the tensor that is sharded over it, None if none is; () if it
    # was sharded in another way; None for a tensor that is not a DTensor.
    sharded: tuple[int | None, ...] | None


class Form(TypedDict):
    """The state of one object in checkpoints, except its tensors. The keys must not change."""

    structure: bytes  # the pickled state; persistent ids stand for tensors: ("tensor", key) or ("pickled", number)
    tensors: dict[str, Kind]  # by key
    pickled: list[Tensor]  # tensors that are not written by torch.distributed.checkpoint, by number


# The state of an extra object, at a save.


def take_extra(name: str, state: object) -> tuple[Tensors, Form] | None:
    """Return the tensors, uncopied, and the form; None if there is no tensor in dicts, lists and tuples.

    Raises UsageError for tensors that could not be loaded again; TypeError for what cannot be pickled.
    """
    found: Tensors = {}
    for key, tensor in _leaves(state):
        found.setdefault(key, tensor)
    if not found:
        return None
    buffer = io.BytesIO()
    writer = _Writer(buffer, name, {id(tensor): key for key, tensor in reversed(found.items())})  # the first key of each
    try:
        writer.dump(state)
    except UsageError:
        raise
    except Exception as error:
        raise TypeError(
            f"the state of extra {name!r} cannot be pickled: {type(error).__name__}: {error}; have its state_dict() return only "
            "tensors and what pickle can write"
        ) from error
    kinds = {key: _kind(tensor) for key, tensor in writer.tensors.items()}
    return writer.tensors, {"structure": buffer.getvalue(), "tensors": kinds, "pickled": writer.pickled}


class _Writer(Pickler):
    """Pickles a state without its tensors."""

    def __init__(self, file: io.BytesIO, name: str, keys: Mapping[int, str]) -> None:
        """keys: by the tensor's id."""
        super().__init__(file, PROTOCOL)
        self._name, self._keys = name, keys
        self._numbered: dict[int, tuple[int, Tensor]] = {}  # those in `pickled`, by id; kept, so that no other gets that
        self.tensors: Tensors = {}  # those that the state has, by key
        self.pickled: list[Tensor] = []  # those to be pickled with the form

    def persistent_id(self, value: object) -> tuple[str, str | int] | None:
        if not isinstance(value, Tensor):
            return None
        key = self._keys.get(id(value))
        _refuse_sharded(f"extra.{self._name}{key or ''}", value, key is None)
        if key is not None and _is_stored(value):
            self.tensors[key] = value
            return "tensor", key
        if id(value) not in self._numbered:
            self._numbered[id(value)] = len(self.pickled), value
            self.pickled.append(_on_cpu(value))
        return "pickled", self._numbered[id(value)][0]


def _refuse_sharded(what: str, tensor: Tensor, hidden: bool) -> None:
    """Raise UsageError for a sharded tensor of which the ranks' parts could not be put together again."""
    if isinstance(tensor, DTensor) and hidden:
        raise UsageError(f"{what} has a DTensor in an object that is no dict, list or tuple: put it in one of these")
    if _is_partial(tensor):
        raise UsageError(f"{what} is a DTensor of which each rank has a partial sum: redistribute it before it is saved")
    if hasattr(tensor, "local_shards"):
        raise UsageError(f"{what} is a {type(tensor).__name__}: only DTensors can be saved sharded, make it one")


def _is_stored(tensor: Tensor) -> bool:
    """Return whether torch.distributed.checkpoint can write a tensor."""
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)
    return type(tensor) in _TYPES and plain


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, as the one of rank 0 is for all: theirs may not have its device."""
    if tensor.device.type in ("cpu", "meta"):
        return tensor
    moved = tensor.detach().cpu()
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _kind(tensor: Tensor) -> Kind:
    return {
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "device": tensor.device.type,
        "parameter": isinstance(tensor, nn.Parameter),
        "requires_grad": tensor.requires_grad,
        "sharded": _dimensions(tensor.placements) if isinstance(tensor, DTensor) else None,
    }


def _dimensions(placements: Iterable[Placement]) -> tuple[int | None, ...]:
    known = [each for each in placements if type(each) in (Shard, Replicate)]
    return tuple(each.dim if isinstance(each, Shard) else None for each in known) if len(known) == len(list(placements)) else ()


def digests(tensors: Mapping[str, Tensors]) -> dict[str, str]:
    """Return a checksum of the keys, types and shapes of each object's tensors, which must be equal on all ranks."""
    return {
        name: checksum_of(repr(sorted((key, str(each.dtype), tuple(each.shape)) for key, each in found.items())).encode())
        for name, found in tensors.items()
    }


# ... and at a load.


@dataclass(frozen=True)
class Places:
    devices: Mapping[str, torch.device]  # by type, of this rank
    meshes: Mapping[int, DeviceMesh]  # by their number of dimensions; none of those that two meshes have
    sharded: bool  # whether it is on any mesh

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Places:
        """parts: all parameters and buffers."""
        meshes: dict[int, list[DeviceMesh]] = {}
        for each in parts:
            if isinstance(each, DTensor) and each.device_mesh not in (known := meshes.setdefault(each.device_mesh.ndim, [])):
                known.append(each.device_mesh)
        devices = {each.device.type: each.device for each in reversed(parts)}
        only = {dimensions: found[0] for dimensions, found in meshes.items() if len(found) == 1}
        return cls(devices, only, bool(meshes))


def extra_template(forms: Mapping[str, Form], present: Mapping[str, Any], model: nn.Module) -> dict[str, Tensors]:
    """Return tensors to load into, of the shapes and types that were saved.

    forms: by the objects' names. present: the present states of these objects.
    """
    parts = [*model.parameters(), *model.buffers()]
    places = Places.of(parts)
    there = {name: dict(_leaves(state)) for name, state in present.items()}
    users = Counter(_memory(each) for each in (*parts, *(each for found in there.values() for each in found.values())))
    found: dict[str, Tensors] = {}
    for name, form in forms.items():
        found[name], whole = {}, []
        for key, kind in form["tensors"].items():
            now = there[name].get(key)
            fits = now is not None and _has_place(now, kind, places)
            found[name][key] = tensor = _like(now, kind, users) if fits else _made(kind, places)
            if not fits and places.sharded and kind["sharded"] is not None and not isinstance(tensor, DTensor):
                whole.append(key)
        if whole:
            seen = f"{len(whole)} tensors, such as {whole[0]}, were sharded, and the model has no one mesh like the one they had"
            logger.warning("extra %r: %s: each rank loads all of them, as plain tensors", name, seen)
    return found


class _Reader(pickle.Unpickler):
    """Unpickles a state as it was saved. This runs code: a checkpoint is trusted as much as the training script."""

    def __init__(self, form: Form, tensors: Tensors) -> None:
        super().__init__(io.BytesIO(form["structure"]))
        self._pickled = form["pickled"]
        self._tensors = {key: _as_saved(tensors[key], kind) for key, kind in form["tensors"].items()}

    def persistent_load(self, pid: tuple[str, Any]) -> Tensor:
        where, which = pid
        return self._tensors[which] if where == "tensor" else self._pickled[which]


def _as_saved(tensor: Tensor, kind: Kind) -> Tensor:
    if kind["parameter"]:
        return nn.Parameter(tensor, kind["requires_grad"])
    return tensor.requires_grad_(kind["requires_grad"])


def _has_place(present: Tensor, kind: Kind, places: Places) -> bool:
    """Return whether a tensor is to be placed as the present one. What was sharded and can be is not loaded whole."""
    if not _is_stored(present) or tuple(present.shape) != kind["shape"]:
        return False
    if isinstance(present, DTensor):
        return not _is_partial(present)
    return len(kind["sharded"] or ()) not in places.meshes


def _like(present: Tensor, kind: Kind, users: Mapping[object, int]) -> Tensor:
    """Return a tensor that is placed as the present one; that itself if it has the type, and its memory has no other user.

    Others may be a parameter of which the object keeps an average, or the same tensor under another key: those are loaded with
    other values.
    """
    if present.dtype == kind["dtype"] and users[_memory(present)] == 1 and local_part(present).is_contiguous():
        return present.detach()
    return torch.empty_like(present.detach(), dtype=kind["dtype"], memory_format=torch.contiguous_format, requires_grad=False)


def _made(kind: Kind, places: Places) -> Tensor:
    """Return a tensor for which the object has no place: on this rank's device of the kind, sharded as it was saved."""
    shape, dtype, sharded = kind["shape"], kind["dtype"], kind["sharded"]
    if sharded and len(sharded) in places.meshes:
        placements = [Replicate() if dim is None else Shard(dim) for dim in sharded]
        return distributed.empty(shape, dtype=dtype, device_mesh=places.meshes[len(sharded)], placements=placements)
    return torch.empty(shape, dtype=dtype, device=places.devices.get(kind["device"], "cpu"))


def _is_partial(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def _memory(tensor: Tensor) -> object:
    """Return what two tensors in the same memory have in common."""
    return (tensor.device, local_part(tensor).untyped_storage().data_ptr()) if _is_stored(tensor) else id(tensor)


def _leaves(state: object, key: str = "", seen: dict[int, object] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, with keys such as ['a'][0]. Nothing is entered twice."""
    seen = {} if seen is None else seen
    if isinstance(state, Tensor):
        yield key, state
    elif isinstance(state, (Mapping, list, tuple)) and id(state) not in seen:
        seen[id(state)] = state  # kept, so that no other object gets its id
        for each, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _leaves(value, f"{key}[{each!r}]", seen)
