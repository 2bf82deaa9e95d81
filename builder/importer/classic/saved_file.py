"""Read a saved model's bytes, up to a limit."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from agent.reading import open_at_once
from builder.errors import ModelError
from builder.spelling import READABLE


def read_bounded(path: Path, limit: int) -> tuple[bytes, str]:
    """Return a file's bytes, and their SHA-256 in hexadecimal.

    Raises `ModelError` if it is not a regular file, cannot be read, is empty, or is larger than `limit`
        bytes.
    """
    try:
        with os.fdopen(open_at_once(path), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(
                    f"expected a regular file, got a device, a pipe or a folder: {path}",
                    hint="give the file that booster.save_model wrote",
                )
            if not 0 < status.st_size <= limit:
                raise ModelError(
                    f"expected a model of 1 to {limit} bytes, got {status.st_size}: {path}",
                    hint="save it again with booster.save_model, or train fewer or smaller trees",
                )
            raw = stream.read(limit)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}", hint=READABLE) from error
    return raw, hashlib.sha256(raw).hexdigest()
