"""Instructions of processors, called by the names that LLVM has for them.

LLVM gives the number 0 to a name that it does not know, and a call of it would be wrong code. So an unknown
name is an error here.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call
from tvm.target.codegen import llvm_lookup_intrinsic_id

from builder.errors import BuildError


def number_of(name: str) -> tirx.Expr:
    """Return the number by which a call names an instruction.

    Parameters
    ----------
    name
        LLVM's name without `llvm.`, such as `x86.sse2.pmadd.wd`.

    Raises
    ------
    BuildError
        If TVM's LLVM does not have it.
    """
    number = llvm_lookup_intrinsic_id(f"llvm.{name}")
    if not number:
        raise BuildError(f"expected the instruction {name} in TVM's LLVM, got none")
    return tirx.const(number, "uint32")


def instruction(name: str, dtype: str, *operands: tirx.Expr) -> Call:
    """Return the result of an instruction, of type `dtype`.

    Raises
    ------
    BuildError
        If TVM's LLVM does not have it.
    """
    result: Call = tirx.call_llvm_pure_intrin(dtype, number_of(name), *operands)
    return result
