"""Whether this machine may run a bundle whose signature holds.

Promises a decision from values alone: nothing is read, written or loaded. Leaves the manifest's truth to
`verify` and remembering the committed counter to `agent.deploy`.
"""

from __future__ import annotations

from agent.bundle.machine import Machine, arch_of_triple
from agent.bundle.manifest import Manifest
from agent.errors import IncompatibleError, MixAndMatchError, RollbackError


def admit(manifest: Manifest, machine: Machine, *, deployed_as: str, committed_counter: int | None) -> None:
    """Return if the bundle may run here, as that model.

    Parameters
    ----------
    manifest
        Verified.
    machine
        The machine that would run it.
    deployed_as
        The model's name in whatever asked for the deployment.
    committed_counter
        The highest security counter that this machine has committed for that name; None if it never had one.

    Raises
    ------
    MixAndMatchError
        If it is another model's bundle.
    IncompatibleError
        If it was made for another machine; the message names the first thing that is missing.
    RollbackError
        If its security counter is lower than the committed one.
    """
    if manifest.name != deployed_as:
        raise MixAndMatchError(
            f"the bundle is of model {manifest.name}, it was deployed as {deployed_as!r:.80}"
        )
    check_machine(manifest, machine)
    if committed_counter is not None and manifest.security_counter < committed_counter:
        raise RollbackError(
            f"the bundle's security counter is {manifest.security_counter}, "
            f"this device has committed {committed_counter} for {manifest.name}",
            hint="compile it again with a --security-counter that is not lower",
        )


def check_machine(manifest: Manifest, machine: Machine) -> None:
    """Return if the machine has all that the bundle's kernels need.

    Raises
    ------
    IncompatibleError
        If naming the first thing that is missing.
    """
    target, runtime = manifest.target, manifest.runtime
    arch = arch_of_triple(target.triple)
    if arch != machine.arch or "linux" not in target.triple.split("-"):
        raise IncompatibleError(
            f"the bundle is for {target.triple}, this machine is {machine.arch} Linux",
            hint="compile it with the --target of this machine",
        )
    if not set(manifest.compatible) & machine.compatible:
        raise IncompatibleError(
            f"the bundle is for {_list(manifest.compatible)}, "
            f"this machine is {_list(sorted(machine.compatible))}",
            hint="name the machine with --compatible, or add the name to the agent's configuration",
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
            hint="install the agent's release that belongs to the builder's",
        )
    if machine.glibc is None or _version(machine.glibc) < _version(runtime.glibc):
        raise IncompatibleError(
            f"the bundle needs glibc {runtime.glibc}, this machine has {machine.glibc or 'another libc'}",
            hint="compile it for an older glibc, or update the machine",
        )
    needed = manifest.resources.arena_bytes + manifest.resources.params_bytes
    if machine.memory_bytes is not None and needed > machine.memory_bytes:
        raise IncompatibleError(
            f"the model needs {needed >> 20} MiB of memory, this machine has {machine.memory_bytes >> 20} MiB"
        )


def _version(text: str) -> tuple[int, ...]:
    # "2.36" or "2.36.9000": what is no number does not count.
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def _list(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
