"""One name for one flag: what a flag is called and means is the same for every verb of both programs."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import pytest

import builder.cli as cli
from agent.cli import _parser as agent_parser

# Flags of several verbs -> what each of their helps says.
SENSES: Final = {
    "--accuracy": "how often the (device's )?answers are right",
    "--agent": "an agent to deploy to|agent's name",
    "--broker": r"mqtts?://|mqtt\[s\]://",
    "--cafile": "CA certificates|authority that issued the broker's certificate",
    "--cert": "client certificate",
    "--config": "^configuration",
    "--counter-ahead-of-time": "more than two days ahead",
    "--html": "also write a page of the graph",
    "--input-shapes": "shapes of (the )?inputs",
    "--inputs": "an .npz",
    "--json": "^print (one )?JSON|as JSON lines",
    "--key": "private key of the client certificate",
    "--labels": "class names",
    "--min-repeat-ms": "shortest duration of a measurement",
    "--model": "the model's name on the agent",
    "--model-version": "the model's version",
    "--name": "the model's name on devices",
    "--number": "per measurement|runs to average",
    "--outputs": "to this .npz file",
    "--password-file": "file with the password",
    "--postprocess": "outputs into an answer",
    "--precision": "quantise",
    "--preprocess": "how to turn a picture",
    "--print-top": "print",
    "--repeat": "measurements|send it N times",
    "--report": "write what became of each node|a page",
    "--rpc-key": "key that (the board|they) registered with|name for boards",
    "--rpc-tracker": "registered with this tracker",
    "--security-counter": "a device refuses a lower counter",
    "--show-input": "preprocess makes of",
    "--sign-key": "private key",
    "--state-dir": "^folder for",
    "--target": "device to compile for",
    "--trust": "public key.*folder of them",
    "--tuning-records": "records",
    "--wait": "how long to wait",
}
# Whose values are what the verb writes or needs: a bundle, a folder, a table.
VARIOUS: Final = {
    "--output": "what the verb writes",
    "--precision": "quantize has none that is only arithmetic",
    "--report": "compile also writes JSON",
    "--device": "a script for TVMC gives `run --device cpu`; on the agent it is the device's name",
    "--version": "of the program",
}


def flags() -> Iterator[tuple[str, str, argparse.Action]]:
    """Yield verb, flag and action, of both programs, without what their helps hide."""
    for program, parser in (("edgebundle", cli._parser()), ("edge-agent", agent_parser())):
        yield from _flags(program, parser)


def _flags(prefix: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _flags(f"{prefix} {name}", inner)
        elif action.help is not argparse.SUPPRESS:
            for flag in action.option_strings:
                if flag.startswith("--") and flag not in ("--help", "--traceback"):
                    yield prefix, flag, action


@pytest.fixture(scope="module")
def shared() -> dict[str, list[tuple[str, argparse.Action]]]:
    """The flags that several verbs have."""
    found: dict[str, list[tuple[str, argparse.Action]]] = defaultdict(list)
    for verb, flag, action in flags():
        found[flag].append((verb, action))
    return {flag: uses for flag, uses in found.items() if len(uses) > 1}


def test_a_flag_has_one_metavar(shared: dict[str, list[tuple[str, argparse.Action]]]) -> None:
    several = {
        flag: {str(action.metavar or action.choices or action.nargs): verb for verb, action in uses}
        for flag, uses in shared.items()
        if flag not in VARIOUS
    }
    assert {flag: found for flag, found in several.items() if len(found) > 1} == {}


def test_a_flag_has_one_sense(shared: dict[str, list[tuple[str, argparse.Action]]]) -> None:
    ambiguous = [
        f"{verb} {flag}: {action.help}"
        for flag, uses in shared.items()
        for verb, action in uses
        if flag in SENSES and not re.search(SENSES[flag], str(action.help))
    ]
    assert ambiguous == []


def test_every_shared_flag_has_a_sense(shared: dict[str, list[tuple[str, argparse.Action]]]) -> None:
    helps = {flag: {str(action.help) for _, action in uses} for flag, uses in shared.items()}
    differing = {flag for flag, texts in helps.items() if len(texts) > 1}
    assert sorted(differing - SENSES.keys() - VARIOUS.keys()) == []
    assert sorted(SENSES.keys() - shared.keys()) == [], "no flag of several verbs has this name any more"


def test_every_flag_says_what_it_does() -> None:
    silent = [
        f"{verb} {flag}" for verb, flag, action in flags() if not re.search("[a-z]{3}", str(action.help))
    ]
    assert silent == []
