"""What an attacker may send, as hypothesis strategies: whole packets, and the documents in them.

Most of it is legal MQTT, so that the broker passes it on: an agent never sees what a broker refuses. Most
requests name a model that runs.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import struct
from typing import Any, Final

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given, seed, settings

from agent.errors import BundleError
from agent.wire.desired import Desired
from tests.nightly.hostile import packets
from tests.nightly.hostile.packets import Packet

DEVICE: Final = "kitchen"
# `twice` doubles four numbers, `segfault` crashes if the first of them is 13, `picture` takes pictures.
MODELS: Final = ("twice", "segfault", "picture")
# A client, a deployer, and another device.
CLIENT, DEPLOYER, NEIGHBOUR = "mallory", "fleet", "garage"
# Packets of one run of hypothesis: more, and its record of what was tried costs more than the drawing.
CHUNK: Final = 250
_REPLY: Final = f"edge/v1/replies/{CLIENT}/{DEVICE}/x"

# Limits and what is just beyond them, of MQTT and of the agent.
SIZES: Final = (0, 1, 2, 127, 128, 255, 256, 1023, 1024, 1025, 4096, 16_384, 16_385, 22_000, 32_768, 65_535)
COUNTS: Final = (0, 1, 2, 3, 8, 9, 64, 255, 256, 257, 300)
INTEGERS: Final = (0, 1, -1, 127, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53 - 1, 2**53, 2**63, 2**64, 10**400)


@functools.cache
def _one_of(*items: Any) -> st.SearchStrategy[Any]:
    """Return the same strategy for the same items: making one costs more than drawing from it."""
    return st.sampled_from(items)


@functools.cache
def _below(limit: int) -> st.SearchStrategy[int]:
    return st.integers(0, limit - 1)


sizes = st.sampled_from(SIZES)


def _bytes(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


noise = st.builds(_bytes, st.integers(0, 1000), sizes)
texts = st.one_of(
    st.sampled_from(
        [
            "",
            "x",
            "\0",
            "\n",
            "\x1b[2J",
            "é",
            "\U0001f600",
            "../..",
            "+",
            "#",
            "$SYS",
            "a/b",
            "%s%n",
            "\ufeff",
        ]
    ),
    st.text(max_size=20),
    st.builds(
        lambda text, size: text * (size // max(1, len(text))), st.sampled_from(["x", "é", '"', "\\"]), sizes
    ),
)
raw_texts = st.one_of(
    texts.map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"a\x00b"]),
    noise,
)
numbers = st.one_of(
    st.sampled_from([0.0, 1.0, 13.0, -0.0, 1e308, 1e-320, 3.5]),
    st.integers(-5, 20),
    st.sampled_from(INTEGERS),
)
scalars = st.one_of(numbers, texts.filter(lambda text: len(text) < 2000), st.booleans(), st.none())
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def _json(value: object) -> bytes:
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except ValueError:  # an integer of more digits than Python writes
        return b"[" + b"9" * 5000 + b"]"


# Documents that a strict parser refuses in different places.
odd_json = st.sampled_from(
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"}",
        b'{"a":1,"a":2}',
        b"[" * 5000,
        b'{"inputs":' * 2000,
        b"\xef\xbb\xbf{}",
        b"NaN",
        b'{"inputs":[NaN,Infinity]}',
        b"9" * 5000,
        b"1e999999",
        b'{"x":"' + b"\\" * 9999 + b'"}',
        b'"\\ud800"',
        b"{}x",
        b'{"id":"' + b"i" * 70_000 + b'"}',
        b"[" + b"0," * 60_000 + b"0]",
        b'{"inputs":[' + b"{}," * 9000 + b"{}]}",
        b'["\xff\xfe"]',
    ]
)
tensors = st.fixed_dictionaries(
    {
        "name": st.one_of(st.just("x"), texts.filter(lambda text: len(text) < 300)),
        "datatype": st.one_of(st.sampled_from(["FP32", "INT64", "BYTES", "BOOL", "FP16", "FP99"]), scalars),
        "shape": st.one_of(st.just([4]), st.lists(st.sampled_from(INTEGERS), max_size=20), scalars),
        "data": st.one_of(
            st.lists(numbers, min_size=4, max_size=4),
            st.just([13.0, 1, 1, 1]),
            st.lists(anything, max_size=6),
            noise.map(lambda raw: [base64.b64encode(raw).decode()]),
            anything,
        ),
    },
    optional={
        "parameters": st.one_of(st.just({"content_type": "image/png"}), anything),
        "more": anything,
    },
)
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "reply_to": st.one_of(st.just(_REPLY), texts, anything),
        "id": st.one_of(texts, anything),
        "deadline_s": st.one_of(st.sampled_from([0, 1, -1, 1e-9, 86_400, 1e300, 2**53]), anything),
        "parameters": anything,
        "outputs": anything,
    },
)
requests_json = st.one_of(
    st.builds(
        lambda inputs, more: _json({"inputs": inputs, **more}),
        st.one_of(st.lists(tensors, max_size=3), anything),
        envelopes,
    ),
    odd_json,
)


@functools.cache
def _pictures() -> tuple[bytes, ...]:
    from PIL import Image

    made = []
    for mode, size in (
        ("L", (8, 8)),
        ("RGB", (64, 48)),
        ("RGBA", (16, 16)),
        ("P", (9, 7)),
        ("CMYK", (8, 8)),
        ("L", (1, 1)),
    ):
        picture = Image.effect_noise(size, 60).convert(mode)
        for kind in ("PNG", "JPEG"):
            if (kind == "PNG" and mode == "CMYK") or (kind == "JPEG" and mode in ("RGBA", "P")):
                continue
            out = io.BytesIO()
            picture.save(out, kind)
            made.append(out.getvalue())
    return tuple(made)


def _damage(raw: bytes, number: int, times: int) -> bytes:
    chance = random.Random(number)
    out = bytearray(raw)
    for _ in range(times):
        at = chance.randrange(len(out)) if out else 0
        match chance.randrange(5):
            case 0 if out:
                out[at] ^= 1 << chance.randrange(8)
            case 1 if out:
                out[at] = chance.choice((0, 255, 127, 128))
            case 2:
                del out[at : at + chance.randrange(1, 40)]
            case 3:
                out[at:at] = chance.randbytes(chance.randrange(1, 40))
            case _:
                # A dimension or a length: four bytes of a PNG's or JPEG's header.
                out[16:20] = struct.pack(">I", chance.choice((0, 1, 2**16, 2**31 - 1, 2**32 - 1)))
    return bytes(out)


def damaged(sources: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Return damaged copies, and some that are whole."""
    return st.builds(_damage, sources, st.integers(0, 10**6), st.sampled_from([0, 0, 1, 2, 5, 30]))


