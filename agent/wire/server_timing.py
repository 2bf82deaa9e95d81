"""Where the device's part of an answer's time went, as a user property in the form of W3C Server-Timing.

The value is `queue;dur=0.12, decode;dur=1.9, compute;dur=2.4, encode;dur=0.05`, in milliseconds (W3C Server
Timing, 3). It is absent from answers that were not computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# Longer values are not read; the agent's have about 70 characters.
MAX_CHARACTERS: Final = 256
_METRIC: Final = re.compile(r"(queue|decode|compute|encode);dur=([0-9]{1,9}(?:\.[0-9]{1,6})?)")
_NAMES: Final = ("queue", "decode", "compute", "encode")


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """The four parts.

    Attributes
    ----------
    queue_us, decode_us, compute_us, encode_us
        Microseconds of waiting for the model, of decoding and preprocessing, of the graph, and of
        postprocessing and encoding.
    """

    queue_us: int
    decode_us: int
    compute_us: int
    encode_us: int

    def __str__(self) -> str:
        parts = (self.queue_us, self.decode_us, self.compute_us, self.encode_us)
        return ", ".join(
            f"{name};dur={max(0, us) / 1000:g}" if us < 1_000_000 else f"{name};dur={us // 1000}"
            for name, us in zip(_NAMES, parts, strict=True)
        )

    @classmethod
    def parse(cls, text: str | None) -> ServerTiming | None:
        """Read the parts; None if one is missing."""
        if text is None or len(text) > MAX_CHARACTERS:
            return None
        found = {
            match[1]: round(1000 * float(match[2]))
            for match in map(_METRIC.fullmatch, map(str.strip, text.split(",")))
            if match is not None
        }
        if found.keys() != set(_NAMES):
            return None
        return cls(*(found[name] for name in _NAMES))
