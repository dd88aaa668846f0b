"""Classes that checkpoints hold pickled. A pickle names the module and the class. Neither name may change, or one version could
no longer read the checkpoints of another, including an older version after a downgrade.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moment:
    """One tensor of an optimizer's state. The field names must not change either.

    Attributes:
        like_parameter: whether it has the shape and sharding of its parameter.
    """

    like_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