pictures = damaged(st.deferred(lambda: st.sampled_from(_pictures())))
raw_tensors = st.one_of(
    st.lists(st.floats(width=32), min_size=4, max_size=4).map(lambda values: struct.pack("<4f", *values)),
    st.just(struct.pack("<4f", 13, 1, 1, 1)),
    noise,
)


def _cbor(value: object) -> bytes:
    import cbor2

    try:
        return bytes(cbor2.dumps(value))
    except (ValueError, OverflowError, cbor2.CBOREncodeError):
        return b"\xf6"


cbor = damaged(
    st.one_of(
        st.builds(lambda inputs: _cbor({"inputs": inputs}), st.lists(tensors, max_size=2)),
        st.sampled_from(
            [b"\x9f" * 500, b"\xdb" + b"\xff" * 8, b"\x5b" + b"\xff" * 8, b"\xc2\x58\xff", b"\xd8\x1d\x00"]
        ),
    )
)
PAYLOADS: Final[dict[str, st.SearchStrategy[bytes]]] = {
    "application/json": requests_json,
    "application/octet-stream": raw_tensors,
    "image/jpeg": pictures,
    "image/png": pictures,
    "application/cbor": cbor,
}

reply_topics = st.one_of(
    st.just(_REPLY),
    st.just(_REPLY),
    st.just(_REPLY),
    st.sampled_from(
        [
            "",
            "x",
            "edge/v1/replies/alice/kitchen/x",
            f"edge/v1/{DEVICE}/desired",
            f"edge/v1/{DEVICE}/state",
            "edge/v1/replies/groups/x",
            "edge/v1/replies/../x",
            "edge/v1/replies/mallory/" + "x/" * 30 + "x",
            "edge/v1/replies/mallory/" + "y" * 60_000,
            f"edge/v1/replies/mallory/{DEVICE}/a b",
            f"edge/v1/{DEVICE}/models/twice/infer",
            "$SYS/broker/uptime",
            "edge/v1/replies/mallory/\u0007",
            "edge/v1/replies/mallory/garage/x",
            f"edge/v1/replies/mallory/{DEVICE}/" + "z" * 900,
        ]
    ),
    texts.map(lambda text: f"edge/v1/replies/mallory/{text}"),
)
tensor_properties = st.one_of(
    st.sampled_from(
        [
            "x;FP32;4",
            "x;FP32;1,4",
            "x;FP32;",
            "x;FP32;-1",
            ";;",
            "x;FP32;" + "9" * 400,
            "x;FP32;" + "1," * 5000 + "1",
        ]
    ),
    texts,
)
user_pairs = st.one_of(
    tensor_properties.map(lambda text: (b"tensor", text.encode("utf-8", "replace"))),
    st.tuples(st.just(b"accept"), raw_texts),
    st.tuples(st.sampled_from([b"traceparent", b"tracestate"]), raw_texts),
    st.tuples(raw_texts, raw_texts),
)


