"""How much of a quantised model's work is computed with integers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FloatLayer:
    """A layer of a quantised model that is computed in float32.

    Attributes
    ----------
    name, operator
        The node of the model.
    multiply_adds
        Its work.
    """

    name: str
    operator: str
    multiply_adds: int


@dataclass(frozen=True, slots=True)
class IntegerWork:
    """The work of a quantised model's convolutions, matrix products and recurrent layers.

    Attributes
    ----------
    multiply_adds
        All of it.
    floats
        The layers that are computed in float32, those with the most work first.
    in_twos
        The multiply-adds of layers whose weights are too large to add four products in 16 bits, so that two
        are added. Only processors without dot products of bytes add them so.
    """

    multiply_adds: int
    floats: tuple[FloatLayer, ...]
    in_twos: int = 0

    @property
    def share(self) -> float:
        """What is computed with integers, from 0 to 1."""
        return 1.0 - sum(layer.multiply_adds for layer in self.floats) / max(self.multiply_adds, 1)

    def summary(self, named: int) -> str:
        """Return the work in one line.

        Parameters
        ----------
        named
            How many layers in float32 it names; the others are counted.
        """
        total = f"{self.multiply_adds / 1e6:,.1f} million multiply-adds"
        names = [
            f"{layer.operator} {layer.name[:60]} ({layer.multiply_adds / max(self.multiply_adds, 1):.1%})"
            for layer in self.floats[:named]
        ]
        more = f" and {len(self.floats) - named} more" if len(self.floats) > named else ""
        rest = f"; in float32: {', '.join(names)}{more}" if names else ""
        large = f"{self.in_twos / max(self.multiply_adds, 1):.1%} with weights too large to add four products"
        twos = f"; {large} in 16 bits (`quantize --target` makes smaller ones)" if self.in_twos else ""
        return f"{self.share:.1%} of {total} computed in integers{rest}{twos}"
