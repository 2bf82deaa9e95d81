"""The table of rewrites, and operators that need no entry in it."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from builder.importer.rewrites import REWRITES
from tests.builder.importer.rewrites.cases import Case, ModelMaker, check_case, one


def test_the_table_names_operators_that_exist() -> None:
    assert all(onnx.defs.has(operator) for operator in REWRITES)


CASES: dict[str, Case] = {
    "activation defined by others": (one("Celu", ["x"], alpha=0.7), {}, [2, 3, 4]),
    "hard swish": (one("HardSwish", ["x"]), {}, [2, 3, 4]),
    "einsum": (one("Einsum", ["x", "x"], equation="bij,bkj->bik"), {}, [2, 3, 3]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_operators(make_model: ModelMaker, noise: Any, agrees: Any, case: str) -> None:
    check_case(make_model, noise, agrees, *CASES[case])
