"""The kernels of one `mod.so`.

Promises a kernel by its name, called without a lookup, and the control functions that the builder links into
each `mod.so`. Loading runs the library's constructors: who calls `load` trusts the file, or is behind a
sandbox already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import tvm_ffi

from agent.errors import FormatError, IncompatibleError

# A kernel takes its tensors, inputs before outputs, and returns nothing.
Kernel = Callable[..., Any]
# The loader is asked for by name, for `tvm_ffi.load_module` guesses it from the path's extension, and a
# descriptor's path has none.
_LOADER: Final = "ffi.Module.load_from_file.so"


class KernelModule:
    """A loaded kernel library; `load` makes one.

    Kernels keep the library mapped, so it goes when the last of them and this object are gone.
    """

    def __init__(self, module: tvm_ffi.Module, descriptor: int) -> None:
        self._module: Any = module
        self._descriptor = descriptor

    @classmethod
    def load(cls, source: str | os.PathLike[str] | int) -> KernelModule:
        """Load a library from its path, or from a descriptor such as a sealed memory file's.

        The library is mapped through a descriptor of its own, kept open as long as this object lives: the
        dynamic linker takes a second library under a loaded one's name for the same, and a file that was
        compiled again must not run as what it was before.

        Raises
        ------
        IncompatibleError
            If the dynamic linker refuses the file: another architecture, a newer glibc, a library that is
            absent.
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
            # The message ends in the path and dlerror's reason, which may begin with the path once more.
            reason = str(error).strip().rpartition(f"{path} ")[2].removeprefix(f"{path}: ")
            raise IncompatibleError(
                f"cannot load the kernel library {name}: {reason}",
                hint="compile the bundle for this machine: its architecture and its glibc",
            ) from error
        return cls(module, descriptor)

    def __getitem__(self, name: str) -> Kernel:
        """Return the kernel called `name`.

        Raises
        ------
        FormatError
            If the library has no such kernel.
        """
        function = self._find(name)
        if function is None:
            raise FormatError(f"mod.so has no kernel {name!r}, which mod.json calls")
        return function

    def set_threads(self, count: int) -> bool:
        """Have kernels use `count` threads; False if the library has no such control.

        Raises
        ------
        ValueError
            If `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"a kernel runs on 1 thread or more, not {count}")
        function = self._find("edge_set_threads")
        if function is None:
            return False
        function(count)
        return True

    def threads(self) -> int | None:
        """Return how many threads kernels use, or None if the library does not say."""
        function = self._find("edge_threads")
        return None if function is None else int(function())

    def _find(self, name: str) -> Kernel | None:
        try:
            kernel: Kernel = self._module.get_function(name)
        except AttributeError:
            return None
        return kernel

    def __del__(self) -> None:
        # The name stays taken until the library is unmapped; kernels that outlive this object keep it mapped.
        self._module = None
        with contextlib.suppress(OSError, AttributeError, TypeError):
            os.close(self._descriptor)
