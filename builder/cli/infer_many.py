"""`infer` with several pictures or recordings, or with `--accuracy`."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from typing import TYPE_CHECKING

from agent.terminal import note
from builder.cli.answers import results_of
from builder.cli.asking import ask_each
from builder.cli.files import File, Files
from builder.errors import ModelError

if TYPE_CHECKING:
    from builder.running.accuracy import Truth
    from edgebundle.answer import Answer
    from edgebundle.broker import Broker


async def infer_many(args: argparse.Namespace, broker: Broker, names: list[str]) -> int:
    """Ask a model on a device about each file."""
    from builder.cli.infer import answer_document, answer_lines
    from edgebundle.async_client import AsyncClient
    from edgebundle.request import Request

    if args.outputs or args.repeat > 1:
        flag = "--outputs" if args.outputs else "--repeat"
        raise ModelError(
            f"{flag}: expected one input, got several", hint=f"leave out {flag}, or give one input"
        )
    if "-" in names:
        raise ModelError(
            "--inputs: expected - as the only input, got others beside it",
            hint="leave out -, or ask in a call of its own for what comes from standard input",
        )
    files = Files(names, accuracy=args.accuracy, labels=None, draw=args.draw, as_json=args.json)

    async def ask(file: File) -> Answer:
        request = await asyncio.to_thread(Request.from_file, file.path)
        return await model(request, deadline_s=args.deadline, raw=args.raw)

    def take(file: File, answer: Answer) -> None:
        document, lines = answer_document([answer]), answer_lines(answer, args.print_top)
        files.add(file, results_of(answer), partial(_is_right, answer), document, lines)

    async with AsyncClient(broker, progress=note) as client:
        model = client.model(args.agent, args.model)
        await ask_each(files, ask, take, files.refuse)
    return files.finish()


def _is_right(answer: Answer, truth: Truth) -> tuple[bool, bool, int]:
    """Return whether the right class is the best one, or among the five best, and how many it lists."""
    if not answer.lists("indices"):
        raise ModelError(
            f"{answer.model}: expected an answer with classes, got none",
            hint="declare them: edgebundle repack BUNDLE --postprocess softmax,top5",
        )
    right = [truth.label in (each.label, str(each.index)) for each in answer.labels[:5]]
    return any(right[:1]), any(right), len(right)
