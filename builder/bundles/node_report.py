"""Writes what became of each node of a model, as JSON for programs or as a page for people."""

from __future__ import annotations

import html
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from agent.durable import replacing
from builder.bundles.package import NodeFate, Package
from builder.errors import OTHER_FOLDER, PackageError

SUFFIXES: Final = (".json", ".html")

_WORDS: Final = {
    "kernel": "computed by a kernel",
    "folded": "folded: it depends on no input, the compiler computed it",
    "no work": "no work: its result is its input's memory",
    "unused": "unused: no output depends on it",
}
_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem; overflow-wrap: anywhere }
thead th { position: sticky; top: 0; background: Canvas }
tbody tr { border-top: 1px solid color-mix(in srgb, CanvasText 15%, Canvas) }
code { font-size: .9em }
input { font: inherit; padding: .3rem .5rem; width: min(30rem, 100%) }
"""
_SCRIPT: Final = """
const box = document.querySelector("input"), rows = [...document.querySelectorAll("tbody tr")];
box.addEventListener("input", () => {
  const wanted = box.value.toLowerCase();
  for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
});
"""


def write_report(package: Package, path: str | os.PathLike[str]) -> None:
    """Write the report of a package that was just compiled; the suffix of `path` says in which form.

    Raises
    ------
    PackageError
        If the file cannot be written.
    """
    text = _page(package) if Path(path).suffix == ".html" else _document(package)
    try:
        with replacing(Path(path)) as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise PackageError(f"{path}: cannot be written ({error.strerror})", hint=OTHER_FOLDER) from error


def _document(package: Package) -> str:
    nodes = [asdict(node) for node in package.nodes]
    return json.dumps({"name": package.manifest.name, "nodes": nodes}, indent=1) + "\n"


def _page(package: Package) -> str:
    name = html.escape(package.manifest.name)
    counts = Counter(str(node.fate) for node in package.nodes)
    summary = "".join(
        f"<li>{counts[fate]} {html.escape(words)}</li>" for fate, words in _WORDS.items() if counts[fate]
    )
    rows = "".join(map(_row, package.nodes))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}: nodes</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{name}: what became of each node</h1><ul>{summary}</ul>"
        '<p><label>Find <input type="search" placeholder="a node, an operator or a kernel"></label></p>'
        "<table><thead><tr><th>Node<th>Operator<th>Fate<th>Kernels<th>Together with</thead>"
        f"<tbody>{rows}</tbody></table><script>{_SCRIPT}</script></html>\n"
    )


def _row(node: NodeFate) -> str:
    kernels, others = _list(node.kernels), _list(node.fused_with)
    return (
        f"<tr><td><code>{html.escape(node.name)}</code><td>{html.escape(node.operator)}"
        f"<td>{html.escape(node.fate)}<td>{kernels}<td>{others}"
    )


def _list(names: Sequence[str]) -> str:
    return "<br>".join(f"<code>{html.escape(name)}</code>" for name in names)
