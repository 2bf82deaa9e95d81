"""The TOML files in which users declare what a device does around a model."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from builder.errors import ModelError
from builder.spelling import similar_file

MAX_DECLARATION_BYTES: Final = 64 << 10  # a dozen lines in practice


def read_toml(text: str, hint: str) -> dict[str, Any]:
    """Return the content of a file; `hint` is for one that is not TOML.

    Raises `ModelError` if it cannot be read, is too large, or is not TOML.
    """
    path = Path(text)
    try:
        if (size := path.stat().st_size) > MAX_DECLARATION_BYTES:
            raise ModelError(
                f"{path}: expected at most {MAX_DECLARATION_BYTES} bytes, got {size}",
                hint="give the TOML file of a declaration, which has a dozen lines",
            )
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})", hint=similar_file(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: expected TOML ({error})", hint=hint) from error
