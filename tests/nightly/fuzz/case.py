"""One file to read, or a folder of them, as a fuzzer makes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Case:
    """Files in a folder of their own.

    Attributes
    ----------
    main
        The path to give to the command, relative to the folder.
    files
        Path -> content. No path leaves the folder.
    links
        Path -> where a symbolic link there leads to.
    pipes
        Paths of named pipes, which no process writes to.
    """

    main: str
    files: Mapping[str, bytes]
    links: Mapping[str, str] = field(default_factory=dict)
    pipes: tuple[str, ...] = ()

    def place(self, folder: Path) -> None:
        """Write the files into an empty folder."""
        for name in (*self.files, *self.links, *self.pipes):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        for name, target in self.links.items():
            (folder / name).symlink_to(target)
        for name in self.pipes:
            os.mkfifo(folder / name)

    @property
    def content(self) -> bytes:
        """The content of the main file."""
        return self.files[self.main]

    def with_content(self, content: bytes) -> Case:
        """Return the case with another content of its main file."""
        return Case(self.main, {**self.files, self.main: content}, self.links, self.pipes)


def one_file(name: str, content: bytes) -> Case:
    """Return a case of one file."""
    return Case(name, {name: content})
