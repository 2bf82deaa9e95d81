"""Which bundle of a set a device takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.bundle.manifest import Manifest, Target
from agent.wire.info import Hardware, Info
from builder.errors import FleetError, PackageError
from builder.fleet.bundle_set import BundleSet, Variant, list_files
from tests.agent.deploy.rig import MACHINE
from tests.builder.fleet.rig import info_of
from tests.bundles import make_manifest

PI = replace(MACHINE, arch="aarch64", compatible=frozenset({"linux-aarch64"}))
PI4 = info_of("pi4", replace(PI, cpu_model="Cortex-A72", features=frozenset({"asimd", "fp"})))
PI5 = info_of("pi5", replace(PI, cpu_model="Cortex-A76", features=frozenset({"asimd", "asimddp", "fp"})))
NEWER = info_of("new", replace(PI, cpu_model="Cortex-A78", features=frozenset({"asimd", "asimddp", "fp"})))


def variant(name: str, cpu: str, features: tuple[str, ...], **changes: Any) -> Variant:
    manifest: Manifest = make_manifest(
        name="digits",
        version="1.0.0",
        target=Target("aarch64-linux-gnu", cpu, features),
        compatible=("linux-aarch64",),
        runtime=replace(make_manifest().runtime, abi=str(MACHINE.abi), glibc="2.28"),
    )
    return Variant(Path(name), replace(manifest, **changes))


INT8_76 = variant("int8-a76.bundle", "cortex-a76", ("asimd", "asimddp"))
FLOAT_76 = variant("float-a76.bundle", "cortex-a76", ("asimd", "asimddp"))
FLOAT_72 = variant("float-a72.bundle", "cortex-a72", ("asimd",))
FLOAT_53 = variant("float-a53.bundle", "cortex-a53", ("asimd",))


def names(chosen: BundleSet, info: Info) -> list[str]:
    return [entry.path.name for entry in chosen.choose(info).fitting]


def test_each_device_gets_the_best_that_it_can_run() -> None:
    """Its own core, else most of its features, else the first."""
    chosen = BundleSet.of([FLOAT_53, FLOAT_72, INT8_76, FLOAT_76])
    assert names(chosen, PI5) == [
        "int8-a76.bundle",
        "float-a76.bundle",
        "float-a53.bundle",
        "float-a72.bundle",
    ]
    assert names(chosen, PI4) == ["float-a72.bundle", "float-a53.bundle"]
    assert names(chosen, NEWER)[:2] == ["int8-a76.bundle", "float-a76.bundle"]
    assert names(BundleSet.of([FLOAT_76, INT8_76]), PI5)[0] == "float-a76.bundle"
    [refusal, _] = chosen.choose(PI4).refused
    assert refusal.name == "int8-a76.bundle"
    assert "lacks: asimddp" in refusal.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "other"}, "differ in name: digits and other"),
        ({"version": "2.0.0"}, "differ in version: 1.0.0 and 2.0.0"),
        ({"security_counter": 7}, "differ in security counter"),
        ({"outputs": ()}, "differ in outputs"),
    ],
)
def test_bundles_of_different_models_are_no_set(changes: dict[str, Any], words: str) -> None:
    if "outputs" in changes:
        changes = {"outputs": (replace(FLOAT_72.manifest.outputs[0], name="other"),)}
    other = Variant(Path("other.bundle"), replace(FLOAT_76.manifest, **changes))
    with pytest.raises(PackageError, match=words):
        BundleSet.of([FLOAT_72, other])


def test_a_text_of_an_agent_cannot_control_the_terminal() -> None:
    hostile = replace(PI4, hardware=replace(PI4.hardware, cpu="\x1b[2J"))
    [refusal] = BundleSet.of([INT8_76]).choose(hostile).refused
    assert "\x1b" not in refusal.reason


def test_an_agent_that_does_not_say_what_it_is() -> None:
    with pytest.raises(FleetError, match="expected pi4 to say what it runs on"):
        BundleSet.of([FLOAT_72]).choose(replace(PI4, hardware=Hardware()))


def test_files_and_folders(tmp_path: Path) -> None:
    for name in ("b.bundle", "a.bundle", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    both = [tmp_path / "a.bundle", tmp_path / "b.bundle"]
    assert list_files([tmp_path]) == both
    assert list_files(list(reversed(both))) == list(reversed(both))
    with pytest.raises(PackageError, match="same file twice"):
        list_files([tmp_path, both[0]])
    with pytest.raises(PackageError, match="got none"):
        list_files([tmp_path / "empty"])
