"""What a kernel is to the author of the model: the ONNX nodes that it computes, their window and shapes.

A call in mod.json may say so in its attributes. Promises that what is written and what is read back is short
printable ASCII, because the names come from a model's file. Nothing but messages and profiles uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# An unrolled loop or a long chain of operators would fill a screen; the first and the last nodes say enough.
MAX_NODES: Final = 16
# Exporters write the path of a module; 4096 nodes with such names take a twentieth of mod.json's limit.
MAX_NAME_CHARS: Final = 96
MAX_WINDOW_CHARS: Final = 64
MAX_SHAPES_CHARS: Final = 160

_UNSAFE: Final = re.compile(r"[^!-~]|,")


@dataclass(frozen=True, slots=True)
class Layer:
    """The part of a model that one call of a kernel computes.

    Attributes
    ----------
    nodes
        The ONNX nodes as `Operator name`, such as `Conv /stem/conv`; those that a copy serves if the call
        only moves data.
    window
        Kernel size, strides, groups and dilation of a convolution or pooling, such as `3x3 /2 g32`.
    reads, writes
        Shapes of the nodes' inputs and outputs as in the model, such as `1x3x224x224`; weights are left out.
    """

    nodes: tuple[str, ...] = ()
    window: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        nodes: Sequence[tuple[str, str]],
        window: str = "",
        reads: Sequence[Sequence[int]] = (),
        writes: Sequence[Sequence[int]] = (),
    ) -> Layer:
        """Make a layer of operators and their names, and of shapes; long lists and names are shortened."""
        labels = [f"{clean(op, MAX_NAME_CHARS)} {clean(name, MAX_NAME_CHARS)}" for op, name in nodes]
        if len(labels) > MAX_NODES:
            half = MAX_NODES // 2
            labels = [*labels[:half], *labels[half - MAX_NODES :]]
        return cls(tuple(labels), clean(window, MAX_WINDOW_CHARS, " "), _texts(reads), _texts(writes))

    @classmethod
    def from_attrs(cls, attrs: Mapping[str, str]) -> Layer:
        """Read the attributes of a call, which are untrusted; what is missing is empty."""

        def items(key: str, limit: int) -> tuple[str, ...]:
            text = attrs.get(key, "")[: MAX_NODES * (limit + 1)]
            return tuple(clean(item, limit, " ") for item in text.split(",") if item)[:MAX_NODES]

        return cls(
            items("onnx", 2 * MAX_NAME_CHARS),
            clean(attrs.get("window", ""), MAX_WINDOW_CHARS, " "),
            items("reads", MAX_SHAPES_CHARS),
            items("writes", MAX_SHAPES_CHARS),
        )

    def to_attrs(self) -> dict[str, str]:
        """Return the attributes of a call; what is empty is left out."""
        attrs = {
            "onnx": ",".join(self.nodes),
            "window": self.window,
            "reads": ",".join(self.reads),
            "writes": ",".join(self.writes),
        }
        return {key: value for key, value in attrs.items() if value}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes, without their operators."""
        return tuple(node.rpartition(" ")[2] for node in self.nodes)

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators of the nodes."""
        return tuple(node.partition(" ")[0] for node in self.nodes)


def clean(text: str, limit: int, allowed: str = "") -> str:
    """Return `text` in printable ASCII without commas, shortened in the middle to `limit` characters.

    Characters in `allowed` stay too.
    """
    text = shorten(text[: 4 * limit] if len(text) > 4 * limit else text, limit)
    return _UNSAFE.sub(lambda found: found[0] if found[0] in allowed else "_", text)


def shorten(text: str, limit: int) -> str:
    """Return `text` without its middle if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    kept = max(limit - len(".."), 0)
    tail = (kept + 1) // 2
    return f"{text[: kept - tail]}..{text[len(text) - tail :]}"


def _texts(shapes: Sequence[Sequence[int]]) -> tuple[str, ...]:
    texts = ["x".join(map(str, shape)) or "scalar" for shape in shapes]
    if len(texts) > MAX_NODES:
        texts = texts[:MAX_NODES]
    return tuple(clean(text, MAX_SHAPES_CHARS) for text in texts)
