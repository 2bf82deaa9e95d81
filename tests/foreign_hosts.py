"""Machines that are not the one that runs the tests: no test may depend on which one it is."""

from __future__ import annotations

from dataclasses import replace

from builder.target.host import Host

_KIB = 1 << 10


def replace_host(name: str) -> None:
    """Make targets of this process that mean this machine mean another: `small` or `large`.

    The small one has a core with 4 lanes, whose code any x86-64 processor can run.

    Raises
    ------
    ValueError
        If no machine has this name.
    """
    here = Host.detect()
    if name == "large":
        other = replace(here, cores=128, l1_bytes=128 * _KIB, l2_bytes=4096 * _KIB, l2_cores=1)
    elif name == "small":
        other = replace(here, cores=1, l1_bytes=24 * _KIB, l2_bytes=128 * _KIB, l2_cores=2)
        if here.arch == "x86_64":
            other = replace(other, cpu="x86-64-v2", without=())
    else:
        raise ValueError(f"EDGEBUNDLE_TEST_HOST: expected small or large, got {name!r}")
    Host.detect = lambda: other  # type: ignore[method-assign]
