"""Pages: self-contained HTML files that show what a model looks at, exactly."""

from clearhead.inspector.page import Page, view
from clearhead.inspector.schema import FORMAT, VERSION, validate

__all__ = ["FORMAT", "VERSION", "Page", "validate", "view"]
