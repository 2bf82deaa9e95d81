"""Read a model that LightGBM saved as text (`.txt`), without LightGBM.

LightGBM compares in double precision. The model here takes float32, and each threshold is rounded down to
float32: a float32 number is below the one exactly if it is below the other. So every branch is LightGBM's.

Source: LightGBM's `Tree::ToString` and `Tree::NumericalDecision` as its documentation describes the format,
versions `v3` and `v4`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from builder.errors import ModelError, lines_of
from builder.importer.classic.boosted import LEQ, Boosted, Link, Tree, check_tree
from builder.importer.classic.ensemble import MAX_CATEGORY
from builder.importer.classic.ensemble import MEMBER_NUMBER as MEMBER
from builder.importer.classic.saved_file import read_bounded

MAX_BYTES: Final = 512 << 20
# Objective -> how scores become an answer, and whether that is a class.
_OBJECTIVES: Final[Mapping[str, tuple[Link, bool]]] = {
    "binary": ("sigmoid", True),
    "cross_entropy": ("sigmoid", False),
    "cross_entropy_lambda": ("softplus", False),
    "fair": ("identity", False),
    "gamma": ("exp", False),
    "huber": ("identity", False),
    "lambdarank": ("identity", False),
    "mape": ("identity", False),
    "multiclass": ("softmax", True),
    "multiclassova": ("sigmoids", True),
    "poisson": ("exp", False),
    "quantile": ("identity", False),
    "rank_xendcg": ("identity", False),
    "regression": ("identity", False),
    "regression_l1": ("identity", False),
    "tweedie": ("exp", False),
}
_HINT: Final = "save it with booster.save_model('MODEL.txt')"
# The bits of `decision_type`.
_CATEGORICAL, _DEFAULT_LEFT, _MISSING_SHIFT, _MISSING_MASK = 1, 2, 2, 3
_ZERO, _NAN = 1, 2


def read_lightgbm(path: Path) -> tuple[Boosted, str]:
    """Read a model.

    Raises `ModelError` if the file cannot be read, is no such model, or has something that cannot be
        imported.
    """
    raw, digest = read_bounded(path, MAX_BYTES)
    if raw.split(b"\n", 1)[0].strip() != b"tree":
        raise ModelError(
            f"expected a model saved by LightGBM, which begins with 'tree', got {path}", hint=_HINT
        )
    try:
        return _model(raw, str(path)), digest
    except KeyError as error:
        raise ModelError(
            f"expected a model saved by LightGBM, got a file without {error!s:.80}: {path}", hint=_HINT
        ) from error
    except (ValueError, OverflowError, UnicodeDecodeError) as error:
        raise ModelError(
            f"expected a model saved by LightGBM, got {path}: {lines_of(error)[0]:.160}", hint=_HINT
        ) from error


def _model(raw: bytes, where: str) -> Boosted:
    body, end, _ = raw.partition(b"\nend of trees")
    head, *blocks = body.split(b"\nTree=")
    header = _fields(head)
    objective, options = _objective(header, where)
    link, classifier = _OBJECTIVES[objective]
    if b"sqrt" in header.get(b"objective", b"").split():  # trained on square roots with the sign
        link = "square"
    targets = int(header[b"num_tree_per_iteration"])
    features = int(header[b"max_feature_idx"]) + 1
    if targets < 1 or len(blocks) % targets:
        raise ValueError(f"expected a multiple of {targets} trees, got {len(blocks)}")
    sizes = header.get(b"tree_sizes")
    if sizes is None and not (blocks or end):
        raise ValueError("expected trees, got a file that was cut off")
    if sizes is not None and len(sizes.split()) != len(blocks):
        raise ValueError(f"expected {len(sizes.split())} trees, got {len(blocks)}: a part is missing")
    if len(blocks) > 1 << 20 or targets > 1 << 12:
        raise ValueError("expected fewer trees")
    trees = []
    for index, block in enumerate(blocks):
        tree = _tree(_fields(block), index % targets, f"{where}: tree {index}")
        check_tree(tree, features, f"{where}: tree {index}")
        trees.append(tree)
    scale = float(options.get("sigmoid", 1.0))
    if classifier and targets == 1 and link != "sigmoid":
        raise ValueError(f"expected several classes of {objective}")
    return Boosted(
        features, trees, np.zeros(targets, np.float32), link, scale if link.startswith("sigmoid") else 1.0,
        average=b"\naverage_output" in head, classifier=classifier, names=_names(header, features),
    )  # fmt: skip


def _names(header: Mapping[bytes, bytes], features: int) -> tuple[str, ...]:
    """Return the features' names; none if LightGBM numbered them itself (`Column_0`)."""
    # LightGBM refuses names with spaces, or replaces these.
    names = tuple(header.get(b"feature_names", b"").decode("utf-8", "replace").split())
    if len(names) != features:  # before anything is made for each feature: a file may claim any number
        return ()
    own = all(name == f"Column_{place}" for place, name in enumerate(names))
    return () if own else names


