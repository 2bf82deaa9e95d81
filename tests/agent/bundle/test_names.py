from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.bundle.names import check_compatible, check_model_name, check_security_counter, check_version


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (check_model_name, "pets-2.1_int8", ["", "Pets", "-pets", "p" * 65, "pets\n"]),
        (check_version, "1.0.0-rc.1+build.7", ["", "1.0", "01.0.0", "1.0.0-01", "1.0.0-" + "a" * 59]),
        (check_security_counter, (1 << 63) - 1, [-1, 1 << 63]),
        (
            check_compatible,
            ["raspberrypi,4-model-b", "linux-x86_64"],
            [[], ["a"] * 65, [""], ["-a"], ["a b"], ["a" * 129]],
        ),
    ],
)
def test_what_a_user_chooses_can_be_checked_without_a_manifest(
    check: Callable[[Any], None], good: Any, bad: list[Any]
) -> None:
    check(good)
    for value in bad:
        with pytest.raises(ValueError, match=r"expected .*, got "):
            check(value)
