"""A Debian release on an architecture, for which a package is built.

Each wheel of tvm-ffi works with one version of Python only, so each release needs its own package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Release:
    """One release of Debian on one architecture.

    Attributes
    ----------
    suite
        Debian's code name, such as `bookworm`.
    number
        Debian's number, such as 12. It is part of the package's version, so that 13's package sorts after
        12's.
    python
        Version of the release's own Python, such as `3.11`.
    arch
        Debian's name for the architecture, such as `arm64`.
    machine
        Its name in wheel names, such as `aarch64`.
    glibc_minor
        36 for a release with glibc 2.36; wheels for newer versions do not run there.
    """

    suite: str
    number: int
    python: str
    arch: str
    machine: str
    glibc_minor: int

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
        """Debian packages that replace wheels: only on 32-bit ARM, for which these wheels do not exist."""
        if self.arch != "armhf":
            return ()
        return ("python3-cffi-backend", "python3-cryptography", "python3-numpy", "python3-pil")

    def wheel_options(self) -> list[str]:
        """Return the pip options that select this release's wheels on any machine."""
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
    """Return the entries of `RELEASES` with one of `suites` and one of `arches`.

    An empty list means all, except armhf: it builds on Debian machines only, so it has to be named.
    """
    wanted = arches or [arch for arch, _ in _ARCHES]
    return tuple(r for r in RELEASES if r.suite in (suites or [r.suite]) and r.arch in wanted)
