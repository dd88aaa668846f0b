"""What checkpoints hold pickled. Pickles name this module, and the class in it: checkpoints of every version can be read by the
others, the older ones after a downgrade too, only as long as both names stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moment:
    """One tensor of an optimizer's state. The names of its fields must not change either.

    Attributes:
        like_parameter: it has the parameter's shape and is sharded as the parameter is.
    """

    like_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
