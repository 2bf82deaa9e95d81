"""What the Debian package takes from the sources, without building it."""

from __future__ import annotations

from deb import package

from agent.deploy.store.state_format import STATE_FORMAT
from tests.packaging.conftest import PROJECT


def test_the_packages_state_format_is_the_agents() -> None:
    assert package.state_format(PROJECT) == str(STATE_FORMAT)


def test_the_packages_configuration_trusts_the_packages_keyring() -> None:
    text = package.configuration(PROJECT)
    assert text.startswith("# /etc/edge-agent/agent.toml")
    assert '\ndir = "/etc/edge-agent/keyring"\n' in text
