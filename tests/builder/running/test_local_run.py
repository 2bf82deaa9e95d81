"""Running a compiled model on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent.bundle.manifest import Target
from builder import Package, profile, run
from builder.errors import BuildError, ModelError, PackageError, ShapeError
from builder.running.local_run import prepared

DIGITS = Path(__file__).parents[3] / "examples" / "digits"


@pytest.fixture(scope="module")
def digits(digits_bundle: Path) -> Package:
    return Package.load(digits_bundle)


@pytest.mark.slow
def test_a_picture_gets_its_label(digits: Package) -> None:
    result = run(digits, DIGITS / "seven.png")
    assert result.answers is not None
    assert result.answers["labels"][0] == b"seven"
    assert float(result.answers["scores"][0]) > 0.9


def test_inputs_are_checked_by_name_shape_and_dtype(digits: Package) -> None:
    with pytest.raises(
        ShapeError, match=r"the input tensor 'imag' is not in the graph. Expected inputs: 'image'"
    ):
        run(digits, {"imag": np.zeros((1, 1, 8, 8), "float32")})
    for wrong in (np.zeros((1, 1, 9, 8), "float32"), np.zeros((1, 1, 8, 8), "int64")):
        with pytest.raises(ShapeError):
            run(digits, {"image": wrong})


@pytest.mark.slow
def test_a_bundle_for_another_machine_does_not_run_here(digits: Package) -> None:
    target = Target("riscv64-linux-gnu", "generic-rv64", ())
    package = Package(replace(digits.manifest, target=target), digits.members)
    with pytest.raises(PackageError, match="got one for riscv64-linux-gnu"):
        run(package)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"not an npz", b"PK\5\6" + bytes(18)])
def test_inputs_that_are_not_an_npz_are_refused(digits: Package, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "inputs.npz"
    path.write_bytes(content)
    if content.startswith(b"PK"):  # an empty archive is an .npz of no arrays: everything is filled
        assert run(digits, path).outputs
        return
    with pytest.raises(BuildError):
        run(digits, path)


def test_an_npz_with_pickled_objects_is_not_unpickled(digits: Package, tmp_path: Path) -> None:
    path = tmp_path / "inputs.npz"
    np.savez(path, image=np.array([{"a": 1}], dtype=object))
    with pytest.raises(BuildError):
        run(digits, path)


def test_missing_inputs_are_filled_alike_in_each_run(digits: Package) -> None:
    one, two = (run(digits).get_output("output_0") for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, run(digits, fill_mode="zeros").get_output("output_0"))
    ones = run(digits, {"image": np.ones((1, 1, 8, 8), "float32")}).get_output("output_0")
    np.testing.assert_array_equal(ones, run(digits, fill_mode="ones").get_output("output_0"))


def test_outputs_are_saved_under_their_names(digits: Package, tmp_path: Path) -> None:
    result = run(digits)
    result.save(tmp_path / "outputs.npz")
    with np.load(tmp_path / "outputs.npz") as file:
        np.testing.assert_array_equal(file["output_0"], result.get_output("output_0"))


def test_times_are_returned_only_if_asked_for(digits: Package) -> None:
    assert run(digits).times is None
    times = run(digits, benchmark=True, repeat=3).times
    assert times is not None
    assert len(times.results) == 3


def test_a_picture_needs_a_declared_preprocess(digits: Package) -> None:
    plain = replace(digits, manifest=replace(digits.manifest, preprocess=None))
    with pytest.raises(ModelError, match="does not declare how to turn a picture into its input"):
        run(plain, DIGITS / "seven.png")


def test_a_picture_that_cannot_be_decoded_is_refused(digits: Package, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(ModelError):
        run(digits, tmp_path / "broken.png")


def test_only_the_cpu_is_a_device(digits: Package) -> None:
    with pytest.raises(PackageError, match="expected cpu, got 'cuda'"):
        run(digits, device="cuda")


def test_a_profile_has_a_row_for_each_kernel(digits: Package) -> None:
    report = profile(digits, number=2)
    assert report.rows
    assert report.total_us > 0


def test_a_prepared_module_runs(digits: Package) -> None:
    module = prepared(digits, threads=1)
    module.run()
    assert np.isfinite(np.array(module.get_output(0))).all()
