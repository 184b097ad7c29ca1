"""Whisper's ``generate``, which selects eager attention to have weights for the timestamps of words."""

from __future__ import annotations

import copy
from typing import Any

from transformers.models.whisper.modeling_whisper import WhisperForConditionalGeneration

from clearhead.integrations.recast import stands_for

__all__ = ["SwappedWhisper"]


@stands_for(WhisperForConditionalGeneration)
class SwappedWhisper(WhisperForConditionalGeneration):  # type: ignore[misc]
    """``WhisperForConditionalGeneration`` that keeps its attention implementation; put in place by ``swap``."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's; ``return_token_timestamps=True`` takes the weights of the selected implementation."""
        shared = self.model.config
        # The original selects eager attention in this config, and never takes it back.
        self.model.config = copy.copy(shared)
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.model.config = shared
