"""States as users write them: `past.*:present.*` stands for all pairs of such names."""

from __future__ import annotations

from collections.abc import Sequence

from builder.errors import ModelError


def expand_states(texts: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Return states with `past.*:present.*` written out: one for each input that fits.

    Raises
    ------
    ModelError
        If a pattern fits no input, or its output does not exist.
    """
    found = []
    for item in (item for text in texts for item in text.split()):
        before, _, after = item.partition(":")
        if before.count("*") != 1 or after.count("*") != 1:
            found.append(item)
            continue
        head, tail = before.split("*")
        names = [
            name
            for name in inputs
            if name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail)
        ]
        pairs = [(name, after.replace("*", name[len(head) : len(name) - len(tail)])) for name in names]
        if not pairs or (missing := [each for _, each in pairs if each not in outputs]):
            got = f"'{missing[0]:.80}'" if pairs else "no input of that name"
            raise ModelError(
                f"--state {item[:80]}: expected inputs and outputs of the model, got {got}",
                hint='see the names with `edgebundle check MODEL`; for example --state "h:hn c:cn"',
            )
        found += [f"{one}:{other}" for one, other in pairs]
    return found
