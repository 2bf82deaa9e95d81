"""The verbs that talk to agents: `deploy`, `infer`, `agents`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.cli import Parser, SubParsers
from builder.cli.arguments import add_json, not_negative, positive, seconds
from builder.cli.progress import print_line
from builder.cli.refused_bundle import naming_file
from builder.fleet.hints import deployment_hint

if TYPE_CHECKING:
    from builder.fleet.agents import AgentSummary
    from builder.fleet.deploy import DeployProgress
    from edgebundle.answer import Answer
    from edgebundle.async_model import AsyncModel
    from edgebundle.broker import Broker
    from edgebundle.output import Output


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verbs."""
    _add_deploy(subparsers)
    _add_infer(subparsers)
    _add_agents(subparsers)


def _add_deploy(subparsers: SubParsers) -> None:
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
    parser.add_argument(
        "bundles",
        metavar="FILE",
        nargs="+",
        help="the bundle; or several of one model, preferred ones first, or a folder of them",
    )
    parser.add_argument(
        "--agent",
        required=True,
        action="append",
        metavar="NAME",
        help="an agent's name: `device` in its configuration, the first column of `edgebundle agents`; "
        "repeatable: the agents are served one after the other, until one fails",
    )
    add_broker(parser)
    parser.add_argument(
        "--source",
        metavar="URL",
        help="https URL that the agent downloads the bundle from; for several bundles, one that ends in / "
        "(default: this command sends the bundle over MQTT)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the result (default: %(default)g)",
    )
    add_json(parser)
    parser.set_defaults(handler=_deploy)


def _add_infer(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "infer",
        help="send a request to a model on an agent",
        description="Send a picture, tensors or a JSON request to a model on an agent, and print the answer.",
        epilog="examples:\n"
        "  edgebundle infer --agent kitchen --model resnet50 --input cat.jpg --broker mqtt://localhost\n"
        "  arecord -q -t wav -f S16_LE -r 16000 | edgebundle infer --agent kitchen --model vad --input - "
        "--broker mqtt://localhost\n"
        "  edgebundle infer --agent kitchen --model bert --input tokens.npz --outputs out.npz "
        "--broker mqtt://localhost\n"
        "  edgebundle infer --agent kitchen --model resnet50 --input cat.jpg --repeat 100 "
        "--broker mqtt://localhost",
    )
    add_agent(parser)
    parser.add_argument("--model", required=True, metavar="NAME", help="the model's name on the agent")
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="a .jpg or .png picture, a .wav recording, an .npz of inputs, or a .json request; - reads a "
        "picture or a WAV from stdin, the WAV while it arrives",
    )
    add_broker(parser)
    parser.add_argument(
        "--accuracy",
        metavar="CSV|JSON",
        help="print how often the device's answers are right, as `edgebundle run --accuracy` does; --input "
        "may be the folder of the pictures",
    )
    parser.add_argument("--outputs", metavar="FILE", help="write the output tensors to this .npz file")
    parser.add_argument(
        "--print-top",
        type=not_negative,
        default=5,
        metavar="N",
        help="number of labels to print (default: %(default)s)",
    )
    parser.add_argument(
        "--repeat",
        type=positive,
        default=1,
        metavar="N",
        help="send it N times over one connection, one after the other, and print the latencies "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="give up after this time; until then, send the request again if needed (default: %(default)g)",
    )
    add_json(parser)
    parser.set_defaults(handler=_infer)


def _add_agents(subparsers: SubParsers) -> None:
    parser = subparsers.add_parser(
        "agents",
        help="list the agents at a broker and their models",
        description="List the agents at a broker, each with its state, device and models.",
        epilog="example:\n  edgebundle agents --broker mqtt://localhost",
    )
    add_broker(parser)
    parser.add_argument(
        "--wait",
        type=seconds,
        default=2.0,
        metavar="SECONDS",
        help="how long to wait for agents (default: %(default)g)",
    )
    add_json(parser)
    parser.set_defaults(handler=_agents)


def add_agent(parser: Parser) -> None:
    """Add `--agent`."""
    parser.add_argument(
        "--agent",
        required=True,
        metavar="NAME",
        help="the agent's name: `device` in its configuration, the first column of `edgebundle agents`",
    )


