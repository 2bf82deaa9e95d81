"""One form for each operator, before layouts are chosen.

The importer writes some operators as tensor expressions (ONNX's Min, Max and Clip), and batch norm as a
tuple. Here they become the Relax operators that the layout pass knows, constants are folded, slices after a
convolution become less padding, and a batch norm after it is folded into its weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, TensorLoad

from builder.kernels.passes import branches
from builder.kernels.passes.crops import Crops
from builder.kernels.rewriter import (
    Values,
    constant_of,
    in_anf,
    is_small_integers,
    op_name,
    rewrite_main,
    run,
    shape_of,
    users_of,
)

_EXTREMA: Final[Mapping[type, Callable[..., relax.Expr]]] = {
    tirx.Max: relax.op.maximum,
    tirx.Min: relax.op.minimum,
}
_EXTREMA_BY_NAME: Final[Mapping[str, Callable[..., relax.Expr]]] = {
    "relax.maximum": relax.op.maximum,
    "relax.minimum": relax.op.minimum,
}


def canonicalise(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite `mod` so that later passes see each operator in one form.

    Parameters
    ----------
    mod
        A static Relax module whose weights are constants.
    """
    t = relax.transform
    mod = in_anf(mod)
    mod = rewrite_main(mod, _Forms(mod).emit, Values)
    mod = _fold_constants(run(mod, t.DecomposeOpsForInference(), t.CanonicalizeBindings()))
    mod = rewrite_main(mod, Crops(mod).emit, Values)
    # The convolutions that were sliced would count as readers when scales are folded.
    mod = run(mod, t.DeadCodeElimination(["main"]))
    mod = rewrite_main(mod, _FoldScale(mod).emit, Values)
    mod = _fold_constants(run(mod, t.CanonicalizeBindings()))
    return run(mod, t.DeadCodeElimination(["main"]))


# Operators whose result depends only on the shape of their tensor, or is a shape.
_READ_SHAPES: Final = re.compile(r"_like$|shape_of$|shape_to_tensor$|tensor_to_shape$|\.size$")


def _fold_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Fold what depends only on constants.

    TVM's pass legalises every operator to see whether it can be folded, which took a third of the time of
    lowering. So it runs only on a module in which a binding reads no variable.
    """
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, Call) and op_name(value) == "relax.call_dps_packed":
                continue  # weights of few bits, which stay as they are
            reads_shape = isinstance(value, Call) and _READ_SHAPES.search(op_name(value))
            if reads_shape or not relax.analysis.free_vars(value):
                return run(mod, relax.transform.FoldConstant())
    return mod


# Operators on constants that importers often leave. TVM's constant folding compiles a function for each call,
# which took most of the time of lowering a MobileNet; these are folded with NumPy.
_FOLDS: Final = ("relax.isnan", "relax.where", "relax.reshape", "relax.permute_dims")


def _fold(name: str, call: Call, numbers: list[np.ndarray | None]) -> np.ndarray | None:
    """Return the value of `call`, an operator of `_FOLDS`, None if its tensors are not all constants."""
    x = numbers[0]
    if x is None:
        return None
    if name == "relax.isnan":
        return np.asarray(np.isnan(x))
    if name == "relax.reshape":
        return x.reshape(shape_of(call))
    if name == "relax.permute_dims":
        axes = call.attrs.axes
        return np.ascontiguousarray(x.transpose(None if axes is None else [int(a) for a in axes]))
    yes, no = numbers[1:]
    return None if yes is None or no is None else np.where(x, yes, no)


class _Forms:
    """Rewrites operators that the importer wrote as tensor expressions, and batch norm."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._tuples: dict[relax.Var, relax.Expr] = {}
        # The variable of a maximum with a number -> the other operand, and the number.
        self._lowest: dict[relax.Var, tuple[relax.Expr, float]] = {}

    def emit(self, table: Values, var: relax.Var, call: Call) -> bool:
        """Replace `call` if it is such an operator, or if it can be folded."""
        name = op_name(call)
        folded = (
            _fold(name, call, [constant_of(table.plain(a)) for a in call.args]) if name in _FOLDS else None
        )
        if folded is not None:
            table.define(var, relax.const(folded, str(call.ty.dtype)))
            return True
        if name == "relax.call_tir":
            operator = _extremum(self._mod[call.args[0]])
            args = list(call.args[1].fields)
            if operator is None or len(args) != 2:
                return False
            if not self._clip(table, var, operator, args):
                table.define(var, table.bb.emit(operator(*map(table.plain, args))))
            return True
        if name in _EXTREMA_BY_NAME:
            return self._clip(table, var, _EXTREMA_BY_NAME[name], list(call.args))
        if name == "relax.nn.batch_norm" and not call.attrs.training:
            return self._batch_norm(table, var, call)
        return name == "relax.power" and _square(table, var, call)

    def _clip(
        self, table: Values, var: relax.Var, operator: Callable[..., relax.Expr], args: list[relax.Expr]
    ) -> bool:
        """Replace a maximum and a minimum, each with one number, by a clip, which has its bounds in the code.

        A bound that is loaded may be NaN: LLVM then needs three instructions on ARM rather than one.
        """
        x, bound = args if isinstance(args[0], relax.Var) else reversed(args)
        number = constant_of(table.plain(bound))
        if number is None or number.size != 1 or number.ndim > len(shape_of(x)) or number.dtype != np.float32:
            return False
        if operator is relax.op.maximum:
            self._lowest[var] = (x, float(number.item()))
            return False
        if x not in self._lowest or self._lowest[x][1] > float(number.item()):
            return False
        source, lowest = self._lowest[x]
        table.define(var, table.bb.emit(relax.op.clip(table.plain(source), lowest, float(number.item()))))
        return True

    def _batch_norm(self, table: Values, var: relax.Var, call: Call) -> bool:
        """Replace a batch norm with constant statistics by a multiplication and an addition."""
        numbers = [constant_of(a) for a in call.args[1:5]]
        if any(n is None for n in numbers):
            return False
        gamma, beta, mean, variance = (np.asarray(n, "float64") for n in numbers)
        axis, rank = int(call.attrs.axis), len(shape_of(call.args[0]))
        factor = gamma / np.sqrt(variance + float(call.attrs.epsilon))
        shift = beta - mean * factor
        shape = [1] * rank
        shape[axis] = gamma.size
        x = table.plain(call.args[0])
        dtype = str(call.args[0].ty.dtype)
        y = table.bb.emit(relax.op.multiply(x, relax.const(factor.reshape(shape).astype(dtype))))
        y = table.bb.emit(relax.op.add(y, relax.const(shift.reshape(shape).astype(dtype))))
        statistics = [table.plain(a) for a in call.args[3:5]]
        table.define(var, relax.Tuple([y, *statistics]))
        return True


