"""Pages: self-contained HTML files that show every attention weight of a model."""

from clearhead.inspector.page import Page, view
from clearhead.inspector.schema import FORMAT, VERSION, validate

__all__ = ["FORMAT", "VERSION", "Page", "validate", "view"]