def add_broker(parser: Parser) -> None:
    """Add the flags for the broker and this client's credentials."""
    group = parser.add_argument_group("broker")
    group.add_argument("--broker", required=True, metavar="URL", help="mqtt[s]://[USER@]HOST[:PORT]")
    group.add_argument("--password-file", type=Path, metavar="FILE", help="file with the password of USER")
    group.add_argument(
        "--cafile", type=Path, metavar="PEM", help="CA certificates for mqtts (default: the system's)"
    )
    group.add_argument("--cert", type=Path, metavar="PEM", help="client certificate")
    group.add_argument("--key", type=Path, metavar="PEM", help="private key of the client certificate")
    group.add_argument(
        "--mqtt-version",
        choices=("auto", "5", "3.1.1"),
        default="auto",
        help="auto tries 5, then 3.1.1 if the broker refuses (default: %(default)s)",
    )


def broker_of(args: argparse.Namespace) -> Broker:
    """Return the broker that the flags of `add_broker` describe."""
    from edgebundle.broker import Broker

    return Broker(
        url=args.broker,
        cafile=args.cafile,
        certificate=args.cert,
        key=args.key,
        password_file=args.password_file,
        protocol=args.mqtt_version,
    )


def _deploy(args: argparse.Namespace) -> int:
    from builder.fleet.bundle_file import BundleFile
    from builder.fleet.bundle_set import list_files

    files = list_files(args.bundles)
    for file in files:
        with naming_file(str(file)):
            BundleFile.read(file).require_signature(str(file))
    for agent in dict.fromkeys(args.agent):
        _deploy_to(args, files, agent)
    return 0


def _deploy_to(args: argparse.Namespace, files: Sequence[Path], agent: str) -> None:
    import asyncio

    from builder.errors import FleetError
    from builder.fleet.deploy_set import deploy_set_async

    name = str(files[0]) if len(files) == 1 else "the bundles"
    with _show_deployment(quiet=args.json) as steps, naming_file(name):
        result = asyncio.run(
            deploy_set_async(
                files,
                agent,
                broker_of(args),
                source=args.source,
                wait_s=args.wait,
                steps=steps,
                progress=(lambda _line: None) if args.json else print_line,
            )
        )
    if args.json:
        _print_json(
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
            }
        )
    if not result.ok:
        why = ": ".join(word for word in (result.status, result.message) if word)
        code = f" ({result.code})" if result.code else ""
        raise FleetError(
            f"{result.agent}: {result.model} {result.version}: {why}{code}",
            hint=deployment_hint(result.code) or "the version that ran before is still in service",
        )
    if not args.json:
        note = f", {result.message}" if result.message else ""
        print(
            f"{result.model} {result.version} is in service on {result.agent} "
            f"({result.duration_s:.1f} s, {result.sent_bytes / 1e6:.2f} MB sent{note})"
        )


def _infer(args: argparse.Namespace) -> int:
    import asyncio

    from builder.errors import FleetError
    from edgebundle.errors import ClientError, RefusedError

    if args.input is None and args.accuracy is None:
        raise FleetError("expected --input, got none", hint="for example --input cat.jpg")
    try:
        if args.accuracy is not None:
            from builder.cli.device_accuracy import infer_accuracy

            return asyncio.run(infer_accuracy(args, broker_of(args)))
        data = _given(args.input)
        answers = asyncio.run(_ask(args, data))
    except RefusedError as error:
        if args.json:
            _print_json(
                {
                    "agent": args.agent,
                    "model": args.model,
                    "status": error.status,
                    "message": error.message,
                    "hint": error.hint,
                }
            )
        raise FleetError(
            f"{args.agent}: {args.model}: {error.message} (status {error.status})", hint=error.hint
        ) from error
    except ClientError as error:
        raise FleetError(error.message, hint=error.hint) from error
    answer = answers[-1]
    if args.outputs:
        import numpy as np

        np.savez(args.outputs, **{output.name: _plain(output) for output in answer.outputs})
    if args.json:
        _print_json(_infer_json(answers))
    else:
        _print_answer(answers, args.print_top)
    return 0


