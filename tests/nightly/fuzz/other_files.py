"""Files of frameworks, projects, labels, records, pictures and recordings to damage, and hostile ones."""

from __future__ import annotations

import io
import json
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from tests.nightly.fuzz.case import Case, one_file
from tests.nightly.fuzz.onnx_models import sound_models

_SPEC = json.dumps(
    [1, {"type": "builtins.tuple", "context": "null", "children_spec": [
        {"type": None, "context": None, "children_spec": []}]}]
)  # fmt: skip


def _graph() -> dict[str, Any]:
    """What `torch.export.save` writes about a program: its form, without nodes."""
    meta = {
        "dtype": 7, "sizes": [{"as_int": 3}, {"as_expr": {"expr_str": "s0 + 1", "hint": {"as_int": 8}}}],
        "requires_grad": False, "device": {"type": "cpu", "index": None}, "strides": [{"as_int": 1}],
        "storage_offset": {"as_int": 0}, "layout": 7,
    }  # fmt: skip
    node = {"target": "torch.ops.aten.relu.default", "inputs": [], "outputs": [], "metadata": {}}
    graph = {"inputs": [], "outputs": [], "nodes": [node], "tensor_values": {"x": meta}, "sym_int_values": {}}
    call = {"fqn": "", "signature": {"inputs": [], "outputs": [], "in_spec": _SPEC, "out_spec": _SPEC}}
    signature: dict[str, Any] = {"input_specs": [], "output_specs": []}
    return {
        "graph_module": {"graph": graph, "signature": signature, "module_call_graph": [call]},
        "opset_version": {"aten": 10}, "range_constraints": {"s0": {"min_val": 1, "max_val": 8}},
        "schema_version": {"major": 8, "minor": 7}, "verifiers": [], "torch_version": "2.8",
    }  # fmt: skip


def pt2_files() -> list[Case]:
    """Exported programs, as new and as older versions of PyTorch save them."""
    config = {"config": {"w": {"path_name": "weight_0", "is_param": True, "use_pickle": False}}}
    new = {
        "model/archive_format": b"pt2", "model/data/weights/weight_0": bytes(64),
        "model/data/weights/model_weights_config.json": json.dumps(config).encode(),
        "model/models/model.json": json.dumps(_graph()).encode(), "model/byteorder": b"little",
    }  # fmt: skip
    old = {
        "serialized_exported_program.json": json.dumps(_graph()).encode(), "version": b"8.7",
        "serialized_state_dict.pt": bytes(200), "serialized_constants.pt": b"",
    }  # fmt: skip
    pickled = {"model/data.pkl": b"\x80\x02cos\nsystem\nq\x00X\x09\x00\x00\x00touch ranq\x01\x85q\x02Rq\x03."}
    return [one_file("model.pt2", zipped(members)) for members in (new, old)] + [
        one_file(f"model{suffix}", zipped(pickled)) for suffix in (".pt2", ".pt", ".pth")
    ]


def _packed(content: bytes) -> Case:
    """A program whose document is far larger than its archive."""
    return one_file("model.pt2", zipped({_DOCUMENT: content}, zipfile.ZIP_DEFLATED))


