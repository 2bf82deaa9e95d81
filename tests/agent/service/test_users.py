"""Who asks is the user in the topic: levels that only look like another user get nothing in that user's name.

The broker checks no names here, as one without an access list does not.
"""

from __future__ import annotations

import json

from tests.agent.service.conftest import StartService, status_of
from tests.conftest import BrokerProcess

ALICE = "edge/v1/replies/alice/answers"
# An empty one, encodings, look-alikes (in Cyrillic and without width), levels of topics, and too long ones.
NAMES = ["", "%61lice", "alice%00", "alic\u0435", "alice\u200b", "alice ", " alice", "$SYS", ".", "..", "~a"]
NAMES += ["anonymous", "groups", "replies", "a" * 129, "a" * 60_000]


async def test_level_that_is_no_users_name_causes_nothing_in_the_name_of_another(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, models=["echo"]) as rig:
        alice, mallory = await rig.client("alice"), await rig.client("mallory")
        document = json.dumps({"reply_to": ALICE, "id": "7", "inputs": []}).encode()
        for name in NAMES:
            topic = f"edge/v1/kitchen/models/echo/infer/{name}"
            mallory.send(b"x", topic=topic, reply_to=ALICE)
            mallory.connection.publish(topic, document, qos=1)
        assert status_of(await mallory.ask(b"x")) == 200  # the agent has taken what he sent before
        await rig.settle()
        assert [message.payload for message in alice.received] == [b"marker 0"]  # her own
        counts = rig.service.samples()
        # All but `anonymous`, which is told so below its own name.
        assert counts['edge_inference_unanswerable_total{reason="foreign_user"}'] == 2 * (len(NAMES) - 1)


async def test_request_of_another_with_equal_correlation_and_payload_is_not_hers(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, models=["echo"]) as rig:
        alice, mallory = await rig.client("alice"), await rig.client("mallory")
        assert status_of(await alice.ask(b"private", correlation=b"1")) == 200
        # Her request again, word for word, in another name; and with a reply topic of his own.
        mallory.send(b"private", correlation=b"1", reply_to=ALICE)
        [refused] = await mallory.answers(b"1", 1)
        assert status_of(refused) == 400
        assert status_of(await mallory.ask(b"x")) == 200  # the agent has taken what he sent before
        await rig.settle()
        assert len(await alice.answers(b"1", 1)) == 1
        assert not any("duplicates" in name and value for name, value in rig.service.samples().items())
