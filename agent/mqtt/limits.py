"""What a broker accepts: the limits that it states in CONNACK (MQTT 5.0, 3.2.2.3).

Not here, because obeying them takes nothing: Topic Alias Maximum (we send no aliases), Subscription
Identifiers Available (we send none), Assigned Client Identifier (we always have a name).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# The largest packet that MQTT can represent: a byte, four bytes of length, and what they count.
LARGEST_PACKET_BYTES: Final = 1 + 4 + 268_435_455


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """The limits of one connection; the defaults are those of a broker that states none.

    It accepts `receive_maximum` QoS 1 messages before it acknowledges one. It ends the connection at a packet
    that is larger than `max_packet_bytes`, at a retained message unless it keeps these (`retain`), and after
    `keep_alive_s` of silence; None stands for the time that we asked for.
    """

    receive_maximum: int = 65535
    max_packet_bytes: int = LARGEST_PACKET_BYTES
    max_qos: int = 1
    retain: bool = True
    wildcards: bool = True
    shared: bool = True
    keep_alive_s: int | None = None

    def allows(self, topic_filter: str) -> bool:
        """Return whether a subscription to this filter is possible."""
        if topic_filter.startswith("$share/"):
            return self.shared and (self.wildcards or not _has_wildcard(topic_filter))
        return self.wildcards or not _has_wildcard(topic_filter)

    def missing(self) -> tuple[str, ...]:
        """Return what the agent has to do without, as lines for the log."""
        lines = (
            (
                self.max_qos < 1,
                "accepts only QoS 0: answers and reports are sent once, and may be lost",
            ),
            (
                not self.retain,
                "keeps no retained messages: state, info and reported documents reach only connected clients",
            ),
            (
                not self.wildcards,
                "accepts no wildcards in subscriptions: requests cannot reach this device",
            ),
            (
                not self.shared,
                "accepts no shared subscriptions: requests to groups cannot reach this device",
            ),
        )
        return tuple(line for missing, line in lines if missing)


NO_LIMITS: Final = BrokerLimits()


def _has_wildcard(topic_filter: str) -> bool:
    return "+" in topic_filter or "#" in topic_filter
