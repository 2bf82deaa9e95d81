"""Topics as two inverse functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire import topics
from agent.wire.topics import (
    Block,
    BlockWant,
    Desired,
    GroupInfer,
    Infer,
    Info,
    Job,
    Metrics,
    ModelState,
    Reply,
    Reported,
    State,
    Topic,
    format_topic,
    parse_topic,
)

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True).filter(
    lambda name: name not in topics.RESERVED_NAMES
)
models = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)
users = st.just("") | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._~:=@-]{0,127}", fullmatch=True).filter(
    topics.is_user_name
)
digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
suffixes = st.from_regex(r"[A-Za-z0-9._-]{1,20}(/[A-Za-z0-9._-]{1,20}){0,3}", fullmatch=True)
any_topic: st.SearchStrategy[Topic] = st.one_of(
    st.builds(State, names),
    st.builds(Info, names),
    st.builds(Metrics, names),
    st.builds(Desired, names),
    st.builds(Reported, names),
    st.builds(ModelState, names, models),
    st.builds(Infer, names, models, users),
    st.builds(GroupInfer, names, models, users),
    st.builds(Job, names, names | st.sampled_from(["groups", "replies"])),
    st.builds(BlockWant, names, digests),
    st.builds(Block, names, digests, st.integers(0, 10**15)),
    st.builds(Reply, names, suffixes),
)


@pytest.mark.slow
@given(any_topic)
def test_what_is_written_is_read_again(topic: Topic) -> None:
    assert parse_topic(format_topic(topic)) == topic


@pytest.mark.slow
@given(st.text(max_size=80) | any_topic.map(lambda topic: format_topic(topic) + "/"))
def test_what_is_read_is_what_would_be_written(text: str) -> None:
    topic = parse_topic(text)
    assert topic is None or format_topic(topic) == text


@pytest.mark.slow
@given(any_topic.map(format_topic), st.integers(0, 200), st.characters())
def test_a_changed_character_is_another_topic_or_none(text: str, at: int, character: str) -> None:
    at %= len(text)
    changed = text[:at] + character + text[at + 1 :]
    topic = parse_topic(changed)
    assert topic is None or format_topic(topic) == changed


@pytest.mark.parametrize(
    "text",
    [
        "edge/v1/kitchen/desired",
        "edge/v1/replies",
        "edge/v1/replies/",
        "edge/v1/replies/client",
        "edge/v1/replies/client/",
        "edge/v1/replies//x",
        "edge/v1/replies/client/#",
        "edge/v1/replies/client/+",
        "edge/v1/replies/+/x",
        "edge/v1/replies/client/a//b",
        "edge/v1/replies/client/a\0b",
        "edge/v1/replies/client/a b",
        "edge/v1/replies/groups/x",
        "edge/v1/replies/../kitchen/desired",
        "/edge/v1/replies/client/x",
        "Edge/v1/replies/client/x",
        "edge/v2/replies/client/x",
        "edge/v1/replies/client/" + "x" * 129,
        "edge/v1/replies/client/" + "x/" * 2000,
        "$share/g/edge/v1/replies/client/x",
    ],
)
def test_only_a_topic_in_the_reply_space_is_a_reply(text: str) -> None:
    assert not isinstance(parse_topic(text), Reply)


@pytest.mark.parametrize("name", ["groups", "replies", "", "a/b", "+", "#", "$SYS", "a" * 65, "-x", "ä"])
def test_name_that_cannot_be_a_device_is_refused(name: str) -> None:
    assert not topics.is_device_name(name)
    with pytest.raises(ValueError, match="topic"):
        format_topic(State(name))


def test_reserved_word_as_a_device_is_not_a_topic() -> None:
    assert parse_topic("edge/v1/groups/state") is None
    assert parse_topic("edge/v1/replies/state") is None
    assert parse_topic("edge/v1/groups/g/models/m/infer") == GroupInfer("g", "m")


def test_user_is_the_level_after_infer() -> None:
    assert parse_topic("edge/v1/kitchen/models/m/infer/a@b.org") == Infer("kitchen", "m", "a@b.org")
    assert parse_topic("edge/v1/groups/g/models/m/infer/alice") == GroupInfer("g", "m", "alice")
    assert parse_topic("edge/v1/kitchen/models/infer/infer") == Infer("kitchen", "infer")
    assert parse_topic("edge/v1/kitchen/models/infer/infer/infer") == Infer("kitchen", "infer", "infer")


@pytest.mark.parametrize(
    "user",
    ["+", "#", "", "a b", "a\0b", "a/b", "-a", "$a", "ä", "a" * 129, "anonymous", "groups", "replies"],
)
@pytest.mark.parametrize("kind", [Infer, GroupInfer])
def test_name_that_cannot_be_a_user_is_in_no_topic(kind: type[Infer | GroupInfer], user: str) -> None:
    text = f"{format_topic(kind('kitchen', 'm'))}/{user}"
    assert parse_topic(text) is None
    assert topics.asking_user(text) == (None if "/" in user else user)
    if user:
        with pytest.raises(ValueError, match="topic"):
            format_topic(kind("kitchen", "m", user))


def test_no_topic_matches_two_filters_for_requests() -> None:
    of_all, of_users = topics.infer_filters("kitchen")
    assert of_users == f"{of_all}/+"
    assert of_all.count("/") + 1 == of_users.count("/")
    assert topics.group_filters("g", "m") == (
        "$share/g/edge/v1/groups/g/models/m/infer",
        "$share/g/edge/v1/groups/g/models/m/infer/+",
    )
