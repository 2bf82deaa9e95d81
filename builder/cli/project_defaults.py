"""Verbs that are run in the folder of a project take what is not given from its `edgebundle.toml`.

Promises: a flag on the command line wins over the file. What the file says about its model is not applied to
another model or bundle that the command line names. What a stranger's file must not do needs a yes
(`project_trust`). A verb takes part with the arguments that it has, and needs no code of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from builder.cli.project_file import FILE, Project
from builder.errors import ProjectError
from builder.spelling import did_you_mean

Parsed = tuple[argparse.Namespace, list[str]]

# The verbs that read the file.
_VERBS: Final = frozenset(
    {
        "agents",
        "check",
        "compile",
        "dashboard",
        "deploy",
        "infer",
        "inspect",
        "metrics",
        "profile",
        "quantize",
        "repack",
        "rollback",
        "run",
        "tune",
    }
)
# These ask a fleet, not for a model.
_ONLY_FLEET: Final = frozenset({"agents", "dashboard", "metrics"})
# The other flags of these mean something else.
_ONLY_FILES: Final = frozenset({"quantize", "tune"})
# How many words an argument takes, if none is enough.
_OPTIONAL: Final[Mapping[int | str | None, int | str]] = {
    None: argparse.OPTIONAL,
    argparse.ONE_OR_MORE: argparse.ZERO_OR_MORE,
}


def with_project(
    verbs: Mapping[str, argparse.ArgumentParser],
    arguments: Sequence[str],
    parse: Callable[[Sequence[str]], Parsed],
) -> Parsed:
    """Parse arguments; in the folder of a project with its values as defaults.

    `verbs`: the parsers of the verbs. That of the chosen verb is changed.
    `arguments`: the command line.
    `parse`: parses it with these parsers.
    Raises `ProjectError` if the file cannot be used, or needs a yes and does not get it.
    """
    verb = next((word for word in arguments if not word.startswith("-")), "")
    file = Path(FILE)
    wants_help = any(word in ("-h", "--help") for word in arguments)
    if verb not in _VERBS or verb not in verbs or wants_help or not file.is_file():
        return parse(arguments)
    project = Project.load(file)
    values = {**_fleet(verb, project), **_model(verb, project)}
    _apply(verbs[verb], values)
    args, unknown = _parsed(verbs[verb], arguments, parse)
    source = _source(verb, project)
    own = getattr(args, source[0], None) if source is not None else None
    if source is not None and own is not None and own != source[1]:
        others = dict.fromkeys(_model(verb, project))
        _apply(verbs[verb], others)
        args, unknown = _parsed(verbs[verb], arguments, parse)
        values |= others
    from builder.cli.project_trust import require_trust  # loaded late: most folders have no such file

    require_trust(vars(args), values, arguments)
    return args, unknown


def _parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str], parse: Callable[[Sequence[str]], Parsed]
) -> Parsed:
    """Parse, and let flags that may be repeated replace the project's list; argparse would add them to it."""
    args, unknown = parse(arguments)
    for action in parser._actions:
        default, given = action.default, getattr(args, action.dest, None)
        if isinstance(action, argparse._AppendAction) and default and given and len(given) > len(default):
            setattr(args, action.dest, given[len(default) :])
    return args, unknown


def _source(verb: str, project: Project) -> tuple[str, str | list[str]] | None:
    """Return the argument that names the file which a verb works on, and the project's value."""
    model = project.model
    if verb in ("compile", "check", "quantize", "tune"):
        return None if model.file is None else ("model", model.file)
    if verb in ("infer", "rollback") or verb in _ONLY_FLEET:
        return None
    bundle = _bundle(project)
    if bundle is None:
        return None
    return ("bundles", [bundle]) if verb == "deploy" else ("bundle", bundle)


def _bundle(project: Project) -> str | None:
    model = project.model
    if model.bundle is not None or model.file is None:
        return model.bundle
    return f"{Path(model.file).stem}.bundle"


def _fleet(verb: str, project: Project) -> dict[str, object]:
    fleet = project.fleet
    values: dict[str, object] = {
        "broker": fleet.broker,
        "cafile": _path(fleet.cafile),
        "cert": _path(fleet.cert),
        "password_file": _path(fleet.password_file),
        "mqtt_version": fleet.mqtt_version,
        "agent": (list(fleet.agents) if verb == "deploy" else fleet.agents[0]) if fleet.agents else None,
    }
    if verb == "compile":
        return {"sign_key": project.sign.key}
    return values | ({"sign_key": project.sign.key} if verb == "repack" else {"key": _path(fleet.key)})


def _model(verb: str, project: Project) -> dict[str, object]:
    model = project.model
    if verb in _ONLY_FLEET:
        return {}
    if verb in ("infer", "rollback"):
        return {"model": model.name}
    bundle = _bundle(project)
    values: dict[str, object] = {
        "model": model.file,
        "bundle": bundle,
        "bundles": None if bundle is None else [bundle],
        "target": model.target,
        "input_shapes": model.input_shapes,
        "input_values": model.input_values,
    }
    if verb == "quantize":
        values |= {"preprocess": model.preprocess, "calibration": model.calibration}
    if verb in _ONLY_FILES:
        return values
    return values | {
        "output": model.bundle if verb == "compile" else None,
        "name": model.name,
        "model_version": model.version,
        "preprocess": model.preprocess,
        "postprocess": model.postprocess,
        "labels": model.labels,
        "columns": model.columns,
        "precision": model.precision,
        "calibration": model.calibration if model.precision is not None else None,
    }


def _apply(parser: argparse.ArgumentParser, values: Mapping[str, object]) -> None:
    """Make values the defaults of the arguments of these names, which then need not be given.

    A value of None takes such a default away again.
    """
    for action in parser._actions:
        if action.dest not in values or action.help is argparse.SUPPRESS:
            continue
        value = values[action.dest]
        saved = getattr(action, "without_project", (action.default, action.required, action.nargs))
        action.without_project = saved  # type: ignore[attr-defined]  # an attribute of ours
        action.default, action.required, action.nargs = saved
        if value is None:
            continue
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise ProjectError(
                f"{FILE}: {action.dest}: expected one of {', '.join(known)}, got {str(value)!r:.80}",
                hint=did_you_mean(str(value), known, otherwise="see docs/project.md"),
            )
        action.default, action.required = value, False
        if not action.option_strings:
            action.nargs = _OPTIONAL.get(action.nargs, action.nargs)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
