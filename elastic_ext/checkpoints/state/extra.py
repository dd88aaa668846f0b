"""Split the state of an extra object into tensors and their form, and put it together again as it was.

The form is a pickle of the whole state with a key in place of each tensor. So a load gives back what was saved, containers, keys
and types, as torch.save and torch.load would, with any object that loads it. That object only shows how tensors of the same
shape are placed: on which device, how sharded, and in which memory, if nothing else uses that memory.

Tensors that torch.distributed.checkpoint cannot write (sparse, quantized), and those inside other objects than dicts, lists and
tuples, are pickled with the form. Two tensors that share memory come back apart, unless they are one object.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed.tensor as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.directory.own_files import checksum_of
from elastic_ext.checkpoints.state import Pickler, local_part

logger = logging.getLogger(__name__)

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


# Save.


def take(name: str, state: object) -> tuple[Tensors, Form] | None:
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


# Load.


@dataclass(frozen=True)
class Places:
    """Where the model is."""

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


def template(forms: Mapping[str, Form], present: Mapping[str, Any], model: nn.Module) -> dict[str, Tensors]:
    """Return tensors to load into, of the shapes and types that were saved.

    Args:
        forms: by the objects' names.
        present: the present states of these objects.
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


def put(form: Form, tensors: Tensors) -> Any:
    """Return the state as it was saved. tensors: loaded."""
    return _Reader(form, tensors).load()


class _Reader(pickle.Unpickler):
    """Unpickles a state. This runs code: a checkpoint is trusted as much as the training script."""

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


# Both.


def _leaves(state: object, key: str = "", seen: dict[int, object] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, with keys such as ['a'][0]. Nothing is entered twice."""
    seen = {} if seen is None else seen
    if isinstance(state, Tensor):
        yield key, state
    elif isinstance(state, (Mapping, list, tuple)) and id(state) not in seen:
        seen[id(state)] = state  # kept, so that no other object gets its id
        for each, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _leaves(value, f"{key}[{each!r}]", seen)