def _objective(header: Mapping[bytes, bytes], where: str) -> tuple[str, Mapping[str, str]]:
    """Return the objective and its options, such as `binary sigmoid:1`."""
    name, *words = header.get(b"objective", b"regression").decode().split()
    options = dict(word.split(":", 1) for word in words if ":" in word)
    if name not in _OBJECTIVES or ("sqrt" in words and _OBJECTIVES[name][0] != "identity"):
        raise ModelError(
            f"{where}: expected an objective such as binary, got {' '.join([name, *words])!r:.60}",
            hint="export the model to ONNX with onnxmltools",
        )
    return name, options


def _fields(block: bytes) -> Mapping[bytes, bytes]:
    """The lines `key=value` of a block."""
    found: dict[bytes, bytes] = {}
    for line in block.splitlines():
        key, equals, value = line.partition(b"=")
        if equals:
            found.setdefault(key.strip(), value)
    return found


def _tree(fields: Mapping[bytes, bytes], target: int, where: str) -> Tree:
    if fields.get(b"is_linear", b"0").strip() != b"0":
        raise ModelError(
            f"{where}: expected numbers in leaves, got linear models (linear_tree)",
            hint="train it with linear_tree=False",
        )
    leaves = _numbers(fields[b"leaf_value"], np.float64)
    largest = np.max(np.abs(leaves), initial=0.0)
    if largest > np.finfo(np.float32).max:
        raise ModelError(
            f"{where}: expected values of leaves that float32 can hold, got {largest:.3g}",
            hint="divide the target by a constant, and train again",
        )
    if int(fields[b"num_leaves"]) != leaves.size:
        raise ValueError(f"expected {int(fields[b'num_leaves'])} leaves, got {leaves.size}")
    if leaves.size == 1:
        none = np.zeros(0, np.int64)
        empty = none.astype(np.float32), none.astype(np.uint8), none.astype(bool)
        return Tree(none, *empty, none, none, (), leaves.astype(np.float32), target)
    feature = _numbers(fields[b"split_feature"], np.int64)
    threshold = _numbers(fields[b"threshold"], np.float64)
    decision = _numbers(fields[b"decision_type"], np.int64)
    left, right = _numbers(fields[b"left_child"], np.int64), _numbers(fields[b"right_child"], np.int64)
    columns = (threshold, decision, left, right)
    if feature.size != leaves.size - 1 or any(column.size != feature.size for column in columns):
        raise ValueError(f"{where}: expected {leaves.size - 1} numbers in each list")
    categorical = (decision & _CATEGORICAL) != 0
    default_left = (decision & _DEFAULT_LEFT) != 0
    missing = decision >> _MISSING_SHIFT & _MISSING_MASK
    zero_left = threshold >= 0
    # Zeros that count as missing would need a second test; often they go to the same side anyway.
    if (~categorical & (missing == _ZERO) & (default_left != zero_left)).any():
        raise ModelError(
            f"{where}: expected zeros to be numbers, got a model in which they are missing values",
            hint="train with zero_as_missing=false",
        )
    # A model that saw no missing values takes them for zeros. A missing category goes to the right.
    tracks = np.where(missing == _NAN, default_left, zero_left) & ~categorical
    members = _members(fields, threshold[categorical].astype(np.int64)) if categorical.any() else ()
    rounded = _rounded_down(np.where(categorical, 0.0, threshold))
    modes = np.where(categorical, MEMBER, LEQ).astype(np.uint8)
    return Tree(feature, rounded, modes, tracks, left, right, members, leaves.astype(np.float32), target)


def _members(fields: Mapping[bytes, bytes], sets: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The categories of each set, from its bits."""
    bounds = _numbers(fields[b"cat_boundaries"], np.int64)
    words = _numbers(fields[b"cat_threshold"], np.int64)
    if sets.min() < 0 or sets.max() + 1 >= bounds.size:
        raise ValueError("expected sets that are listed in cat_boundaries")
    found = []
    for place in sets.tolist():
        start, stop = int(bounds[place]), int(bounds[place + 1])
        if not 0 <= start <= stop <= words.size or (stop - start) * 32 > MAX_CATEGORY + 32:
            raise ValueError("expected sets that are listed in cat_threshold")
        bits = (words[start:stop, None] >> np.arange(32)) & 1
        found.append(np.flatnonzero(bits.reshape(-1)))
    return found


def _rounded_down(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the largest float32 numbers that are not larger."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    above = rounded.astype(np.float64) > values
    return np.where(above, np.nextafter(rounded, np.float32(-np.inf)), rounded)


def _numbers(text: bytes, dtype: type[np.generic]) -> NDArray[Any]:
    """Read numbers that are separated by blanks; splitting the text first would take ten times the memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = np.fromstring(text.decode("ascii"), np.float64, sep=" ")
        except (DeprecationWarning, ValueError) as error:
            raise ValueError(f"expected numbers, got {text[:40]!r}") from error
    if np.isnan(found).any():
        raise ValueError("expected numbers, got NaN")
    if np.dtype(dtype).kind == "i":
        if found.size and (np.abs(found).max() > 1 << 53 or (found != np.floor(found)).any()):
            raise ValueError("expected whole numbers")
        return found.astype(dtype)
    return found
