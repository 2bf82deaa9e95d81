"""The desired document in force: merged with other tools', and written again when it was replaced."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.desired import FREE_VERSIONS, MAX_VERSION, Desired, DesiredModel
from agent.wire.reported import Rejection, Reported
from builder.errors import FleetError
from builder.fleet.desired import DesiredState

DIGITS = DesiredModel("digits", "sha256:" + "a" * 64, 10, "1.0.0", "j1", ("mqtt",))
OTHER_DIGITS = replace(DIGITS, job="j9")


def other(model: str) -> DesiredModel:
    return replace(DIGITS, model=model, job=f"job-{model}")


def doc(version: int, *models: DesiredModel) -> Desired:
    return Desired(version, models)


def reported(desired: Desired | None, *, code: str = "", version: int | None = None) -> bytes:
    error = Rejection(code, "m", version) if code else None
    return Reported(desired, error=error).to_bytes()


def names(written: Desired) -> set[str]:
    return {entry.model for entry in written.models}


def write(state: DesiredState, *, online: bool = True) -> Desired:
    return Desired.from_bytes(state.write(online=online))


def test_first_document_has_only_our_model() -> None:
    written = write(DesiredState(DIGITS))
    assert written == Desired(1, (DIGITS,), None)


def test_document_has_everything_that_the_one_in_force_has_and_names_it() -> None:
    state = DesiredState(DIGITS)
    in_force = doc(7, other("faces"))
    state.on_reported(reported(in_force))
    written = write(state)
    assert (written.version, names(written)) == (8, {"digits", "faces"})
    assert written.base == in_force.digest, "both sides compute the same digest"


def test_our_entry_replaces_the_one_in_force() -> None:
    state = DesiredState(DIGITS)
    state.on_reported(reported(doc(7, other("faces"), OTHER_DIGITS)))
    assert write(state).models == (other("faces"), DIGITS)


def test_agent_that_is_away_gets_a_document_without_a_base() -> None:
    state = DesiredState(DIGITS)
    state.on_reported(reported(doc(7, other("faces"))))
    assert write(state, online=False).base is None


def test_document_that_the_agent_has_not_seen_yet_is_the_base() -> None:
    state = DesiredState(DIGITS)
    state.on_reported(reported(doc(7)))
    state.on_desired(doc(8, other("faces")).to_bytes())
    written = write(state)
    assert (written.version, names(written)) == (9, {"digits", "faces"})


def test_document_that_the_agent_refused_is_not_the_base_but_outnumbered() -> None:
    state = DesiredState(DIGITS)
    state.on_desired(doc(8, other("words")).to_bytes())
    state.on_reported(reported(doc(7, other("faces")), code="ERR_CONFLICT", version=8))
    written = write(state)
    assert (written.version, names(written)) == (9, {"digits", "faces"})


def test_unreadable_document_at_the_broker_is_outnumbered() -> None:
    state = DesiredState(DIGITS)
    state.on_reported(reported(doc(7, other("faces"))))
    state.on_desired(b'{"version":30,"models":{"words":{"new":1}}}')
    written = write(state)
    assert (written.version, names(written)) == (31, {"digits", "faces"})


@pytest.mark.parametrize("version", [MAX_VERSION, MAX_VERSION - 1, FREE_VERSIONS + 8])
def test_document_that_the_agent_refuses_for_its_version_is_not_outnumbered(version: int) -> None:
    state = DesiredState(DIGITS)
    state.on_reported(reported(doc(7, other("faces"))))
    state.on_desired(doc(version, other("evil")).to_bytes())
    written = write(state)
    assert (written.version, names(written)) == (8, {"digits", "faces"})


def test_agent_far_up_is_followed_in_steps() -> None:
    state = DesiredState(DIGITS)
    state.on_reported(reported(doc(FREE_VERSIONS + 5, other("faces"))))
    state.on_desired(doc(FREE_VERSIONS + 9, other("faces")).to_bytes())
    assert write(state).version == FREE_VERSIONS + 10


def test_another_document_of_the_same_version_is_not_preferred_to_the_one_in_force() -> None:
    state = DesiredState(DIGITS)
    state.on_desired(doc(7, other("words")).to_bytes())
    state.on_reported(reported(doc(7, other("faces"))))
    assert names(write(state)) == {"digits", "faces"}


def test_conflict_is_a_loss_and_another_refusal_is_passed_on() -> None:
    state = DesiredState(DIGITS)
    state.write(online=True)
    assert not state.lost()
    state.on_reported(reported(None, code="ERR_CONFLICT", version=1))
    assert state.lost()
    state.on_reported(reported(None, code="ERR_ENDLESS_DATA", version=1))
    assert (state.lost(), state.rejection()) == (False, Rejection("ERR_ENDLESS_DATA", "m", 1))
    state.on_reported(reported(None, code="ERR_CONFLICT", version=99))
    assert not state.lost(), "another tool's conflict is not ours"


def test_document_in_force_without_our_model_is_a_loss() -> None:
    state = DesiredState(DIGITS)
    state.on_reported(reported(replace(write(state), base=None)))
    assert not state.lost()
    state.on_reported(reported(doc(2, other("faces"))))
    assert state.lost()
    state.on_reported(reported(doc(2, OTHER_DIGITS)))
    assert state.lost()


def test_document_is_published_again_only_while_no_other_replaced_it() -> None:
    state = DesiredState(DIGITS)
    before = state.published
    assert before is None
    written = state.write(online=True)
    assert state.published == written
    state.on_desired(written)
    assert state.published == written
    state.on_desired(b"")
    assert state.published == written, "the broker has forgotten it"
    for foreign in (doc(9, other("faces")).to_bytes(), b'{"version":9,"models":{"new":1}}'):
        state.on_desired(foreign)
        assert state.published is None


def test_report_with_an_unreadable_desired_document_stops_the_deployment() -> None:
    """Writing without what it says would take the agent's other models out of service."""
    state = DesiredState(DIGITS)
    newer = {"version": 3, "models": {"faces": {"key of a later version": 1}}}
    state.on_reported(json.dumps({"version": 3, "models": {}, "desired": newer, "error": None}).encode())
    assert state.reported
    with pytest.raises(FleetError, match="report cannot be read"):
        state.write(online=True)
    state.on_reported(b"")
    assert names(write(state)) == {"digits"}


@given(
    st.binary(max_size=100)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.dictionaries(
            st.sampled_from(["version", "models", "desired", "error", "x"]), inner, max_size=4
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_at_the_broker_lead_to_a_readable_document(rubbish: bytes) -> None:
    state = DesiredState(DIGITS)
    state.on_desired(rubbish)
    written = write(state)
    assert (written.get("digits"), 1 <= written.version <= MAX_VERSION) == (DIGITS, True)
    state.on_reported(rubbish)
    with contextlib.suppress(FleetError):
        assert write(state).get("digits") == DIGITS
    state.lost()
    state.rejection()


def test_entry_of_another_tool_is_kept_as_it_was() -> None:
    entry: dict[str, Any] = {**other("faces").to_document(), "sources": ["https://a.example/b", "mqtt"]}
    raw = json.dumps({"version": 1, "models": {"faces": entry}}).encode()
    state = DesiredState(DIGITS)
    state.on_desired(raw)
    assert json.loads(state.write(online=True))["models"]["faces"] == entry
