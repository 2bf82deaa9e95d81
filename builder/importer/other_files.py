"""What a file is that is not the model, or the bundle, it was taken for: its first bytes say so.

Leaves models themselves to their readers. Names in hints exist in the libraries' current versions.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Final

from agent.reading import open_at_once
from builder.importer.model_path import EXPORT_HINT

_SKLEARN: Final = (
    "in the program that has it: from skl2onnx import to_onnx; "
    "open('MODEL.onnx', 'wb').write(to_onnx(model, X[:1]).SerializeToString())"
)


@dataclass(frozen=True, slots=True)
class OtherFile:
    """What a file is, and what to do with it.

    `what`: the kind of file, with its article.
    """

    what: str
    hint: str


_DOWNLOAD: Final = "download the file itself"
_PACKED: Final = "unpack it first"
_MODEL: Final = "give the model's file instead"
_PICKLE: Final = OtherFile("a pickle, as joblib and scikit-learn save models", _SKLEARN)
_UNKNOWN: Final = OtherFile("a truncated file or another format", EXPORT_HINT)
_BEGINNINGS: Final = (
    (rb"version https://git-lfs", OtherFile("a Git LFS pointer", "fetch the file with git lfs pull")),
    (rb"\s*<(!doctype|html)", OtherFile("a web page", _DOWNLOAD)),
    (rb"\s*<\?xml", OtherFile("an XML file", "give the ONNX model that it was converted from")),
    (rb"\xff\xd8\xff", OtherFile("a JPEG picture", f"{_MODEL}; pictures are for --inputs")),
    (rb"\x89PNG", OtherFile("a PNG picture", f"{_MODEL}; pictures are for --inputs")),
    (rb"(RIFF|RF64)....WAVE", OtherFile("a recording (WAV)", f"{_MODEL}; recordings are for --inputs")),
    (rb"%PDF", OtherFile("a PDF document", _MODEL)),
    (rb"\x93NUMPY", OtherFile("an array that NumPy saved", f"{_MODEL}; arrays are for --inputs")),
    (rb"\x7fELF", OtherFile("a program or a library", _MODEL)),
    (rb"\x80[\x02-\x05]", _PICKLE),
    (rb"\x89HDF", OtherFile("an HDF5 file", "if Keras saved it, give it the suffix .h5")),
    (rb"....TFL3", OtherFile("a TensorFlow Lite file", "give it the suffix .tflite")),
    (rb"GGUF", OtherFile("a GGUF file", "export the model to ONNX from the framework that trained it")),
    (rb".{7}\x00\{\"", OtherFile("a safetensors file, which has only weights", "export the model to ONNX")),
    (rb"tree\s", OtherFile("a model of LightGBM", "give it the suffix .txt")),
    (rb"\{L\x00", OtherFile("a model of XGBoost (UBJSON)", "give it the suffix .ubj")),
    (rb"\s*\{", OtherFile("a JSON file", "if XGBoost saved it, give it the suffix .json")),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!", OtherFile("a compressed file", _PACKED)),
    (rb"PK\x03\x04", OtherFile("a zip archive", f"{_PACKED}, and give the model in it")),
)
# Names in the first entries of an archive.
_ARCHIVES: Final = (
    (b"data.pkl", OtherFile("a zip archive that PyTorch saved", "export it: torch.onnx.export, or .pt2")),
    (b"config.json", OtherFile("a zip archive that Keras saved", "give it the suffix .keras")),
    (b"metadata.json", OtherFile("a zip archive that Keras saved", "give it the suffix .keras")),
)
_COMPRESSED: Final = re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|\x04\x22M\x18|\x78[\x01\x5e\x9c\xda]")
_PICKLED: Final = (".joblib", ".pkl", ".pickle")
_HEAD_BYTES: Final = 4096


def recognise(raw: bytes, name: str) -> OtherFile:
    """Tell what a file is.

    `raw`: its content.
    """
    head = raw[:_HEAD_BYTES]
    if name.lower().endswith(_PICKLED) and _COMPRESSED.match(head):
        return _PICKLE
    if name.lower().endswith(".torchscript"):
        return OtherFile("a TorchScript file", "export the model to ONNX: torch.onnx.export, or format=onnx")
    if head.startswith(b"PK\x03\x04"):
        for entry, found in _ARCHIVES:
            if entry in head:
                return found
    if head[257:262] == b"ustar":
        return OtherFile("a tar archive", "a bundle is compiled already: use run, inspect or deploy")
    return next(
        (found for start, found in _BEGINNINGS if re.match(start, head, re.DOTALL | re.IGNORECASE)), _UNKNOWN
    )


def instead_of_bundle(path: str | os.PathLike[str]) -> OtherFile | None:
    """Tell what a file is that was taken for a bundle; None if it may be one, or cannot be told."""
    try:
        fd = open_at_once(path)
    except OSError:
        return None
    try:
        head = os.pread(fd, _HEAD_BYTES, 0)
    except OSError:  # of a folder
        return None
    finally:
        os.close(fd)
    found = recognise(head, os.fspath(path))
    if found is _UNKNOWN or head[257:262] == b"ustar":
        return None
    if found.hint.startswith((_DOWNLOAD, _PACKED)) or found.what == "a Git LFS pointer":
        return found
    if found.hint.startswith(_MODEL):
        return replace(found, hint=found.hint.replace(_MODEL, "give the bundle instead"))
    return replace(found, hint="compile a model first: edgebundle compile MODEL")
