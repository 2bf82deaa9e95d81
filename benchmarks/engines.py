"""The engines that are compared, each behind the same two calls: load a model once, run it on fixed inputs.

Every engine gets float32 or int8, a batch of 1, fixed shapes and the same number of threads, and its fastest
documented settings that do not change the numbers (no bfloat16, no fast math). An engine that has its own
converter gets the file that converts best; the conversion is not timed. LiteRT's converter does not take a
quantised network: it gets the one before, and LiteRT's own quantiser makes int8 of it, of the same tensors.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

Arrays = Mapping[str, np.ndarray[Any, Any]]
Run = Callable[[], list[np.ndarray[Any, Any]]]
# Our engine: with the heuristic's schedules only, and with tuning records if some are given.
UNTUNED, OURS = "untuned", "edgebundle"
CONVERSION_LIMIT_S: Final = 300


class UnavailableError(Exception):
    """The engine is not installed or cannot run this model; the message says which."""


def bundle_of(model: Path, engine: str) -> Path:
    """Return the path of the bundle for `engine`, `OURS` or `UNTUNED`, in the folder of `model`."""
    return model.with_suffix(".bundle" if engine == OURS else f".{UNTUNED}.bundle")


def simplified_of(model: Path) -> Path:
    """Return the path of the model with fixed shapes and folded constants, which some converters need."""
    return model.with_suffix(".simplified.onnx")


def float_of(model: Path) -> Path:
    """Return the path of the network, with fixed shapes, that a quantised `model` was made from."""
    return model.with_suffix(".float.onnx")


def load_edgebundle(model: Path, inputs: Arrays, threads: int) -> Run:
    """Load our bundle as `compile` makes it, with tuning records if some were given."""
    return _load_bundle(bundle_of(model, OURS), inputs, threads)


def load_untuned(model: Path, inputs: Arrays, threads: int) -> Run:
    """Load our bundle that was compiled without records."""
    return _load_bundle(bundle_of(model, UNTUNED), inputs, threads)


def _load_bundle(path: Path, inputs: Arrays, threads: int) -> Run:
    from agent.runtime.graph_executor import create
    from builder.bundles.package import Package
    from builder.running.in_memory import load_kernels

    if not path.exists():
        raise UnavailableError("no tuning records were given, so both bundles are the same")
    package = Package.load(path)
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
    """Load the model in ONNX Runtime: all optimisations, the CPU provider, symbolic dimensions fixed."""
    import onnx
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    for value in onnx.load(model, load_external_data=False).graph.input:
        if value.name not in inputs:
            continue
        for dim, size in zip(value.type.tensor_type.shape.dim, inputs[value.name].shape, strict=True):
            if dim.dim_param:
                options.add_free_dimension_override_by_name(dim.dim_param, size)
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, dict(inputs))


def load_openvino(model: Path, inputs: Arrays, threads: int) -> Run:
    """Load the model in OpenVINO, for latency and in float32: its default is bfloat16 if the CPU has it."""
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
    """Load the model in ncnn, converted by pnnx: one float32 image as input, any number of outputs."""
    import ncnn

    if len(inputs) != 1 or next(iter(inputs.values())).ndim != 4:
        raise UnavailableError("expected one image as input, got other inputs: ncnn has no 64-bit token ids")
    (value,) = inputs.values()
    stem = convert_for_ncnn(model, value.shape)
    net = ncnn.Net()
    net.opt.num_threads = threads
    for name in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, name, False)
    if net.load_param(f"{stem}.ncnn.param") or net.load_model(f"{stem}.ncnn.bin"):
        raise UnavailableError("ncnn cannot load the files that pnnx wrote")
    # A copy: a first layer that works in place would write into the array.
    image = ncnn.Mat(np.ascontiguousarray(value[0])).clone()
    outputs = net.output_names()

    def run() -> list[np.ndarray[Any, Any]]:
        extractor = net.create_extractor()
        extractor.input("in0", image)
        return [np.array(extractor.extract(name)[1]) for name in outputs]

    return run


def convert_for_ncnn(model: Path, shape: tuple[int, ...]) -> Path:
    """Convert a model for ncnn unless it has been converted before; return the stem of ncnn's two files.

    Raises
    ------
    UnavailableError
        If pnnx cannot convert the model, or leaves operators that ncnn does not have.
    """
    for source in (simplified_of(model), model):
        stem = source.with_suffix("")
        stem = stem.with_name(stem.name.replace("-", "_"))  # as pnnx names its files
        if not Path(f"{stem}.ncnn.param").exists() and source.exists():
            pnnx = Path(sys.executable).with_name("pnnx")
            command = [str(pnnx), str(source), f"inputshape=[{','.join(map(str, shape))}]", "fp16=0"]
            subprocess.run(
                command, capture_output=True, cwd=model.parent, timeout=CONVERSION_LIMIT_S, check=False
            )
        param = Path(f"{stem}.ncnn.param")
        if param.exists() and "pnnx." not in param.read_text() and "aten::" not in param.read_text():
            return stem
    raise UnavailableError("pnnx cannot convert it to operators of ncnn")


def load_pytorch(model: Path, inputs: Arrays, threads: int) -> Run:
    """Load the model in PyTorch: converted from ONNX with its shapes written out, eval mode, not compiled."""
    import torch

    if float_of(model).exists():
        raise UnavailableError("onnx2torch does not convert quantised networks")
    torch.set_num_threads(threads)
    network, tensors = _torch_module(model, inputs)

    def run() -> list[np.ndarray[Any, Any]]:
        with torch.inference_mode():
            result = network(*tensors)
        return [t.numpy() for t in (result if isinstance(result, tuple | list) else (result,))]

    return run


def _torch_module(model: Path, inputs: Arrays) -> tuple[Any, tuple[Any, ...]]:
    import onnx
    import onnx2torch
    import torch

    from benchmarks.fixed_shapes import write_out

    reasons = []
    sources = (float_of(model),) if float_of(model).exists() else (simplified_of(model), model)
    for source in sources:
        try:
            network = onnx2torch.convert(onnx.load(source)).eval()
        except NotImplementedError as error:
            reasons.append(str(error))
            continue
        tensors = tuple(torch.from_numpy(value) for value in inputs.values())
        return write_out(network, tensors), tensors
    raise UnavailableError(f"onnx2torch cannot convert it: {reasons[0]}")


def load_litert(model: Path, inputs: Arrays, threads: int) -> Run:
    """Load the model in LiteRT with its XNNPACK delegate, converted by litert-torch."""
    from ai_edge_litert.interpreter import Interpreter

    path = model.with_suffix(".tflite")
    if not path.exists():
        convert_for_litert(model, inputs, path)
    interpreter = Interpreter(str(path), num_threads=threads)
    interpreter.allocate_tensors()
    # In the order of the arguments that were traced: args_0, args_1, ...
    places = sorted(interpreter.get_input_details(), key=lambda place: place["name"])
    results = sorted(interpreter.get_output_details(), key=lambda place: place["name"])
    for place, value in zip(places, inputs.values(), strict=True):
        interpreter.set_tensor(place["index"], _as_tensor(value, place["dtype"], *place["quantization"]))

    def run() -> list[np.ndarray[Any, Any]]:
        interpreter.invoke()
        return [
            _dequantised(interpreter.get_tensor(place["index"]), *place["quantization"]) for place in results
        ]

    return run


def _as_tensor(
    value: np.ndarray[Any, Any], dtype: type[np.generic], scale: float, zero: int
) -> np.ndarray[Any, Any]:
    """Return an input as the converter has it: integers are narrowed, numbers with a scale quantised."""
    if scale:
        limits = np.iinfo(np.dtype(dtype).name)
        value = np.clip(np.rint(value / np.float32(scale)) + zero, limits.min, limits.max)
    return value.astype(dtype)


def _dequantised(value: np.ndarray[Any, Any], scale: float, zero: int) -> np.ndarray[Any, Any]:
    """Return the numbers that a tensor stands for; a scale of 0 says that it is not quantised."""
    return (value.astype(np.float32) - zero) * np.float32(scale) if scale else value


def convert_for_litert(model: Path, inputs: Arrays, path: Path) -> None:
    """Convert a model for LiteRT, by way of PyTorch, quantise it if `model` is, and write it to `path`.

    Raises
    ------
    UnavailableError
        If litert-torch refuses the model. Any other failure is left to the engine's process, which
        reports it.
    """
    import litert_torch

    network, tensors = _torch_module(model, inputs)
    part = path.with_suffix(".part.tflite")
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every pass
        try:
            converted = litert_torch.convert(network, tensors)
        except _LITERT_REFUSALS as error:
            raise UnavailableError(f"litert-torch cannot convert it: {type(error).__name__}") from error
        converted.export(str(part))
    if float_of(model).exists():
        whole, part = part, path.with_suffix(".int8.tflite")
        _quantise_for_litert(whole, part, inputs, dynamic=_finds_ranges(model))
        whole.unlink()
    part.rename(path)


def _quantise_for_litert(source: Path, path: Path, inputs: Arrays, *, dynamic: bool) -> None:
    """Quantise a float network by LiteRT's own quantiser: weights for each channel, activations of 8 bits.

    If `dynamic`, activations are quantised while the network runs.
    """
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import quantizer, recipe

    work = quantizer.Quantizer(str(source))
    work.load_quantization_recipe(recipe.dynamic_wi8_afp32() if dynamic else recipe.static_wi8_ai8())
    found = None
    if not dynamic:
        ((signature, sides),) = Interpreter(str(source)).get_signature_list().items()
        found = work.calibrate({signature: [dict(zip(sides["inputs"], inputs.values(), strict=True))]})
    work.quantize(found).export_model(str(path), overwrite=True)


def _finds_ranges(model: Path) -> bool:
    """Whether a quantised network finds the ranges of its activations while it runs."""
    import onnx

    nodes = onnx.load(model, load_external_data=False).graph.node
    return any(node.op_type == "DynamicQuantizeLinear" for node in nodes)


# What torch.export and the converter's passes raise for a model that they cannot express; exceptions of
# Dynamo and of MLIR's bindings derive from RuntimeError.
_LITERT_REFUSALS: Final = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError)


ENGINES: Final[Mapping[str, Callable[[Path, Arrays, int], Run]]] = {
    OURS: load_edgebundle,
    UNTUNED: load_untuned,
    "onnxruntime": load_onnxruntime,
    "openvino": load_openvino,
    "ncnn": load_ncnn,
    "pytorch": load_pytorch,
    "litert": load_litert,
}
OTHERS: Final = tuple(name for name in ENGINES if name not in (OURS, UNTUNED))
# Names in tables and pictures.
TITLES: Final[Mapping[str, str]] = {
    OURS: "edgebundle",
    UNTUNED: "edgebundle, untuned",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "ncnn": "ncnn",
    "pytorch": "PyTorch",
    "litert": "LiteRT",
}


def versions() -> dict[str, str]:
    """Return the versions of the other engines that are installed."""
    from importlib import metadata

    packages = {"litert": "ai-edge-litert", "pytorch": "torch"}
    found = {}
    for name in OTHERS:
        try:
            found[name] = metadata.version(packages.get(name, name))
        except metadata.PackageNotFoundError:
            continue
    return found


def limit_threads(threads: int) -> None:
    """Set the number of threads of our engine and of OpenMP runtimes, which must not be loaded yet."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["EDGE_NUM_THREADS"] = str(threads)