def _given(name: str) -> object:
    """Read the file of `--input`; `-` is a picture or a recording on standard input."""
    from builder.fleet.listening import WAV_HEAD_BYTES, Piped, is_wav
    from edgebundle.errors import UsageError
    from edgebundle.request import MAX_REQUEST_BYTES, Request, read_arrays

    if name != "-":
        path = Path(name)
        return read_arrays(path) if path.suffix == ".npz" else Request.from_file(path)
    head = sys.stdin.buffer.read(WAV_HEAD_BYTES)
    if is_wav(head):
        return Piped(head)
    try:
        return Request.image(head + sys.stdin.buffer.read(MAX_REQUEST_BYTES + 1 - len(head)))
    except UsageError as error:
        raise UsageError(f"standard input: {error.message}", hint=error.hint) from error


async def _ask(args: argparse.Namespace, data: object) -> list[Answer]:
    """Ask as often as `--repeat` says."""
    from builder.fleet.listening import Piped, listen
    from edgebundle.async_client import AsyncClient
    from edgebundle.request import Request

    async with AsyncClient(broker_of(args), progress=print_line) as client:
        model = client.model(args.agent, args.model)
        if isinstance(data, Piped):
            return [await listen(model, data, sys.stdin.buffer, args.deadline, _print_heard(args))]
        if not isinstance(data, Request) and (await _keeps_state(model)):
            async with model.session() as session:  # each repetition is a step
                return [await session(data, deadline_s=args.deadline) for _ in range(args.repeat)]
        return [await model(data, deadline_s=args.deadline) for _ in range(args.repeat)]


async def _keeps_state(model: AsyncModel) -> bool:
    from edgebundle.errors import UnknownModelError

    try:
        return (await model.info()).has_state
    except UnknownModelError:  # this user may not read the model's document; the agent will say what it needs
        return False


def _print_heard(args: argparse.Namespace) -> Callable[[Answer], None]:
    def show(answer: Answer) -> None:
        for line in _heard(answer):
            print(json.dumps(line) if args.json else line["text"], flush=True)

    return show


def _heard(answer: Answer) -> list[dict[str, Any]]:
    """Return the stretches of time that an answer has: start and end in seconds, label, and all as text."""
    from builder.cli.answers import clock

    if "segments" not in answer:
        return []
    labels = answer.output("labels").flat() if "labels" in answer else ()
    classes = answer.output("classes").flat() if "classes" in answer else ()
    edges = answer.output("segments").flat()
    found = []
    for i, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        label = str(labels[i]) if labels else f"class {classes[i]}" if classes else "speech"
        text = f"{clock(start)} to {clock(end)}  {label}"
        found.append({"start_s": start, "end_s": end, "label": label, "text": text})
    return found


def _agents(args: argparse.Namespace) -> int:
    from builder.fleet.agents import agents

    found = agents(broker_of(args), wait_s=args.wait)
    if args.json:
        _print_json([_agent_json(agent) for agent in found])
        return 0
    if not found:
        print("no agents at this broker", file=sys.stderr)
    for agent in found:
        words = (agent.condition, f"edge-agent {agent.version}" if agent.version else "", agent.machine)
        print(f"{agent.name}  {'  '.join(word for word in words if word)}")
        if agent.name_conflict:
            print("    TWO AGENTS HAVE THIS NAME: give one another name (edge-agent enroll --device NAME)")
        if agent.sandbox_missing:
            print(f"    sandbox without {', '.join(agent.sandbox_missing)}")
        for model in agent.models:
            condition, _, reason = model.condition.partition(": ")
            print(f"    {model.name} {model.version}  {condition}  {model.digest[:19]}")
            if reason:
                print(f"        {reason}")
    return 0


def _print_answer(answers: Sequence[Answer], count: int) -> None:
    answer = answers[-1]
    for line in _heard(answer):
        print(line["text"])
    for label in answer.labels[:count]:
        print(f"{label.score:10.6f}  {label.label}")
    for box in answer.boxes[:count]:
        corners = ", ".join(f"{edge:.0f}" for edge in (box.x0, box.y0, box.x1, box.y1))
        print(f"{box.score:10.6f}  {box.label}  [{corners}]")
    if not answer.labels and not answer.boxes and "segments" not in answer:
        for output in answer.outputs:
            shape = ",".join(map(str, output.shape))
            values = output.flat()[:9]
            shown = ", ".join(
                f"{value:.6g}" if output.datatype != "BYTES" else str(value) for value in values[:8]
            )
            more = ", ..." if len(values) > 8 else ""
            print(f"{output.name}  {output.datatype} [{shape}]  {shown}{more}")
    print(f"{answer.model} {answer.version}, {_latencies(answers)}", file=sys.stderr)


