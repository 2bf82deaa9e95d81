"""`infer` with several pictures or recordings: an answer for each, drawn if wanted, and a summary."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from agent.errors import EdgeError
from builder.cli import EXIT_INPUT
from builder.cli.answers import Summary, draw_answer, drawn_names, results_of
from builder.cli.json_output import print_json
from builder.cli.progress import clear_line, print_line
from builder.errors import BuildError, ModelError

if TYPE_CHECKING:
    from edgebundle.answer import Answer
    from edgebundle.async_model import AsyncModel
    from edgebundle.broker import Broker


async def infer_many(args: argparse.Namespace, broker: Broker, names: list[str]) -> int:
    """Ask a model on a device about each file; one that cannot be used is reported, and others go on."""
    from builder.cli.infer import answer_document, answer_lines
    from builder.running.input_files import input_files
    from edgebundle.async_client import AsyncClient
    from edgebundle.defaults import IN_FLIGHT
    from edgebundle.errors import DeadlineError, ExecutionError, InputError, PayloadError, UsageError

    if args.outputs or args.repeat > 1:
        flag = "--outputs" if args.outputs else "--repeat"
        raise ModelError(f"{flag}: expected one input, got several")
    if "-" in names:
        raise ModelError("--inputs: expected - as the only input, got others beside it")
    files = input_files(names)
    drawn: list[Path | None] = [*drawn_names(files, args.draw)] if args.draw else [None] * len(files)
    summary, documents, began = Summary(), [], time.monotonic()
    running: deque[tuple[Path, Path | None, asyncio.Task[Answer]]] = deque()
    done = failed = 0

    async def take() -> None:
        nonlocal done, failed
        file, output, task = running.popleft()
        done += 1
        if sys.stderr.isatty():
            print(f"\r\033[K{done} of {len(files)}: {file.name[:60]}", end="", file=sys.stderr, flush=True)
        try:
            answer = await task
            results = results_of(answer)
            if output is not None:
                await asyncio.to_thread(draw_answer, file, results, output)
        except (
            *(InputError, ExecutionError, PayloadError, DeadlineError, UsageError),
            *(BuildError, EdgeError, OSError),
        ) as error:
            failed += 1
            clear_line()
            reason = " ".join(str(getattr(error, "message", error)).split())
            where = "" if str(file) in reason else f"{file}: "
            print_line(f"edgebundle: error: {where}{reason}")
            return
        summary.add(results)
        if args.json:
            documents.append({"file": str(file), **answer_document([answer])})
            return
        clear_line()
        print(f"{file}:", *answer_lines(answer, args.print_top), sep="\n")

    async with AsyncClient(broker, progress=print_line) as client:
        model = client.model(args.agent, args.model)
        try:
            for file, output in zip(files, drawn, strict=True):
                running.append((file, output, asyncio.ensure_future(_ask(model, file, args))))
                if len(running) >= IN_FLIGHT:
                    await take()
            while running:
                await take()
        finally:
            for *_, task in running:
                task.cancel()
            await asyncio.gather(*(task for *_, task in running), return_exceptions=True)
    clear_line()
    if args.json:
        print_json({"results": documents, "failed": failed})
    else:
        print(summary.line(time.monotonic() - began, failed))
    return EXIT_INPUT if failed else 0


async def _ask(model: AsyncModel, file: Path, args: argparse.Namespace) -> Answer:
    from edgebundle.request import Request

    request = await asyncio.to_thread(Request.from_file, file)
    return await model(request, deadline_s=args.deadline, raw=args.raw)
