"""The want document: an agent asks for blocks of a bundle, at `edge/v1/<device>/bundles/<digest>/want`.

The answer is one message for each block, at `.../block/<offset>`, whose payload is the file's bytes from that
offset on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from agent.errors import FormatError
from agent.wire import document

# Four integers and their keys take about 70 bytes.
MAX_WANT_BYTES: Final = 1024
# A client that may publish a want can make the other side send at most 64 blocks of 1 MiB at a time.
MAX_BLOCK_BYTES: Final = 1024 * 1024
MAX_COUNT: Final = 64
# A broker that takes no packet of this size would not take the documents about a deployment either.
MIN_BLOCK_BYTES: Final = 512
# What a packet with a block has beside the block and its topic: lengths, and properties that a broker adds.
_HEAD_BYTES: Final = 32
_RANGES: Final = {
    "offset": (0, document.MAX_SAFE_INTEGER),
    "count": (1, MAX_COUNT),
    "block_bytes": (1, MAX_BLOCK_BYTES),
    "seq": (1, document.MAX_SAFE_INTEGER),
}


def largest_block(topic: str, max_packet_bytes: int) -> int:
    """Return how many bytes a block on `topic` has at most, by the largest packet; below 1 if none fits."""
    return min(max_packet_bytes - len(topic) - _HEAD_BYTES, MAX_BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Want:
    """A request for `count` blocks of `block_bytes` each, from byte `offset` on.

    Attributes
    ----------
    offset
        The first byte, at least 0.
    count
        1 to 64.
    block_bytes
        1 to 1 MiB.
    seq
        Grows with each request, so that a new request differs from a copy of an old one.
    """

    offset: int
    count: int
    block_bytes: int
    seq: int

    def to_bytes(self) -> bytes:
        """Write the document."""
        return document.encode(asdict(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Want:
        """Read the document strictly.

        Raises
        ------
        EndlessDataError
            If it is too long.
        FormatError
            If it is not a want document, or a value is out of its range.
        """
        value = document.parse_strictly(raw, "the want document", MAX_WANT_BYTES)
        if not isinstance(value, dict) or value.keys() != _RANGES.keys():
            raise FormatError(f"expected exactly {', '.join(sorted(_RANGES))}, got {document.shown(value)}")
        for key, (low, high) in _RANGES.items():
            if type(value[key]) is not int or not low <= value[key] <= high:
                raise FormatError(
                    f"{key}: expected an integer from {low} to {high}, got {document.shown(value[key])}"
                )
        return cls(**value)
