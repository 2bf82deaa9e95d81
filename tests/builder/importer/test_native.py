"""Native code that crashes, hangs or fills the memory takes only its own process with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError, NativeCrashError, NativeError
from builder.importer import native
from builder.importer.constant_folding import fold_constants
from builder.importer.shapes import infer_shapes
from tests.patience import wait_until

ModelMaker = Callable[..., onnx.ModelProto]


@pytest.fixture
def process() -> Iterator[native.NativeProcess]:
    one = native.NativeProcess()
    yield one
    one.close()


def crashing() -> onnx.ModelProto:
    """A LabelEncoder of a value without a type, behind thirty other nodes."""
    nodes = [helper.make_node("Relu", ["x" if i == 0 else f"r{i}"], [f"r{i + 1}"]) for i in range(30)]
    nodes += [
        helper.make_node("Unknown", ["r30"], ["u"], domain="elsewhere"),
        helper.make_node(
            "LabelEncoder",
            ["u"],
            ["y"],
            name="encode",
            domain="ai.onnx.ml",
            keys_floats=[1.0],
            values_floats=[2.0],
        ),
        helper.make_node("Relu", ["y"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1])],
    )
    domains = [("", 17), ("ai.onnx.ml", 2), ("elsewhere", 1)]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(*domain) for domain in domains])


def ask(process: native.NativeProcess, model: onnx.ModelProto) -> None:
    process.ask("infer_shapes", [False, False, True], [model.SerializeToString()])


def test_a_crash_is_one_line_and_the_next_model_is_read(relu: onnx.ModelProto) -> None:
    with pytest.raises(NativeCrashError, match=r"^onnx's shape inference crashed \(SIGSEGV\)$"):
        native.infer_shapes(crashing(), strict=False)
    assert native.infer_shapes(relu, strict=True).graph.output[0].type.HasField("tensor_type")


def test_the_node_is_named_that_inference_crashes_on() -> None:
    with pytest.raises(ModelError, match=r"crashed \(SIGSEGV\) on node 'encode' \(LabelEncoder\)") as caught:
        infer_shapes(crashing(), strict=False)
    assert caught.value.hint is not None


def test_a_call_that_takes_too_long_is_ended(make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_BYTES_A_SECOND", 1 << 40)
    process = native.NativeProcess(seconds=0.01)
    body = make_model([helper.make_node("Relu", ["x"], ["y"])], {"x": [1]}, {"y": [1]})
    nodes = [helper.make_node("Add", [f"v{i}", f"v{i}"], [f"v{i + 1}"]) for i in range(60_000)]
    body.graph.node.extend(nodes)
    body.graph.node.append(helper.make_node("Identity", ["x"], ["v0"]))
    with pytest.raises(NativeCrashError, match="took longer than"):
        for _ in range(50):
            ask(process, body)
    process.close()


def test_a_call_that_needs_too_much_memory_is_refused(make_model: ModelMaker) -> None:
    shape = numpy_helper.from_array(np.array([1 << 33]), "shape")
    model = make_model([helper.make_node("ConstantOfShape", ["shape"], ["y"])], {}, {"y": [None]})
    model.graph.initializer.append(shape)
    with pytest.raises(NativeCrashError, match=r"^ONNX Runtime needs more than 4096 MiB$"):
        native.evaluate(model, ["y"], {})


def test_what_onnx_runtime_dies_of_is_not_folded(make_model: ModelMaker) -> None:
    """ONNX Runtime crashes on a Split whose first part is unread."""
    nodes = [
        helper.make_node("Split", ["w"], ["", "half"], axis=0, num_outputs=2),
        helper.make_node("Add", ["x", "half"], ["y"]),
    ]
    model = make_model(nodes, {"x": [2]}, {"y": [2]}, {"w": np.arange(4, dtype=np.float32)}, opset=18)
    fold_constants(model)
    assert [node.op_type for node in model.graph.node] == ["Split", "Add"]


def test_arrays_go_there_and_back(make_model: ModelMaker) -> None:
    model = make_model(
        [
            helper.make_node("Transpose", ["x"], ["y"]),
            helper.make_node("Cast", ["x"], ["z"], to=TensorProto.BOOL),
        ],
        {"x": [2, 3]},
        {"y": [3, 2], "z": ([2, 3], TensorProto.BOOL)},
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = native.evaluate(model, ["y", "z"], {"x": x[:, ::1]})
    np.testing.assert_array_equal(made["y"], x.T)
    np.testing.assert_array_equal(made["z"], x != 0)


def test_a_scalar_stays_a_scalar(make_model: ModelMaker) -> None:
    model = make_model([helper.make_node("Neg", ["x"], ["y"])], {"x": []}, {"y": []})
    assert native.evaluate(model, ["y"], {"x": np.array(2, np.float32)})["y"].shape == ()


def test_threads_take_turns(relu: onnx.ModelProto) -> None:
    failures: list[BaseException] = []

    def run(strict: bool) -> None:
        try:
            for _ in range(20):
                native.infer_shapes(relu, strict=strict)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=run, args=[index % 2 == 0]) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_process_that_ended_for_want_of_work_is_started_again(
    process: native.NativeProcess, relu: onnx.ModelProto
) -> None:
    ask(process, relu)
    running = process._process
    assert running is not None
    assert running.stdin is not None
    running.stdin.close()
    running.wait()
    running.stdin = open(os.devnull, "wb")  # noqa: SIM115, PTH123 - no reply comes
    ask(process, relu)
    assert process._process is not running


def test_an_interruption_leaves_no_half_reply(
    process: native.NativeProcess, relu: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    ask(process, relu)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("builder.importer.native_program.receive", interrupt)
        ask(process, relu)
    ask(process, relu)


def test_a_fork_has_a_process_of_its_own(relu: onnx.ModelProto) -> None:
    native.infer_shapes(relu, strict=True)
    child = os.fork()
    if child == 0:
        try:
            for _ in range(5):
                native.infer_shapes(relu, strict=False)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the status says so
            os._exit(1)
    for _ in range(5):
        native.infer_shapes(relu, strict=True)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_PROGRAM = """
