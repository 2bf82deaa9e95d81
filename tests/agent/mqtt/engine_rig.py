"""One session over memory instead of sockets, for tests of the engine and its turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.mqtt.engine import MQTT_5, Connack, Engine, Listener
from agent.mqtt.message import Message
from agent.mqtt.properties import EMPTY, Properties, encode
from agent.mqtt.reason_codes import Reason
from agent.mqtt.settings import BrokerSettings
from tests.agent.mqtt.memory_broker import Client, MemoryBroker

SETTINGS = BrokerSettings("broker", receive_maximum=17, excess_messages=0, max_packet_bytes=1 << 20)


class Rig(Listener):
    """An engine, what it called, and the broker's end of its latest connection."""

    def __init__(
        self,
        broker: MemoryBroker | None = None,
        *,
        version: int = MQTT_5,
        on_message: Callable[[Message], None] | None = None,
        shed: Callable[[str, float], bool] | None = None,
        **options: object,
    ) -> None:
        self.broker = broker or MemoryBroker()
        self.messages: list[Message] = []
        self.acknowledged: list[tuple[int, Reason]] = []
        self.granted: list[tuple[int, Sequence[Reason]]] = []
        self.lost: list[Reason | None] = []
        self._take = on_message or self.messages.append
        self._shed = shed
        self.engine = Engine("me", version, listener=self, **options)  # type: ignore[arg-type]

    def on_message(self, message: Message) -> None:
        self._take(message)

    def on_puback(self, packet_id: int, verdict: Reason) -> None:
        self.acknowledged.append((packet_id, verdict))

    def on_suback(self, packet_id: int, verdicts: Sequence[Reason]) -> None:
        self.granted.append((packet_id, verdicts))

    def on_lost(self, why: Reason | None) -> None:
        self.lost.append(why)

    def sheds(self, topic: str, flooded_for_s: float) -> bool:
        return self._shed is not None and self._shed(topic, flooded_for_s)

    @property
    def client(self) -> Client:
        return self.broker.clients[-1]

    async def connect(
        self, epoch: int = 1, password: str | None = None, settings: BrokerSettings = SETTINGS
    ) -> Connack:
        return await self.engine.connect(await self.broker.open_socket(settings), epoch, settings, password)

    def publish(
        self,
        payload: bytes = b"x",
        packet_id: int | None = 1,
        *,
        retain: bool = False,
        properties: Properties = EMPTY,
        dup: bool = False,
    ) -> Reason | None:
        return self.engine.publish(
            "a/b", payload, packet_id=packet_id, retain=retain, packed=encode(properties), dup=dup
        )
