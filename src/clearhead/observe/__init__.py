"""Looking inside an attention while it runs."""

from clearhead.observe.explain import explain, find_token
from clearhead.observe.explanation import Explanation, Step

__all__ = ["Explanation", "Step", "explain", "find_token"]