import sys, time
import onnx
from builder.importer import native
native.infer_shapes(onnx.load_from_string(bytes.fromhex(sys.argv[1])), strict=True)
print(native._process_of(__import__("os").getpid())._process.pid, flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


def _ended(pid: int) -> bool:
    """Whether a process has ended; without a parent that asks for its status, it is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("end", [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_a_program_ends(relu: onnx.ModelProto, end: signal.Signals | None) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, relu.SerializeToString().hex(), "exit" if end is None else "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert program.stdout is not None
    with program.stdout:
        pid = int(program.stdout.readline())
    if end is not None:
        program.send_signal(end)
    program.wait()
    wait_until(lambda: _ended(pid), "the process ends")


def test_a_file_runs_with_texts_rows_and_flags(tmp_path: Path) -> None:
    text = """
       <ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]>
       agraph (string[1, n] words, bool[2] flags) => (bool[2] not_flags, scores, copies) {
          not_flags = Not (flags)
          places = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_floats = [1.0, 2.0]> (words)
          scores = ai.onnx.ml.ZipMap <classlabels_strings = ["no", "yes"]> (places)
          copies = Identity (words)
       }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    session = native.FileSession(tmp_path / "model.onnx", 1)
    assert session.get_inputs()[0] == ("words", "tensor(string)", [1, "n"])
    feeds = {"words": np.array([["b", "a"]], object), "flags": np.array([True, False])}
    flags, scores, copies = session.run(["not_flags", "scores", "copies"], feeds)
    np.testing.assert_array_equal(flags, [False, True])
    assert flags.dtype == np.bool_
    assert scores == [{"no": 2.0, "yes": 1.0}]
    np.testing.assert_array_equal(copies, [["b", "a"]])
    with pytest.raises(NativeError, match="words"):
        session.run(["copies"], {"words": np.zeros((1, 2), "f4")})


def test_file_that_was_written_again_is_opened_again(tmp_path: Path) -> None:
    for number in (1, 2):
        text = f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[1] x) => (float[1] y) {{
                n = Constant<value = float[1] {{{number}}}>()
                y = Add(x, n)
            }}"""
        onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
        session = native.FileSession(tmp_path / "model.onnx", 1)
        (made,) = session.run(["y"], {"x": np.zeros(1, np.float32)})
        np.testing.assert_array_equal(made, [number])


def test_sums_of_long_vectors_are_not_taken_for_shapes() -> None:
    """As torchvision's SSDlite has them: ONNX's inference then took more than 4 GiB."""
    vector = helper.make_tensor_value_info("v", TensorProto.INT64, [1 << 20])
    names = ["v", *(f"v{number}" for number in range(60))]
    nodes = [helper.make_node("Add", ["v", before], [after]) for before, after in pairwise(names)]
    last = helper.make_tensor_value_info(names[-1], TensorProto.INT64, None)
    model = helper.make_model(helper.make_graph(nodes, "g", [vector], [last]))
    found = native.infer_shapes(model, strict=True).graph.output[0].type.tensor_type
    assert found.shape.dim[0].dim_value == 1 << 20
