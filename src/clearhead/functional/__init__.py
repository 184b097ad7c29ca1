"""Functions on tensors: attention as clearhead states it, and the signatures of other libraries, computed by it.

Names are imported when they are first read.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.functional.exact import attention, explain_dispatch, observe_attention
    from clearhead.functional.flash import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from clearhead.functional.flash_cache import flash_attn_with_kvcache
    from clearhead.functional.flex import flex_attention
    from clearhead.functional.paged import paged_attention
    from clearhead.functional.varlen import varlen_attn
else:
    from clearhead.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "clearhead.functional.exact": "attention explain_dispatch observe_attention",
            "clearhead.functional.flex": "flex_attention",
            "clearhead.functional.flash": (
                "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func "
                "flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func"
            ),
            "clearhead.functional.flash_cache": "flash_attn_with_kvcache",
            "clearhead.functional.paged": "paged_attention",
            "clearhead.functional.varlen": "varlen_attn",
        },
    )

__all__ = [
    "attention",
    "explain_dispatch",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "observe_attention",
    "paged_attention",
    "varlen_attn",
]
