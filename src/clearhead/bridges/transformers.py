"""Hugging Face transformers: an alias of ``clearhead.integrations.transformers.interface``."""

from clearhead.integrations.transformers.interface import NAME, enable

__all__ = ["NAME", "enable"]
