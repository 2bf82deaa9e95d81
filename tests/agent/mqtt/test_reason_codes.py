"""Every reason code of the specification has a row, and the rows have the right actions."""

from __future__ import annotations

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

from agent.mqtt.reason_codes import Action, reason


def test_every_code_of_the_specification_has_a_row() -> None:
    for code in ReasonCode(PacketTypes.CONNACK).names:
        assert "Unknown" not in reason(code).name, f"0x{code:02x}"


def test_failures_never_count_as_done_when_connecting() -> None:
    for code in range(0x80, 0x100):
        assert reason(code).failed
        assert reason(code).connecting is not Action.DONE


@pytest.mark.parametrize(
    ("code", "connecting", "sending"),
    [
        (0x00, Action.DONE, Action.DONE),
        (0x10, Action.DONE, Action.DONE),
        (0x84, Action.FALL_BACK, Action.GIVE_UP),
        (0x87, Action.LATER, Action.GIVE_UP),
        (0x88, Action.RETRY, Action.RETRY),
        (0x8E, Action.LATER, Action.RETRY),
        (0x93, Action.RETRY, Action.RETRY),
        (0x95, Action.RETRY, Action.GIVE_UP),
        (0x97, Action.RETRY, Action.RETRY),
        (0xFE, Action.RETRY, Action.RETRY),
    ],
)
def test_actions_of_a_code(code: int, connecting: Action, sending: Action) -> None:
    assert (reason(code).connecting, reason(code).sending) == (connecting, sending)