def _square(table: Values, var: relax.Var, call: Call) -> bool:
    """Replace a power of 2 by a square, which layouts know."""
    x, exponent = call.args[0], constant_of(table.plain(call.args[1]))
    if exponent is None or exponent.size != 1 or exponent.item() != 2 or shape_of(x) != shape_of(call):
        return False
    table.define(var, table.bb.emit(relax.op.square(table.plain(x))))
    return True


def _extremum(func: tirx.PrimFunc) -> Callable[..., relax.Expr] | None:
    """Return the Relax operator of a function that is one element-wise maximum or minimum, else None."""
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, stores.append))
    if len(stores) != 1:
        return None
    value = stores[0].value
    operator = _EXTREMA.get(type(value))
    if operator is None or not all(isinstance(v, TensorLoad) for v in (value.a, value.b)):
        return None
    if len(func.params) != 3 or not all(
        load.source.same_as(param) for load, param in zip((value.a, value.b), func.params, strict=False)
    ):
        return None
    # NumPy's broadcasting only: each index is the loop's variable, or zero on an axis of extent one.
    for load in (value.a, value.b):
        own = stores[0].indices[len(stores[0].indices) - len(load.indices) :]
        for index, iterator, extent in zip(load.indices, own, load.source.shape, strict=True):
            if not index.same_as(iterator) and int(extent) != 1:
                return None
    return operator


