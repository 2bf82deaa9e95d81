"""`edgebundle deploy` of several bundles, with a real broker and agents on different machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.bundle.machine import Machine
from agent.bundle.manifest import Target
from builder.errors import FleetError, PackageError
from builder.fleet.deploy_set import deploy_set_async
from builder.target.device_target import resolve
from builder.target.half_arithmetic import FEATURES
from edgebundle.broker import Broker
from tests.agent.deploy.rig import MACHINE, Bundle, make_bundle
from tests.builder.fleet.rig import Device
from tests.conftest import BrokerProcess

OLD = MACHINE
NEW = replace(MACHINE, features=frozenset({"avx2", "avx512f"}))
NONE = replace(MACHINE, features=frozenset())


def write(folder: Path, name: str, bundle: Bundle) -> Path:
    (folder / name).write_bytes(bundle.raw)
    return folder / name


@pytest.fixture
def bundles(tmp_path: Path) -> list[Path]:
    return [
        write(tmp_path, "plain.bundle", make_bundle(params=b"plain")),
        write(tmp_path, "wide.bundle", make_bundle(params=b"wide", features=("avx2", "avx512f"))),
    ]


@pytest.mark.slow
async def test_two_devices_take_different_variants(
    mosquitto: BrokerProcess, tmp_path: Path, bundles: list[Path]
) -> None:
    """And a device whose processor was exchanged takes the other one, at the same counter."""
    broker = Broker(mosquitto.url)
    notes: list[str] = []
    async with (
        Device(tmp_path / "1", mosquitto.url, device="old", machine=OLD, published=OLD) as old,
        Device(tmp_path / "2", mosquitto.url, device="new", machine=NEW, published=NEW) as new,
    ):
        first = await deploy_set_async(bundles, "old", broker, progress=notes.append)
        second = await deploy_set_async(bundles, "new", broker, progress=notes.append)
        assert old.models.serving == new.models.serving == {"digits": "1.0.0"}
        assert (first.ok, second.ok) == (True, True)
        assert first.digest != second.digest
        third = await deploy_set_async(bundles[:1], "new", broker)
        assert (third.ok, third.digest) == (True, first.digest)
    assert notes[0].startswith("wide.bundle does not run on old: ")
    assert "lacks: avx512f" in notes[0]
    assert notes[1:] == [
        "plain.bundle is the best of 2 bundles for old",
        "wide.bundle is the best of 2 bundles for new",
    ]


@pytest.mark.slow
async def test_float16_goes_to_the_device_that_computes_in_it(
    mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    """A set of float, float16 and int8: the order says which of two that run is preferred."""
    targets: dict[str, Target] = {}
    machines: dict[str, Machine] = {}
    for name in ("rpi4", "rpi5"):
        device = resolve(name)
        targets[name] = Target(device.triple, device.cpu, device.features)
        machines[name] = replace(
            MACHINE,
            arch="aarch64",
            cpu_model=device.cpu.title(),
            features=frozenset(device.features),
            compatible=frozenset({"linux-aarch64"}),
        )
    assert FEATURES["aarch64"] in targets["rpi5"].features
    files = {
        name: write(tmp_path, f"{name}.bundle", make_bundle(params=name.encode(), target=targets[target]))
        for name, target in (("fp16", "rpi5"), ("int8", "rpi5"), ("float", "rpi4"))
    }
    broker, notes = Broker(mosquitto.url), list[str]()
    async with (
        Device(
            tmp_path / "4", mosquitto.url, device="pi4", machine=machines["rpi4"], published=machines["rpi4"]
        ),
        Device(
            tmp_path / "5", mosquitto.url, device="pi5", machine=machines["rpi5"], published=machines["rpi5"]
        ),
    ):
        for agent in ("pi4", "pi5"):
            assert (await deploy_set_async([*files.values()], agent, broker, progress=notes.append)).ok
        # The Pi 4 decides by itself, too: it refuses what was compiled for the other.
        with pytest.raises(FleetError, match="asimdhp"):
            await deploy_set_async([files["fp16"], files["int8"]], "pi4", broker)
        other = [files["int8"], files["fp16"], files["float"]]
        assert (await deploy_set_async(other, "pi5", broker, progress=notes.append)).ok
    assert [line for line in notes if "best" in line] == [
        "float.bundle is the best of 3 bundles for pi4",
        "fp16.bundle is the best of 3 bundles for pi5",
        "int8.bundle is the best of 3 bundles for pi5",
    ]


@pytest.mark.slow
async def test_tiles_go_to_the_devices_that_have_them(mosquitto: BrokerProcess, tmp_path: Path) -> None:
    """One processor as a virtual machine shows it: with its tiles, and without them."""
    xeon = "llvm -mtriple=x86_64-linux-gnu -mcpu=sapphirerapids"
    devices = {
        name: resolve(target) for name, target in (("tiles", xeon), ("plain", f"{xeon} -mattr=-amx-tile"))
    }
    assert {"amx_tile", "amx_int8"} <= set(devices["tiles"].features)
    assert [name for name in devices["plain"].features if "amx" in name] == []
    files = {}
    for name, of in (("int8-amx", "tiles"), ("float", "plain")):
        target = Target(devices[of].triple, devices[of].cpu, devices[of].features)
        files[name] = write(tmp_path, f"{name}.bundle", make_bundle(params=name.encode(), target=target))
    broker, notes = Broker(mosquitto.url), list[str]()
    for name, device in devices.items():
        machine = replace(MACHINE, features=frozenset(device.features))
        async with Device(tmp_path / name, mosquitto.url, device=name, machine=machine, published=machine):
            assert (await deploy_set_async([*files.values()], name, broker, progress=notes.append)).ok
            if name == "plain":
                refused = await deploy_set_async([files["int8-amx"]], name, broker)
                assert not refused.ok
                assert "amx_int8" in str(refused)
    assert [line for line in notes if "best" in line] == [
        "int8-amx.bundle is the best of 2 bundles for tiles",
        "float.bundle is the best of 2 bundles for plain",
    ]


@pytest.mark.slow
async def test_a_variant_that_the_agent_refuses_is_followed_by_the_next(
    mosquitto: BrokerProcess, tmp_path: Path, bundles: list[Path]
) -> None:
    """The agent published more than its machine has; it decides by its machine."""
    notes: list[str] = []
    async with Device(tmp_path / "1", mosquitto.url, device="liar", machine=OLD, published=NEW) as device:
        result = await deploy_set_async(bundles, "liar", Broker(mosquitto.url), progress=notes.append)
        assert device.models.serving == {"digits": "1.0.0"}
    assert result.ok
    assert notes[1].startswith("liar refuses wide.bundle: ")


@pytest.mark.slow
async def test_no_variant_runs(mosquitto: BrokerProcess, tmp_path: Path, bundles: list[Path]) -> None:
    async with Device(tmp_path / "1", mosquitto.url, device="bare", machine=NONE, published=NONE) as device:
        with pytest.raises(FleetError) as caught:
            await deploy_set_async(bundles, "bare", Broker(mosquitto.url))
        assert device.models.serving == {}
    for word in ("got 2 that do not", "plain.bundle: ", "wide.bundle: ", "avx512f"):
        assert word in str(caught.value)


@pytest.mark.slow
async def test_an_agent_without_an_info_document(
    mosquitto: BrokerProcess, tmp_path: Path, bundles: list[Path]
) -> None:
    async with Device(tmp_path / "1", mosquitto.url, device="silent"):
        with pytest.raises(FleetError, match="expected silent to say what it runs on, got no info document"):
            await deploy_set_async(bundles, "silent", Broker(mosquitto.url), wait_s=0.5)
    with pytest.raises(FleetError, match="no agent called nobody is known"):
        await deploy_set_async(bundles, "nobody", Broker(mosquitto.url), wait_s=0.3)


async def test_what_is_refused_without_a_broker(tmp_path: Path, bundles: list[Path]) -> None:
    nowhere = Broker("mqtt://127.0.0.1:1")
    with pytest.raises(FleetError, match="expected a URL that ends in /"):
        await deploy_set_async(bundles, "any", nowhere, source="https://files.example/a.bundle")
    with pytest.raises(FleetError, match="expected the name of an agent"):
        await deploy_set_async(bundles, "a/b", nowhere)
    other = write(tmp_path, "later.bundle", make_bundle(counter=2))
    with pytest.raises(PackageError, match="differ in security counter: 1 and 2"):
        await deploy_set_async([bundles[0], other], "any", nowhere)
