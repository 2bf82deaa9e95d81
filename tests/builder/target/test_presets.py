from __future__ import annotations

from builder.target.presets import PRESETS, unknown_target


def test_a_mistyped_target_gets_the_one_that_was_meant() -> None:
    assert "did you mean rpi5?" in str(unknown_target("rpi6").hint)
    hint = str(unknown_target("zzz").hint)
    assert all(name in hint for name in PRESETS)
    assert len(str(unknown_target("x" * 100_000))) < 200
