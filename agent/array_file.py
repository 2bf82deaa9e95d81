"""Files of arrays (`.npz`), as numpy writes them.

Promises: whatever is wrong with such a file ends in one of the errors of `damage`, of which `reason_of`
makes a line. Nothing but the standard library is imported before a file is read.
Leaves to others: limits, and which arrays there should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

_MOST_OF_A_REASON: Final = 120  # characters


def read_arrays(path: Path | IO[bytes]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a file by name.

    Raises
    ------
    Exception
        If the file cannot be read, is damaged, or contains objects: one of `damage`.
    """
    import numpy as np

    arrays = np.load(path, allow_pickle=False)
    if isinstance(arrays, np.ndarray):
        raise TypeError("expected an archive of arrays, got one array")
    with arrays:
        members = set(arrays.zip.namelist())
        # By the member's name: an array may be called `a.npy` beside one called `a`.
        found = {n: arrays[f"{n}.npy" if f"{n}.npy" in members else n] for n in arrays.files}
    for name, array in found.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"expected arrays only, got another file called {name}")
    return found


def write_arrays(path: Path | IO[bytes], arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays by name, without pickles: a name may be any, which those of `numpy.savez` may not.

    Raises
    ------
    OSError
        If the file cannot be written.
    ValueError
        If an array contains objects.
    """
    import zipfile

    import numpy as np

    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def damage() -> tuple[type[Exception], ...]:
    """Return what numpy and `zipfile` raise for a damaged file.

    numpy documents only some of them: it passes on those of the decompressors and of the tokenizer, which
    reads an array's header. A shape in such a header may ask for more memory than there is.
    """
    import lzma
    import tokenize
    import zipfile
    import zlib

    return (
        OSError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        RuntimeError,
        MemoryError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        tokenize.TokenError,
    )


def reason_of(error: Exception) -> str:
    """Return what is wrong, in one line."""
    return " ".join(str(error).split())[:_MOST_OF_A_REASON]
