"""tvm-ffi for 32-bit ARM: no wheel is published, so it is cross-compiled from source.

Two things prevent an ordinary build, and only the first is in the library. A static assertion expects two
pointers to take 16 bytes; nothing depends on that (the allocator uses the size of the structure, and 8 is
ARM's strictest alignment), so the assertion is corrected. And the build tool wants to run the target's
Python; so the three libraries are compiled here one by one, with Debian's `g++-arm-linux-gnueabihf` and the
Python headers of the release.

The compiler matters: zig links the C++ library statically into each of the three, so an object that one
library allocates is freed by the allocator of another, and the import aborts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from deb.release import Release

_ASSERTION: Final = "static_assert(sizeof(PyCustomAllocHeader) == 16,"
_CORRECTED: Final = "static_assert(sizeof(PyCustomAllocHeader) == 2 * sizeof(void*),"
_HEADER: Final = "python/tvm_ffi/cython/tvm_ffi_python_object.h"
# Debian's armhf: ARMv7 with VFPv3-D16, no NEON.
_COMPILER: Final = ("arm-linux-gnueabihf-g++", "-march=armv7-a+fp", "-mfloat-abi=hard")
_FLAGS: Final = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-w")
_DEFINES: Final = ("-DTVM_FFI_EXPORTS", "-DTVM_FFI_USE_LIBBACKTRACE=0")


def build(release: Release, sdist: Path, headers: Path, packages: Path) -> None:
    """Build tvm-ffi from its source distribution, and copy it into `packages` as a wheel would unpack.

    Parameters
    ----------
    release
        A release for armhf.
    sdist
        The source distribution, whose digest has been checked.
    headers
        A root folder of the release with Python's headers in usr/include.
    packages
        The folder of Python packages.
    """
    built = _kept(release, sdist)
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            _build(release, _unpack(sdist, Path(scratch)), headers, Path(scratch) / "built")
            try:
                (Path(scratch) / "built").rename(built)
            except OSError:
                if not built.exists():  # another build was faster
                    raise
    shutil.copytree(built, packages, dirs_exist_ok=True, symlinks=True)


def _kept(release: Release, sdist: Path) -> Path:
    """Return the cache folder for these sources, as built by this version of this file."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("EDGEBUNDLE_CACHE") or Path(home) / "edgebundle")
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(sdist.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    return cache / f"tvm-ffi-{release.name}-{digest[:16]}"


def _unpack(sdist: Path, into: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (source,) = (path for path in into.iterdir() if path.is_dir())
    header = source / _HEADER
    text = header.read_text()
    if text.count(_ASSERTION) != 1:
        raise SystemExit(
            f"error: {_HEADER}: expected one assertion of the header's size, got {text.count(_ASSERTION)}"
        )
    header.write_text(text.replace(_ASSERTION, _CORRECTED))
    return source


def _build(release: Release, source: Path, headers: Path, into: Path) -> None:
    package = into / "tvm_ffi"
    shutil.copytree(source / "python/tvm_ffi", package, ignore=shutil.ignore_patterns("cython"))
    (package / "lib").mkdir()
    include = [
        f"-I{source / path}" for path in ("include", "3rdparty/dlpack/include", "python/tvm_ffi/cython")
    ]
    # pyconfig.h includes the architecture's own version from usr/include/TRIPLE. That folder also has the C
    # library's headers, which must come from the cross compiler: so only the one subfolder is copied.
    python = headers / "usr/include" / f"python{release.python}"
    triple = "arm-linux-gnueabihf"
    shutil.copytree(
        headers / "usr/include" / triple / python.name, source / "pyconfig" / triple / python.name
    )
    include += [f"-I{python}", f"-I{source / 'pyconfig'}"]
    prefix = f"-ffile-prefix-map={source}=tvm-ffi"

    objects = source / "objects"
    objects.mkdir()
    sources = sorted((*source.glob("src/ffi/*.cc"), *source.glob("src/ffi/extra/*.cc")))

    def compile_one(file: Path) -> Path:
        target = objects / f"{file.stem}.o"
        _run([*_COMPILER, *_FLAGS, *_DEFINES, prefix, *include, "-c", str(file), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(compile_one, sources))
    library, testing = package / "lib/libtvm_ffi.so", package / "lib/libtvm_ffi_testing.so"
    link = [*_COMPILER, "-shared", "-s", "-Wl,--build-id=none"]
    _run([*link, "-Wl,-soname,libtvm_ffi.so", *map(str, compiled), "-o", str(library), "-ldl", "-pthread"])

    shared = [*_COMPILER, *_FLAGS, prefix, *include, "-shared", "-s", "-Wl,--build-id=none"]
    # This is a test library, but the extension module is linked against it.
    defines = ["-DTVM_FFI_EXPORTS", "-DTVM_FFI_DLL_EXPORT_INCLUDE_METADATA=1"]
    names = ["-Wl,-soname,libtvm_ffi_testing.so", "-Wl,-rpath,$ORIGIN"]
    tests = map(str, sorted(source.glob("src/ffi/testing/*.cc")))
    _run([*shared, *defines, *names, *tests, str(library), "-o", str(testing)])
    core = source / "core.cpp"
    cython = [sys.executable, "-m", "cython", "--cplus", "--module-name", "tvm_ffi.core", "-o", str(core)]
    _run([*cython, "python/tvm_ffi/cython/core.pyx"], folder=source)
    module = package / f"core.cpython-{release.python.replace('.', '')}-arm-linux-gnueabihf.so"
    _run([*shared, "-Wl,-rpath,$ORIGIN/lib", str(core), str(library), str(testing), "-o", str(module)])

    version = source.name.rpartition("-")[2]
    information = into / f"apache_tvm_ffi-{version}.dist-info"
    (information / "licenses").mkdir(parents=True)
    shutil.copy(source / "PKG-INFO", information / "METADATA")
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(source / name, information / "licenses")


def _run(command: list[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command[:1])} failed:\n{done.stderr[-4000:]}")
