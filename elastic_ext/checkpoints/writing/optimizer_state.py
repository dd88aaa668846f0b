"""Split the state of an optimizer by parameter name, and put it together again.

A load reads the names and shapes from the checkpoint. torch's own `set_state_dict` instead takes a step with zero gradients to
find out what the optimizer would hold. So here no untrained step is counted, and an optimizer that was saved before its first
step is restored as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.state import Moment

Names = Mapping[nn.Parameter, str]
Moments = dict[str, dict[str, Tensor]]  # tensors of the state, by parameter name and key


class Form(TypedDict):
    """The optimizer state in checkpoints, except the tensors. The keys must not change.

    Attributes:
        groups: the parameter groups, with names instead of parameters.
        state: by parameter name and key: a Moment instead of each tensor, other values as they are.
    """

    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]


def take(optimizer: Optimizer, names: Names) -> tuple[Moments, Form]:
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
    form: dict[str, dict[str, Any]] = {}
    for index, state in packed["state"].items():
        name, parameter = by_index[index], parameters[index]
        moments[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        form[name] = {
            key: _moment(name, key, value, parameter) if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in state.items()
        }
    return moments, {"groups": copy.deepcopy(groups), "state": form}


def template(form: Form, parameters: Mapping[str, nn.Parameter]) -> Moments:
    """Return tensors to load into. Raises UsageError for a parameter that the model does not have."""
    moments: Moments = {}
    for name, state in form["state"].items():
        if name not in parameters:
            raise UsageError(
                f"the checkpoint has optimizer state for {name}, which the model does not have: build the model that was saved"
            )
        moments[name] = {key: _empty(each, parameters[name]) for key, each in state.items() if isinstance(each, Moment)}
    return moments


def put(optimizer: Optimizer, names: Names, form: Form, moments: Moments) -> None:
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


def _empty(moment: Moment, parameter: nn.Parameter) -> Tensor:
    if moment.like_parameter:
        return torch.zeros_like(parameter.detach(), dtype=moment.dtype)
    return torch.zeros(moment.shape, dtype=moment.dtype)


def _in_order(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order of their indices in `Optimizer.state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
