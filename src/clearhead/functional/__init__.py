"""Functions on tensors: attention as clearhead states it, and the signatures of other libraries, computed by it.

Names are imported when they are first read.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.functional.exact import attention, explain_dispatch, observe_attention
    from clearhead.functional.flex import flex_attention
else:
    from clearhead.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "clearhead.functional.exact": "attention explain_dispatch observe_attention",
            "clearhead.functional.flex": "flex_attention",
        },
    )

__all__ = ["attention", "explain_dispatch", "flex_attention", "observe_attention"]