correlations = st.one_of(st.just(b"1"), st.binary(max_size=9), noise)
few_pairs = st.lists(user_pairs, max_size=2)
# What a broker should refuse: a subscription's property, a value out of range, a property twice or unknown.
forbidden = st.sampled_from(
    [
        (packets.SUBSCRIPTION_ID, b"\x01"),
        (packets.PAYLOAD_FORMAT, b"\x07"),
        (packets.EXPIRY, b"\0\0\0\0"),
        (0x7F, b""),
    ]
)


@st.composite
def properties(draw: st.DrawFn, content_type: str) -> tuple[tuple[int, bytes], ...]:
    """Draw the properties of a request."""
    out: list[tuple[int, bytes]] = []

    def sometimes(one_in: int) -> bool:
        return draw(_below(one_in)) == 0

    if not sometimes(8):
        out.append((packets.RESPONSE_TOPIC, packets.string(draw(reply_topics).encode("utf-8", "replace"))))
    if not sometimes(6):
        kind = content_type.encode() if not sometimes(4) else draw(raw_texts)
        out.append((packets.CONTENT_TYPE, packets.string(kind)))
    if not sometimes(3):
        out.append((packets.CORRELATION, packets.string(draw(correlations))))
    if sometimes(2):
        expiry = draw(_one_of(0, 1, 2, 60, 86_400, 2**31, 2**32 - 1))
        out.append((packets.EXPIRY, struct.pack(">I", expiry)))
    if sometimes(6):
        out.append((packets.PAYLOAD_FORMAT, bytes([draw(_one_of(0, 1))])))
    if content_type == "application/octet-stream" and not sometimes(5):
        out.append(
            (
                packets.USER_PROPERTY,
                packets.pair(b"tensor", draw(tensor_properties).encode("utf-8", "replace")),
            )
        )
    for name, value in draw(few_pairs):
        out.append((packets.USER_PROPERTY, packets.pair(name, value)))
    if sometimes(10):
        name, value = draw(
            _one_of((b"k", b"v"), (b"tensor", b"x;FP32;4"), (b"traceparent", b"t" * 55), (b"", b""))
        )
        out += [(packets.USER_PROPERTY, packets.pair(name, value))] * draw(_one_of(*COUNTS))
    if sometimes(60):
        out.append(draw(forbidden))
    return tuple(out)


