"""The fleet from documents: what is shown of each, what a page gets, and what a stranger cannot do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent.wire import topics
from agent.wire.job import JobState, Result, Status, Step
from agent.wire.metrics import format_metrics
from agent.wire.presence import Presence
from dashboard import fleet_state
from dashboard.device import MAX_DOCUMENT_BYTES
from dashboard.fleet_state import FleetState

ONLINE = Presence("online", 1, "1.0.0").to_bytes()


class Clock:
    """Both clocks of a fleet."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fleet(*names: str) -> tuple[FleetState, Clock]:
    clock = Clock()
    state = FleetState(clock, clock)
    for name in names:
        state.on_message(topics.State(name), ONLINE, is_retained=True)
    state.settle()
    return state, clock


def rows(state: FleetState, revision: int = 0) -> dict[str, Any]:
    state.settle()
    found = [json.loads(row) for row in state.rows_since(revision)[0]]
    return {row["name"]: row for row in found}


def send(state: FleetState, topic: topics.Topic, document: Mapping[str, object], **more: bool) -> None:
    state.on_message(topic, json.dumps(document).encode(), **more)


def model(state: FleetState, name: str, **fields: object) -> None:
    send(
        state, topics.ModelState(name, "digits"), {"name": "digits", "version": "1", "ready": True, **fields}
    )


def job(state: FleetState, name: str, status: Status, **fields: Any) -> None:
    more = fields.pop("is_retained", False)
    document = JobState(id="j", model="digits", digest="sha256:" + "0" * 64, status=status, **fields)
    state.on_message(topics.Job(name, "j"), document.to_bytes(), is_retained=more)


def test_only_changes_are_told() -> None:
    state, _ = fleet("a", "b")
    first = state.revision
    assert rows(state, first) == {}
    state.on_message(topics.State("a"), ONLINE)
    assert rows(state, first) == {}, "the same again"
    model(state, "b")
    assert rows(state, first)["b"]["models"] == [["digits", "1", "ready"]]
    state.on_message(topics.State("a"), b"")
    changed, gone, is_whole = state.rows_since(first)
    assert (len(changed), gone, is_whole) == (1, ["a"], False)
    state.on_message(topics.State("a"), ONLINE)
    state.settle()
    assert state.rows_since(first)[1] == [], "it came back"
    assert state.rows_since(0)[2]


def test_page_that_slept_for_too_many_removals_gets_the_whole_list() -> None:
    state, _ = fleet("a")
    first = state.revision
    for i in range(fleet_state._MAX_GONE + 1):
        state.on_message(topics.State(f"b{i}"), ONLINE)
        state.on_message(topics.State(f"b{i}"), b"")
    state.settle()
    assert state.rows_since(first)[2]


def test_what_needs_attention() -> None:
    state, _ = fleet("a", "ok")
    send(
        state,
        topics.State("a"),
        {"state": "online", "name_conflict": True, "storage": "full", "inference": "offline"},
    )
    report = {"digest": "", "version": "1", "state": "rolled_back", "message": "it failed"}
    refused = {"code": "ERR_CONFLICT", "message": "no", "version": 3}
    send(state, topics.Reported("a"), {"models": {"digits": report}, "error": refused})
    values = {'edge_temperature_celsius{zone="cpu"}': 85.0, 'edge_throttled{cause="under_voltage"}': 1.0}
    state.on_message(topics.Metrics("a"), format_metrics(values))
    found = rows(state)
    assert found["ok"]["alerts"] == []
    assert found["a"]["alerts"] == [
        "two agents have this name",
        "requests cannot arrive",
        "storage: full",
        "digits: rolled back",
        "refused a request: ERR_CONFLICT",
        "slowed down: under voltage",
        "hot: 80 °C or more",
    ]
    texts = [event["text"] for event in state.events_since(0)]
    assert texts == ["refused a request: no (ERR_CONFLICT)", "digits is rolled back: it failed"]


