"""How Sphinx makes the site from the pages and the docstrings (`make docs`).

The folder of the sources is that of the project, so that the pages' own relative links are those of the site.
Nothing is fetched from another host while a page is shown: Furo has its styles and scripts with it, and the
fonts are the reader's.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PROJECT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

import agent  # noqa: E402 - from the project

project = "edgebundle"
project_copyright = "the edgebundle authors"
version = release = agent.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/decisions/*.md", "docs/reference/*.md", "examples/*/README.md"]
exclude_patterns = [".venv*", "dist", "build", "shared", ".*_cache", "node_modules"]
html_theme = "furo"
html_title = f"edgebundle {version}"
html_show_sphinx = False
# Anchors as on the hosts of repositories: the heading in lower case, with hyphens.
myst_heading_anchors = 4
# Docstrings are NumPy style, and single backticks are references.
default_role = "py:obj"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_default_options = {
    "members": True,
    "inherited-members": "Mapping,Exception,tuple",
    "special-members": "__call__",
}
python_use_unqualified_type_names = True

# [text](folder/), but not [text](https://host/).
_FOLDER_LINK: Final = re.compile(r"\[([^]]*)\]\((?!\w+:)[^()\s]*/\)")
# [page.md](page.md): the site has pages, not files.
_PAGE_NAME: Final = re.compile(r"\[(?:[\w.-]+/)*([\w-]+)\.md\](?=\()")
# The order of the pages; the table in docs/README.md says whom each is for.
TABLE_OF_CONTENTS: Final = {
    "Start": (
        "docs/install",
        "docs/broker",
        "docs/project",
        "docs/your-detector",
        "docs/clients",
        "docs/camera",
        "docs/audio",
        "docs/rows",
    ),
    "Models": ("docs/importing", "docs/quantisation", "docs/tuning", "docs/profiling", "docs/from-tvmc"),
    "Devices": (
        "docs/deployment",
        "docs/signing",
        "docs/monitoring",
        "docs/dashboard",
        "docs/sd-card",
        "docs/container",
        "docs/sandbox",
        "SECURITY",
    ),
    "Reference": (
        "docs/mqtt",
        "docs/bundle-format",
        "docs/graph-executor",
        "docs/reference/client",
        "docs/reference/builder",
        "docs/reference/executor",
    ),
    "More": (
        "docs/README",
        "docs/design-spaces",
        "docs/llvm-wrapped-indices",
        "docs/benchmarks",
        "examples/digits/README",
        "examples/sensors/README",
        "CONTRIBUTING",
        "CHANGELOG",
    ),
}


def setup(app: Sphinx) -> None:
    """Connect what happens to pages."""
    app.add_js_file(None, body=Path(__file__).with_name("site.js").read_text())
    app.connect("source-read", _adapt)
    app.connect("build-finished", _write_index)


def _adapt(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append the table of contents, and take away links to folders and suffixes, which no site has."""
    source[0] = _PAGE_NAME.sub(r"[\1]", _FOLDER_LINK.sub(r"\1", source[0]))
    if page == root_doc:
        for caption, pages in TABLE_OF_CONTENTS.items():
            source[0] += _contents(pages, f":caption: {caption}\n")
    if page == "docs/README":
        source[0] += _contents(["decisions/*"], ":glob:\n")


def _contents(pages: tuple[str, ...] | list[str], options: str) -> str:
    return f"\n\n```{{toctree}}\n:hidden:\n{options}\n" + "\n".join(pages) + "\n```\n"


def _write_index(app: Sphinx, error: Exception | None) -> None:
    """Lead from the folder of the site to its first page."""
    if error is None and app.builder.format == "html":
        page = '<!doctype html><meta charset="utf-8"><title>edgebundle</title>'
        page += f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(page)
