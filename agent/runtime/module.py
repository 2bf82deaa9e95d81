"""The kernels of one `mod.so`.

Promises kernels by name, which are then called without a lookup, and the control functions that the builder
links into each `mod.so`. Loading runs the library's constructors: a caller of `load` must trust the file, or
be in a sandbox already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import tvm_ffi

from agent.bundle.processors import Processors
from agent.errors import FormatError, IncompatibleError

# A kernel takes its tensors, inputs before outputs, and returns nothing.
Kernel = Callable[..., Any]
# `tvm_ffi.load_module` guesses the loader from the path's extension; a descriptor's path has none, so the
# loader is named.
_LOADER: Final = "ffi.Module.load_from_file.so"


class KernelModule:
    """A loaded kernel library; `load` makes one.

    The library stays mapped until this object and all of its kernels are deleted.
    """

    def __init__(self, module: tvm_ffi.Module, descriptor: int) -> None:
        self._module: Any = module
        self._descriptor = descriptor

    @classmethod
    def load(cls, source: str | os.PathLike[str] | int) -> KernelModule:
        """Load a library; its kernels use `Processors.threads` threads, or EDGE_NUM_THREADS.

        Each load maps the library through a new descriptor, and so under a path that no loaded library has:
        given the path of a loaded library, the dynamic linker would return that one, even if the file was
        compiled again since. The descriptor stays open while this object lives.

        Parameters
        ----------
        source
            Path of the library, or a descriptor of it, such as a sealed memory file's.

        Raises
        ------
        IncompatibleError
            If the file cannot be opened, or the dynamic linker refuses it: it is for another architecture or
            a newer glibc, or needs a library that is missing; or if the kernel refuses what its kernels need.
        """
        try:
            descriptor = (
                os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            )
        except OSError as error:
            raise IncompatibleError(f"cannot open the kernel library {source}: {error.strerror}") from error
        name = f"descriptor {source}" if isinstance(source, int) else str(Path(source))
        path = f"/proc/self/fd/{descriptor}"
        try:
            module = tvm_ffi.get_global_func(_LOADER)(path, "so")
        except RuntimeError as error:
            os.close(descriptor)
            # The message ends with the path and dlerror's reason, which may itself begin with the path.
            reason = str(error).strip().rpartition(f"{path} ")[2].removeprefix(f"{path}: ")
            raise IncompatibleError(
                f"cannot load the kernel library {name}: {reason}",
                hint="compile the bundle for this machine's architecture and glibc",
            ) from error
        loaded = cls(module, descriptor)
        try:
            if os.environ.get("EDGE_NUM_THREADS"):
                loaded.threads()
            else:
                # The library itself knows only the affinity mask, not cores and quotas.
                loaded.set_threads(Processors.detect().threads)
        except RuntimeError as error:
            raise IncompatibleError(f"cannot use the kernel library {name}: {error}") from error
        return loaded

    def __getitem__(self, name: str) -> Kernel:
        """Return the kernel named `name`.

        Raises
        ------
        FormatError
            If the library has no such kernel.
        """
        function = self._find(name)
        if function is None:
            raise FormatError(f"mod.json calls kernel {name!r}, which mod.so does not have")
        return function

    def set_threads(self, count: int) -> bool:
        """Set the number of threads that kernels use; return False if the library does not allow it.

        Raises
        ------
        ValueError
            If `count` is less than 1.
        """
        if count < 1:
            raise ValueError(f"count: expected 1 thread or more, got {count}")
        function = self._find("edge_set_threads")
        if function is None:
            return False
        function(count)
        return True

    def threads(self) -> int | None:
        """Return the number of threads that kernels use, or None if the library does not report it."""
        function = self._find("edge_threads")
        return None if function is None else int(function())

    def _find(self, name: str) -> Kernel | None:
        try:
            kernel: Kernel = self._module.get_function(name)
        except AttributeError:
            return None
        return kernel

    def __del__(self) -> None:
        # The path is in use until the library is unmapped; kernels that outlive this object keep it mapped.
        self._module = None
        with contextlib.suppress(OSError, AttributeError, TypeError):
            os.close(self._descriptor)
