from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.bundle.admission import admit
from agent.bundle.machine import Machine
from agent.bundle.manifest import FileDigest, Resources, Runtime, Target
from agent.errors import CounterAheadError, IncompatibleError, MixAndMatchError, RollbackError

PI4 = Machine(
    arch="aarch64",
    cpu_model="Cortex-A72",
    features=frozenset({"fp", "asimd", "crc32"}),
    glibc="2.36",
    abi="tvm-ffi-0.1",
    compatible=frozenset({"linux-aarch64", "raspberrypi,4-model-b"}),
    memory_bytes=1 << 30,
)


def runtime(**changes: str) -> Runtime:
    return replace(Runtime("0.27.0.post1", "0.1.14.post1", "graph", "tvm-ffi-0.1", "2.28"), **changes)


def test_bundle_for_this_machine_is_admitted(kit: Any) -> None:
    admit(kit.manifest(), PI4, deployed_as="pets", committed_counter=None)
    admit(kit.manifest(), PI4, deployed_as="pets", committed_counter=7)
    admit(kit.manifest(runtime=runtime(glibc="2.36")), PI4, deployed_as="pets", committed_counter=6)


def test_another_models_bundle_is_refused(kit: Any) -> None:
    with pytest.raises(MixAndMatchError, match="expected a bundle of model 'cars', got one of pets") as error:
        admit(kit.manifest(), PI4, deployed_as="cars", committed_counter=None)
    assert error.value.code == "ERR_MIX_AND_MATCH"


def test_lower_security_counter_is_refused(kit: Any) -> None:
    with pytest.raises(
        RollbackError, match="is a downgrade: expected a security counter of 8 or higher, got 7"
    ) as error:
        admit(kit.manifest(version="9.0.0"), PI4, deployed_as="pets", committed_counter=8)
    assert error.value.code == "ERR_ROLLBACK"


@pytest.mark.parametrize(
    ("counter", "committed", "meant", "is_refused"),
    [
        (3, None, None, False),
        (1_796_000_000, 5, None, False),  # exactly the bound
        (1_796_000_001, 5, None, True),
        (1_796_000_001, None, None, True),
        (1_796_000_000_000, 5, None, True),
        ((1 << 63) - 1, 5, None, True),
        ((1 << 63) - 1, 5, True, False),
        # An agent without this check has committed it: a bundle that raises nothing locks nothing out.
        (1_796_000_000_000, 1_796_000_000_000, None, False),
        (1_796_000_000_001, 1_796_000_000_000, None, True),
    ],
)
def test_counter_that_would_lock_out_later_builds_is_refused(
    kit: Any, counter: int, committed: int | None, meant: bool | None, is_refused: bool
) -> None:
    manifest = kit.manifest(security_counter=counter, counter_ahead_of_time=meant)

    def is_admitted(highest: int | None) -> None:
        admit(manifest, PI4, deployed_as="pets", committed_counter=committed, highest_counter=highest)

    is_admitted(None)  # it was installed before
    if not is_refused:
        is_admitted(1_796_000_000)
        return
    with pytest.raises(
        CounterAheadError, match=rf"at most 1796000000 \(2026-11-30\), got {counter}$"
    ) as error:
        is_admitted(1_796_000_000)
    assert error.value.code == "ERR_COUNTER_AHEAD"
    assert "--counter-ahead-of-time" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("changes", "machine", "message"),
    [
        (
            {"target": Target("x86_64-linux-gnu", "x86-64-v3", ("avx2",))},
            {},
            "expected a bundle for aarch64 Linux, got one for x86_64-linux-gnu",
        ),
        ({"target": Target("armv7l-linux-gnueabihf", "generic", ())}, {}, "armv7l-linux-gnueabihf"),
        ({"target": Target("aarch64-apple-darwin", "generic", ())}, {}, "aarch64-apple-darwin"),
        (
            {"compatible": ("raspberrypi,5-model-b",)},
            {},
            "expected a bundle for one of linux-aarch64, raspberrypi,4-model-b, "
            "got one for raspberrypi,5-model-b",
        ),
        (
            {"target": Target("aarch64-linux-gnu", "cortex-a76", ("asimd", "asimddp", "atomics"))},
            {},
            r"the bundle is for cortex-a76 and needs CPU features that this machine \(Cortex-A72\) lacks: "
            "asimddp, atomics",
        ),
        ({}, {"features": frozenset(), "cpu_model": ""}, "that this machine lacks: asimd, crc32"),
        ({"runtime": runtime(abi="tvm-ffi-0.2")}, {}, "needs tvm-ffi-0.2, this machine has tvm-ffi-0.1"),
        ({"runtime": runtime(abi="tvm-ffi-0.10")}, {}, "needs tvm-ffi-0.10, this machine has tvm-ffi-0.1"),
        ({}, {"abi": None}, "needs tvm-ffi-0.1, this machine has no tvm-ffi"),
        ({"runtime": runtime(glibc="2.37")}, {}, "needs glibc 2.37, this machine has 2.36"),
        ({}, {"glibc": None}, "this machine has another libc"),
        # Compared as numbers: 2.4 is older than 2.28.
        ({}, {"glibc": "2.4"}, "needs glibc 2.28, this machine has 2.4"),
        (
            {"resources": Resources(1 << 30, 1 << 20)},
            {},
            "needs 1025 MiB of memory, this machine has 1024 MiB",
        ),
        (
            {"resources": Resources(1 << 29, 1 << 20)},
            {"memory_limit_bytes": 300 << 20},
            "needs 513 MiB of memory, the agent's control group allows 300 MiB",
        ),
        # With the workspaces of three further threads.
        (
            {"resources": Resources(1 << 29, 1 << 20, 200 << 20)},
            {"threads": 4},
            "needs 1113 MiB of memory, this machine has 1024 MiB",
        ),
    ],
)
def test_bundle_for_another_machine_is_refused_with_what_is_missing(
    kit: Any, changes: dict[str, Any], machine: dict[str, Any], message: str
) -> None:
    manifest = kit.manifest(**{"compatible": ("linux-aarch64",), **changes})
    with pytest.raises(IncompatibleError, match=message) as error:
        admit(manifest, replace(PI4, **machine), deployed_as="pets", committed_counter=None)
    assert error.value.code == "ERR_INCOMPATIBLE"
    assert "\n" not in str(error.value)


def test_the_bundles_files_count_because_they_stay_in_memory(kit: Any) -> None:
    manifest = kit.manifest(compatible=("linux-aarch64",))
    files = {**manifest.files, "mod.params": FileDigest("0" * 64, 1200 << 20)}
    with pytest.raises(IncompatibleError, match="needs 1200 MiB of memory, this machine has 1024 MiB"):
        admit(replace(manifest, files=files), PI4, deployed_as="pets", committed_counter=None)


def test_unknown_memory_is_not_a_reason_to_refuse(kit: Any) -> None:
    manifest = kit.manifest(resources=Resources(1 << 38, 0), compatible=("linux-aarch64",))
    admit(manifest, replace(PI4, memory_bytes=None), deployed_as="pets", committed_counter=None)
