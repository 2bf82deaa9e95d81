"""Einsum as transposes and a product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import ModelMaker, operators

EQUATIONS = {
    "bhid,bhjd->bhij": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "bhwc,hkc->bhwk": ((1, 3, 4, 5), (3, 6, 5)),
    "ij,jk": ((3, 4), (4, 5)),
    "...ij,...jk->...ik": ((2, 3, 4, 5), (2, 3, 5, 2)),
    "nctv,vw->nctw": ((2, 3, 4, 5), (5, 6)),
    "ijk,jil->kl": ((2, 3, 4), (3, 2, 5)),
    "abc,cd->db": ((2, 3, 4), (4, 5)),
    "bi,bj->bij": ((2, 3), (2, 4)),
    "bhw,c->bchw": ((2, 3, 4), (5,)),
    "i,i->": ((7,), (7,)),
    "bqc,bchw->bqhw": ((2, 3, 4), (2, 4, 5, 6)),
    "bik,bkj->bij": ((1, 3, 1), (2, 2, 4)),
    "...ij,...jk": ((2, 1, 4, 5), (1, 3, 5, 2)),
    "ab,bc->ac": ((3, 4), (1, 2)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_sum_of_products(equation: str, make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    a, b = EQUATIONS[equation]
    shape = list(np.einsum(equation, np.zeros(a), np.zeros(b)).shape)
    node = helper.make_node("Einsum", ["x", "z"], ["y"], name="node", equation=equation)
    model = make_model([node], {"x": list(a), "z": list(b)}, {"y": shape})
    assert "Einsum" not in operators(import_onnx(model).onnx)
    agrees(model, noise(*a), noise(*b))


def test_a_diagonal_stays(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    node = helper.make_node("Einsum", ["x", "z"], ["y"], name="node", equation="ii,ij->j")
    agrees(make_model([node], {"x": [3, 3], "z": [3, 4]}, {"y": [4]}), noise(3, 3), noise(3, 4))
