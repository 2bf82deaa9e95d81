"""The verb `deploy`: a bundle, or the best of several, to agents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.terminal import note, printable, say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import json_flag
from builder.cli.broker_flags import BrokerFlags, wait_flag
from builder.cli.flags import argument, flag, part, takes
from builder.cli.refused_bundle import naming_file
from builder.fleet.hints import deployment_hint

if TYPE_CHECKING:
    from builder.fleet.deploy import DeployProgress, DeployResult


@dataclass(frozen=True, slots=True)
class _Deploy:
    bundles: list[str] = argument(
        metavar="FILE",
        nargs="+",
        help="the bundle; or several of one model, preferred ones first, or a folder of them",
    )
    agent: list[str] = flag(
        required=True,
        action="append",
        metavar="NAME",
        help="an agent's name: `device` in its configuration, the first column of `edgebundle agents`; "
        "repeatable: the agents are served one after the other, until one fails",
    )
    at: BrokerFlags = part(BrokerFlags, "broker")
    source: str | None = flag(
        metavar="URL",
        help="https URL that the agent downloads the bundle from; for several bundles, one that ends in / "
        "(default: this command sends the bundle over MQTT)",
    )
    wait: float = wait_flag(600.0, "the result")
    json: bool = json_flag()


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "deploy",
        help="deploy a bundle to an agent and wait for the result",
        description="Deploy a bundle to an agent over MQTT. The agent downloads, verifies and tests it, then "
        "switches to it.\nThe old version serves until the new one has passed its recorded samples.\n\n"
        "Of several bundles of one model (same name, version, security counter, inputs and outputs), the\n"
        "agent gets the best that its processor can run: one for exactly its core, otherwise the one that\n"
        "uses most of its CPU features, otherwise the first.",
        epilog="examples:\n"
        "  edgebundle deploy resnet50.bundle --agent kitchen --broker mqtts://broker --cafile ca.pem\n"
        "  edgebundle deploy resnet50.bundle --agent kitchen --broker mqtt://localhost \\\n"
        "      --source https://files.example/bundles/resnet50.bundle\n"
        "  edgebundle deploy resnet50-int8-pi5.bundle resnet50-pi4.bundle --agent kitchen --broker mqtt://localhost",
    )
    takes(parser, _Deploy, _deploy)


def _deploy(args: _Deploy) -> int:
    from builder.fleet.bundle_file import BundleFile
    from builder.fleet.bundle_set import list_files

    files = list_files(args.bundles)
    for file in files:
        with naming_file(str(file)):
            BundleFile.read(file).require_signature(str(file))
    for agent in dict.fromkeys(args.agent):
        try:
            _deploy_to(args, files, agent)
        except KeyboardInterrupt:
            note(
                f"stopped waiting for {agent}: what is wished stays, and an agent with the bundle goes on; "
                "see `edgebundle agents`, or return with `edgebundle rollback`"
            )
            raise
    return 0


def _deploy_to(args: _Deploy, files: Sequence[Path], agent: str) -> None:
    import asyncio

    from builder.fleet.deploy_set import deploy_set_async

    name = str(files[0]) if len(files) == 1 else "the bundles"
    with show_deployment(quiet=args.json) as steps, naming_file(name):
        result = asyncio.run(
            deploy_set_async(
                files,
                agent,
                args.at.made(),
                source=args.source,
                wait_s=args.wait,
                steps=steps,
                progress=(lambda _line: None) if args.json else note,
            )
        )
    print_result(result, as_json=args.json)


def print_result(result: DeployResult, *, as_json: bool) -> None:
    """Print what became of a deployment.

    Raises `FleetError` if it did not succeed.
    """
    from builder.errors import FleetError

    if as_json:
        say_json(
            {
                "agent": result.agent,
                "model": result.model,
                "version": result.version,
                "digest": result.digest,
                "job": result.job,
                "status": result.status,
                "result": result.result,
                "code": result.code,
                "message": result.message,
                "sent_bytes": result.sent_bytes,
                "duration_s": round(result.duration_s, 3),
            },
            indent=2,
        )
    if not result.ok:
        why = ": ".join(word for word in (result.status, result.message) if word)
        code = f" ({result.code})" if result.code else ""
        raise FleetError(
            f"{result.agent}: {result.model} {result.version}: {why}{code}",
            hint=deployment_hint(result.code) or "the version that ran before is still in service",
        )
    if not as_json:
        note = f", {result.message}" if result.message else ""
        say(
            f"{result.model} {result.version} is in service on {result.agent} "
            f"({result.duration_s:.1f} s, {result.sent_bytes / 1e6:.2f} MB sent{note})"
        )


@contextmanager
def show_deployment(*, quiet: bool) -> Iterator[Callable[[DeployProgress], None]]:
    """Show a deployment's progress on stderr: a bar on a terminal, a line for each step elsewhere."""
    if quiet:
        yield lambda _progress: None
        return
    if not sys.stderr.isatty():
        last = [""]

        def line(progress: DeployProgress) -> None:
            if progress.step and progress.step != last[0]:
                last[0] = progress.step
                note(progress.step)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("waiting for the agent", total=1.0)
        yield lambda progress: bar.update(
            task,
            description=printable((progress.step or progress.status.lower()).replace("_", " ")),
            completed=progress.fraction,
        )