def _with_others(others: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Case:
    """A program with other members in its archive."""
    return one_file("model.pt2", zipped({_DOCUMENT: json.dumps(_graph()).encode(), **others}, kind))


def _code() -> bytes:
    """A document with code in the size of a dimension."""
    return json.dumps(_graph()).encode().replace(b"s0 + 1", b"__import__('os').system('touch ran')")


_DOCUMENT: Final = "m/models/model.json"
HOSTILE_PT2: Final[Sequence[Callable[[], Case]]] = (
    lambda: _packed(b"[" * (100 << 20)),
    lambda: _packed(b'{"a":[' + b"{}," * (30 << 20) + b"{}]}"),
    lambda: _packed(b"[" + b'"x",' * (25 << 20) + b"1]"),
    lambda: _packed(b"[" + b"0.5," * (25 << 20) + b"1]"),
    lambda: _packed(b"1" * 100_000_000),
    lambda: _with_others(dict.fromkeys(("m/a.json", "m/b.json"), b" " * (80 << 20)), zipfile.ZIP_LZMA),
    lambda: _with_others(
        dict.fromkeys([f"m/{at}.json" for at in range(100)], b"[" + b"0," * (1 << 20) + b"0]"),
        zipfile.ZIP_DEFLATED,
    ),
    lambda: _with_others(dict.fromkeys([f"m/{at}" for at in range(120_000)], b"")),
    lambda: _with_others({"m/MODELS/MODEL.json": _code()}),
    lambda: one_file("model.pt2", zipped({_DOCUMENT: _code()}) + _with_others({}).content),
    lambda: Case("model.pt2", {}, pipes=("model.pt2",)),
    lambda: Case("model.pt2", {}, {"model.pt2": "/dev/zero"}),
)


def keras_files() -> list[Case]:
    """Models as Keras saves them: a zip, and the beginning of an HDF5 file."""
    layer = {"module": "keras.layers", "class_name": "Dense", "config": {"units": 3, "name": "dense"}}
    members = {
        "metadata.json": b'{"keras_version": "3.12.0", "date_saved": "2026-11-01@10:00:00"}',
        "config.json": json.dumps({"class_name": "Sequential", "config": {"layers": [layer]}}).encode(),
        "model.weights.h5": b"\x89HDF\r\n\x1a\n" + bytes(500),
    }
    return [
        one_file("model.keras", zipped(members)),
        one_file("model.h5", b"\x89HDF\r\n\x1a\n\x00\x00\x00\x00\x00\x08\x08\x00" + bytes(800)),
    ]


def saved_models() -> list[Case]:
    """A folder as TensorFlow saves a model."""
    shard = "model/variables/variables.data-00000-of-00001"
    files = {
        "model/saved_model.pb": b"\x08\x01\x12\x10\n\x04main\x12\x08\n\x06tags_1", shard: bytes(300),
        "model/variables/variables.index": bytes(200), "model/assets/words.txt": b"one\ntwo\n",
    }  # fmt: skip
    return [Case("model", files)]


def _with_links(links: dict[str, str]) -> Case:
    return Case("model", saved_models()[0].files, links)


# Pipes and devices where files are expected, links out of a folder, too many files.
HOSTILE_KERAS: Final[Sequence[Callable[[], Case]]] = (
    lambda: _with_links({"model/assets/zero": "/dev/zero"}),
    lambda: _with_links({"model/assets/root": "/"}),
    lambda: _with_links({"model/assets/again": "."}),
    lambda: Case("model", saved_models()[0].files, pipes=("model/assets/pipe",)),
    lambda: Case("model", {"model/assets/a": b""}, pipes=("model/saved_model.pb",)),
    lambda: Case("model", {**saved_models()[0].files, **{f"model/assets/{at}": b"" for at in range(3000)}}),
    lambda: Case("model.keras", {}, pipes=("model.keras",)),
    lambda: Case("model.h5", {}, {"model.h5": "/dev/zero"}),
    lambda: Case("model.h5", {"other": b"\x89HDF"}, {"model.h5": "model.h5"}),
)


def zipped(members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, compress_type=kind)
    return stream.getvalue()


PROJECT = b"""[model]
target = "rpi4"
name = "network"
version = "1.2.0"
input_shapes = "x:[1,3,8,8]"

[sign]
key = "signing.key"

[fleet]
broker = "mqtt://localhost"
agents = ["kitchen", "garage"]
"""


def projects() -> list[Case]:
    """A project's file beside a model."""
    model = sound_models()[0].SerializeToString()
    return [Case("edgebundle.toml", {"edgebundle.toml": PROJECT, "model.onnx": model})]


def labels() -> list[Case]:
    """Files of labels."""
    return [
        one_file("labels.txt", text)
        for text in (b"cat\ndog\n", "Žluťoučký\nkůň\n".encode(), b"a\r\nb\r\n", b"\xef\xbb\xbfx\ny")
    ]


def pictures() -> list[Case]:
    """Small pictures of both kinds."""
    rng = np.random.default_rng(0)
    found = []
    for suffix, kind, mode, options in (
        ("jpg", "JPEG", "RGB", {"quality": 60}), ("jpg", "JPEG", "L", {"progressive": True}),
        ("jpg", "JPEG", "CMYK", {}), ("png", "PNG", "RGBA", {}), ("png", "PNG", "P", {}),
        ("png", "PNG", "I;16", {}),
    ):  # fmt: skip
        if mode == "I;16":
            image = Image.fromarray(rng.integers(0, 65535, (24, 18), dtype=np.uint16))
        else:
            image = Image.fromarray(rng.integers(0, 255, (40, 30, 3), dtype=np.uint8)).convert(mode)
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        found.append(one_file(f"picture.{suffix}", stream.getvalue()))
    return found


def _png(width: int, height: int, *more: bytes) -> Case:
    """A picture of any size, with chunks before its pixels."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = _chunk(b"IDAT", zlib.compress(bytes(min(width * height * 3, 100 << 20))))
    end = _chunk(b"IEND", b"")
    return one_file("picture.png", b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + data + end)


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


# Many pixels in a few bytes, and texts that grow.
HOSTILE_PICTURES: Final[Sequence[Callable[[], Case]]] = (
    lambda: _png(50_000, 50_000),
    lambda: _png(2**31 - 1, 1),
    lambda: _png(8, 8, _chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(200 << 20)))),
    lambda: _png(8, 8, _chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(200 << 20)))),
    lambda: _png(0, 0),
)


def recordings() -> list[Case]:
    """WAV files of several kinds."""
    samples = (np.sin(np.arange(1600) / 5) * 20_000).astype("<i2").tobytes()
    found = []
    for kind, bits, channels in ((1, 16, 1), (1, 8, 2), (1, 24, 1), (3, 32, 1), (0xFFFE, 16, 2)):
        width = channels * bits // 8
        layout = struct.pack("<HHIIHH", kind, channels, 16_000, 16_000 * width, width, bits)
        if kind == 0xFFFE:
            layout += struct.pack("<HHI", 22, bits, 3) + struct.pack("<H", 1) + bytes(14)
        body = (
            b"WAVEfmt " + struct.pack("<I", len(layout)) + layout + b"LIST" + struct.pack("<I", 4) + b"INFO"
        )
        body += b"data" + struct.pack("<I", len(samples)) + samples
        found.append(one_file("sound.wav", b"RIFF" + struct.pack("<I", len(body)) + body))
    return found


def records() -> list[Case]:
    """A folder of tuning records with three measured points."""
    from builder.importer import import_onnx
    from builder.records.folder import Records
    from builder.target.device_target import resolve
    from builder.tuning.tasks.extraction import extract_tasks
    from tests.two_operators import two_operators

    device = resolve("host")
    task = max(extract_tasks(import_onnx(two_operators()), device), key=lambda task: task.space.size)
    points = [point for d in task.space.all_decisions() if (point := task.space.point(d)) is not None]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "records"
        with Records.write(folder, device) as written:
            written.append(task, zip(points[:3], [[2e-5, 4e-5], None, [1e-5]], strict=True))
        files = {f"records/{path.name}": path.read_bytes() for path in folder.iterdir()}
    return [Case("records", files)]