def _latencies(answers: Sequence[Answer]) -> str:
    """Return the latency of one answer and its parts, or a summary of several."""
    if len(answers) > 1:
        times = sorted(answer.latency_s for answer in answers)
        p50, p99 = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
        return (
            f"{len(times)} answers: {1000 * times[0]:.1f} ms at least, {1000 * p50:.1f} ms p50, "
            f"{1000 * p99:.1f} ms p99"
        )
    timing = answers[0].timing
    parts = {
        "network": timing.network_s,
        "queue": timing.queue_s,
        "decode": timing.decode_s,
        "compute": timing.compute_s,
        "encode": timing.encode_s,
    }
    known = ", ".join(f"{name} {1000 * part:.1f}" for name, part in parts.items() if part is not None)
    return f"{1000 * timing.total_s:.1f} ms" + (f" ({known})" if known else "")


def _infer_json(answers: Sequence[Answer]) -> dict[str, Any]:
    answer = answers[-1]
    timing = answer.timing
    return {
        "agent": answer.agent,
        "model": answer.model,
        "version": answer.version,
        "status": 200,
        "message": "",
        "latency_s": round(answer.latency_s, 6),
        "latencies_s": [round(each.latency_s, 6) for each in answers],
        "network_s": timing.network_s if timing.network_s is None else round(timing.network_s, 6),
        "queue_s": timing.queue_s,
        "decode_s": timing.decode_s,
        "compute_s": timing.compute_s,
        "encode_s": timing.encode_s,
        "attempts": answer.attempts,
        "top": [{"label": each.label, "score": each.score, "index": each.index} for each in answer.labels],
        "boxes": [
            {
                "label": box.label,
                "score": box.score,
                "index": box.index,
                "box": [box.x0, box.y0, box.x1, box.y1],
            }
            for box in answer.boxes
        ],
        "outputs": [
            {
                "name": output.name,
                "datatype": output.datatype,
                "shape": list(output.shape),
                "data": list(output.flat()),
            }
            for output in answer.outputs
        ],
    }


def _agent_json(agent: AgentSummary) -> dict[str, Any]:
    return {
        "name": agent.name,
        "state": agent.state,
        "inference": agent.inference,
        "groups": agent.groups,
        "name_conflict": agent.name_conflict,
        "version": agent.version,
        "machine": agent.machine,
        "sandbox": None
        if agent.sandbox_missing is None
        else {"complete": not agent.sandbox_missing, "missing": list(agent.sandbox_missing)},
        "models": [
            {
                "name": model.name,
                "version": model.version,
                "ready": model.ready,
                "digest": model.digest,
                "inputs": list(model.inputs),
                "service": model.service,
                "reason": model.reason,
            }
            for model in agent.models
        ],
    }


def _plain(output: Output) -> Any:  # noqa: ANN401 - a numpy array; numpy is not imported at the top
    """Return the values as an array that numpy loads without pickle: strings in numpy's own type."""
    return output.values.astype(str) if output.datatype == "BYTES" else output.values


@contextmanager
def _show_deployment(*, quiet: bool) -> Iterator[Callable[[DeployProgress], None]]:
    """Show a deployment's progress on stderr: a bar on a terminal, a line for each step elsewhere."""
    if quiet:
        yield lambda _progress: None
        return
    if not sys.stderr.isatty():
        last = [""]

        def line(progress: DeployProgress) -> None:
            if progress.step and progress.step != last[0]:
                last[0] = progress.step
                print_line(progress.step)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("waiting for the agent", total=1.0)
        yield lambda progress: bar.update(
            task,
            description=(progress.step or progress.status.lower()).replace("_", " "),
            completed=progress.fraction,
        )


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
