"""The files of the page, read once: names, media types, contents.

Promises: only these names are served, so no path of a request ever reaches the file system.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Final

_TYPES: Final = MappingProxyType(
    {
        "html": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
    }
)
INDEX: Final = "index.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file."""

    media_type: str
    content: bytes


def read_page_files() -> dict[str, PageFile]:
    """Return the files of the page by name."""
    folder = resources.files(__package__) / "page"
    files = {}
    # The colours are shared with the pages that are written to files.
    for file in (*folder.iterdir(), resources.files("builder") / "colours.css"):
        media_type = _TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None and file.is_file():
            files[file.name] = PageFile(media_type, file.read_bytes())
    return files
