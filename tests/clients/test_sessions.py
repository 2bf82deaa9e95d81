"""Sessions over MQTT: streams in parts equal ONNX Runtime's loop, and no step counts twice."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from builder import Options, cli
from builder.bundles.package import Package
from builder.compiler import compile
from builder.compiling.identity import Identity
from builder.compiling.repack import repack
from builder.importer import import_onnx
from builder.importer.bounded_shapes import parse_bounded_shapes
from builder.importer.growing import load_growing
from edgebundle import (
    AsyncClient,
    Client,
    InputError,
    MediaTypeError,
    SessionGoneError,
    SessionStepError,
    UsageError,
)
from tests.clients.conftest import Site, deploy, run_site
from tests.clients.test_javascript import LIBRARY, MQTT
from tests.needs import needed
from tests.patience import PATIENCE_S
from tests.streaming_models import (
    HOP,
    RATE,
    STATES,
    WINDOW,
    Loop,
    decoded,
    decoder,
    probabilities,
    recurrent,
    wav,
)

pytestmark = pytest.mark.slow
LISTEN = f"samples,rate={RATE},window={WINDOW},hop={HOP}"
# The sessions of a model on the agent, by default.
SESSIONS = 16


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, digits_bundle: Path) -> Iterator[Site]:
    """One of its own, whose models other tests do not see."""
    yield from run_site(tmp_path_factory.mktemp("sessions"), digits_bundle)


@pytest.fixture(scope="module")
def counter(site: Site) -> Package:
    """The model `counter`, whose state is h."""
    package = compile(import_onnx(recurrent()), options=Options(states=STATES), identity=Identity("counter"))
    deploy(site, package, "counter")
    return package


@pytest.fixture(scope="module")
def hearer(site: Site) -> Package:
    """The model `hearer`, with a state, on windows of samples."""
    package = compile(
        import_onnx(recurrent(WINDOW)),
        options=Options(
            states=STATES, preprocess=LISTEN, postprocess="speech,min_speech_ms=4,min_silence_ms=6,pad_ms=1"
        ),
        identity=Identity("hearer"),
    )
    deploy(site, package, "hearer")
    return package


@contextmanager
def foreign(site: Site) -> Iterator[Foreign]:
    client = Foreign(site)
    try:
        yield client
    finally:
        client.close()


class Foreign:
    """A plain client with MQTT 5, which sends what it is told."""

    def __init__(self, site: Site) -> None:
        self.name = f"plain{secrets.token_hex(4)}"
        # What it says of itself: a test changes it.
        self.asked_as, self.reply_to = f"/{self.name}", f"edge/v1/replies/{self.name}/r"
        self._client = paho.Client(CallbackAPIVersion.VERSION2, self.name, protocol=paho.MQTTv5)
        self._seen: list[paho.MQTTMessage] = []
        self._client.on_message = lambda _client, _data, message: self._seen.append(message)
        self._client.connect("127.0.0.1", site.port)
        self._client.subscribe(f"edge/v1/replies/{self.name}/#", 1)
        self._client.loop(0.5)
        self._client.loop(0.5)

    def close(self) -> None:
        self._client.disconnect()

    def send(
        self, payload: bytes, user: list[tuple[str, str]], correlation: bytes | None, model: str = "counter"
    ) -> None:
        properties = Properties(PacketTypes.PUBLISH)
        properties.ResponseTopic = self.reply_to
        properties.ContentType = "application/octet-stream"
        properties.UserProperty = user
        if correlation is not None:
            properties.CorrelationData = correlation
        topic = f"edge/v1/kitchen/models/{model}/infer{self.asked_as}"
        self._client.publish(topic, payload, 1, properties=properties)

    def answer(self, correlation: bytes | None) -> tuple[str, dict[str, str], bytes]:
        for _ in range(400):
            if self._seen:
                message = self._seen.pop(0)
                # Both deliveries of a repeated request may be answered.
                if getattr(message.properties, "CorrelationData", None) != correlation:
                    continue
                user: dict[str, str] = dict(message.properties.UserProperty)  # type: ignore[union-attr]
                return user["__stat"], user, bytes(message.payload)
            self._client.loop(0.05)
        pytest.fail("no answer")

    def ask(
        self, x: np.ndarray, *user: tuple[str, str], correlation: bytes | None = None, repeat: bool = False
    ) -> tuple[str, dict[str, str], bytes]:
        correlation = secrets.token_bytes(8) if correlation is None else correlation or None
        raw = x.astype(np.float32).tobytes()
        pairs = [("tensor", "x;FP32;1,4"), *user]
        for _ in range(2 if repeat else 1):
            self.send(raw, pairs, correlation)
        return self.answer(correlation)


CAPACITY = 12


@pytest.fixture(scope="module")
def writer(site: Site) -> Package:
    """The model `writer`, a decoder with room for 12 tokens."""
    path = site.folder / "writer.onnx"
    onnx.save(decoder(), str(path))
    shapes = parse_bounded_shapes(f"past.key:[1,0..{CAPACITY},8]")
    model, states = load_growing(path, shapes, ["past.*:present.*"], {"mask": 1}, progress=lambda _: None)
    package = compile(model, options=Options(states=states), identity=Identity("writer"))
    deploy(site, package, "writer")
    return package


async def test_a_decoder_writes_the_tokens_of_onnx_runtimes_loop(site: Site, writer: Package) -> None:
    """Two sessions at a time, each with its own caches, until they are full."""
    async with AsyncClient(site.url) as client:
        model = client.model("kitchen", "writer")
        info = await model.info()
        assert [spec.name for spec in info.inputs] == ["ids"]
        assert [spec.name for spec in info.outputs] == ["logits"]

        async def write(token: int) -> list[int]:
            ids = [token]
            async with model.session() as session:
                while len(ids) <= CAPACITY:
                    answer = await session(np.array([[ids[-1]]]))
                    wanted = decoded(decoder(), ids)[-1]
                    np.testing.assert_allclose(answer["logits"], wanted, rtol=1e-4, atol=1e-5)
                    ids.append(int(np.argmax(answer["logits"])))
                for _ in range(2):
                    with pytest.raises(SessionGoneError, match="the session is full: its state holds 12"):
                        await session(np.array([[ids[-1]]]))
                session.reset()
                again = await session(np.array([[token]]))
                assert int(np.argmax(again["logits"])) == ids[1]
            return ids

        first, second = await asyncio.gather(write(1), write(2))
        assert first != second


async def test_interleaved_sessions_equal_onnx_runtimes_loop(site: Site, counter: Package) -> None:
    rng = np.random.default_rng(1)
    streams = {name: rng.normal(size=(12, 1, 4)).astype(np.float32) for name in "abcde"}
    async with AsyncClient(site.url) as client:
        model = client.model("kitchen", "counter")

        async def follow(inputs: np.ndarray) -> list[np.ndarray]:
            got = []
            async with model.session() as session:
                for number, x in enumerate(inputs):
                    if number == 8:
                        session.reset()
                    answer = await session(x)
                    assert list(answer) == ["y"]
                    got.append(answer["y"])
            return got

        answers = await asyncio.gather(*(follow(inputs) for inputs in streams.values()))
        for inputs, got in zip(streams.values(), answers, strict=True):
            loop = Loop(recurrent())
            for number, (x, y) in enumerate(zip(inputs, got, strict=True)):
                if number == 8:
                    loop.reset()
                np.testing.assert_allclose(y, loop(x), rtol=1e-4, atol=1e-6)


def test_a_repeated_request_is_one_step(site: Site, counter: Package) -> None:
    x = np.ones((1, 4), np.float32)
    loop = Loop(recurrent())
    first, second = loop(x), loop(x)
    with foreign(site) as client:
        name = ("session", "once")
        status, user, payload = client.ask(x, name, correlation=b"1", repeat=True)
        assert (status, user["session_step"]) == ("200", "0")
        np.testing.assert_allclose(np.frombuffer(payload, np.float32), first.ravel(), rtol=1e-4)
        # Again, after the answer: another delivery of the same request gets the same answer.
        again = client.ask(x, name, correlation=b"1")
        assert (again[0], again[1]["session_step"], again[2]) == ("200", "0", payload)
        status, user, payload = client.ask(x, name, correlation=b"2")
        assert (status, user["session_step"]) == ("200", "1")
        np.testing.assert_allclose(np.frombuffer(payload, np.float32), second.ravel(), rtol=1e-4)
        # A step that was counted already is refused, whatever its Correlation Data.
        assert client.ask(x, name, ("session_step", "1"))[0] == "409"
        assert client.ask(x, name, ("session_step", "2"))[0] == "200"


@pytest.mark.parametrize(
    "user",
    [
        [("session", "")],
        [("session", "a/b")],
        [("session", "#")],
        [("session", "x" * 65)],
        [("session", "x\u202e")],
        [("session", "a"), ("session", "b")],
        [("session", "a"), ("session_step", "-1")],
        [("session", "a"), ("session_step", "1e3")],
        [("session", "a"), ("session_step", "9" * 400)],
        [("session", "a"), ("session_step", str(2**53))],
        [("session", "a"), ("session_end", "yes")],
        [("session_step", "0")],
        [],
    ],
)
def test_hostile_sessions_are_refused(site: Site, counter: Package, user: list[tuple[str, str]]) -> None:
    with foreign(site) as client:
        status, properties, _ = client.ask(np.ones((1, 4)), *user)
        assert status == "400"
        assert properties["__stMsg"].isprintable()


def test_a_step_without_correlation_data_is_refused(site: Site, counter: Package) -> None:
    with foreign(site) as client:
        status, properties, _ = client.ask(np.ones((1, 4)), ("session", "a"), correlation=b"")
        assert status == "400"
        assert "Correlation Data" in properties["__stMsg"]


def test_nobody_else_continues_or_ends_the_session_of_a_user(site: Site, counter: Package) -> None:
    x, loop = np.ones((1, 4), np.float32), Loop(recurrent())
    cam, end = ("session", "cam-at-the-front-door"), ("session_end", "1")
    with foreign(site) as alice, foreign(site) as mallory:

        def goes_on(step: str) -> None:
            status, user, payload = alice.ask(x, cam)
            assert (status, user["session_step"]) == ("200", step)
            np.testing.assert_allclose(np.frombuffer(payload, np.float32), loop(x).ravel(), rtol=1e-4)

        goes_on("0")
        # In her own name, but as if the answer were for alice: only she herself hears of it.
        mallory.reply_to = f"edge/v1/replies/{alice.name}/r"
        status, user, _ = mallory.ask(1000 * x, cam)
        assert (status, "expected a Response Topic below" in user["__stMsg"]) == ("400", True)
        assert mallory.ask(x, cam, end)[0] == "400"
        goes_on("1")
        # In her own name, and in none: sessions of her own.
        mallory.reply_to = f"edge/v1/replies/{mallory.name}/r"
        for name in (mallory.asked_as, ""):
            mallory.asked_as = name
            assert mallory.ask(1000 * x, cam)[1]["session_step"] == "0"
            assert mallory.ask(x, cam, end)[0] == "200"
        goes_on("2")
        assert mallory.ask(x, ("session", "cam"))[0] == "400", (
            "without a user, the name must be hard to guess"
        )


def test_the_oldest_of_too_many_sessions_is_told(site: Site, counter: Package) -> None:
    x = np.ones((1, 4), np.float32)
    with Client(site.url) as client:
        model = client.model("kitchen", "counter")
        sessions = [model.session() for _ in range(SESSIONS + 1)]
        for session in sessions:
            session(x)
        with pytest.raises(SessionGoneError, match="made room"):
            sessions[0](x)
        sessions[0].reset()
        loop = Loop(recurrent())
        np.testing.assert_allclose(sessions[0](x)["y"], loop(x), rtol=1e-4)
        np.testing.assert_allclose(sessions[-1](x)["y"], loop(x), rtol=1e-4)
        for session in sessions:
            session.__exit__(None, None, None)


def test_json_without_mqtt_5_has_its_session_in_the_document(site: Site, counter: Package) -> None:
    seen: list[dict[str, object]] = []
    client = paho.Client(CallbackAPIVersion.VERSION2, "old", protocol=paho.MQTTv311)
    client.on_message = lambda _client, _data, message: seen.append(json.loads(message.payload))
    client.connect("127.0.0.1", site.port)
    client.subscribe("edge/v1/replies/old/#", 1)
    loop = Loop(recurrent())
    x = np.ones((1, 4), np.float32)
    names = itertools.count()

    def ask(inputs: list[dict[str, object]], **more: object) -> dict[str, object]:
        document = {
            "reply_to": "edge/v1/replies/old/r", "id": f"n{next(names)}", "session": "s", "inputs": inputs,
        } | more  # fmt: skip
        client.publish("edge/v1/kitchen/models/counter/infer/old", json.dumps(document), 1)
        for _ in range(400):
            if seen:
                break
            client.loop(0.05)
        return seen.pop(0)

    ones: dict[str, object] = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}
    for step in (0, 1):
        answer = ask([ones], session_step=step)
        assert (answer["status"], answer["session_step"]) == (200, step)
        np.testing.assert_allclose(answer["outputs"][0]["data"], loop(x).ravel(), rtol=1e-4)  # type: ignore[index]
    # Without tensors: only the end, if it is that of this session and not of an earlier one.
    assert ask([], session_step=7, session_end=True)["status"] == 409
    assert ask([], session_step=2)["status"] == 400
    assert ask([], session_step=2, session_end=True)["status"] == 200
    assert ask([ones])["session_step"] == 0
    assert ask([], session_end=True)["status"] == 200
    client.disconnect()


def test_leaving_a_session_ends_it_without_mqtt_5(site: Site, counter: Package) -> None:
    with Client(site.url.replace("mqtt://", "mqtt://ender@"), mqtt_version="3.1.1") as client:
        model = client.model("kitchen", "counter")
        with model.session("s") as session:
            session(np.ones((1, 4), np.float32))
        again = model.session("s")
        again._session._step = 1
        with pytest.raises(SessionGoneError):
            again(np.ones((1, 4), np.float32))


def test_a_recording_in_parts_equals_the_whole(site: Site, hearer: Package) -> None:
    rng = np.random.default_rng(5)
    samples = rng.normal(size=1000).astype(np.float32) * np.repeat(rng.random(10) > 0.5, 100)
    samples = samples.astype(np.float32)
    expected = probabilities(Loop(recurrent(WINDOW)), samples)
    with Client(site.url) as client:
        model = client.model("kitchen", "hearer")
        whole = model(audio=wav(samples))
        np.testing.assert_allclose(whole["probabilities"], expected, rtol=1e-4, atol=1e-6)
        with model.session() as session:
            cuts = [0, 1, 7, 40, 333, 334, 700, 1000]
            parts = [session(audio=samples[a:b]) for a, b in itertools.pairwise(cuts)]
            parts.append(session.finish())
        np.testing.assert_array_equal(
            np.concatenate([part["probabilities"] for part in parts]), whole["probabilities"]
        )
        np.testing.assert_array_equal(np.concatenate([p["segments"] for p in parts]), whole["segments"])
        with pytest.raises(UsageError, match="group"):
            client.model("group:all", "hearer").session()
        with pytest.raises(InputError, match="expected a recording without postprocess=none"):
            model(audio=wav(samples), raw=True)
        with pytest.raises(MediaTypeError, match="expected a recording, got image/png") as caught:
            model(image=b"\x89PNG\r\n\x1a\n")
        assert caught.value.hint == "send a WAV file: this model takes audio"
        with pytest.raises(InputError) as refused:
            model(audio=wav(samples, 44100))
        assert refused.value.hint is not None
        assert refused.value.hint not in refused.value.message, "told once"


PROGRAM = """
import * as library from "./edgebundle.js";
const [url, sound] = process.argv.slice(2);
const client = new library.Client(url);
const counter = client.model("kitchen", "counter").session();
const input = () => ({ tensors: { x: { shape: [1, 4], data: new Float32Array([1, 1, 1, 1]) } } });
// Sent at once, computed one after the other.
const first = await Promise.all([counter(input()), counter(input()), counter(input())]);
counter.reset();
const again = await counter(input());
await counter.close();
const errors = [];
for (const wrong of ["a b", ""]) {
  try { client.model("kitchen", "counter").session(wrong); } catch (error) { errors.push(error.name); }
}
const whole = await client.model("kitchen", "hearer")({ audio: sound });
const hearing = client.model("kitchen", "hearer").session();
const part = await hearing({ audio: sound });
const rest = await hearing.finish();
const info = await client.model("kitchen", "hearer").info();
await client.close();
const numbers = (answer, name) => Array.from(answer.outputs.get(name).data, Number);
console.log(JSON.stringify({
  steps: [...first, again].map((answer) => numbers(answer, "y")[0]),
  errors,
  whole: numbers(whole, "probabilities"),
  parts: [...numbers(part, "probabilities"), ...numbers(rest, "probabilities")],
  info: [info.hasState, info.audioInput, info.audioRate],
}));
"""


def test_javascript_has_sessions(
    site: Site, counter: Package, hearer: Package, tmp_path: Path, npm: Callable[[str], Path]
) -> None:
    (tmp_path / "node_modules").symlink_to(npm(MQTT))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "main.js").write_text(PROGRAM)
    (tmp_path / "edgebundle.js").write_bytes((LIBRARY / "edgebundle.js").read_bytes())
    samples = np.random.default_rng(7).normal(size=1000).astype(np.float32)
    (tmp_path / "sound.wav").write_bytes(wav(samples))
    command = [needed("node"), "main.js", site.url, "sound.wav"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    loop, x = Loop(recurrent()), np.ones((1, 4), np.float32)
    expected = [float(loop(x)[0, 0]) for _ in range(3)]
    np.testing.assert_allclose(result["steps"], [*expected, expected[0]], rtol=1e-4)
    assert result["errors"] == ["UsageError", "UsageError"]
    heard = probabilities(Loop(recurrent(WINDOW)), samples)
    np.testing.assert_allclose(result["whole"], heard, rtol=1e-4, atol=1e-6)
    assert result["parts"] == result["whole"]
    assert result["info"] == [True, "x", RATE]


def test_a_pipe_is_heard_while_it_comes(
    site: Site, hearer: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(6)
    samples = (rng.normal(size=5 * RATE // 4) * np.repeat(rng.random(10) > 0.5, RATE // 8)).astype(np.float32)
    whole = wav(samples)
    (site.folder / "sound.wav").write_bytes(whole)
    ask = ["infer", "--agent", "kitchen", "--model", "hearer", "--broker", site.url, "--input"]
    assert cli.main([*ask, str(site.folder / "sound.wav")]) == 0
    expected = capsys.readouterr().out
    assert " speech" in expected
    # As a recorder writes it to a pipe: without a length.
    pipe = SimpleNamespace(buffer=io.BytesIO(whole[:40] + bytes(4) + whole[44:]))
    monkeypatch.setattr(sys, "stdin", pipe)
    assert cli.main([*ask, "-"]) == 0
    assert capsys.readouterr().out == expected
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"no sound")))
    assert cli.main([*ask, "-"]) != 0
    assert "expected a JPEG or PNG" in capsys.readouterr().err


def test_infer_takes_repetitions_as_steps(
    site: Site, counter: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.ones((1, 4), np.float32)
    np.savez(site.folder / "x.npz", x=x)
    ask = ["infer", "--agent", "kitchen", "--model", "counter", "--broker", site.url, "--json"]
    assert cli.main([*ask, "--input", str(site.folder / "x.npz"), "--repeat", "3"]) == 0
    loop = Loop(recurrent())
    expected = [loop(x) for _ in range(3)][-1]
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    np.testing.assert_allclose(np.ravel(outputs[0]["data"]), expected.ravel(), rtol=1e-4)


def test_another_version_ends_sessions_and_says_so(site: Site, counter: Package) -> None:
    x = np.ones((1, 4), np.float32)
    with Client(site.url) as client, client.model("kitchen", "counter").session() as session:
        session(x)
        deploy(site, repack(counter, identity=Identity(version="2.0.0")), "counter")
        with pytest.raises(SessionGoneError, match="restarted or replaced"):
            session(x)
        session.reset()
        assert session(x).version == "2.0.0"
        # The step is still counted on the device.
        session.reset()
        session._session._step = 5
        with pytest.raises(SessionStepError):
            session(x)
