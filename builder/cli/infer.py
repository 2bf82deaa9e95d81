"""The verb `infer`: one request, or several, to a model on an agent."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.array_file import write_arrays
from agent.terminal import note, say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import json_flag, not_negative, positive, seconds
from builder.cli.broker_flags import BrokerFlags, agent_flag
from builder.cli.flags import flag, part, takes
from builder.cli.input_names import check_named, is_many, named_inputs

if TYPE_CHECKING:
    from builder.cli.answers import Stretch
    from builder.cli.files import File
    from edgebundle.answer import Answer
    from edgebundle.async_model import AsyncModel
    from edgebundle.output import Output

_LOG: Final = "the log of the device says more: journalctl -u edge-agent"


@dataclass(frozen=True, slots=True)
class _Infer:
    agent: str = agent_flag()
    model: str = flag(required=True, metavar="NAME", help="the model's name on the agent")
    inputs: list[list[str]] | None = flag(
        "-i",
        "--inputs",
        "--input",
        metavar="FILE",
        nargs="+",
        action="append",
        help="a .jpg or .png picture, a .wav recording, an .npz of inputs, a table of rows (.csv, .json, "
        ".jsonl), or a .json request; - reads a picture or a WAV from stdin, the WAV while it arrives; or "
        "several pictures or recordings: files, folders, or patterns such as 'photos/*.jpg'",
    )
    at: BrokerFlags = part(BrokerFlags, "broker")
    accuracy: str | None = flag(
        metavar="CSV|JSON",
        help="print how often the device's answers are right, as `edgebundle run --accuracy` does; --inputs "
        "may be the folder of the pictures, or the table of rows",
    )
    outputs: str | None = flag(
        "-o",
        "--outputs",
        "--output",
        metavar="NPZ|CSV|JSON",
        help="write the output tensors to this .npz file; for a table of rows, write the answers to this "
        ".csv, .json or .jsonl file",
    )
    draw: str | None = flag(
        metavar="OUT.jpg|DIR",
        help="draw the answer on the picture: boxes, labels, key points, masks; a folder for several inputs",
    )
    raw: bool = flag(
        action="store_true",
        help="ask for the model's own outputs, without the postprocess that the bundle declares",
    )
    print_top: int = flag(
        type=not_negative, default=5, metavar="N", help="number of labels to print (default: %(default)s)"
    )
    repeat: int = flag(
        type=positive,
        default=1,
        metavar="N",
        help="send it N times over one connection, one after another, and print the latencies "
        "(default: %(default)s)",
    )
    deadline: float = flag(
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="give up after this time; until then, send the request again if needed (default: %(default)g)",
    )
    json: bool = json_flag()


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "infer",
        help="send a request to a model on an agent",
        description="Send a picture, tensors or a JSON request to a model on an agent, and print the answer.",
        epilog="examples:\n"
        "  edgebundle infer --agent kitchen --model resnet50 --inputs cat.jpg --broker mqtt://localhost\n"
        "  arecord -q -t wav -f S16_LE -r 16000 | edgebundle infer --agent kitchen --model vad --inputs - "
        "--broker mqtt://localhost\n"
        "  edgebundle infer --agent kitchen --model yolox --inputs photos/ --draw drawn/ "
        "--broker mqtt://localhost\n"
        "  edgebundle infer --agent kitchen --model sensors --inputs readings.csv -o answers.csv "
        "--broker mqtt://localhost\n"
        "  edgebundle infer --agent kitchen --model bert --inputs tokens.npz --outputs out.npz "
        "--broker mqtt://localhost\n"
        "  edgebundle infer --agent kitchen --model resnet50 --inputs cat.jpg --repeat 100 "
        "--broker mqtt://localhost",
    )
    takes(parser, _Infer, _infer)


def _infer(args: _Infer) -> int:
    import asyncio

    from builder.cli.rows import ONE_TABLE, is_rows
    from builder.errors import FleetError
    from edgebundle.errors import ClientError, RefusedError

    names = named_inputs(args.inputs)
    if not names and args.accuracy is None:
        raise FleetError("expected --inputs, got none", hint="for example --inputs cat.jpg")
    check_named(names)
    rows = any(is_rows(name) for name in names)
    for name in ("draw", "raw"):
        if getattr(args, name) and (rows or args.accuracy):
            raise FleetError(
                f"--{name}: expected pictures or tensors, got {'a table' if rows else '--accuracy'}",
                hint=f"leave out --{name}",
            )
    if args.draw and args.raw:
        raise FleetError(
            "--draw: expected the answer of the postprocess, got --raw", hint="leave out one of them"
        )
    if rows and len(names) > 1:
        raise FleetError(f"--inputs: expected one table, got {len(names)} files", hint=ONE_TABLE)
    try:
        if rows:
            return asyncio.run(_infer_rows(args, names[0]))
        if args.accuracy is not None or len(names) > 1 or is_many(names[0]):
            return asyncio.run(_infer_many(args, names))
        return _infer_one(args, names[0])
    except RefusedError as error:
        if args.json:
            say_json(
                {
                    "agent": args.agent,
                    "model": args.model,
                    "status": error.status,
                    "message": error.message,
                    "hint": error.hint,
                },
                indent=2,
            )
        raise FleetError(
            f"{args.agent}: {args.model}: {error.message} (status {error.status})",
            hint=error.hint or _LOG,
        ) from error
    except ClientError as error:
        raise FleetError(error.message, hint=error.hint or _LOG) from error


async def _infer_rows(args: _Infer, name: str) -> int:
    from builder.cli.rows import Table, infer_rows
    from edgebundle.async_client import AsyncClient

    table = Table(name, args.outputs, args.accuracy, args.json)
    async with AsyncClient(args.at.made(), progress=note) as client:
        return await infer_rows(table, client.model(args.agent, args.model), args.deadline)


async def _infer_many(args: _Infer, names: list[str]) -> int:
    """Ask about each picture or recording."""
    import asyncio

    from builder.cli.asking import ask_each
    from builder.cli.files import Files
    from builder.errors import ModelError
    from edgebundle.async_client import AsyncClient
    from edgebundle.defaults import IN_FLIGHT
    from edgebundle.request import Request

    if args.outputs or args.repeat > 1:
        extra = "--outputs" if args.outputs else "--repeat"
        raise ModelError(
            f"{extra}: expected one input, got several", hint=f"leave out {extra}, or give one input"
        )
    if "-" in names:
        raise ModelError(
            "--inputs: expected - as the only input, got others beside it",
            hint="leave out -, or ask in a call of its own for what comes from standard input",
        )
    files = Files(
        names,
        accuracy=args.accuracy,
        labels=None,
        draw=args.draw,
        as_json=args.json,
        most=args.print_top,
    )

    async def ask(file: File) -> Answer:
        request = await asyncio.to_thread(Request.from_file, file.path)
        return await model(request, deadline_s=args.deadline, raw=args.raw)

    async with AsyncClient(args.at.made(), progress=note) as client:
        model = client.model(args.agent, args.model)
        await ask_each(files, ask, IN_FLIGHT)
    return files.finish()


def _infer_one(args: _Infer, name: str) -> int:
    import asyncio

    from builder.cli.answers import document, draw_on, lines_of
    from edgebundle.request import Request

    data = _given(name)
    drawn = None if args.draw is None else _drawn(name, data, args.draw)
    answers, before = asyncio.run(_ask(args, data))
    answer = answers[-1]
    if args.outputs:
        write_arrays(Path(args.outputs), {output.name: _plain(output) for output in answer.outputs})
    if drawn is not None:
        assert isinstance(data, Request)
        draw_on(data.body, data.content_type, answer, drawn)
    if args.json:
        say_json(document(answer, answers), indent=2)
    else:
        say(*lines_of(answer, args.print_top, before))
        note(f"{answer.model} {answer.version}, {_latencies(answers)}")
    return 0


def _given(name: str) -> object:
    """Read the file of `--inputs`; `-` is a picture or a recording on standard input."""
    from agent.wire.beginnings import HEAD_BYTES, content_type_of
    from agent.wire.content_types import WAV
    from builder.fleet.listening import Piped
    from edgebundle.errors import UsageError
    from edgebundle.request import MAX_REQUEST_BYTES, Request, read_arrays

    if name != "-":
        path = Path(name)
        return read_arrays(path) if path.suffix == ".npz" else Request.from_file(path)
    head = sys.stdin.buffer.read(HEAD_BYTES)
    if content_type_of(head) == WAV:
        return Piped(head)
    try:
        return Request.image(head + sys.stdin.buffer.read(MAX_REQUEST_BYTES + 1 - len(head)))
    except UsageError as error:
        raise UsageError(f"standard input: {error.message}", hint=error.hint) from error


def _drawn(name: str, data: object, output: str) -> Path:
    """Return the file that the answer is drawn to; check the picture before anything is sent."""
    from agent.wire.content_types import IMAGES
    from builder.cli.answers import drawn_names
    from builder.errors import FleetError
    from edgebundle.request import Request

    if not isinstance(data, Request) or data.content_type not in IMAGES:
        raise FleetError(
            f"--draw: expected a picture to draw on, got {name}",
            hint="give a JPEG or PNG picture with --inputs, or leave out --draw",
        )
    if name == "-" and (Path(output).is_dir() or output.endswith("/")):
        raise FleetError(
            f"--draw: expected a file for the picture of standard input, got {output}",
            hint="name a file: --draw drawn.png",
        )
    return drawn_names([Path(name)], output)[0]


async def _ask(args: _Infer, data: object) -> tuple[list[Answer], list[Stretch]]:
    """Ask as often as `--repeat` says; return what was heard before the last answer, too."""
    from builder.cli.answers import stretches
    from builder.errors import FleetError
    from builder.fleet.listening import Piped, listen
    from edgebundle.async_client import AsyncClient
    from edgebundle.request import Request

    heard: list[Stretch] = []

    def show(answer: Answer) -> None:
        for stretch in stretches(answer):
            heard.append(stretch)
            if args.json:
                say_json(asdict(stretch))
            else:
                say(stretch, flush=True)

    async with AsyncClient(args.at.made(), progress=note) as client:
        model = client.model(args.agent, args.model)
        if isinstance(data, Piped):
            if args.raw:
                raise FleetError(
                    "--raw: expected a picture or tensors, got a recording that is still arriving",
                    hint="leave out --raw, or give a .wav file that is complete",
                )
            return [await listen(model, data, sys.stdin.buffer, args.deadline, show)], heard
        if not isinstance(data, Request) and (await _keeps_state(model)):
            if args.raw:
                raise FleetError(
                    "--raw: expected a model without a state, got one that needs a session",
                    hint="leave out --raw",
                )
            async with model.session() as session:  # each repetition is a step
                return [await session(data, deadline_s=args.deadline) for _ in range(args.repeat)], []
        return [await model(data, deadline_s=args.deadline, raw=args.raw) for _ in range(args.repeat)], []


async def _keeps_state(model: AsyncModel) -> bool:
    from edgebundle.errors import UnknownModelError

    try:
        return (await model.info()).has_state
    except UnknownModelError:  # this user may not read the model's document; the agent will say what it needs
        return False


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
    known = ", ".join(f"{name} {1000 * part:.1f}" for name, part in timing.parts_s.items())
    return f"{1000 * timing.total_s:.1f} ms" + (f" ({known})" if known else "")


def _plain(output: Output) -> Any:  # noqa: ANN401 - a numpy array; numpy is not imported at the top
    """Return the values as an array that numpy loads without pickle: strings in numpy's own type."""
    return output.values.astype(str) if output.datatype == "BYTES" else output.values
