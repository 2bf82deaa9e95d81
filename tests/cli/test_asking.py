"""Asking a device about many items: one that has no answer is an error, and the others go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from builder.cli.asking import ask_each
from edgebundle import async_client
from edgebundle.answer import Answer, Timing
from edgebundle.defaults import IN_FLIGHT
from edgebundle.errors import (
    ClientError,
    DeadlineError,
    InputError,
    NoAnswerError,
    OverloadedError,
    PayloadError,
    UnknownModelError,
)
from edgebundle.output import Output
from tests.cli.terminal import Terminal

WHERE = ("--agent", "a", "--model", "m", "--broker", "mqtt://127.0.0.1:1")


class Numbers:
    """Numbers to ask about."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.taken: list[int] = []
        self.refused: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def add(self, item: int, answer: Answer) -> None:
        del answer
        self.taken.append(item)

    def refuse(self, item: int, error: Exception) -> None:
        del error
        self.refused.append(item)


def asked(count: int, failing: Callable[[int], ClientError | None]) -> tuple[list[int], list[int]]:
    """Ask about numbers; return those that were answered and those that were refused."""
    items = Numbers(count)

    async def ask(item: int) -> Any:
        if (error := failing(item)) is not None:
            raise error
        return item

    asyncio.run(ask_each(items, ask, IN_FLIGHT))
    return items.taken, items.refused


@pytest.mark.parametrize("error", [DeadlineError, PayloadError, OverloadedError, InputError, NoAnswerError])
def test_an_item_without_an_answer(error: type[ClientError]) -> None:
    taken, refused = asked(40, lambda item: error("no") if item % 4 == 1 else None)
    assert refused == list(range(1, 40, 4))
    assert taken == [item for item in range(40) if item not in refused]


@pytest.mark.parametrize("error", [UnknownModelError, NoAnswerError])
def test_no_item_has_an_answer(error: type[ClientError]) -> None:
    with pytest.raises(error):
        asked(1000, lambda item: error("no") if item > 100 else None)


def test_nothing_reads_the_answers() -> None:
    class Closed(Numbers):
        def add(self, item: int, answer: Answer) -> None:
            super().add(item, answer)
            raise BrokenPipeError

    async def ask(item: int) -> Any:
        return item

    closed = Closed(3)
    with pytest.raises(BrokenPipeError):
        asyncio.run(ask_each(closed, ask))
    assert (closed.taken, closed.refused) == ([0], [])


def serve(monkeypatch: pytest.MonkeyPatch, model: object) -> None:
    """Let every client find this model."""

    class Client:
        def __init__(self, *_: object, **__: object) -> None: ...

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        def model(self, *_: object) -> object:
            return model

    monkeypatch.setattr(async_client, "AsyncClient", Client)


def test_outputs_of_any_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: Terminal) -> None:
    class Model:
        async def info(self) -> object:
            return SimpleNamespace(has_state=False)

        async def __call__(self, _data: object, **_: object) -> Answer:
            names = ("file", "allow_pickle")
            outputs = tuple(Output(name, "FP32", (1,), np.ones(1, np.float32).tobytes()) for name in names)
            return Answer("agent", "model", "1", outputs, Timing(0.1))

    serve(monkeypatch, Model())
    np.savez(tmp_path / "in.npz", x=np.zeros(1, np.float32))
    result = terminal("infer", *WHERE, "--inputs", tmp_path / "in.npz", "-o", tmp_path / "out.npz")
    assert result.code == 0, result
    with np.load(tmp_path / "out.npz") as written:
        assert written.files == ["file", "allow_pickle"]


def test_a_late_row_of_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: Terminal) -> None:
    class Model:
        async def info(self) -> object:
            return SimpleNamespace(columns=[SimpleNamespace(name="a", datatype="FP32")])

        async def item(self, request: Any, *, deadline_s: float) -> Answer:
            del deadline_s
            [row] = json.loads(request.body)["row"].values()
            if row % 3 == 1:
                raise DeadlineError("too late") if row < 5 else PayloadError("too long")
            output = Output("y", "FP32", (1,), np.array([row], np.float32).tobytes())
            return Answer("agent", "model", "1", (output,), Timing(0.1))

    serve(monkeypatch, Model())
    table, truth, out = (tmp_path / name for name in ("t.csv", "truth.csv", "out.csv"))
    table.write_text("a\n" + "".join(f"{row}\n" for row in range(20)))
    truth.write_text("label\n" + "".join(f"{'x' if row == 3 else row}\n" for row in range(20)))
    result = terminal("infer", *WHERE, "--inputs", table, "-o", out, "--accuracy", truth)
    assert result.code == 4
    late = [f"edgebundle: error: {table}:{row + 2}: too late" for row in (1, 4)]
    assert [line for line in result.err if "too late" in line] == late
    assert "8 could not be used" in result.err[-1]
    wanted = [row for row in range(20) if row % 3 != 1 and row != 3]
    lines = [line.split(",") for line in out.read_text().splitlines()[1:]]
    assert [int(line) - 2 for line, _ in lines] == wanted
    # A truth that is no number counts for its own row only.
    assert result.out == "mean absolute error 0, root mean square 0 of 12 rows\n"
