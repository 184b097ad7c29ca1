"""Hugging Face transformers: an alias of names in ``clearhead.integrations.transformers``."""

from clearhead.integrations.transformers.int8_cache import Int8Cache
from clearhead.integrations.transformers.interface import NAME, enable
from clearhead.integrations.transformers.paged import PagedCache

__all__ = ["NAME", "Int8Cache", "PagedCache", "enable"]
