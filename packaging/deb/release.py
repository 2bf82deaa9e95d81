"""A Debian release on an architecture: what a package is built for.

Wheels of tvm-ffi are made for one version of Python each, so a package serves one release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Release:
    """One release of Debian on one architecture."""

    suite: str
    """Debian's code name, ``bookworm``."""
    number: int
    """Debian's number, 12: part of the package's version, so that 13's package follows 12's."""
    python: str
    """The release's own Python, ``3.11``."""
    arch: str
    """Debian's name of the architecture, ``arm64``."""
    machine: str
    """The same in wheel names, ``aarch64``."""
    glibc_minor: int
    """The 36 of the release's glibc 2.36: the newest wheels it takes."""

    @property
    def name(self) -> str:
        """The name of this release's lock file."""
        return f"{self.suite}-{self.arch}"

    @property
    def python_next(self) -> str:
        """The first version of Python that the package does not work with."""
        major, minor = self.python.split(".")
        return f"{major}.{int(minor) + 1}"

    @property
    def from_debian(self) -> tuple[str, ...]:
        """Debian's packages in place of wheels: none but on 32-bit ARM, for which there are no wheels."""
        if self.arch != "armhf":
            return ()
        return ("python3-cffi-backend", "python3-cryptography", "python3-numpy", "python3-pil")

    def wheel_options(self) -> list[str]:
        """Pip options that choose this release's wheels, on whatever machine pip runs."""
        platforms = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc_minor, 16, -1)]
        platforms.append(f"manylinux2014_{self.machine}")
        options = ["--implementation=cp", f"--python-version={self.python}"]
        return options + [f"--platform={platform}" for platform in platforms]


_SUITES: Final = (("bookworm", 12, "3.11", 36), ("trixie", 13, "3.13", 41))
_ARCHES: Final = (("arm64", "aarch64"), ("amd64", "x86_64"))

RELEASES: Final = (
    *(
        Release(suite, number, python, arch, machine, glibc)
        for suite, number, python, glibc in _SUITES
        for arch, machine in _ARCHES
    ),
    *(Release(suite, number, python, "armhf", "armv7l", glibc) for suite, number, python, glibc in _SUITES),
)


def select(suites: list[str], arches: list[str]) -> tuple[Release, ...]:
    """Return the releases of `RELEASES` of any of `suites` and `arches`; an empty list stands for all.

    For all but armhf, which only builds on a Debian machine: it has to be named.
    """
    wanted = arches or [arch for arch, _ in _ARCHES]
    return tuple(r for r in RELEASES if r.suite in (suites or [r.suite]) and r.arch in wanted)
