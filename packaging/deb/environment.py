"""The private environment of the package: a virtual environment made of plain files.

A virtual environment is a `pyvenv.cfg`, a link to the system's Python and a folder of Python packages, so it
can be made for another architecture without running its programs. The system's own Python is not changed, and
its packages are not visible inside. The exception is 32-bit ARM, where some of them replace missing wheels.

Nothing runs from the files that the package ships: packaging/files/postinst makes a folder of its own from
them for each installation, and `current` names the one that runs next.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from deb.release import Release

HOME: Final = Path("usr/lib/edge-agent")
SHIPPED: Final = HOME / "shipped"

# Files that the agent never reads: tests, headers, compiler inputs, stubs, and decoders of image formats that
# it refuses. Without them, the package is about 35 MB smaller and offers less to attack.
_UNUSED: Final = (
    "bin",
    "builder",
    "dashboard",
    "edgebundle",
    "**/tests",
    "**/*.pyi",
    "**/*.pyx",
    "**/*.pxd",
    "**/*.pxi",
    "**/*.a",
    "**/*.h",
    "**/.gitignore",
    "PIL/_avif.*.so",
    "PIL/_imagingcms.*.so",
    "PIL/_imagingft.*.so",
    "PIL/_imagingtk.*.so",
    "PIL/_webp.*.so",
    "pillow.libs/libavif-*",
    "pillow.libs/libbrotli*",
    "pillow.libs/libfreetype-*",
    "pillow.libs/libharfbuzz-*",
    "pillow.libs/liblcms2-*",
    "pillow.libs/libpng16-*",
    "pillow.libs/libsharpyuv-*",
    "pillow.libs/libwebp*",
    "numpy/_core/_*_tests.*.so",
    "numpy/_core/_simd.*.so",
    "numpy/_core/lib",
    "numpy/_pyinstaller",
    "numpy/distutils",
    "numpy/f2py",
    "numpy/random/_examples",
    "numpy/testing",
    "tvm_ffi/3rdparty",
    "tvm_ffi/cython",
    "tvm_ffi/include",
    "tvm_ffi/lib/*.dSYM",
    "tvm_ffi/share",
    "tvm_ffi/src",
    "tvm_ffi/testing",
    # Files that pip writes; they name folders that no longer exist.
    "*.dist-info/RECORD",
    "*.dist-info/INSTALLER",
    "*.dist-info/REQUESTED",
    "*.dist-info/direct_url.json",
    "edgebundle-*.dist-info/entry_points.txt",
)

_LAUNCHER: Final = """\
#!@HOME@/bin/python -I
import sys

from agent.cli import main

sys.exit(main())
"""


def site_packages(root: Path, release: Release) -> Path:
    """Return the folder of Python packages below `root`, the folder that becomes `/` on the device."""
    return root / SHIPPED / "lib" / f"python{release.python}" / "site-packages"


def make(root: Path, release: Release) -> None:
    """Make the environment around the Python packages in `site_packages`, and strip them.

    Parameters
    ----------
    root
        The folder that becomes `/` on the device.
    release
        The release that the package is built for.
    """
    strip(site_packages(root, release))
    home = root / SHIPPED
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to(f"/usr/bin/python{release.python}")
    launcher = home / "bin/edge-agent"
    launcher.write_text(_LAUNCHER)
    launcher.chmod(0o755)
    (home / "pyvenv.cfg").write_text(
        "home = /usr/bin\n"
        f"include-system-site-packages = {'true' if release.from_debian else 'false'}\n"
        f"version = {release.python}\n"
    )
    (root / "usr/bin").mkdir()
    (root / "usr/bin/edge-agent").symlink_to("../lib/edge-agent/current/bin/edge-agent")


def strip(packages: Path) -> None:
    """Remove from the folder `packages` the files that the agent never reads."""
    for pattern in _UNUSED:
        for path in sorted(packages.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for path in packages.rglob("*"):
        if path.is_file():
            # Libraries are mapped, not run: they need no executable bit, and only some wheels set it.
            path.chmod(0o644)
        elif path.is_dir():
            path.chmod(0o755)
