"""Real workers: a bundle in sealed memory files, a compiled mod.so, a process and its channel."""

from __future__ import annotations

import os
import socket
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.bundle.columns import InputColumns
from agent.bundle.graph import Graph
from agent.bundle.manifest import Manifest, Resources, Samples
from agent.bundle.processing import Postprocess, Preprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.bundle.verify import _seal
from agent.worker.channel import Channel, send_load
from agent.worker.frames import Answer, Failed, Frame, Load, Ready, Request
from tests.agent.launching import Forked, fork, template
from tests.bundles import make_manifest
from tests.fake_module import GraphBuilder, params
from tests.needs import needed
from tests.patience import PATIENCE_S


def compile_c(source: Path, target: Path, *flags: str) -> Path:
    import tvm_ffi.libinfo as info

    includes = [f"-I{path}" for path in (info.find_include_path(), info.find_dlpack_include_path())]
    # Flags after the source: the linker searches a library only for names that are already missing.
    output = ["-o", str(target), str(source)]
    command = [needed("gcc"), "-O1", "-shared", "-fPIC", *includes, *output, *flags, "-lpthread"]
    subprocess.run(command, check=True)
    return target


@pytest.fixture(scope="session")
def kernel_library(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    return shared_kernels(shared_file)


def shared_kernels(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    def write(path: Path) -> None:
        compile_c(Path(__file__).with_name("kernels.c"), path)

    return shared_file("kernels.so", write)


def sealed(content: bytes) -> int:
    descriptor = os.memfd_create("member", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(descriptor, content)
    _seal(descriptor)
    return descriptor


def manifest(
    files: Mapping[str, bytes],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *,
    preprocess: Preprocess | None = None,
    postprocess: Postprocess | None = None,
    samples: Samples | None = None,
    columns: tuple[InputColumns, ...] | None = None,
) -> Manifest:
    return make_manifest(
        files,
        name="probe",
        version="1.2.3",
        security_counter=0,
        inputs=inputs,
        outputs=outputs,
        preprocess=preprocess,
        postprocess=postprocess,
        columns=columns,
        samples=samples or Samples(0, 1e-4, 1e-5),
        resources=Resources(0, 0),
    )


def one_kernel(name: str, shape: tuple[int, ...] = (4,)) -> Graph:
    g = GraphBuilder()
    return g.graph(g.call(name, [g.input("x", shape)], shape))


class WorkerProcess:
    """A worker as the agent has it: a process and a channel."""

    def __init__(self, process: Forked, connection: socket.socket) -> None:
        self.process = process
        self.connection = connection
        self.channel = Channel(connection)
        self.loaded: Ready | Failed | None = None

    def infer(self, payload: bytes | np.ndarray[Any, Any] = b"", **fields: Any) -> tuple[Answer, bytes]:
        body = payload.tobytes() if isinstance(payload, np.ndarray) else payload
        self.channel.send(Request(**{"seq": 1, "content_type": "application/octet-stream", **fields}), body)
        frame = self.channel.receive()
        assert isinstance(frame, Frame), "the worker is gone"
        assert isinstance(frame.header, Answer)
        return frame.header, bytes(frame.payload)

    def infer_raw(self, *values: float) -> np.ndarray[Any, Any]:
        answer, payload = self.infer(np.array(values, np.float32))
        assert answer.status == 200, answer.message
        return np.frombuffer(payload, np.float32)


Spawn = Callable[..., WorkerProcess]


@pytest.fixture
def spawn(kernel_library: Path) -> Iterator[Spawn]:
    """Start workers: `spawn(graph, weights, spec..., load fields...)`; all are gone when the test ends."""
    started: list[WorkerProcess] = []

    def start(
        graph: Graph | str,
        *,
        library: Path | None = None,
        weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
        files: Mapping[str, bytes] | None = None,
        inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "FP32", (4,)),),
        outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "FP32", (4,)),),
        load: Mapping[str, Any] | None = None,
        **declared: Any,
    ) -> WorkerProcess:
        if isinstance(graph, str):
            graph = one_kernel(graph)
        content = {
            "mod.so": (library or kernel_library).read_bytes(),
            "mod.json": graph.to_json(),
            "mod.params": params(**(weights or {})),
        } | dict(files or {})
        ours, theirs = socket.socketpair()
        with theirs, template() as (connection, _):
            process = fork(connection, [theirs.fileno(), 2])
        worker = WorkerProcess(process, ours)
        started.append(worker)
        ours.settimeout(PATIENCE_S)
        descriptors = [sealed(each) for each in content.values()]
        described = manifest(content, inputs, outputs, **declared).to_bytes()
        send_load(ours, Load(tuple(content), **(load or {})), described, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        frame = worker.channel.receive()
        if frame is not None:
            assert isinstance(frame.header, Ready | Failed)
            worker.loaded = frame.header
        return worker

    yield start
    for worker in started:
        worker.connection.close()
        worker.process.kill()
        worker.process.wait()


@pytest.fixture(scope="session")
def python_headers() -> str:
    return sysconfig.get_paths()["include"]


def processor_s(pid: int) -> float:
    """Return the processor seconds of a process in user mode; proc_pid_stat(5), field 14."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")
