"""Read a file: open it without waiting for anybody, and know what a damaged one raises.

Promises: a FIFO or a device in the place of a file does not hold up the caller, who then sees what it is.
Nothing else is imported before it is needed. Leaves to others: limits, and what may be read.
"""

from __future__ import annotations

import os


def open_at_once(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of `path`, open for reading; a FIFO is not waited for, and reads as empty.

    Raises
    ------
    OSError
        If the system refuses.
    """
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def damaged_arrays() -> tuple[type[Exception], ...]:
    """Return what numpy and `zipfile` raise for a file that should be an `.npz` file of arrays, and is not.

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
