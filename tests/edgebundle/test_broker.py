"""What describes a broker: a URL, and what a URL cannot say."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgebundle import AsyncClient, Broker, UsageError


def test_options_are_those_of_the_broker() -> None:
    made = Broker.of("mqtts://b", cafile="ca.pem", certificate=Path("c.pem"), key="k.pem", mqtt_version="5")
    assert made == Broker("mqtts://b", Path("ca.pem"), Path("c.pem"), Path("k.pem"), None, "5")
    assert Broker.of("mqtt://b") == Broker("mqtt://b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cafile": "ca.pem"}, "mqtts://"),
        ({"mqtt_version": "4"}, "MQTT version"),
        ({"password_file": "p"}, None),
    ],
)
async def test_options_are_checked_when_the_client_is_made(
    options: dict[str, str], words: str | None
) -> None:
    if words is None:
        AsyncClient("mqtt://b", **options)  # type: ignore[arg-type]
        return
    with pytest.raises(UsageError, match=words):
        AsyncClient("mqtt://b", **options)  # type: ignore[arg-type]


async def test_broker_and_options_are_not_mixed() -> None:
    with pytest.raises(UsageError, match="expected a Broker or cafile, got both"):
        AsyncClient(Broker("mqtts://b"), cafile="ca.pem")
    with pytest.raises(TypeError):
        AsyncClient("mqtt://b", cacert="x")  # type: ignore[call-arg]
