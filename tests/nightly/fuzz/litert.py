"""Run LiteRT in a fork of this process, which has imported it: starting Python takes longer than a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ai_edge_litert.interpreter import Interpreter  # noqa: F401 - here, so that no fork has to import it

from builder.importer.tflite import litert_process

_REFUSED: Final = 1
_RAISED: Final = 2


def run_forked(folder: Path, kernels: str) -> tuple[int, str]:
    """Do what `builder.importer.tflite.comparison.start_interpreter` does, with the same results."""
    said = folder / "stderr"
    child = os.fork()
    if child == 0:
        status = _RAISED
        try:
            with said.open("wb") as stream, Path(os.devnull).open("wb") as sink:
                os.dup2(sink.fileno(), 1)
                os.dup2(stream.fileno(), 2)
                reason = litert_process.main(folder, kernels)
                if reason is not None:
                    os.write(2, f"refused: {reason}\n".encode())
                status = 0 if reason is None else _REFUSED
        except BaseException as error:  # noqa: BLE001 - the end of this process, which must not return
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended), said.read_text(errors="replace")
