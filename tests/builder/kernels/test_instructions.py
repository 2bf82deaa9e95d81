"""Instructions by LLVM's names."""

from __future__ import annotations

import pytest
from tvm import tirx
from tvm.target.codegen import llvm_get_intrinsic_name

from builder.errors import BuildError
from builder.kernels.instructions import instruction


def test_a_call_names_its_instruction() -> None:
    call = instruction("fma.f32", "float32", *(tirx.const(k, "float32") for k in (1, 2, 3)))
    number, *operands = call.args
    assert llvm_get_intrinsic_name(int(number)) == "llvm.fma"
    assert [float(each.value) for each in operands] == [1, 2, 3]


def test_a_name_that_llvm_does_not_know_is_refused() -> None:
    with pytest.raises(BuildError, match=r"the instruction x86\.multiply\.everything in TVM's LLVM"):
        instruction("x86.multiply.everything", "int32")
