"""Pages: self-contained HTML files that show what a model looks at.

``view`` shows any attention; ``render`` and ``write_page`` show the digits of ``clearhead demo``.
"""

from clearhead.inspector.attention_page import Page, view
from clearhead.inspector.page import render, write_page
from clearhead.inspector.schema import FORMAT, VERSION, pack_floats, unpack_floats, validate

__all__ = ["FORMAT", "VERSION", "Page", "pack_floats", "render", "unpack_floats", "validate", "view", "write_page"]