model_names = st.one_of(
    st.sampled_from(MODELS), st.sampled_from(MODELS), texts.filter(lambda text: 0 < len(text) < 200)
)

# What a request may have behind `infer`, without a user or under names that no user has.
NO_USERS: Final = ("", "/anonymous", "/groups", "/a b", "/" + "m" * 200)
_USERS: Final = (*[f"/{CLIENT}"] * 6, "/honest", *NO_USERS)


@st.composite
def infer_packets(draw: st.DrawFn) -> Packet:
    """Draw a request."""
    content_type = draw(_one_of(*PAYLOADS))
    place = draw(_one_of(DEVICE, DEVICE, DEVICE, DEVICE, "groups/door"))
    topic = f"edge/v1/{place}/models/{draw(model_names)}/infer{draw(_one_of(*_USERS))}"
    other = draw(_below(16)) == 0
    payload = draw(PAYLOADS[draw(_one_of(*PAYLOADS))] if other else PAYLOADS[content_type])
    return Packet(
        CLIENT,
        topic.encode("utf-8", "replace"),
        payload,
        qos=draw(_one_of(0, 1, 1, 1, 1, 2)),
        retain=draw(_below(31)) == 0,
        dup=draw(_below(31)) == 0,
        properties=draw(properties(content_type)),
    )


versions = st.one_of(st.integers(0, 40), st.sampled_from(INTEGERS), scalars)
digests = st.one_of(
    _one_of("sha256:" + "0" * 64, "sha256:" + "a1" * 32, "sha256:", "md5:" + "0" * 32), scalars
)
entries = st.fixed_dictionaries(
    {
        "digest": digests,
        "size": st.one_of(_one_of(1, 1000, 10**6), st.sampled_from(INTEGERS), scalars),
        "version": st.one_of(st.just("1.0.0"), texts, scalars),
        "job": st.one_of(st.uuids().map(str), texts, scalars),
        "sources": st.one_of(
            st.just(["mqtt"]),
            st.lists(
                st.sampled_from(
                    ["mqtt", "https://127.0.0.1:1/x", "file:///etc/passwd", "http://x", "https://[::1"]
                ),
                max_size=10,
            ),
            anything,
        ),
    },
    optional={"more": anything},
)
desired_documents = st.one_of(
    st.builds(
        lambda version, models, more: _json({"version": version, "models": models, **more}),
        versions,
        st.one_of(
            st.dictionaries(st.one_of(_one_of("extra", "other"), st.text(max_size=8)), entries, max_size=3),
            st.just({f"m{number}": {} for number in range(70)}),
            anything,
        ),
        st.fixed_dictionaries({}, optional={"base": st.one_of(digests, anything), "more": anything}),
    ),
    # A document with everything right: the agent begins to fetch what is not on offer.
    st.builds(
        lambda version, job: _json(
            {
                "version": version,
                "models": {
                    "extra": {
                        "digest": "sha256:" + "a1" * 32,
                        "size": 100_000,
                        "version": "1.0.0",
                        "job": job,
                        "sources": ["mqtt"],
                    }
                },
            }
        ),
        st.integers(1, 2**53 - 1),
        st.uuids().map(str),
    ),
    odd_json,
)


def _harmless(raw: bytes) -> bool:
    """Return whether a document does not name a model of the honest client, which a deployer may replace."""
    try:
        return not any(entry.model in MODELS for entry in Desired.from_bytes(raw).models)
    except BundleError:
        return True


harmless_documents = damaged(desired_documents).filter(_harmless)
offsets = st.sampled_from(["0", "65536", "131072", "1", "-1", "00", "99999999999999999", "9007199254740993"])


