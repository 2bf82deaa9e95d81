"""Running a compiled model on a board: the same checks and the same results as on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder import Package, run
from builder.boards.remote_run import profile_on_board, run_on_board
from builder.errors import FleetError, ModelError, ShapeError
from tests.bundles import FILES, make_manifest
from tests.ports import free_port

KEY = "testboard"


@pytest.fixture
def package() -> Package:
    return Package(make_manifest(), FILES)


def test_inputs_are_checked_before_a_board_is_asked(package: Package, tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    with pytest.raises(ShapeError, match=r"'z' is not in the graph. Expected inputs: 'x'"):
        run_on_board(package, {"z": np.zeros(4)}, tracker=nowhere, key=KEY)
    (tmp_path / "inputs.npz").write_bytes(b"not an npz")
    with pytest.raises(ModelError, match=r"expected an \.npz file"):
        run_on_board(package, tmp_path / "inputs.npz", tracker=nowhere, key=KEY)
    with pytest.raises(FleetError):
        run_on_board(package, {"x": np.zeros((1, 4), np.float32)}, tracker=nowhere, key=KEY)


@pytest.mark.slow
def test_a_board_gives_the_outputs_of_this_machine(lab: Any, digits_bundle: Path) -> None:
    lab.start_board(free_port())
    package = Package.load(digits_bundle)
    inputs = {"image": np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)}
    there = run_on_board(package, inputs, tracker=lab.tracker, key=KEY, benchmark=True, repeat=2)
    np.testing.assert_allclose(there.get_output("output_0"), run(package, inputs).get_output("output_0"))
    assert there.times is not None
    assert len(there.times.results) == 2
    assert profile_on_board(package, tracker=lab.tracker, key=KEY, number=1).rows
