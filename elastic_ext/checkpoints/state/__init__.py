"""The training state: how it is pickled here, how it is split and put together again in `capture` and, of extra objects, in
`extra`.

Checkpoints hold Moment pickled. A pickle names the module and the class. Neither name may change, or one version could no longer
read the checkpoints of another, including an older version after a downgrade. No part of a sharded tensor may be in state of
which one rank's is kept for all: all ranks would get that part.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic_ext.base.errors import UsageError


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
