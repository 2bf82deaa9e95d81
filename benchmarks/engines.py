"""The engines that are compared, each behind the same two calls: load a model once, run it on fixed inputs.

Every engine gets float32, a batch of 1 and the same number of threads, and is asked for its fastest
documented settings for that; none is allowed to change the numbers (no bfloat16, no fast math).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray[Any, Any]]
Run = Callable[[], list[np.ndarray[Any, Any]]]


class UnavailableError(Exception):
    """The engine is not installed, or does not take this model; the message says which."""


def load_edgebundle(model: Path, inputs: Arrays, threads: int) -> Run:
    """Ours: the bundle beside the model, run by the device's executor."""
    from agent.runtime.graph_executor import create
    from builder.execute import load_kernels
    from builder.package import Package

    package = Package.load(model.with_suffix(".bundle"))
    kernels = load_kernels(package.members["mod.so"])
    kernels.set_threads(threads)
    module = create(package.members["mod.json"], kernels)
    module.load_params(package.members["mod.params"])
    for name, value in inputs.items():
        module.set_input(name, value)
    outputs = [module.output_view(i) for i in range(module.get_num_outputs())]

    def run() -> list[np.ndarray[Any, Any]]:
        module.run()
        return outputs

    return run


def load_onnxruntime(model: Path, inputs: Arrays, threads: int) -> Run:
    """ONNX Runtime with all optimisations, on its CPU provider."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, dict(inputs))


def load_openvino(model: Path, inputs: Arrays, threads: int) -> Run:
    """OpenVINO tuned for latency, at float32: it would take bfloat16 where the CPU has it."""
    import openvino as ov

    core = ov.Core()
    network = core.read_model(str(model))
    network.reshape({name: list(value.shape) for name, value in inputs.items()})
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": 1,
    }
    request = core.compile_model(network, "CPU", settings).create_infer_request()
    tensors = {name: ov.Tensor(value) for name, value in inputs.items()}

    def run() -> list[np.ndarray[Any, Any]]:
        request.infer(tensors, share_inputs=True)
        return [tensor.data for tensor in request.output_tensors]

    return run


def load_ncnn(model: Path, inputs: Arrays, threads: int) -> Run:
    """ncnn after pnnx; images of float32 alone."""
    import ncnn

    if len(inputs) != 1 or next(iter(inputs.values())).ndim != 4:
        raise UnavailableError("pnnx converts networks with one image alone here")
    (value,) = inputs.values()
    stem = model.with_suffix("")
    if not Path(f"{stem}.ncnn.param").exists():
        shape = ",".join(map(str, value.shape))
        command = [str(Path(sys.executable).with_name("pnnx")), str(model), f"inputshape=[{shape}]", "fp16=0"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=model.parent, timeout=300, check=False
        )
        if done.returncode != 0 or not Path(f"{stem}.ncnn.param").exists():
            raise UnavailableError("pnnx does not convert it")
    net = ncnn.Net()
    net.opt.num_threads = threads
    for name in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, name, False)
    if net.load_param(f"{stem}.ncnn.param") or net.load_model(f"{stem}.ncnn.bin"):
        raise UnavailableError("ncnn does not load what pnnx made")
    image = ncnn.Mat(np.ascontiguousarray(value[0]))

    def run() -> list[np.ndarray[Any, Any]]:
        extractor = net.create_extractor()
        extractor.input("in0", image)
        return [np.array(extractor.extract("out0")[1])]

    return run


def load_pytorch(model: Path, inputs: Arrays, threads: int) -> Run:
    """PyTorch in eval mode, without compilation, the model read back from ONNX by onnx2torch."""
    import onnx
    import onnx2torch
    import torch

    torch.set_num_threads(threads)
    try:
        network = onnx2torch.convert(onnx.load(model)).eval()
    except NotImplementedError as e:
        raise UnavailableError(f"onnx2torch does not convert it: {e}") from e
    tensors = [torch.from_numpy(value) for value in inputs.values()]

    def run() -> list[np.ndarray[Any, Any]]:
        with torch.inference_mode():
            result = network(*tensors)
        return [t.numpy() for t in (result if isinstance(result, tuple | list) else (result,))]

    return run


ENGINES: Mapping[str, Callable[[Path, Arrays, int], Run]] = {
    "edgebundle": load_edgebundle,
    "onnxruntime": load_onnxruntime,
    "openvino": load_openvino,
    "ncnn": load_ncnn,
    "pytorch": load_pytorch,
}


def limit_threads(threads: int) -> None:
    """Tell the OpenMP runtimes, before any of them is loaded."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["EDGE_NUM_THREADS"] = str(threads)
