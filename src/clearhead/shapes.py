"""Axis names as types: ``Float[Tensor, "batch heads q_len head_dim"]``.

A type checker reads these as plain tensors. At run time they cost nothing, unless jaxtyping is imported before
clearhead, as a test does: then they are checked.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["Bool", "Float", "Int"]

if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Int
elif "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int
else:

    class _Unchecked:
        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return item[0]

    Bool = Float = Int = _Unchecked
