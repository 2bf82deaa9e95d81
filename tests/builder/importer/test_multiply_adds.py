"""The work of a model's nodes."""

from __future__ import annotations

import numpy as np

from builder.importer.multiply_adds import multiply_adds
from tests.builder.quantising.networks import Network


def test_work_of_other_products_is_counted_too() -> None:
    network = Network()
    x = network.input("x", [5, 2, 8])
    w, r = (network.constant(np.zeros((1, 16, n))) for n in (8, 4))
    lstm = network.op("LSTM", x, w, r, hidden_size=4)
    picture = network.input("picture", [1, 3, 4, 4])
    wider = network.op("ConvTranspose", picture, network.constant(np.zeros((3, 6, 2, 2))), strides=[2, 2])
    assert multiply_adds(network.model(lstm, wider)) == 5 * 2 * 16 * (8 + 4) + 3 * 16 * 6 * 4
