"""Open a file for reading, without waiting for anybody.

Promises: a FIFO or a device in the place of a file does not hold up the caller, who then sees what it is.
Leaves to others: limits, and what may be read.
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
