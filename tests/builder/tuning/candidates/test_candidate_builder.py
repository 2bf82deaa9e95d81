"""A batch of candidates is linked once, and holds the code that a bundle holds."""

from __future__ import annotations

import io
import platform
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection

from builder.boards.measuring_process import BuiltKernel
from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import describe, link
from builder.compiling.lower import lower
from builder.errors import LinkError
from builder.importer import ImportedModel, import_onnx
from builder.kernels.design_space import Point
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates import candidate_builder
from builder.tuning.candidates.candidate_builder import CandidateBuilder, kernel_name
from builder.tuning.tasks.extraction import extract_tasks
from tests.two_operators import two_operators

pytestmark = pytest.mark.slow
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 instructions")

ADDRESS_BYTES = 4  # that a relocation changes
CALL = 0xE8  # x86-64: a call of a function at a distance


@pytest.fixture(scope="module")
def model() -> ImportedModel:
    return import_onnx(two_operators())


@pytest.fixture(scope="module")
def tasks(model: ImportedModel, device: DeviceTarget) -> tuple[Task, ...]:
    return extract_tasks(model, device)


@pytest.fixture
def builder(device: DeviceTarget) -> Iterator[CandidateBuilder]:
    builder = CandidateBuilder(device, 1)
    yield builder
    builder.close()


def jobs_of(tasks: tuple[Task, ...]) -> list[tuple[Task, Point]]:
    """Return the heuristic's point of each task."""
    found = [(task, task.space.point(task.space.default)) for task in tasks]
    return [(task, point) for task, point in found if point is not None]


def functions(code: bytes) -> dict[str, bytes]:
    """Return the machine code of each function of a relocatable object, addresses of others replaced by 0."""
    elf = ELFFile(io.BytesIO(code))
    sections = {}
    for index, section in enumerate(elf.iter_sections()):
        content = bytearray(section.data()) if section["sh_type"] != "SHT_NOBITS" else bytearray()
        sections[index] = content
    for section in elf.iter_sections():
        if isinstance(section, RelocationSection):
            for relocation in section.iter_relocations():
                start = relocation["r_offset"]
                sections[section["sh_info"]][start : start + ADDRESS_BYTES] = bytes(ADDRESS_BYTES)
    found = {}
    symbols = elf.get_section_by_name(".symtab")
    assert isinstance(symbols, SymbolTableSection)
    for symbol in symbols.iter_symbols():
        if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_shndx"] != "SHN_UNDEF":
            start, size = symbol["st_value"], symbol["st_size"]
            found[symbol.name] = bytes(sections[symbol["st_shndx"]][start : start + size])
    return found


def same_instructions(ours: bytes, theirs: bytes) -> bool:
    """Whether two functions differ only in how far away the functions are that they call."""
    if len(ours) != len(theirs):
        return False
    at = 0
    while at < len(ours):
        if ours[at] != theirs[at]:
            calls = [i for i in range(max(0, at - ADDRESS_BYTES), at) if ours[i] == theirs[i] == CALL]
            if not calls:
                return False
            at = calls[0] + ADDRESS_BYTES
        at += 1
    return True


def code_at(content: bytes, name: str, size: int) -> bytes:
    """Return `size` bytes from an exported function of a shared object on."""
    elf = ELFFile(io.BytesIO(content))
    symbols = elf.get_section_by_name(".dynsym")
    assert isinstance(symbols, SymbolTableSection)
    [symbol] = symbols.get_symbol_by_name(name) or []
    [offset] = elf.address_offsets(symbol["st_value"])
    return content[offset : offset + size]


@on_x86
def test_a_candidate_is_the_code_that_a_bundle_holds(
    model: ImportedModel, tasks: tuple[Task, ...], device: DeviceTarget, builder: CandidateBuilder
) -> None:
    jobs = jobs_of(tasks)
    objects = [future.result() for future in builder.start(jobs).objects]
    lowered = lower(model.mod, device)
    whole = functions(compile_object(lowered.kernels, device))
    batch = link(objects[0], device, objects[1:])
    for index, ((task, _), code) in enumerate(zip(jobs, objects, strict=True)):
        name = kernel_name(index)
        compiled = {n.replace(name, task.name): body for n, body in functions(code).items() if name in n}
        assert f"__tvm_ffi_{task.name}" in compiled
        for function, body in compiled.items():
            assert same_instructions(body, whole[function]), function
        entry = functions(code)[f"__tvm_ffi_{name}"]
        linked = code_at(batch, f"__tvm_ffi_{name}", len(entry))
        assert all(a in (0, b) for a, b in zip(entry, linked, strict=True))


def test_a_batch_has_one_launcher_and_every_candidate_runs(
    tasks: tuple[Task, ...], builder: CandidateBuilder
) -> None:
    kernels = builder.build(jobs_of(tasks))
    assert all(isinstance(kernel, BuiltKernel) for kernel in kernels)
    [content] = {kernel.content for kernel in kernels if isinstance(kernel, BuiltKernel)}
    exports = describe(content).exports
    assert {"__tvm_ffi_edge_set_threads", *(f"__tvm_ffi_kernel{i}" for i in range(len(tasks)))} <= exports
    with tempfile.TemporaryDirectory() as work:
        Path(work, "batch.so").write_bytes(content)
        module = tvm_ffi.load_module(Path(work, "batch.so"))
        for kernel in kernels:
            assert isinstance(kernel, BuiltKernel)
            *inputs, output = [
                tvm.runtime.tensor(np.full(shape, number, dtype))
                for number, (dtype, shape) in enumerate(kernel.arguments)
            ]
            module[kernel.name](*inputs, output)
            assert not np.any(output.numpy() == len(inputs)), "the output was not written"


def test_a_candidate_that_fails_leaves_the_others_of_its_batch(
    tasks: tuple[Task, ...], builder: CandidateBuilder
) -> None:
    building = builder.start(jobs_of(tasks))
    failed: Future[bytes] = Future()
    failed.set_exception(ValueError("no code for it"))
    building = replace(building, objects=[failed, building.objects[1]])
    first, second = building.results()
    assert first == "no code for it"
    assert isinstance(second, BuiltKernel)
    assert second.name == kernel_name(1)
    assert "__tvm_ffi_kernel1" in describe(second.content).exports
    assert "__tvm_ffi_kernel0" not in describe(second.content).exports


def test_a_linker_that_fails_ends_the_run_and_is_no_candidates_fault(
    tasks: tuple[Task, ...], builder: CandidateBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bytes:
        raise LinkError("zig cannot be started")

    monkeypatch.setattr(candidate_builder, "link", fails)
    with pytest.raises(LinkError, match="zig"):
        builder.build(jobs_of(tasks))
