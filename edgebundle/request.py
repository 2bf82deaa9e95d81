"""An inference request: a picture, tensors or JSON, as a payload for MQTT 5 and as JSON for MQTT 3.1.1.

Promises: numpy is imported only for arrays. An array is converted to the model's datatype only if no value
changes by more than rounding; everything else is an error before anything is sent.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent import array_file
from agent.bundle.tensor_spec import TensorSpec
from agent.wire import document
from agent.wire.beginnings import PNG_SIGNATURE, content_type_of
from agent.wire.content_types import IMAGES, JSON, PNG, RAW, WAV
from agent.wire.session import SessionStep
from agent.wire.tensors import JsonTensor, format_tensor, parse_tensor
from edgebundle.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

# WAV's codes for samples.
_WAV_PCM, _WAV_FLOAT = 1, 3
# By default an agent accepts packets of 64 MiB, of which the properties take at most a part of the rest. A
# broker drops a larger one without a word.
MAX_REQUEST_BYTES: Final = (64 << 20) - (256 << 10)
# Colour types of PNG by the number of channels (RFC 2083, 4.1.1).
_COLOUR_TYPES: Final = {1: 0, 3: 2, 4: 6}
_PNG_CHUNK: Final = struct.Struct(">I4s")
# The fastest level: a device waits less for a few more bytes than for the workstation.
_COMPRESSION: Final = 1


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request.

    Attributes
    ----------
    content_type
        The media type of `body`.
    body
        The payload.
    tensors
        For raw tensors, one `name;FP32;1,3,4` each, in the order in which they lie in `body`.
    session
        Which step of which session it is, or None.
    is_raw
        Whether the answer should have the model's own outputs, without its postprocess.
    """

    content_type: str
    body: bytes = field(repr=False)
    tensors: tuple[str, ...] = ()
    session: SessionStep | None = None
    is_raw: bool = False

    def __post_init__(self) -> None:
        if len(self.body) > MAX_REQUEST_BYTES:
            raise UsageError(
                f"expected a request of at most {MAX_REQUEST_BYTES} bytes, got {len(self.body)}",
                hint="send a smaller picture, or fewer tensors in one request",
            )

    @classmethod
    def image(cls, raw: bytes) -> Request:
        """Make a request from an image file's bytes.

        Raises
        ------
        UsageError
            If they are neither a JPEG nor a PNG.
        """
        content_type = content_type_of(raw)
        if content_type not in IMAGES:
            raise UsageError(
                "expected a JPEG or PNG image, got something else",
                hint="convert it, or give the pixels as an array (height, width, 3) of uint8",
            )
        return cls(content_type, raw)

    @classmethod
    def sound(cls, raw: bytes) -> Request:
        """Make a request from a WAV file's bytes.

        Raises
        ------
        UsageError
            If they are none.
        """
        if content_type_of(raw) != WAV:
            raise UsageError("expected a WAV file, got something else", hint="ffmpeg -i FILE -ac 1 out.wav")
        return cls(WAV, raw)

    @classmethod
    def samples(cls, samples: object, rate: int) -> Request:
        """Make a request from samples.

        Parameters
        ----------
        samples
            float32 or float64 from -1 to 1, or int16; shape (n,), or (n, channels).
        rate
            Samples a second.

        Raises
        ------
        UsageError
            If they have another dtype or shape.
        """
        import numpy as np

        array = np.asarray(samples)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        if array.dtype not in (np.float32, np.int16) or array.ndim not in (1, 2):
            raise UsageError(
                "a recording: expected float32 or int16 of shape (n,) or (n, channels), "
                f"got {array.dtype} {array.shape}",
                hint="convert it: samples.astype(numpy.float32), between -1 and 1",
            )
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        channels = array.shape[1] if array.ndim == 2 else 1
        width = array.dtype.itemsize
        code = _WAV_FLOAT if array.dtype == np.float32 else _WAV_PCM
        form = struct.pack(
            "<HHIIHH", code, channels, rate, rate * channels * width, channels * width, 8 * width
        )
        head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data))
        return cls(WAV, b"RIFF" + struct.pack("<I", len(head) + len(data)) + head + data)

    @classmethod
    def pixels(cls, pixels: object) -> Request:
        """Make a request from the pixels of a picture.

        Parameters
        ----------
        pixels
            A picture of Pillow, or an array: uint8, shape (height, width), (height, width, 3) in the order
            red, green, blue, or (height, width, 4) with alpha. It is sent as PNG.

        Raises
        ------
        UsageError
            If it is neither.
        """
        import numpy as np

        convert = getattr(pixels, "convert", None)
        if convert is not None:  # Pillow: a palette's indices are no colours
            pixels = convert("RGB")
        array = np.asarray(pixels)
        channels = array.shape[2] if array.ndim == 3 else 1
        if (
            array.dtype != np.uint8
            or array.ndim not in (2, 3)
            or channels not in _COLOUR_TYPES
            or not array.size
        ):
            raise UsageError(
                "a picture: expected uint8 of shape (height, width) or (height, width, 3 or 4), "
                f"got {array.dtype} {array.shape}",
                hint="convert it: pixels.astype(numpy.uint8), with the channels last",
            )
        height, width = array.shape[:2]
        rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row begins with filter 0, "none"
        rows[:, 1:] = array.reshape(height, -1)
        head = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), _COMPRESSION)), (b"IEND", b""))
        return cls(PNG, PNG_SIGNATURE + b"".join(_chunk(name, data) for name, data in chunks))

    @classmethod
    def arrays(
        cls,
        arrays: Mapping[str, Any],
        inputs: Sequence[TensorSpec] = (),
        smallest: Sequence[tuple[int, ...]] = (),
        quantised: Collection[str] = (),
    ) -> Request:
        """Make a request from arrays by input name.

        Parameters
        ----------
        arrays
            Arrays, or what `numpy.asarray` takes.
        inputs
            The model's inputs, if they are known: arrays are converted to their datatypes, and leading
            dimensions of 1 may be left out.
        smallest
            Their smallest shapes, if shapes change; `inputs` has the largest.
        quantised
            The quantised inputs, for which the device makes integers of floating-point arrays.

        Raises
        ------
        UsageError
            If an array has a dtype that no model takes, or that its input does not take.
        """
        import numpy as np

        known = {spec.name: spec for spec in inputs}
        unknown = [name for name in arrays if known and name not in known]
        if unknown:
            raise UsageError(
                f"the model does not have an input {unknown[0]!r:.80}",
                hint=f"its inputs are {', '.join(map(str, inputs))}",
            )
        shapes = dict(zip(known, smallest, strict=False))
        tensors, parts = [], []
        for name, given in arrays.items():
            array = np.asarray(given)
            spec = known.get(name)
            if spec is not None and name in quantised and array.dtype.kind == "f":
                spec = TensorSpec(name, "FP32", spec.shape)
            if spec is not None:
                array = _fit(array, spec, shapes.get(name, spec.shape))
            if spec is None or array.shape != spec.shape:
                try:
                    spec = TensorSpec.from_dtype(name, array.dtype.name, array.shape)
                except ValueError as error:
                    raise UsageError(
                        f"input {name}: {error}",
                        hint="convert it to a type of numpy such as float32, int64 or uint8",
                    ) from error
            tensors.append(format_tensor(spec.name, spec.datatype, spec.shape))
            parts.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
        return cls(RAW, b"".join(parts), tuple(tensors))

    @classmethod
    def row(cls, row: object) -> Request:
        """Make a request from a row of a table, for a model that declares columns.

        Parameters
        ----------
        row
            A mapping from the columns' names to values, or a sequence of values in the columns' order; also
            a row of pandas, or an array of one dimension. A value is a number, a truth value, a text, or
            None or NaN if it is missing.

        Raises
        ------
        UsageError
            If it is neither, or a value is something else.
        """
        plain = getattr(row, "to_dict", None) or getattr(row, "tolist", None)
        given = plain() if plain is not None else row
        if isinstance(given, Mapping):
            values: object = {str(name): _value(name, value) for name, value in given.items()}
        elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
            values = [_value(place, value) for place, value in enumerate(given)]
        else:
            raise UsageError(
                f"a row: expected a mapping or a sequence of values, got {type(row).__name__:.80}",
                hint="model(row={'temperature': 21.5, 'humidity': 40})",
            )
        return cls(JSON, json.dumps({"row": values}, separators=(",", ":")).encode())

    @classmethod
    def from_file(cls, path: Path) -> Request:
        """Make a request from a file: a JPEG, a PNG, a WAV, an `.npz` of inputs, or a `.json` request.

        Raises
        ------
        UsageError
            If it is none of these.
        OSError
            If it cannot be read.
        """
        size = path.stat().st_size
        if size > MAX_REQUEST_BYTES:
            raise UsageError(
                f"{path}: expected at most {MAX_REQUEST_BYTES} bytes, got {size}",
                hint="send a part of it: the broker and the agent take no larger message",
            )
        if path.suffix == ".npz":
            return cls.arrays(read_arrays(path))
        raw = path.read_bytes()
        if path.suffix == ".json":
            return cls(JSON, raw)
        if path.suffix.lower() == ".wav":
            return cls.sound(raw)
        try:
            return cls.image(raw)
        except UsageError as error:
            raise UsageError(
                f"{path}: {error.message}",
                hint="use a .jpg, a .png, a .wav, an .npz of inputs or a .json request",
            ) from error

    def to_json(self, inputs: Sequence[TensorSpec]) -> bytes:
        """Return the request as JSON of the Open Inference Protocol, for a broker without MQTT 5.

        Parameters
        ----------
        inputs
            The model's inputs; an image is for the only one.

        Raises
        ------
        UsageError
            If an image is for a model with several inputs, or a tensor holds NaN or infinity.
        """
        more: dict[str, object] = {"parameters": {"postprocess": "none"}} if self.is_raw else {}
        if self.content_type == JSON:
            return self._with(more) if more else self.body
        tensors = self._raw_tensors() if self.content_type == RAW else self._image_tensor(inputs)
        try:
            return document.encode({"inputs": [tensor.to_document() for tensor in tensors], **more})
        except UsageError:  # a ValueError, too
            raise
        except ValueError as error:
            raise UsageError(
                "expected finite numbers, got NaN or infinity, which JSON cannot represent",
                hint="use a broker with MQTT 5",
            ) from error

    def _with(self, more: Mapping[str, object]) -> bytes:
        try:
            return document.encode({**json.loads(self.body), **more})
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(
                "expected a JSON object, got something else",
                hint='write {"inputs": [...]}, as docs/mqtt.md shows',
            ) from error

    def _image_tensor(self, inputs: Sequence[TensorSpec]) -> Iterator[JsonTensor]:
        if len(inputs) != 1:
            raise UsageError(
                f"expected a model with one input for an image, got {len(inputs)} inputs",
                hint="prepare the picture yourself, and give each input as an array by name",
            )
        spec = TensorSpec(inputs[0].name, "BYTES", (1,))
        yield JsonTensor(spec, [base64.b64encode(self.body).decode()], self.content_type)

    def _raw_tensors(self) -> Iterator[JsonTensor]:
        import numpy as np

        offset = 0
        for tensor in self.tensors:
            spec = parse_tensor(tensor)
            data = np.frombuffer(self.body, spec.dtype, spec.nbytes // spec.itemsize, offset)
            offset += spec.nbytes
            yield JsonTensor(spec, data.tolist())


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read the arrays of an `.npz` file by name.

    Raises
    ------
    UsageError
        If it is none, or contains objects.
    OSError
        If it cannot be read.
    """
    size = path.stat().st_size
    if size > MAX_REQUEST_BYTES:
        raise UsageError(
            f"{path}: expected at most {MAX_REQUEST_BYTES} bytes, got {size}",
            hint="send a part of it: the broker and the agent take no larger message",
        )
    try:
        return array_file.read_arrays(path)
    except array_file.damage() as error:
        raise UsageError(
            f"{path} cannot be read as .npz: {array_file.reason_of(error)}",
            hint="write it with numpy.savez(FILE, input_name=array)",
        ) from error


def _value(place: object, value: object) -> float | int | str | None:
    """Return a value of a row as JSON has it."""
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "shape", None) == ():  # a scalar of numpy
        value = item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float) and math.isinf(value):
        raise UsageError(
            f"a row: {place!s:.80}: expected a finite number, got {value}",
            hint="give None for a value that is missing",
        )
    if isinstance(value, int | float | str):
        return value
    if str(value) in ("<NA>", "NaT"):  # how pandas writes a missing value
        return None
    raise UsageError(
        f"a row: {place!s:.80}: expected a number, a truth value or a text, got {type(value).__name__:.80}",
        hint="convert it with float() or str(), or give None for a missing value",
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return _PNG_CHUNK.pack(len(data), name) + data + zlib.crc32(name + data).to_bytes(4, "big")


def _fit(array: np.ndarray[Any, Any], spec: TensorSpec, smallest: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Convert an array to an input's datatype, and add leading dimensions of 1."""
    import numpy as np

    if spec.datatype == "BYTES":
        raise UsageError(
            f"input {spec.name} takes BYTES, which cannot be sent as an array",
            hint="give a picture: model(image='cat.jpg')",
        )
    left_out = len(spec.shape) - array.ndim
    dims = list(zip(smallest, spec.shape, strict=True))
    if (
        left_out > 0
        and all(low == 1 for low, _ in dims[:left_out])
        and all(low <= dim <= high for dim, (low, high) in zip(array.shape, dims[left_out:], strict=True))
    ):
        array = array.reshape((1,) * left_out + array.shape)
    elif (
        smallest[:1] == spec.shape[:1]
        and array.ndim == len(spec.shape)
        and array.shape[1:] == spec.shape[1:]
        and array.shape != spec.shape
    ):
        raise UsageError(
            f"input {spec.name}: expected a batch of {spec.shape[0]}, got {array.shape[0]}",
            hint="send the items of a batch one by one: `for answer in model.map(batch)`",
        )
    wanted = np.dtype(spec.dtype)
    if array.dtype == wanted:
        return array
    refused = UsageError(
        f"input {spec.name}: expected {wanted}, got {array.dtype} with values that do not fit",
        hint=f"convert it first: array.astype({wanted.name!r})",
    )
    if array.dtype.kind in "iu" and wanted.kind in "iu":
        bounds = np.iinfo(wanted)
        if array.size and (int(array.min()) < bounds.min or int(array.max()) > bounds.max):
            raise refused
    elif not np.can_cast(array.dtype, wanted, "same_kind"):
        raise refused
    with np.errstate(over="ignore"):
        fitted: np.ndarray[Any, Any] = array.astype(wanted)
    if (
        wanted.kind == "f"
        and array.dtype.kind == "f"
        and not np.array_equal(np.isfinite(array), np.isfinite(fitted))
    ):
        raise refused
    return fitted
