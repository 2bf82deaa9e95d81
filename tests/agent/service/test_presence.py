"""Birth, clean stop and will."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.service.presence import Presence, Session
from agent.wire.presence import AgentState

SESSION = Session("kitchen", 7, "0.1.0")


class Recorder:
    """A connection that writes down what is published."""

    def __init__(self) -> None:
        self.published: list[tuple[str, dict[str, Any], bool]] = []
        self.connected = True

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> None:
        self.published.append((topic, json.loads(payload), retain))


def test_birth_will_and_stop_have_the_same_number() -> None:
    connection = Recorder()
    here = Presence(SESSION, connection)  # type: ignore[arg-type]
    here.announce()
    here.stop()
    will = SESSION.will()
    assert will.topic == "edge/v1/kitchen/state"
    assert will.retain
    states = [(document["state"], document["session_seq"]) for _, document, _ in connection.published]
    assert states == [("online", 7), ("stopped", 7)]
    assert all(retain for *_, retain in connection.published)
    assert json.loads(will.payload) == {"state": "offline", "session_seq": 7, "version": "0.1.0"}


def test_late_will_is_corrected_and_our_own_state_is_not() -> None:
    connection = Recorder()
    now_s = 0.0
    here = Presence(SESSION, connection, clock=lambda: now_s)  # type: ignore[arg-type]
    here.announce()
    now_s = 10.0
    here.on_state(SESSION.document(AgentState.ONLINE))
    assert len(connection.published) == 1
    here.on_state(Session("kitchen", 6, "0.1.0").document(AgentState.OFFLINE))
    assert [document["state"] for _, document, _ in connection.published] == ["online", "online"]


def test_another_agent_of_this_name_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    here = Presence(SESSION, Recorder(), clock=lambda: now_s)  # type: ignore[arg-type]
    here.announce()
    twin = Session("kitchen", 3, "0.1.0")
    here.on_state(twin.document(AgentState.ONLINE), retained=True)  # our own earlier session
    here.on_state(twin.document(AgentState.OFFLINE), retained=False)  # its will
    here.on_state(b"online", retained=False)
    assert "another agent" not in caplog.text
    for later_s in (10.0, 11.0, 12.0):
        now_s = later_s
        here.on_state(twin.document(AgentState.ONLINE), retained=False)
    assert caplog.text.count("another agent is online as kitchen") == 1
    now_s = 100.0
    here.on_state(twin.document(AgentState.ONLINE), retained=False)
    assert caplog.text.count("another agent is online as kitchen") == 2


def test_two_new_agents_of_one_name_notice_each_other(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (Session.start("kitchen", 1, "0.1.0") for _ in range(2))
    here = Presence(first, Recorder(), clock=lambda: 0.0)  # type: ignore[arg-type]
    here.announce()
    here.on_state(first.document(AgentState.ONLINE), retained=False)
    assert "another agent" not in caplog.text
    here.on_state(second.document(AgentState.ONLINE), retained=False)
    assert "another agent is online as kitchen" in caplog.text


def test_a_conflict_of_names_is_published_until_the_other_agent_ends() -> None:
    connection = Recorder()
    now_s = 0.0
    here = Presence(SESSION, connection, clock=lambda: now_s)  # type: ignore[arg-type]
    twin = Session("kitchen", 3, "0.1.0")
    for state in (AgentState.ONLINE, AgentState.ONLINE, AgentState.OFFLINE):
        now_s += 10
        here.on_state(twin.document(state, name_conflict=True), retained=False)
    now_s += 10
    here.on_state(twin.document(AgentState.ONLINE), retained=True)  # an old message is no conflict
    conflicts = [document.get("name_conflict", False) for _, document, _ in connection.published]
    assert conflicts == [True, True, False, False]


def test_corrections_are_rate_limited() -> None:
    connection = Recorder()
    now_s = 10.0
    here = Presence(SESSION, connection, clock=lambda: now_s)  # type: ignore[arg-type]
    for _ in range(100):
        here.on_state(b"offline")
    assert len(connection.published) == 1


def test_a_correction_that_comes_too_soon_is_made_later() -> None:
    connection, waiting = Recorder(), []
    now_s = 0.0
    here = Presence(
        SESSION,
        connection,  # type: ignore[arg-type]
        clock=lambda: now_s,
        call_later=lambda delay_s, work: waiting.append((delay_s, work)),
    )
    here.announce()
    twin = Session("kitchen", 7, "0.1.0", "abcd")
    now_s = 0.4
    for _ in range(3):
        here.on_state(twin.document(AgentState.STOPPED), retained=False)
    assert len(connection.published) == 1
    [(delay_s, work)] = waiting
    assert delay_s == pytest.approx(0.6)
    now_s = 1.0
    work()
    assert [document["state"] for _, document, _ in connection.published] == ["online", "online"]
    here.on_state(SESSION.document(AgentState.ONLINE), retained=False)
    work()  # the topic is right by now
    assert len(connection.published) == 2


def test_nothing_is_corrected_after_the_stop() -> None:
    connection = Recorder()
    here = Presence(SESSION, connection)  # type: ignore[arg-type]
    here.stop()
    here.on_state(b"anything")
    assert len(connection.published) == 1


def test_state_covers_the_connections_for_requests() -> None:
    connection = Recorder()
    here = Presence(SESSION, connection)  # type: ignore[arg-type]
    here.connections_changed(inference=False, groups=None)
    here.connections_changed(inference=True, groups=None)
    here.connections_changed(inference=True, groups=None)
    here.connections_changed(inference=True, groups=False)
    here.stop()
    said = [
        (document["state"], document.get("inference"), document.get("groups"))
        for _, document, _ in connection.published
    ]
    assert said == [
        ("online", "offline", None),
        ("online", "online", None),
        ("online", "online", "offline"),
        ("stopped", None, None),
    ]


def test_change_while_the_control_connection_is_down_is_published_with_the_birth() -> None:
    connection = Recorder()
    connection.connected = False
    here = Presence(SESSION, connection)  # type: ignore[arg-type]
    here.connections_changed(inference=True, groups=None)
    assert not connection.published
    here.announce()
    assert connection.published[0][1]["inference"] == "online"


def test_echo_of_an_earlier_state_of_ours_is_not_corrected() -> None:
    connection = Recorder()
    now_s = 0.0
    here = Presence(SESSION, connection, clock=lambda: now_s)  # type: ignore[arg-type]
    here.connections_changed(inference=False, groups=None)
    here.connections_changed(inference=True, groups=None)
    now_s = 10.0
    here.on_state(SESSION.document(AgentState.ONLINE, inference=False))
    here.on_state(SESSION.document(AgentState.ONLINE, inference=True))
    assert len(connection.published) == 2
    here.on_state(SESSION.will().payload)
    assert connection.published[2][1]["inference"] == "online"