class _FoldScale:
    """Folds multiplications and additions of one constant per channel into the convolution before them.

    The sum of convolutions of the same values, and of these values times constants, becomes one convolution.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self._users = users_of(mod["main"])
        self._convs: dict[relax.Var, tuple[Call, np.ndarray | None]] = {}
        # What is a value times a factor for each channel, plus a shift if there is one.
        self._scaled: dict[relax.Var, tuple[relax.Var, np.ndarray, np.ndarray | None]] = {}
        # Numbers that are integers: their sums of products are exact only while weights are integers too.
        self._integers: set[relax.Var] = set()

    def emit(self, table: Values, var: relax.Var, call: Call) -> bool:
        """Fold `call` into the convolution that it reads, if it is such a multiplication or addition."""
        name = op_name(call)
        if name == "relax.nn.conv2d":
            layouts = (call.attrs.data_layout, call.attrs.kernel_layout)
            weight = constant_of(call.args[1])
            is_real = str(call.args[1].ty.dtype) == "float32" and call.args[0] not in self._integers
            # Weights that are small integers take a quarter of the bytes only as long as they are.
            is_small = weight is not None and is_small_integers(weight)
            if layouts == ("NCHW", "OIHW") and is_real and not is_small:
                self._convs[var] = (call, None)
            return False
        if name == "relax.astype" and "int" in str(call.args[0].ty.dtype):
            self._integers.add(var)
        if name == "relax.subtract" and call.args[0] in self._integers:
            self._integers.add(var)
        if name not in ("relax.multiply", "relax.add"):
            return False
        if name == "relax.add" and self._add_branches(var, call):
            self._emit_conv(table, var)
            return True
        x, other = call.args if isinstance(call.args[0], relax.Var) else reversed(call.args)
        conv, bias = self._convs.get(x, (None, None)) if isinstance(x, relax.Var) else (None, None)
        if conv is None or self._users[x] != 1:
            self._note_scale(var, call, x, other)
            return False
        numbers, weight = constant_of(other), constant_of(conv.args[1])
        if numbers is None or weight is None:
            return False
        channels = weight.shape[0]
        if (1,) * (4 - numbers.ndim) + numbers.shape not in ((1, channels, 1, 1), (1, 1, 1, 1)):
            return False
        vector = np.broadcast_to(numbers.reshape(-1), (channels,))
        if name == "relax.add":
            self._convs[var] = (conv, vector if bias is None else bias + vector)
        else:
            scaled = (weight * vector.reshape(-1, 1, 1, 1)).astype(weight.dtype)
            conv = Call(conv.op, [conv.args[0], relax.const(scaled)], conv.attrs)
            self._convs[var] = (conv, None if bias is None else bias * vector)
        self._emit_conv(table, var)
        return True

    def _emit_conv(self, table: Values, var: relax.Var) -> None:
        """Define `var` as its convolution and bias."""
        conv, bias = self._convs[var]
        y = table.bb.emit(Call(conv.op, [table.plain(conv.args[0]), conv.args[1]], conv.attrs))
        if bias is not None:
            vector = bias.reshape(1, -1, 1, 1).astype(str(conv.args[1].ty.dtype))
            y = table.bb.emit(relax.op.add(y, relax.const(vector)))
        table.define(var, y)

    def _note_scale(self, var: relax.Var, call: Call, x: relax.Expr, other: relax.Expr) -> None:
        """Keep in mind that `call` scales or shifts the channels of an image, if it does."""
        numbers, shape = constant_of(other), shape_of(call)
        if numbers is None or not isinstance(x, relax.Var) or len(shape) != 4 or shape_of(x) != shape:
            return
        if (1,) * (4 - numbers.ndim) + numbers.shape not in ((1, shape[1], 1, 1), (1, 1, 1, 1)):
            return
        vector = np.broadcast_to(numbers.reshape(-1), (shape[1],))
        if op_name(call) == "relax.multiply":
            self._scaled[var] = (x, vector, None)
        elif x in self._scaled and self._scaled[x][2] is None and self._users[x] == 1:
            self._scaled[var] = (*self._scaled[x][:2], vector)

    def _add_branches(self, var: relax.Var, call: Call) -> bool:
        """Note `var` as one convolution if it adds branches of the same values that nothing else reads."""
        if not all(isinstance(x, relax.Var) and self._users[x] == 1 for x in call.args):
            return False
        if not all(shape_of(x) == shape_of(call) for x in call.args):
            return False
        found = [self._convs[x] for x in call.args if x in self._convs]
        convs, biases = [conv for conv, _ in found], [bias for _, bias in found]
        if len(convs) == 2:
            merged = branches.together(convs[0], convs[1], shape_of(call))
        elif len(convs) == 1:
            rest = next(x for x in call.args if x not in self._convs)
            source, factor, shift = self._scaled.get(rest, (None, None, None))
            if source is None or factor is None or not source.same_as(convs[0].args[0]):
                return False
            merged = branches.with_scaled(convs[0], factor, shape_of(call))
            biases.append(shift)
        else:
            return False
        if merged is None:
            return False
        known = [bias for bias in biases if bias is not None]
        self._convs[var] = (merged, np.sum(known, axis=0) if known else None)
        return True
