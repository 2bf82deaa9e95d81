"""The name of a function that a Relax module calls without having it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm.ir import Call


def packed_name(call: Call) -> str:
    """Return the name of the function that a `call_dps_packed` calls, empty for any other call."""
    if str(getattr(call.op, "name", "")) != "relax.call_dps_packed":
        return ""
    return str(getattr(call.args[0], "global_symbol", ""))
