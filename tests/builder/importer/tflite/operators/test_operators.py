"""Every operator in every datatype that LiteRT has, on odd shapes: the conversion gives LiteRT's numbers.

The models are run in one process, because LiteRT and ONNX Runtime need a millisecond each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

import numpy as np
import pytest
import tflite

from builder.importer.tflite.control_flow import STATIC
from builder.importer.tflite.operators import CONVERTERS
from tests.builder.importer.tflite.litert import distance, run_converted, run_litert
from tests.builder.importer.tflite.operator_cases import Case, X, Y, build, cases

REAL: Final = 1e-5
# The interpreter rounds real data to 8 bits if the weights are whole numbers; we do not.
HYBRID: Final = 0.05
# 16-bit functions that the interpreter interpolates: steps of 65536.
INTERPOLATED: Final = {
    "EXP": 2, "LOG": 32, "LOGISTIC": 2, "RSQRT": 64, "SOFTMAX": 2, "TANH": 2,
}  # fmt: skip
# By `test_detection`, `test_sparsity`, `test_spectrum`, `test_indexing` and `test_stablehlo`.
JUDGED_ELSEWHERE: Final = {
    *("DENSIFY", "NON_MAX_SUPPRESSION_V4", "NON_MAX_SUPPRESSION_V5"),
    *("COMPLEX_ABS", "IMAG", "REAL", "RFFT2D"),
    *("UNIQUE", "WHERE", "REDUCE_WINDOW"),
    *(name for name in CONVERTERS if name.startswith("STABLEHLO")),
}
# Operators of the schema that no graph of tensors with fixed shapes has: strings and hash tables, random
# numbers, and names that stand for no operator.
NOT_TENSORS: Final = {
    *("CUSTOM", "DELEGATE", "PLACEHOLDER_FOR_GREATER_OP_CODES", "CONCAT_EMBEDDINGS", "SKIP_GRAM"),
    *(
        "HASHTABLE",
        "HASHTABLE_FIND",
        "HASHTABLE_IMPORT",
        "HASHTABLE_SIZE",
        "HASHTABLE_LOOKUP",
        "LSH_PROJECTION",
    ),
    *("MULTINOMIAL", "RANDOM_STANDARD_NORMAL", "RANDOM_UNIFORM"),
    "EMBEDDING_LOOKUP_SPARSE",
}
KINDS: Final = ("float", "8 bits", "16 bits", "whole numbers", "hybrid")


def limit_of(case: Case, dtype: str, kind: str) -> float:
    if kind:
        return HYBRID
    if dtype == "int16":
        return INTERPOLATED.get(case.code, 1)
    return {"float32": REAL, "int8": 1, "uint8": 1}.get(dtype, 0)


def kind_of(dtype: str, kind: str) -> str:
    if kind:
        return "hybrid"
    return {"float32": "float", "int8": "8 bits", "uint8": "8 bits", "int16": "16 bits"}.get(
        dtype, "whole numbers"
    )


@pytest.mark.slow
def test_operators_give_the_numbers_of_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    judged: defaultdict[str, set[str]] = defaultdict(set)
    for case, dtype, between, kind in cases():
        name = case.name(dtype, between=between)
        raw, feeds = build(case, dtype, between=between)
        theirs = run_litert(raw, feeds, case.code)
        if isinstance(theirs, str):
            counts["not judged"] += 1
            continue
        error = distance(run_converted(raw, feeds), theirs)
        judged[kind_of(dtype, kind)].add(case.code)
        counts["right" if error <= limit_of(case, dtype, kind) else "wrong"] += 1
        if error > limit_of(case, dtype, kind):
            wrong.append(f"{name}: {error:.3g}")
    codes = set.union(*judged.values())
    known = set(CONVERTERS) | set(STATIC)
    schema = {name for name in vars(tflite.BuiltinOperator) if name[0] != "_" and "STABLEHLO" not in name}
    assert not known & NOT_TENSORS
    taken = known & schema
    with capsys.disabled():
        print(f"\nTFLite: {len(taken)} of {len(schema - NOT_TENSORS)} operators, cases {dict(counts)}")
        print(f"  missing: {sorted(schema - NOT_TENSORS - taken)}")
        for one in KINDS:
            print(f"  {one}: {len(judged[one])} operators")
        print(f"  not judged: {sorted(set(CONVERTERS) - codes)}")
    assert wrong == []
    assert counts["right"] > 2700
    assert len(taken) >= 0.95 * len(schema - NOT_TENSORS)
    assert len(codes) > 115
    assert codes >= set(CONVERTERS) - JUDGED_ELSEWHERE


def test_the_logarithm_of_negative_integers_is_the_lowest() -> None:
    raw, _ = build(Case("LOG", [X((5,), -4, 4)], [Y(-3, 2)]), "int16")
    feeds = [np.array([-32768, -1, 0, 8192, 32767], np.int16)]
    ours, theirs = run_converted(raw, feeds), run_litert(raw, feeds, "LOG")
    assert not isinstance(theirs, str)
    assert list(ours[0][:3]) == list(theirs[0][:3]) == [-32768] * 3
    assert distance(ours, theirs) <= INTERPOLATED["LOG"]
