"""The page: one self-contained HTML file that shows what a model looks at."""

from clearhead.inspector.page import render, write_page
from clearhead.inspector.schema import FORMAT, VERSION, pack_floats, unpack_floats, validate

__all__ = ["FORMAT", "VERSION", "pack_floats", "render", "unpack_floats", "validate", "write_page"]
