"""How the pages of this folder become a site: `make docs` writes target/docs/index.html, which needs no network."""

import re
from importlib.metadata import version as version_of
from typing import Any

project = "pyengine"
author = "the pyengine authors"
copyright = "the pyengine authors, Apache-2.0"
version = release = version_of("pyengine-llm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["sessions/*"]
# A fence without a language is a terminal or a drawing: nothing to colour.
highlight_language = "none"
# Links to a heading of another page are written as on the forges: `page.md#its-heading`.
myst_heading_anchors = 4

# In docstrings `this` is code.
default_role = "literal"
autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"pyengine {version}"
html_extra_path = ["grafana.json"]
html_copy_source = False
html_show_sphinx = False

#: How our docstrings tell of arguments and fields: `name, name: what`, at the margin.
TERM = re.compile(r"(\w+(?:, \w+)*): (.+)")


def list_terms(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Makes a list of the terms of a docstring, in place; reStructuredText would run them together."""
    made: list[str] = []
    in_term = False
    for line in lines:
        term = TERM.fullmatch(line)
        if term:
            made += [] if in_term else [""]
            made.append(f"* ``{term[1]}``: {term[2]}")
        elif in_term and line.strip() and not line.startswith("Raises "):
            made.append(f"  {line.strip()}")
        else:
            made += ["", line] if in_term else [line]
        in_term = bool(term) or (in_term and made[-1].startswith("  "))
    lines[:] = [*made, ""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", list_terms, priority=400)  # before napoleon's 500
