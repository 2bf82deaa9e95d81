"""Whose wish is in force: merged with others', and noticed when it was lost."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.deploy.desired import parse_desired
from builder.fleet.desired import DesiredState, Refusal

ENTRY = {"digest": "sha256:" + "a" * 64, "size": 10, "version": "1.0.0", "job": "j1", "sources": ["mqtt"]}
OTHER = ENTRY | {"job": "j2"}


def doc(version: int, **models: dict[str, Any]) -> dict[str, Any]:
    return {"version": version, "models": models}


def raw(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def reported(taken: dict[str, Any] | None, **error: Any) -> bytes:
    return raw({"desired": taken, "error": error or None, "models": {}})


def test_a_first_document_has_our_wish_alone_and_the_agent_reads_it() -> None:
    state = DesiredState("digits", ENTRY)
    written = parse_desired(state.write(online=True))
    assert (written.version, [request.model for request in written.models]) == (1, ["digits"])
    assert written.base is None


def test_a_document_has_everything_that_the_one_in_force_has_and_names_it() -> None:
    state = DesiredState("digits", ENTRY)
    taken = doc(7, faces=OTHER)
    state.on_reported(reported(taken))
    written = parse_desired(state.write(online=True))
    assert (written.version, {request.model for request in written.models}) == (8, {"digits", "faces"})
    assert written.base == parse_desired(raw(taken)).digest, "both sides compute the same digest"


def test_an_agent_that_is_away_compares_nothing() -> None:
    state = DesiredState("digits", ENTRY)
    state.on_reported(reported(doc(7, faces=OTHER)))
    assert parse_desired(state.write(online=False)).base is None


def test_a_document_that_the_agent_has_not_seen_yet_is_written_from() -> None:
    state = DesiredState("digits", ENTRY)
    state.on_reported(reported(doc(7)))
    state.on_desired(raw(doc(8, faces=OTHER)))
    written = parse_desired(state.write(online=True))
    assert (written.version, {request.model for request in written.models}) == (9, {"digits", "faces"})


def test_a_document_that_the_agent_refused_is_not_written_from_but_outnumbered() -> None:
    state = DesiredState("digits", ENTRY)
    state.on_desired(raw(doc(8, words=OTHER)))
    state.on_reported(reported(doc(7, faces=OTHER), code="ERR_CONFLICT", message="m", version=8))
    written = parse_desired(state.write(online=True))
    assert (written.version, {request.model for request in written.models}) == (9, {"digits", "faces"})


def test_another_document_of_the_same_version_is_not_preferred_to_what_is_in_force() -> None:
    state = DesiredState("digits", ENTRY)
    state.on_desired(raw(doc(7, words=OTHER)))
    state.on_reported(reported(doc(7, faces=OTHER)))
    written = parse_desired(state.write(online=True))
    assert {request.model for request in written.models} == {"digits", "faces"}


def test_a_conflict_is_a_loss_and_another_refusal_is_told() -> None:
    state = DesiredState("digits", ENTRY)
    state.write(online=True)
    assert not state.lost()
    state.on_reported(reported(None, code="ERR_CONFLICT", message="m", version=1))
    assert state.lost()
    state.on_reported(reported(None, code="ERR_ENDLESS_DATA", message="m", version=1))
    assert (state.lost(), state.refusal()) == (False, Refusal("ERR_ENDLESS_DATA", "m"))
    state.on_reported(reported(None, code="ERR_CONFLICT", message="m", version=99))
    assert not state.lost(), "another tool's conflict is not ours"


def test_a_document_in_force_without_our_wish_is_a_loss() -> None:
    state = DesiredState("digits", ENTRY)
    written = json.loads(state.write(online=True))
    state.on_reported(reported({key: written[key] for key in ("version", "models")}))
    assert not state.lost()
    state.on_reported(reported(doc(2, faces=OTHER)))
    assert state.lost()


def test_what_was_published_is_said_again_only_while_nobody_has_said_more() -> None:
    state = DesiredState("digits", ENTRY)
    before = state.published
    assert before is None
    written = state.write(online=True)
    assert state.published == written
    state.on_desired(written)
    assert state.published == written
    state.on_desired(raw(doc(9, faces=OTHER)))
    assert state.published is None


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
def test_whatever_is_at_the_broker_a_readable_document_is_written(rubbish: bytes) -> None:
    state = DesiredState("digits", ENTRY)
    state.on_desired(rubbish)
    state.on_reported(rubbish)
    document = json.loads(state.write(online=True))
    assert document["models"]["digits"] == ENTRY
    assert document["version"] >= 1
    state.lost()
    state.refusal()
