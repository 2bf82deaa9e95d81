"""Machines other than this one, detected from copies of their /proc."""

from __future__ import annotations

import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from agent.bundle.machine import Machine, abi_of, arch_of_triple

# The interpreter's ELF header from e_ident to e_machine: class, little endian, ET_DYN.
AARCH64, ARM, X86_64, RISCV64 = (2, 183), (1, 40), (2, 62), (2, 243)

PI3_64 = """\
processor\t: 0
BogoMIPS\t: 38.40
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd03
CPU revision\t: 4

processor\t: 1
BogoMIPS\t: 38.40
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd03
CPU revision\t: 4

Hardware\t: BCM2835
Revision\t: a02082
Serial\t\t: 00000000deadbeef
Model\t\t: Raspberry Pi 3 Model B Rev 1.2
"""
PI5_FEATURES = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
)
PI4_32 = """\
processor\t: 0
model name\t: ARMv7 Processor rev 3 (v7l)
BogoMIPS\t: 126.00
Features\t: half thumb fastmult vfp edsp neon vfpv3 tls vfpv4 idiva idivt vfpd32 lpae evtstrm crc32
CPU implementer\t: 0x41
CPU part\t: 0xd08

Hardware\t: BCM2711
Model\t\t: Raspberry Pi 4 Model B Rev 1.4
"""
X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz
flags\t\t: fpu sse4_2 avx avx2 fma

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz
flags\t\t: fpu sse4_2 avx avx2
"""
RISCV = "processor\t: 0\nisa\t\t: rv64imafdcv_zicsr_zba_zbb\nmmu\t\t: sv39\nuarch\t\t: spacemit,x60\n"


def machine_at(
    root: Path,
    elf: tuple[int, int] | None,
    cpuinfo: str,
    *,
    compatible: bytes = b"",
    model: bytes = b"",
    hwcap: int | None = None,
    memory: str = "",
) -> Machine:
    tree = root / "proc/device-tree"
    tree.mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/cpuinfo").write_text(cpuinfo)
    if elf:
        bits, machine = elf
        header = b"\x7fELF" + bytes([bits, 1, 1]) + bytes(9) + struct.pack("<HH", 3, machine)
        (root / "proc/self/exe").write_bytes(header + bytes(64))
    if hwcap is not None:
        (root / "proc/self/auxv").write_bytes(struct.pack("NNNN", 6, 4096, 16, hwcap) + bytes(16))
    if compatible:
        (tree / "compatible").write_bytes(compatible)
    if model:
        (tree / "model").write_bytes(model)
    if memory:
        (root / "proc/meminfo").write_text(memory)
    return Machine.detect(root, configured=["acme,camera-2"])


def test_raspberry_pi_3_in_64_bit(tmp_path: Path) -> None:
    machine = machine_at(
        tmp_path,
        AARCH64,
        PI3_64,
        compatible=b"raspberrypi,3-model-b\0brcm,bcm2837\0",
        model=b"Raspberry Pi 3 Model B Rev 1.2\0",
        memory="MemTotal:         917508 kB\nMemFree:          300000 kB\n",
    )
    assert (machine.arch, machine.cpu_model) == ("aarch64", "Cortex-A53")
    assert machine.features == {"fp", "asimd", "evtstrm", "crc32", "cpuid"}
    assert machine.compatible == {"raspberrypi,3-model-b", "brcm,bcm2837", "linux-aarch64", "acme,camera-2"}
    assert machine.board == "Raspberry Pi 3 Model B Rev 1.2"
    assert machine.memory_bytes == 917508 * 1024


def test_raspberry_pi_5_has_dot_products_and_a_pi_4_does_not(tmp_path: Path) -> None:
    pi5 = machine_at(tmp_path / "5", AARCH64, f"processor: 0\nFeatures: {PI5_FEATURES}\nCPU part: 0xd0b\n")
    pi4 = machine_at(tmp_path / "4", AARCH64, PI3_64.replace("0xd03", "0xd08"))
    assert "asimddp" in pi5.features
    assert "asimddp" not in pi4.features
    assert (pi5.cpu_model, pi4.cpu_model) == ("Cortex-A76", "Cortex-A72")


def test_32_bit_system_on_a_raspberry_pi_4(tmp_path: Path) -> None:
    machine = machine_at(tmp_path, ARM, PI4_32)
    assert (machine.arch, machine.cpu_model) == ("armv7l", "Cortex-A72")
    assert {"neon", "vfpv4"} <= machine.features
    assert "linux-armv7l" in machine.compatible


def test_32_bit_process_under_a_64_bit_kernel_is_32_bit(tmp_path: Path) -> None:
    # Such a kernel's cpuinfo lists asimd; the process's AT_HWCAP has neon (bit 12) and vfpv4 (bit 16).
    machine = machine_at(tmp_path, ARM, PI3_64, hwcap=1 << 12 | 1 << 16)
    assert machine.arch == "armv7l"
    assert {"neon", "vfpv4"} <= machine.features


def test_emulated_process_does_not_take_the_hosts_cpu_for_its_own(tmp_path: Path) -> None:
    # Under user-mode emulation, cpuinfo is the host's, and AT_HWCAP the emulator's: fp and asimd.
    machine = machine_at(tmp_path, AARCH64, X86, hwcap=0b11)
    assert (machine.arch, machine.features) == ("aarch64", frozenset({"fp", "asimd"}))
    assert machine.cpu_model == ""


def test_x86_has_what_all_of_its_cores_have(tmp_path: Path) -> None:
    machine = machine_at(tmp_path, X86_64, X86)
    assert machine.arch == "x86_64"
    assert machine.cpu_model.startswith("Intel(R) Core(TM) i5")
    assert machine.features == {"fpu", "sse4_2", "avx", "avx2"}


def test_x86_bits_of_hwcap_are_not_taken_for_features(tmp_path: Path) -> None:
    assert machine_at(tmp_path, X86_64, X86, hwcap=0xFFFFFFFF).features == {"fpu", "sse4_2", "avx", "avx2"}


@pytest.mark.parametrize("saved", [True, False])
def test_tiles_count_only_if_the_kernel_saves_them(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.bundle.machine._saves_tiles", lambda: saved)
    listed = X86.replace("avx2", "avx2 amx_tile amx_int8 amx_bf16")
    tiles = {"amx_tile", "amx_int8", "amx_bf16"} if saved else set()
    assert machine_at(tmp_path, X86_64, listed).features == {"fpu", "sse4_2", "avx", "avx2"} | tiles


def test_riscv_extensions_are_features(tmp_path: Path) -> None:
    machine = machine_at(tmp_path, RISCV64, RISCV)
    assert machine.arch == "riscv64"
    assert {"v", "c", "zba", "zbb"} <= machine.features
    assert "r" not in machine.features
    assert machine.cpu_model == "spacemit,x60"


def test_machine_without_readable_files_is_mostly_unknown(tmp_path: Path) -> None:
    machine = Machine.detect(tmp_path / "nowhere")
    assert machine.features == frozenset()
    assert machine.compatible == {f"linux-{machine.arch}"}
    assert machine.memory_bytes is None


JUNK = [b"\0" * 4096, b"\xff" * 4096, b":\n:\n\n:", b"isa\nflags : \n", bytes(range(256))]


@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_proc_is_ignored(tmp_path: Path, junk: bytes) -> None:
    for path in (
        "cpuinfo",
        "meminfo",
        "self/exe",
        "self/auxv",
        "device-tree/compatible",
        "device-tree/model",
    ):
        file = tmp_path / "proc" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(junk)
    Machine.detect(tmp_path)


def test_configured_name_that_no_device_tree_could_have_is_left_out(tmp_path: Path) -> None:
    assert Machine.detect(tmp_path, configured=["a b", "", "x\n", "good,one"]).compatible >= {"good,one"}
    assert len(Machine.detect(tmp_path, configured=["a b", "", "x\n", "good,one"]).compatible) == 2


def test_this_machine_is_detected() -> None:
    machine = Machine.detect()
    assert machine.arch == platform.machine()
    assert machine.features
    assert machine.glibc == platform.libc_ver()[1]
    assert machine.abi == "tvm-ffi-0.1"
    assert machine.memory_bytes


def test_detecting_the_machine_loads_no_kernel_library() -> None:
    code = (
        "import sys; from agent.bundle.machine import Machine; Machine.detect();"
        "import agent.bundle.verify, agent.bundle.admission, agent.bundle.graph, agent.bundle.params;"
        "print(sorted({'numpy', 'tvm_ffi', 'tvm', 'onnx', 'builder', 'paho'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("triple", "arch"),
    [
        ("aarch64-linux-gnu", "aarch64"),
        ("arm64-linux-gnu", "aarch64"),
        ("armv7l-linux-gnueabihf", "armv7l"),
        ("arm-linux-gnueabihf", "armv7l"),
        ("armv7a-linux-gnueabihf", "armv7l"),
        ("x86_64-pc-linux-gnu", "x86_64"),
        ("riscv64-linux-gnu", "riscv64"),
        ("mips-linux-gnu", "mips"),
    ],
)
def test_triple_names_its_architecture(triple: str, arch: str) -> None:
    assert arch_of_triple(triple) == arch


def test_abi_is_major_and_minor() -> None:
    assert abi_of("0.1.14.post1") == "tvm-ffi-0.1"
    assert abi_of("1.12.3") == "tvm-ffi-1.12"
