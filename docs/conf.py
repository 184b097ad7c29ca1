"""Configuration of the documentation site: ``make docs`` writes it to ``docs/_build/html``, without a network."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

# The extension of the site, and the list of internal names beside the API snapshot, which it reads.
DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

project = "clearhead"
author = "The clearhead developers"
version = release = installed_version("clearhead")
project_copyright = f"{author}, Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx-mathjax-offline",
    "directives",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

html_theme = "furo"
html_title = f"clearhead {release}"
html_static_path = ["_static"]
html_css_files = ["clearhead.css"]
html_js_files = ["local.js"]
html_favicon = "_static/logo.svg"
html_logo = "_static/logo.svg"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#8a3b12", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#f0a878", "color-brand-content": "#7fb8f5"},
    "navigation_with_keys": True,
}
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Kernels say once a page that they use TCP, on this machine alone.
PROFILE = DOCS / "_build" / "ipython" / "profile_default"
PROFILE.mkdir(parents=True, exist_ok=True)
(PROFILE / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 40\n", encoding="utf-8")
os.environ["IPYTHONDIR"] = str(PROFILE.parent)
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS / "_build" / "notebooks")
# A page that writes files leaves them in a folder that is deleted.
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# Annotations as they are written, not as Python resolves them: `Tensor`, not `torch.Tensor` of jaxtyping's classes.
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# A signature wider than this has a line for each parameter.
python_maximum_signature_line_length = 88
# "forward()", not "MultiHeadAttention.forward()", in the contents of a page.
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# "A ``Report``: its ``str`` is a table." is one sentence, not a type and a description.
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
