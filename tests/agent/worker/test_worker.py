"""A worker process from its load frame to its end."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from PIL import Image

from agent.bundle.detection import Objects, Part
from agent.bundle.manifest import Samples
from agent.bundle.processing import Postprocess, Preprocess, Softmax, TopK
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.placement import Placement
from agent.runtime.postprocess import Postprocessor
from agent.worker.frames import Answer, Failed, Ready, Request, Stop
from tests.agent.launching import PROJECT, fork, template
from tests.agent.worker.conftest import Spawn, one_kernel
from tests.fake_module import GraphBuilder, params
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

RAW, JSON = "application/octet-stream", "application/json"
X = np.array([1, 2, 3, 4], np.float32)
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4.5]}]}


def test_a_model_answers_raw_tensors_and_json(spawn: Spawn) -> None:
    worker = spawn("twice")
    loaded = worker.loaded
    assert isinstance(loaded, Ready), loaded
    assert 0 < loaded.load_s < PATIENCE_S
    assert 10 << 20 < loaded.rss_bytes < 200 << 20
    answer, payload = worker.infer(X, seq=7)
    assert (answer.seq, answer.status, answer.message, answer.content_type) == (7, 200, "", RAW)
    assert answer.tensors == ("y;FP32;4",)
    np.testing.assert_array_equal(np.frombuffer(payload, np.float32), X * 2)
    answer, payload = worker.infer(json.dumps(BODY | {"id": "a"}).encode(), content_type=JSON)
    document = json.loads(payload)
    assert document["id"] == "a"
    assert document["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [4], "data": [2, 4, 6, 9]}]


def test_optional_modules_are_imported_before_the_sandbox_closes(spawn: Spawn) -> None:
    worker = spawn("twice")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": X.tobytes()}]}
    answer, payload = worker.infer(cbor2.dumps(body), content_type="application/cbor")
    assert answer.status == 200, answer.message
    assert cbor2.loads(payload)["outputs"][0]["data"] == (X * 2).tobytes()


def test_answer_has_durations(spawn: Spawn) -> None:
    worker = spawn("burn")
    answer, _ = worker.infer(np.array([0.05, 0, 0, 0], np.float32), received_s=time.monotonic() - 0.5)
    assert 500_000 <= answer.queue_us < 5_000_000
    assert 50_000 <= answer.compute_us < 5_000_000
    assert answer.decode_us < 50_000
    assert answer.encode_us < 50_000


def test_a_request_that_cannot_be_answered_gets_the_reason_and_the_next_is_served(spawn: Spawn) -> None:
    worker = spawn("twice")
    cases: tuple[tuple[bytes, dict[str, object], int, str], ...] = (
        (b"{", {"content_type": JSON}, 400, "expected JSON"),
        (b"x", {"content_type": RAW}, 400, r"expected 16 bytes"),
        (b"x", {"content_type": "image/png"}, 415, "takes no images"),
        (b"x", {"content_type": "text/plain"}, 415, "text/plain"),
        (X.tobytes(), {"content_type": RAW, "accept": "text/plain"}, 415, "text/plain"),
        (X.tobytes(), {"content_type": RAW, "deadline_s": 1.0}, 408, "deadline passed"),
    )
    for payload, fields, status, words in cases:
        answer, body = worker.infer(payload, **fields)
        assert (answer.status, answer.compute_us) == (status, 0), fields
        assert words in answer.message
        assert answer.content_type == JSON
        refusal = json.loads(body)
        hint = f" ({refusal['hint']})" if refusal.get("hint") else ""
        assert refusal["error"] + hint == answer.message
        np.testing.assert_array_equal(worker.infer_raw(*X), X * 2)


def test_a_client_without_properties_finds_everything_in_the_json(spawn: Spawn) -> None:
    worker = spawn("twice")
    _, payload = worker.infer(json.dumps(BODY).encode(), content_type="", client_json=True, id="i")
    assert {"status": 200, "message": "", "id": "i"}.items() <= json.loads(payload).items()
    answer, payload = worker.infer(b"x", content_type="text/plain", client_json=True, id="i")
    assert answer.content_type == JSON
    assert {"status": 415, "id": "i"}.items() <= json.loads(payload).items()


def test_requests_sent_ahead_are_answered_in_order(spawn: Spawn) -> None:
    worker = spawn("twice")
    for seq in range(20):
        worker.channel.send(Request(seq, RAW), (X + seq).tobytes())
    worker.channel.send(Stop())
    for seq in range(20):
        frame = worker.channel.receive()
        assert frame is not None
        assert isinstance(frame.header, Answer)
        assert frame.header.seq == seq
        np.testing.assert_array_equal(np.frombuffer(frame.payload, np.float32), (X + seq) * 2)
    # What was sent before the stop is answered, then it ends.
    assert worker.channel.receive() is None
    assert worker.process.wait(PATIENCE_S) == 0


def test_a_worker_ends_with_its_agent(spawn: Spawn) -> None:
    worker = spawn("twice")
    worker.connection.close()
    assert worker.process.wait(PATIENCE_S) == 0


def test_a_terminals_interrupt_is_ignored(spawn: Spawn) -> None:
    worker = spawn("twice")
    worker.process.send_signal(signal.SIGINT)
    worker.process.send_signal(signal.SIGTERM)
    np.testing.assert_array_equal(worker.infer_raw(*X), X * 2)


def test_an_invalid_frame_ends_the_worker(spawn: Spawn) -> None:
    worker = spawn("twice")
    worker.connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert worker.process.wait(PATIENCE_S) == 1


def test_without_a_channel_it_says_how_it_is_started() -> None:
    done = subprocess.run([sys.executable, "-m", "agent.worker"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage:")


# -- the whole bundle


def test_weights_samples_labels_and_steps_of_a_bundle_are_used(spawn: Spawn) -> None:
    g = GraphBuilder()
    w, image = g.input("w", (1, 3, 2, 2)), g.input("image", (1, 3, 2, 2))
    doubled = g.call("twice", [w], (1, 3, 2, 2))
    total = g.reshape(g.call("plus", [image, doubled], (1, 3, 2, 2)), (1, 12))
    weight = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    recorded = np.linspace(0, 1, 12, dtype=np.float32).reshape(1, 3, 2, 2)
    expected = (recorded + 2 * weight).reshape(1, 12)
    worker = spawn(
        g.graph(total),
        weights={"w": weight},
        files={
            "labels.txt": "".join(f"label {i}\n" for i in range(12)).encode(),
            "samples/inputs.params": params(**{"0/image": recorded}),
            "samples/outputs.params": params(**{"0/scores": expected}),
        },
        inputs=(TensorSpec("image", "FP32", (1, 3, 2, 2)),),
        outputs=(TensorSpec("scores", "FP32", (1, 12)),),
        preprocess=Preprocess(
            "image", "RGB", (2, 2), "stretch", "bilinear", None, 1 / 255, (0,), (1,), "NCHW"
        ),
        postprocess=Postprocess((Softmax("scores"), TopK("scores", 2))),
        samples=Samples(1, 1e-4, 1e-5),
        load={"memory_bytes": 1 << 30, "threads": 1, "cpus": (0,)},
    )
    assert isinstance(worker.loaded, Ready), worker.loaded
    file = io.BytesIO()
    Image.new("RGB", (20, 10), "white").save(file, "JPEG")
    answer, payload = worker.infer(file.getvalue(), content_type="image/jpeg")
    assert answer.status == 200, answer.message
    outputs = {output["name"]: output["data"] for output in json.loads(payload)["outputs"]}
    logits = 1 + 2 * np.arange(12)
    probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert outputs["labels"] == ["label 11", "label 10"]
    assert outputs["indices"] == [11, 10]
    np.testing.assert_allclose(outputs["scores"], probabilities[[11, 10]], rtol=1e-5)
    # A damaged image, and one whose header claims a huge size.
    assert worker.infer(file.getvalue()[:300], content_type="image/jpeg")[0].status == 400


def test_a_bundle_whose_samples_do_not_come_out_is_not_served(spawn: Spawn) -> None:
    worker = spawn(
        "twice",
        files={
            "samples/inputs.params": params(**{"0/x": X}),
            "samples/outputs.params": params(**{"0/y": X * 2.1}),
        },
        samples=Samples(1, 1e-4, 1e-5),
    )
    assert isinstance(worker.loaded, Failed)
    assert worker.loaded.code == "ERR_SELF_TEST"
    assert "sample 0: output 'y': expected a relative error up to" in worker.loaded.message
    assert worker.process.wait(PATIENCE_S) == 0


def test_a_bundle_without_samples_that_fails_on_zeros_is_not_served(spawn: Spawn) -> None:
    worker = spawn("abort_on_zeros")
    assert worker.loaded is None
    assert worker.process.wait(PATIENCE_S) == -signal.SIGABRT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            {"graph": one_kernel("absent")},
            "ERR_ARBITRARY_SOFTWARE",
            "kernel 'absent', which mod.so does not have",
        ),
        ({"files": {"mod.so": b"\x7fELF no"}}, "ERR_INCOMPATIBLE", "cannot load the kernel library"),
        ({"files": {"mod.json": b"{}"}}, "ERR_ARBITRARY_SOFTWARE", "mod.json"),
        ({"files": {"mod.params": b"{}"}}, "ERR_ARBITRARY_SOFTWARE", "mod.params"),
        (
            {"outputs": (TensorSpec("y", "FP32", (5,)),)},
            "ERR_ARBITRARY_SOFTWARE",
            "not match the manifest",
        ),
        ({"inputs": (TensorSpec("z", "FP32", (4,)),)}, "ERR_ARBITRARY_SOFTWARE", "not match the manifest"),
        ({"postprocess": Postprocess((TopK("y", 5),))}, "ERR_ARBITRARY_SOFTWARE", "row of at least 5 values"),
    ],
)
def test_a_bundle_that_does_not_fit_together_is_refused_in_one_line(
    spawn: Spawn, change: dict[str, object], code: str, words: str
) -> None:
    worker = spawn(**({"graph": "twice"} | change))
    assert isinstance(worker.loaded, Failed), worker.loaded
    assert worker.loaded.code == code
    assert words in worker.loaded.message
    assert "\n" not in worker.loaded.message
    assert worker.process.wait(PATIENCE_S) == 0


def test_the_worker_holds_only_what_it_needs(
    kernel_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tvm-ffi would import it, wherever it is installed.
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{PROJECT}")
    # The process itself says what it holds: its own `main`, over a real channel, with everything declared.
    script = """if True:
        import os, sys
        sys.argv[0] = "worker"
        from agent.worker import __main__ as worker
        template = os.getpid()
        status = worker.main([sys.argv[1]])
        if os.getpid() == template:
            sys.exit(status)
        held = {name for name, module in sys.modules.items() if module}
        forbidden = "torch ml_dtypes tvm onnx onnxruntime builder paho statistics"
        forbidden += " agent.service agent.deploy agent.mqtt agent.runtime.benchmark"
        print(status, sorted(held & set(forbidden.split())), "cryptography" in held, flush=True)
    """
    from agent.worker.channel import Channel, send_load
    from agent.worker.frames import Load
    from tests.agent.worker.conftest import manifest, sealed

    content = {
        "mod.so": kernel_library.read_bytes(),
        "mod.json": one_kernel("twice").to_json(),
        "mod.params": params(),
    }
    specs = (TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", (4,)),)
    ours, theirs = socket.socketpair()
    output, log = os.pipe()
    with ours, open(output) as lines:  # noqa: PTH123 - a descriptor
        with theirs, template((sys.executable, "-c", script)) as (connection, _):
            process = fork(connection, [theirs.fileno(), log])
        os.close(log)
        descriptors = [sealed(each) for each in content.values()]
        send_load(ours, Load(tuple(content)), manifest(content, *specs).to_bytes(), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel = Channel(ours)
        frame = channel.receive()
        assert frame is not None
        assert isinstance(frame.header, Ready)
        channel.send(Request(1, RAW), X.tobytes())
        assert channel.receive() is not None
        channel.send(Stop())
        assert process.wait() == 0
        assert lines.readline() == "0 [] False\n"


def test_objects_with_masks_are_decoded_inside_the_sandbox(spawn: Spawn) -> None:
    g = GraphBuilder()
    image = g.input("image", (1, 3, 16, 16))
    doubled = g.call("twice", [image], (1, 3, 16, 16))
    outputs = (TensorSpec("rows", "FP32", (1, 16, 48)), TensorSpec("maps", "FP32", (1, 3, 16, 16)))
    step = Objects(
        boxes=(Part("rows", 0, 4),),
        coding="corners",
        scores=(Part("rows", 4, 2),),
        mask_weights=(Part("rows", 6, 3),),
        prototypes="maps",
    )
    declared = Preprocess("image", "RGB", (16, 16), "stretch", "bilinear", None, 0.5, (0,), (1,), "NCHW")
    worker = spawn(
        g.graph(g.reshape(doubled, (1, 16, 48)), doubled),
        files={"labels.txt": "cat\nözen\n".encode()},
        inputs=(TensorSpec("image", "FP32", (1, 3, 16, 16)),),
        outputs=outputs,
        preprocess=declared,
        postprocess=Postprocess((step,)),
    )
    assert isinstance(worker.loaded, Ready), worker.loaded
    # The model doubles halves of pixels: its outputs are the pixels.
    pixels = np.zeros((16, 48), np.uint8)
    pixels[3, :9] = (2, 1, 16, 15, 1, 0, 1, 0, 0)
    pixels[4, :9] = (0, 0, 8, 8, 0, 1, 0, 1, 0)
    maps = pixels.reshape(3, 16, 16)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(maps.transpose(1, 2, 0))).save(file, "PNG")
    answer, payload = worker.infer(file.getvalue(), content_type="image/png")
    assert answer.status == 200, answer.message
    found = {output["name"]: output["data"] for output in json.loads(payload)["outputs"]}
    expected: Any = Postprocessor(Postprocess((step,)), outputs, (b"cat", "özen".encode()))(
        {"rows": pixels[None].astype(np.float32), "maps": maps[None].astype(np.float32)},
        Placement(16, 16, 1, 1, 0, 0, 16, 16),
    )
    assert found["boxes"] == expected["boxes"].ravel().tolist() == [2, 1, 16, 15, 0, 0, 8, 8]
    assert found["labels"] == ["cat", "özen"]
    assert found["masks"] == [code.decode() for code in expected["masks"]]
    assert found["mask_size"] == [16, 16]