@st.composite
def deployer_packets(draw: st.DrawFn) -> Packet:
    """Draw a desired document, or a block of a bundle."""
    if draw(st.booleans()):
        topic, payload = f"edge/v1/{DEVICE}/desired", draw(harmless_documents)
    else:
        digest = draw(_one_of("a1" * 32, "0" * 64, "b2" * 32, "x", "A1" * 32))
        topic, payload = f"edge/v1/{DEVICE}/bundles/{digest}/block/{draw(offsets)}", draw(noise)
    pairs = draw(_one_of(0, 0, 0, 1, 257, 300))
    return Packet(
        DEPLOYER,
        topic.encode(),
        payload,
        qos=draw(_one_of(0, 1, 2)),
        retain=draw(st.booleans()),
        properties=((packets.USER_PROPERTY, packets.pair(b"k", b"v")),) * pairs,
    )


neighbour_topics = st.sampled_from(
    [
        "edge/v1/garage/state",
        "edge/v1/garage/info",
        "edge/v1/garage/reported",
        "edge/v1/garage/jobs/1",
        "edge/v1/garage/models/twice/state",
        "edge/v1/garage/metrics",
        "edge/v1/garage/desired",
        "edge/v1/replies/mallory/garage/x",
        "edge/v1/replies/honest/garage/x",
        "homeassistant/device/edge_garage/config",
        # The rest is forbidden by the access list.
        f"edge/v1/replies/honest/{DEVICE}/x",
        f"edge/v1/{DEVICE}/state",
        f"edge/v1/{DEVICE}/info",
        f"edge/v1/{DEVICE}/reported",
        f"edge/v1/{DEVICE}/models/twice/state",
        f"edge/v1/{DEVICE}/jobs/1",
    ]
)
forged_documents = st.one_of(
    st.sampled_from(
        [b"", b'{"state":"online","session_seq":1}', b'{"state":"offline","session_seq":99999999}']
    ),
    anything.map(_json),
    odd_json,
    noise,
)


@st.composite
def neighbour_packets(draw: st.DrawFn) -> Packet:
    """Draw what another device may write, and what it may not."""
    return Packet(
        NEIGHBOUR,
        draw(neighbour_topics).encode(),
        draw(forged_documents),
        qos=draw(_one_of(0, 1)),
        retain=draw(st.booleans()),
    )


computed_payloads = st.one_of(
    st.lists(st.sampled_from([0.0, 13.0, 1e30]), min_size=4, max_size=4).map(
        lambda values: ("application/octet-stream", struct.pack("<4f", *values))
    ),
    st.lists(st.sampled_from([0, 13, 1e300]), min_size=4, max_size=4).map(
        lambda values: (
            "application/json",
            _json({"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": values}]}),
        )
    ),
    pictures.map(lambda picture: ("image/png", picture)),
)


@st.composite
def computed_packets(draw: st.DrawFn) -> Packet:
    """Draw a request that reaches a kernel, with values that the model may not survive."""
    content_type, payload = draw(computed_payloads)
    return Packet(
        CLIENT,
        f"edge/v1/{DEVICE}/models/{draw(_one_of(*MODELS))}/infer/{CLIENT}".encode(),
        payload,
        qos=1,
        properties=(
            (packets.RESPONSE_TOPIC, packets.string(_REPLY.encode())),
            (packets.CONTENT_TYPE, packets.string(content_type.encode())),
            (packets.CORRELATION, packets.string(draw(correlations))),
            (packets.USER_PROPERTY, packets.pair(b"tensor", b"x;FP32;4")),
        ),
    )


# Made once. Each kind as often as it stands here.
any_packet = st.one_of(
    *(infer_packets() for _ in range(13)),
    *(computed_packets() for _ in range(3)),
    *(deployer_packets() for _ in range(3)),
    neighbour_packets(),
)


def hostile_packets(number: int, count: int = CHUNK) -> list[Packet]:
    """Draw up to `count` packets; the same for the same `number` and version of hypothesis."""
    drawn: list[Packet] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(any_packet)
    def collect(packet: Packet) -> None:
        drawn.append(packet)

    collect()
    return drawn
