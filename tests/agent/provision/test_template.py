"""Values are written into a configuration, and its comments are kept."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.file import parse_config
from agent.config.keys import KEYS, sample_config
from agent.errors import ConfigError
from agent.provision.template import fill

VALUES: dict[str, str | tuple[str, ...]] = {
    "broker.url": "mqtts://b",
    "device": "kitchen",
    "trust.dir": "keyring",
    "groups": ("door", "hall"),
}


def test_values_replace_the_commented_keys_of_the_sample(tmp_path_factory: pytest.TempPathFactory) -> None:
    filled = fill(sample_config(), VALUES)
    lines, sample = filled.splitlines(), sample_config().splitlines()
    assert len(lines) == len(sample)
    changed = [(old, new) for old, new in zip(sample, lines, strict=True) if old != new]
    assert changed == [
        ("#device = ...", 'device = "kitchen"'),
        ("#groups = []", 'groups = ["door", "hall"]'),
        ("#url = ...", 'url = "mqtts://b"'),
        ("#dir = ...", 'dir = "keyring"'),
    ]
    for key in KEYS:
        assert key.text in filled
    config = parse_config(tomllib.loads(filled), {}, {}, folder=tmp_path_factory.mktemp("etc"))
    assert (config.device, config.groups, config.broker.host) == ("kitchen", ("door", "hall"), "b")


def test_other_keys_and_comments_stay_and_replaced_values_are_gone() -> None:
    text = (
        'device = "old" # mine\n\n[broker] # the one in the cellar\n'
        'url = "mqtt://old"\nkeepalive_s = 5\n\n[sources]\nhttps = [\n  "https://a/", # one\n  "https://b/",\n]\n'
    )
    filled = fill(text, {"device": "new", "broker.url": "mqtt://new", "sources.https": ("https://c/",)})
    assert filled == (
        'device = "new"\n\n[broker] # the one in the cellar\n'
        'url = "mqtt://new"\nkeepalive_s = 5\n\n[sources]\nhttps = ["https://c/"]\n'
    )


def test_key_of_the_same_name_in_another_section_is_not_changed() -> None:
    text = '[sources]\nca = "a.pem"\n[broker]\nurl = "mqtts://b"\n'
    filled = fill(text, {"broker.ca": "b.pem"})
    assert tomllib.loads(filled) == {
        "sources": {"ca": "a.pem"},
        "broker": {"url": "mqtts://b", "ca": "b.pem"},
    }


def test_missing_section_is_added_and_a_key_removed() -> None:
    filled = fill(
        '[broker]\nurl = "mqtt://b"\nusername = "me"\n', {"trust.dir": "k", "broker.username": None}
    )
    assert tomllib.loads(filled) == {"broker": {"url": "mqtt://b"}, "trust": {"dir": "k"}}


def test_filling_twice_changes_nothing() -> None:
    once = fill(sample_config(), VALUES)
    assert fill(once, VALUES) == once


@pytest.mark.parametrize("text", ['broker = { url = "mqtt://b" }\n', 'broker.url = "mqtt://b"\n', "no toml"])
def test_layout_that_cannot_be_edited_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fill(text, {"broker.url": "mqtt://c"})
    assert caught.value.hint


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_is_read_back_as_given(value: str) -> None:
    filled = fill(sample_config(), {"broker.username": value})
    assert tomllib.loads(filled)["broker"]["username"] == value
    assert fill(filled, {"device": "k"}).count("\n") == filled.count("\n")