def test_a_model_is_what_its_two_documents_say() -> None:
    state, _ = fleet("a")

    def report(condition: str) -> None:
        document = {"digest": "", "version": "0", "state": condition, "message": "why"}
        send(state, topics.Reported("a"), {"models": {"digits": document}})

    def shown() -> tuple[Any, ...]:
        device = state.get("a")
        assert device is not None
        [found] = device.detail(None)["allModels"]
        assert rows(state)["a"]["models"] == [[found["name"], found["version"], found["condition"]]]
        return found["version"], found["condition"], found["ready"], found["reason"], found["inputs"]

    report("starting")
    assert shown() == ("0", "starting", False, "why", [])
    model(state, "a", message="its own", inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 4]}])
    assert shown() == ("1", "ready", True, "its own", ["x FP32 [1,4]"])
    report("rolled_back")
    assert shown()[:3] == ("1", "rolled back", True)
    report("active")
    send(state, topics.ModelState("a", "digits"), {"version": "1", "state": "LOADING"})
    assert shown()[:4] == ("1", "LOADING", False, "why")
    model(state, "a", ready=False)
    assert shown()[1] == "not ready"


def test_refused_deployment_has_its_reason_and_what_to_do() -> None:
    state, clock = fleet("a")
    job(state, "a", Status.IN_PROGRESS, step=Step.VERIFYING)
    assert rows(state)["a"]["busy"] == "verifying"
    why = {"code": "ERR_ROLLBACK", "message": "a downgrade", "result": Result.REJECTED}
    job(state, "a", Status.REJECTED, time_s=999.0, **why)
    job(state, "a", Status.REJECTED, time_s=999.0, **why)
    [event] = state.events_since(0)
    assert event["text"] == "digits: rejected: a downgrade (ERR_ROLLBACK)"
    assert "counter" in event["hint"]
    assert rows(state)["a"]["busy"] == ""
    device = state.get("a")
    assert device is not None
    assert device.detail(None)["jobs"][0]["message"] == "a downgrade"
    assert clock.now == 1000.0


def test_clock_of_a_device_is_believed_only_where_it_can_be() -> None:
    state, _ = fleet("past", "future", "live")
    job(state, "past", Status.SUCCEEDED, time_s=500.0, is_retained=True)
    job(state, "future", Status.SUCCEEDED, time_s=5e9, is_retained=True)
    job(state, "live", Status.SUCCEEDED, time_s=5.0)
    assert {event["agent"]: event["time_s"] for event in state.events_since(0)} == {
        "past": 500.0,
        "future": 1000.0,
        "live": 1000.0,
    }


def test_state_that_the_broker_does_not_repeat_after_a_reconnect_is_doubted() -> None:
    state, clock = fleet("stays", "went")
    state.on_up()
    state.on_message(topics.State("stays"), ONLINE, is_retained=True)
    clock.now += fleet_state.CONFIRM_WITHIN_S - 1
    assert {row["state"] for row in rows(state).values()} == {"online"}
    clock.now += 2
    assert {name: row["state"] for name, row in rows(state).items()} == {"stays": "online", "went": "unknown"}
    state.on_message(topics.State("went"), ONLINE)
    assert rows(state)["went"]["state"] == "online"


def test_texts_are_cut_and_printable() -> None:
    state, _ = fleet("a")
    send(state, topics.Info("a"), {"hardware": {"board": "<b>\u202e\x1b[31m" + "x" * 5000, "arch": "arm"}})
    model(state, "a", version="<script>", message="\x00" * 5000)
    row = rows(state)["a"]
    assert row["machine"].startswith("<b>??[31mxxx")
    assert len(row["machine"]) < 200
    assert row["models"][0][1] == "<script>"
    device = state.get("a")
    assert device is not None
    assert device.detail("digits")["allModels"][0]["reason"] == "?" * 500


def test_older_newer_and_broken_documents() -> None:
    state, _ = fleet("a")
    for payload in (b"{}", b"[", b"\xff", b"null", b'{"state": 3, "version": []}'):
        own = topics.State("a"), topics.Info("a"), topics.Reported("a"), topics.Metrics("a")
        for topic in (*own, topics.ModelState("a", "m"), topics.Job("a", "j")):
            state.on_message(topic, payload)
            assert "a" in rows(state)
    assert rows(state)["a"]["state"] == "unknown"
    device = state.get("a")
    assert device is not None
    json.dumps(device.detail("m"), allow_nan=False)


