"""The agent's benchmark: small runs of its parts with a real broker and a real agent."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.agent import picture
from benchmarks.agent.__main__ import Size, document, main, measure
from benchmarks.agent.figures import Figure, quantile
from benchmarks.agent.requester import Answered, Requester
from tests.virtual_time import in_virtual_time

SMALL = Size(requests=40, large=4, seconds=0.5, rounds=1, overload_s=2.0, swaps=2)


def test_quantiles_are_of_the_nearest_rank() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [quantile(values, q) for q in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert quantile([7.0], 0.5) == 7
    assert math.isnan(quantile([], 0.5))


def test_a_figure_is_good_within_its_limits() -> None:
    assert Figure("a", "b", 1.0, most=1.0).good
    assert not Figure("a", "b", 1.1, most=1.0).good
    assert not Figure("a", "b", 0.9, least=1.0).good
    assert Figure("a", "b", 0.9).good is None


def test_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["speed"])
    assert ended.value.code == 2
    assert (
        "expected some of idle, latency, throughput, overload, swaps, got 'speed'" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_parts_measure_and_nothing_is_lost(mosquitto: object, tmp_path: Path) -> None:
    figures, series = measure(["idle", "latency", "overload", "swaps"], SMALL)
    found = {(figure.part, figure.name): figure.value for figure in figures}
    assert found["swaps", "swaps"] == 2
    assert found["swaps", "requests that failed"] == 0
    assert found["swaps", "answers with the wrong version's label"] == 0
    assert found["overload", "answered otherwise or not at all"] == 0
    assert found["overload", "answered 200"] > 0
    assert found["latency", "small request, p50"] > 0
    assert found["latency", "CPU per request, agent and worker"] > 0
    assert found["idle", "agent without a model, RSS"] > 1
    assert {label: len(values) for label, values in series.items()} == {
        "agent, 16 bytes": 40,
        "echo, 16 bytes": 40,
        "agent, 600 KB": 4,
        "echo, 600 KB": 4,
    }
    assert all(math.isfinite(figure.value) for figure in figures)
    assert len(json.loads(json.dumps(document(figures, SMALL)))["figures"]) == len(figures)


def test_picture_shows_every_series(tmp_path: Path) -> None:
    path = tmp_path / "latency.png"
    picture.draw({"fast": [0.0005] * 90 + [0.04], "slow": [0.01] * 50}, path, "title")
    with Image.open(path) as image:
        assert image.size == (picture.WIDTH, picture.HEIGHT)
        colours: Any = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or ()}
    legend = [tuple(bytes.fromhex(colour[1:])) for colour in picture.COLOURS[:2]]
    assert all(
        any(max(abs(a - b) for a, b in zip(one, two, strict=True)) < 8 for two in colours) for one in legend
    )


class Late(Requester):
    """A client whose every answer comes after so many seconds."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s

    def send(self, topic: str, payload: bytes, qos: int = 1) -> asyncio.Future[Answered]:
        del topic, payload, qos
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answered] = loop.create_future()
        loop.call_later(self._after_s, answer.set_result, Answered(0.0, self._after_s, 200, "", b""))
        return answer


@in_virtual_time
async def test_model_without_an_answer_in_time_has_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", asyncio.get_running_loop().time)
    tally, took_s = await Late(5.0).at_once("topic", b"", 4, 2.0)
    assert len(tally.answers) == 1
    assert took_s == pytest.approx(5.0)
    tally, took_s = await Late(0.5).at_once("topic", b"", 4, 1.8)
    assert len(tally.answers) == 12
    assert took_s == pytest.approx(1.5)
