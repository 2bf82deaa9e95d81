"""scikit-learn's KNNImputer: the function that fills a column, written without branches.

skl2onnx writes each column as a function with two conditions, on lengths that follow from which numbers are
missing; their branches do not even make values of the same rank. Here every row is filled, and the rows
without a missing number keep their own: the same numbers, with shapes that are known.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import parser

_DOMAIN: Final = "local_domain"
_COLUMN: Final = "knn_imputer_column"
# What skl2onnx gives the function, in its order.
_INPUTS: Final = (
    "i_col", "x", "dist_chunk", "non_missing_fix_x", "mask_fit_x", "dist_idx_map", "mask", "row_missing_idx",
    "_fit_x", "n_neighbors",
)  # fmt: skip
# The function, with the names of skl2onnx for its inputs. Fitted rows whose own number is missing are no
# donors; where no distance to a donor is known, the mean of the fitted column is taken.
_BODY: Final = """
<domain: "local_domain", opset_import: ["" : 18]>
knn_imputer_column (i_col, x, dist_chunk, non_missing_fix_x, mask_fit_x, dist_idx_map, mask, row_missing_idx,
                    _fit_x, n_neighbors) => (filled)
{
  axis_0 = Constant <value = int64[1] {0}> ()
  axis_1 = Constant <value = int64[1] {1}> ()
  zero = Constant <value = float {0.0}> ()
  one = Constant <value = float {1.0}> ()
  far = Constant <value = float {3.4028234e38}> ()

  is_donor = Gather <axis = 1> (non_missing_fix_x, i_col)
  fitted = Gather <axis = 1> (_fit_x, i_col)
  value = Where (is_donor, fitted, zero)
  distance = Gather <axis = 0> (dist_chunk, dist_idx_map)
  no_distance = IsNaN (distance)
  known = Not (no_distance)
  counts = And (known, is_donor)
  key = Where (counts, distance, far)

  size = Size (fitted)
  fewest = Min (n_neighbors, size)
  k = Reshape (fewest, axis_1)
  nearest, place = TopK <axis = 1, largest = 0> (key, k)
  weights = Cast <to = 1> (counts)
  weight = GatherElements <axis = 1> (weights, place)
  neighbour = Gather <axis = 0> (value, place)
  product = Mul (weight, neighbour)
  total = ReduceSum <keepdims = 0> (product, axis_1)
  count = ReduceSum <keepdims = 0> (weight, axis_1)
  divisor = Max (count, one)
  of_neighbours = Div (total, divisor)

  donors = Cast <to = 1> (is_donor)
  number = ReduceSum <keepdims = 0> (donors)
  at_least_one = Max (number, one)
  sum = ReduceSum <keepdims = 0> (value)
  mean = Div (sum, at_least_one)
  has_neighbours = Greater (count, zero)
  imputed = Where (has_neighbours, of_neighbours, mean)

  own = Gather <axis = 1> (x, i_col)
  is_missing = Gather <axis = 1> (mask, i_col)
  chosen = Where (is_missing, imputed, own)
  column = Unsqueeze (chosen, axis_1)
  index = Reshape (i_col, axis_1)
  next = Add (index, axis_1)
  width = Shape <start = 1> (x)
  before = Slice (x, axis_0, index, axis_1)
  after = Slice (x, next, width, axis_1)
  filled = Concat <axis = 1> (before, column, after)
}
"""


def without_branches(model: onnx.ModelProto) -> None:
    """Replace the function that fills a column of a KNNImputer, if a model has it."""
    for function in model.functions:
        if (function.domain, function.name, tuple(function.input)) == (_DOMAIN, _COLUMN, _INPUTS):
            function.CopyFrom(parser.parse_function(_BODY))
