"""Code, graph and weights in memory, run by the executor that devices use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agent.errors import IncompatibleError
from builder import Package, run
from builder.running.in_memory import execute, executor, load_kernels

IMAGE = np.linspace(0, 1, 64, dtype="float32").reshape(1, 1, 8, 8)


@pytest.fixture(scope="module")
def digits(digits_bundle: Path) -> Package:
    return Package.load(digits_bundle)


def parts(package: Package) -> tuple[bytes, bytes, bytes]:
    return package.members["mod.so"], package.members["mod.json"], package.members["mod.params"]


@pytest.mark.slow
def test_execute_gives_the_same_output_as_running_the_bundle(digits: Package) -> None:
    (found,) = execute(*parts(digits), {"image": IMAGE})
    np.testing.assert_array_equal(found, run(digits, {"image": IMAGE}).get_output("output_0"))


def test_outputs_are_copies(digits: Package) -> None:
    module = executor(*parts(digits))
    module.set_input("image", IMAGE)
    module.run()
    (first,) = execute(*parts(digits), {"image": IMAGE})
    first[:] = 0
    assert np.array(module.get_output(0)).any()


def test_code_that_is_not_for_this_machine_is_refused() -> None:
    with pytest.raises(IncompatibleError):
        load_kernels(b"\x7fELF, but not really")
