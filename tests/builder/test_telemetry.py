from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S


def test_onnx_runtime_sends_no_telemetry(tmp_path: Path) -> None:
    # ONNX Runtime's telemetry writes a session file into the temporary folder as soon as it starts.
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    subprocess.run(
        [sys.executable, "-c", "import builder, onnxruntime; onnxruntime.SessionOptions()"],
        env=environment | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path), "CI": ""},
        timeout=PATIENCE_S,
        check=True,
    )
    assert list(tmp_path.iterdir()) == []
