"""The content types of requests and answers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

# Open Inference Protocol v2.
JSON: Final = "application/json"
# Raw tensors, described by user properties `tensor`.
RAW: Final = "application/octet-stream"
# A parameter in `accept`: answer with the model's own outputs, without its postprocess.
UNPROCESSED: Final = "postprocess=none"
# The JSON's form with tensors as byte strings, if cbor2 is installed.
CBOR: Final = "application/cbor"
JPEG: Final = "image/jpeg"
PNG: Final = "image/png"
# The only input of a model that declares a preprocessing.
IMAGES: Final = (JPEG, PNG)

# A recording, for a model that declares audio; RFC 2586 has the second, RFC 2361 the names of the first.
WAV: Final = "audio/wav"
L16: Final = "audio/l16"
RECORDINGS: Final = (WAV, L16)
# Other names, which browsers and old programs use.
SAME_AS: Final = MappingProxyType(
    {
        **dict.fromkeys(("audio/x-wav", "audio/wave", "audio/vnd.wave"), WAV),
        **dict.fromkeys(("image/jpg", "image/pjpeg"), JPEG),
        "image/x-png": PNG,
    }
)

# In the order in which an agent lists what it accepts.
REQUESTS: Final = (JSON, RAW, JPEG, PNG, WAV, L16, CBOR)
