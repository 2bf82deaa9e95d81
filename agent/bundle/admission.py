"""The decision whether this machine may run a verified bundle.

Promises a decision from its arguments only: it reads, writes and loads nothing. Leaves the manifest's
authenticity to `verify`, and the record of committed counters to `agent.deploy`.
"""

from __future__ import annotations

from agent.bundle.counter_time import AHEAD_HINT, day_of
from agent.bundle.machine import Machine, arch_of_triple
from agent.bundle.manifest import Manifest
from agent.errors import CounterAheadError, IncompatibleError, MixAndMatchError, RollbackError


def admit(
    manifest: Manifest,
    machine: Machine,
    *,
    deployed_as: str,
    committed_counter: int | None,
    highest_counter: int | None = None,
) -> None:
    """Check that a bundle may run on this machine under a model's name.

    Parameters
    ----------
    manifest
        The verified bundle's manifest.
    machine
        The machine that would run it.
    deployed_as
        The model's name in the request to deploy it.
    committed_counter
        The highest security counter that this machine has committed for that name, or None if it has none.
    highest_counter
        The highest one that is not ahead of time; None for a bundle that was installed before.

    Raises
    ------
    MixAndMatchError
        If the bundle holds another model.
    IncompatibleError
        If it was made for another machine; the message names the first thing that this one lacks.
    RollbackError
        If its security counter is lower than the committed one.
    CounterAheadError
        If it is ahead of time, is not meant to be, and would raise the committed one.
    """
    if manifest.name != deployed_as:
        raise MixAndMatchError(f"expected a bundle of model {deployed_as!r:.80}, got one of {manifest.name}")
    check_machine(manifest, machine)
    if committed_counter is not None and manifest.security_counter < committed_counter:
        raise RollbackError(
            f"{manifest.name} {manifest.version} is a downgrade: expected a security counter of "
            f"{committed_counter} or higher, got {manifest.security_counter}",
            hint=f"compile it again, or with --security-counter {committed_counter} or higher",
        )
    if highest_counter is None or manifest.counter_ahead_of_time:
        return
    if manifest.security_counter > max(highest_counter, committed_counter or 0):
        raise CounterAheadError(
            f"{manifest.name} {manifest.version} would lock out later builds: expected a security counter of "
            f"at most {highest_counter} ({day_of(highest_counter)}), got {manifest.security_counter}",
            hint=f"compile it again: {AHEAD_HINT}",
        )


def check_machine(manifest: Manifest, machine: Machine) -> None:
    """Check that a machine has everything that the bundle's kernels need.

    In this order: architecture, device type, CPU features, tvm-ffi's ABI, glibc, memory.

    Raises
    ------
    IncompatibleError
        If it lacks something; the message names the first thing.
    """
    target, runtime = manifest.target, manifest.runtime
    arch = arch_of_triple(target.triple)
    if arch != machine.arch or "linux" not in target.triple.split("-"):
        raise IncompatibleError(
            f"expected a bundle for {machine.arch} Linux, got one for {target.triple}",
            hint="compile it with the --target of this machine",
        )
    if not set(manifest.compatible) & machine.compatible:
        raise IncompatibleError(
            f"expected a bundle for one of {_list(sorted(machine.compatible))}, "
            f"got one for {_list(manifest.compatible)}",
            hint="compile it with this device type as --compatible, or add the type to the agent's config",
        )
    if missing := [feature for feature in target.features if feature not in machine.features]:
        who = f"this machine ({machine.cpu_model})" if machine.cpu_model else "this machine"
        raise IncompatibleError(
            f"the bundle is for {target.cpu} and needs CPU features that {who} lacks: {_list(missing)}",
            hint="compile it with the --target of this machine",
        )
    if runtime.abi != machine.abi:
        raise IncompatibleError(
            f"the bundle needs {runtime.abi}, this machine has {machine.abi or 'no tvm-ffi'}",
            hint="install the release of the agent that matches the builder's",
        )
    if machine.glibc is None or _version(machine.glibc) < _version(runtime.glibc):
        raise IncompatibleError(
            f"the bundle needs glibc {runtime.glibc}, this machine has {machine.glibc or 'another libc'}",
            hint="compile it for an older glibc, or update the machine",
        )
    # The agent keeps the files in memory while the model is active.
    files = sum(file.size for file in manifest.files.values())
    needed = manifest.resources.needed_bytes(machine.threads) + files
    if machine.memory_bytes is not None and needed > machine.memory_bytes:
        raise IncompatibleError(
            f"the model needs {needed >> 20} MiB of memory, this machine has {machine.memory_bytes >> 20} MiB"
        )
    if machine.memory_limit_bytes is not None and needed > machine.memory_limit_bytes:
        raise IncompatibleError(
            f"the model needs {needed >> 20} MiB of memory, the agent's control group allows "
            f"{machine.memory_limit_bytes >> 20} MiB",
            hint="raise MemoryMax= of the unit, or --memory of the container",
        )


def _version(text: str) -> tuple[int, ...]:
    # "2.36" or "2.36.9000"; parts that are not numbers are ignored.
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def _list(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
