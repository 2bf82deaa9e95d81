"""What a bundle is called, its version, and which devices may run it, by the rules of the manifest.

Promises to apply these rules before anything is compiled or changed, and needs no compiler for it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.bundle.counter_time import AHEAD_HINT, day_of, highest_counter
from agent.bundle.names import check_compatible, check_model_name, check_security_counter, check_version
from builder.errors import ModelError

# What to do about a manifest that its own rules refuse.
DESCRIBABLE: Final = "give it fewer tensors, or shorter names: docs/bundle-format.md has the limits"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a bundle is called and which devices may run it.

    Attributes
    ----------
    name
        The model's name on devices; None derives it from the file's name.
    version
        Semantic version.
    security_counter
        0 to 2^63 - 1; a device refuses a counter lower than the one it committed for that name. None stands
        for the time of the build in seconds since 1970, so that every build replaces those before it; the
        environment variable `SOURCE_DATE_EPOCH` sets this time for reproducible builds.
    compatible
        Device types, such as `["raspberrypi,4-model-b"]`; None means any Linux of the target's architecture.
    counter_ahead_of_time
        Whether the counter may be more than two days ahead of the time, which devices refuse otherwise: no
        bundle with a lower counter runs under this name any more.
    """

    name: str | None = None
    version: str = "1.0.0"
    security_counter: int | None = None
    compatible: Sequence[str] | None = None
    counter_ahead_of_time: bool = False

    def counter(self) -> int:
        """Return the security counter, or the time of the build in its place.

        Raises
        ------
        ModelError
            If `SOURCE_DATE_EPOCH` is not a number of seconds.
        """
        if self.security_counter is not None:
            return self.security_counter
        stated = os.environ.get("SOURCE_DATE_EPOCH")
        if stated is None:
            return int(time.time())
        if not re.fullmatch("[0-9]{1,18}", stated):
            raise ModelError(
                f"expected a number of seconds in SOURCE_DATE_EPOCH, got {stated!r:.80}",
                hint="unset SOURCE_DATE_EPOCH, or set it to the output of `date +%s`",
            )
        return int(stated)

    def check(self) -> None:
        """Apply the manifest's own rules, before anything is compiled.

        Raises
        ------
        ModelError
            If the manifest does not allow a value, or the counter is ahead of time.
        """
        if isinstance(self.compatible, str):  # Python takes it for a sequence of its characters
            raise ModelError(
                f"expected a sequence of compatible strings, got {self.compatible!r:.80}",
                hint='write a list: compatible=["..."]',
            )
        hint = "docs/bundle-format.md says what versions, counters and device types may be"
        try:
            check_version(self.version)
            check_security_counter(self.counter())
            check_counter_time(self.counter(), meant=self.counter_ahead_of_time)
            if self.compatible is not None:
                check_compatible(self.compatible)
            if self.name is not None:
                hint = f"for example {bundle_name(self.name)}"
                check_model_name(self.name)
        except ValueError as error:
            raise ModelError(str(error), hint=hint) from error


def check_counter_time(counter: int, *, meant: bool) -> None:
    """Check that a counter is not ahead of the time of this machine, unless it is meant to be.

    Raises
    ------
    ModelError
        If devices would refuse it.
    """
    highest = highest_counter(time.time(), synchronised=True)
    if counter <= highest or meant:
        return
    seconds = counter // 1000
    is_milliseconds = highest // 2 < seconds <= highest
    got = f"{counter}, which are milliseconds" if is_milliseconds else f"{counter}"
    raise ModelError(
        "the security counter would lock out later builds: expected at most "
        f"{highest} ({day_of(highest)}), got {got}",
        hint=f"use seconds: --security-counter {seconds}" if is_milliseconds else AHEAD_HINT,
    )


def bundle_name(text: str) -> str:
    """Return a name that bundles may have: `ResNet 50 (v2)` -> `resnet-50-v2`."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:64]
    return name or "model"