def test_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(fleet_state, "MAX_AGENTS", 3)
    state, _ = fleet("a", "b", "c", "d")
    assert (len(state), state.is_full, set(rows(state))) == (3, True, {"a", "b", "c"})
    for i in range(200):
        send(state, topics.ModelState("a", f"m{i}"), {"name": f"m{i}"})
        document = JobState(id="", model="m", digest="", status=Status.FAILED, time_s=float(i))
        state.on_message(topics.Job("a", f"j{i}"), document.to_bytes())
    device = state.get("a")
    assert device is not None
    assert (len(device.models), len(device.jobs), len(device.events)) == (64, 64, 40)
    assert len(json.dumps(device.detail(None))) < 100_000


def test_a_thousand_hostile_agents_cost_a_bounded_memory() -> None:
    """Each has as many documents as it may, full of small tensors and names."""
    state, _ = fleet("a")
    tensor, column = {"name": "x", "datatype": "FP32", "shape": [1]}, {"name": "x"}
    for i in range(200):
        send(
            state, topics.ModelState("a", f"m{i}"),
            {"inputs": [tensor] * 300, "outputs": [tensor] * 300, "postprocess": ["s"] * 3000,
             "columns": [column]},
        )  # fmt: skip
    send(state, topics.Info("a"), {"compatible": ["c"] * 50_000, "hardware": {"features": ["f"] * 30_000}})
    device = state.get("a")
    assert device is not None
    assert len(device.models) < 64
    assert sum(device.sizes.values()) <= MAX_DOCUMENT_BYTES
    assert max(len(model.inputs) + len(model.postprocess) for model in device.models.values()) == 32
    assert not any(model.outputs or model.columns for model in device.models.values()), "a page shows none"
    assert "it publishes more than this page keeps" in rows(state)["a"]["alerts"]
    assert device.state == "online"
    # One that goes makes room.
    for i in range(200):
        state.on_message(topics.ModelState("a", f"m{i}"), b"")
    model(state, "a")
    assert set(device.models) == {"digits"}
    send(state, topics.Info("a"), {"compatible": ["c"]})
    assert rows(state)["a"]["alerts"] == []


def test_metrics_that_wait_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(fleet_state, "MAX_WAITING_BYTES", 1000)
    state, _ = fleet(*(f"a{i}" for i in range(30)))
    for i in range(60):
        state.on_message(topics.Metrics(f"a{i % 30}"), b"{" + b" " * 98 + b"}")
    assert len(state._metrics) == 10
    state.settle()
    assert state._waiting_bytes == 0


def test_an_agent_that_comes_and_goes_does_not_hide_the_others() -> None:
    state, _ = fleet("a", "b")
    job(state, "b", Status.FAILED, code="ERR_SELF_TEST", message="no")
    for i in range(1000):
        presence = Presence("online" if i % 2 else "offline", 1, "1.0.0")
        state.on_message(topics.State("a"), presence.to_bytes())
    assert [event["agent"] for event in state.events_since(0)] == ["b", "a", "a"]


def test_models_that_an_agent_no_longer_reports_have_no_series() -> None:
    state, _ = fleet("a")
    for i in range(5):
        send(state, topics.Reported("a"), {"models": {f"m{i}": {"state": "active"}}})
        metrics = {f'edge_inference_throughput{{model="m{i}"}}': 1.0}
        state.on_message(topics.Metrics("a"), format_metrics(metrics))
        state.settle()
    device = state.get("a")
    assert device is not None
    assert list(device.series) == ["m4"]


def test_metrics_get_a_share_of_the_time_and_those_in_view_come_first() -> None:
    state, clock = fleet(*(f"a{i}" for i in range(10)))

    def slow() -> float:
        clock.now += fleet_state.METRICS_BUDGET_S / 2
        return clock.now

    state._spent = slow
    for i in range(10):
        state.on_message(
            topics.Metrics(f"a{i}"), format_metrics({'edge_temperature_celsius{zone="z"}': 50.0 + i})
        )
    read = lambda: {name for name in (f"a{i}" for i in range(10)) if state._devices[name].sample}  # noqa: E731
    state.settle({"a9"})
    assert "a9" in read()
    assert len(read()) < 5
    for _ in range(10):
        state.settle({"a9"})
    assert len(read()) == 10
    assert state._devices["a9"].live() == [59.0, None]
