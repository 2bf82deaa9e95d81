"""Every parser under hostile input: it raises only our errors, and its memory stays bounded."""

from __future__ import annotations

import base64
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.bundle import archive, keyring, signature
from agent.bundle.archive import read_index
from agent.bundle.graph import Graph
from agent.bundle.manifest import Manifest
from agent.bundle.params import index_params
from agent.bundle.signature import verify_signature
from agent.bundle.tensor_spec import TensorSpec
from agent.bundle.verify import verify
from agent.errors import EdgeError, FormatError

pytestmark = pytest.mark.slow

# The same inputs in every run, so that a failure can be reproduced.
fuzz = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# Far more than any input here needs, and far less than a parser would take that trusts a declared length.
PEAK_BYTES = 4 << 20

edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "copy", "number"]), st.floats(0, 1), st.binary(max_size=24)
    ),
    min_size=1,
    max_size=6,
)
# Values at the limits of length, count and index fields.
EDGES = [0, 1, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def edited(raw: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    data = bytearray(raw)
    for kind, where, extra in changes:
        at = int(where * max(len(data) - 1, 0))
        if kind == "flip" and data:
            data[at] ^= 1 << (len(extra) % 8)
        elif kind == "cut":
            del data[at : at + 1 + len(extra)]
        elif kind == "insert":
            data[at:at] = extra
        elif kind == "copy":
            data[at:at] = data[at // 2 : at // 2 + 64]
        elif kind == "number":
            data[at : at + 8] = EDGES[len(extra) % len(EDGES)].to_bytes(8, "little")
    return bytes(data)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from([*EDGES, -1, "0", "1", "null", "tvm_op", "__nop", "list_int", "float32"]),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=12,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


def replaced(document: Any, seed: int, values: list[Any]) -> Any:
    """Put values at places of a document, chosen by the seed."""
    choose = random.Random(seed)
    for value in values:
        path = choose.choice(list(places(document)))
        if not path:
            return value
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = value
    return document


def only_our_errors(parse: Callable[[], object]) -> None:
    tracemalloc.start()
    try:
        parse()
    except EdgeError as error:
        # A message is one line, whatever the input contains.
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < PEAK_BYTES


def index_of(raw: bytes) -> tuple[archive.Member, ...]:
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, raw)
        return read_index(fd)
    finally:
        os.close(fd)


@fuzz
@given(changes=edits)
def test_archive(kit: Any, changes: list[tuple[str, float, bytes]]) -> None:
    raw = edited(kit.bundle(), changes)
    only_our_errors(lambda: index_of(raw))


@fuzz
@given(raw=st.binary(max_size=4096), blocks=st.integers(0, 4))
def test_archive_of_anything(raw: bytes, blocks: int) -> None:
    only_our_errors(lambda: index_of(raw + bytes(-len(raw) % 512) + bytes(512 * blocks)))


@fuzz
@given(changes=edits)
def test_accepted_archive_is_one_that_we_would_write(
    kit: Any, changes: list[tuple[str, float, bytes]]
) -> None:
    raw = edited(archive.pack(kit.members()), changes)
    try:
        members = index_of(raw)
    except EdgeError:
        return
    assert archive.pack({m.name: raw[m.offset : m.offset + m.size] for m in members}) == raw


@fuzz
@given(changes=edits)
def test_whole_bundle(kit: Any, changes: list[tuple[str, float, bytes]]) -> None:
    good = kit.bundle()
    raw = edited(good, changes)
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, raw)
        try:
            verify(fd, kit.keyring).close()
        except EdgeError:
            return
        assert raw == good
    finally:
        os.close(fd)


@fuzz
@given(changes=edits)
def test_manifest(kit: Any, changes: list[tuple[str, float, bytes]]) -> None:
    raw = edited(kit.manifest().to_bytes(), changes)
    only_our_errors(lambda: Manifest.from_bytes(raw))


@fuzz
@given(seed=st.integers(0, 1 << 32), values=st.lists(json_values, min_size=1, max_size=3))
def test_manifest_of_other_values(kit: Any, seed: int, values: list[Any]) -> None:
    document = replaced(json.loads(kit.manifest().to_bytes()), seed, values)
    raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    def parse() -> None:
        assert Manifest.from_bytes(raw).to_bytes() == raw

    only_our_errors(parse)


@fuzz
@given(changes=edits)
def test_signature(kit: Any, changes: list[tuple[str, float, bytes]]) -> None:
    raw = edited(kit.members()["model.sig"], changes)
    only_our_errors(lambda: verify_signature(raw, kit.keyring))


@fuzz
@given(seed=st.integers(0, 1 << 32), values=st.lists(json_values, min_size=1, max_size=2))
def test_signature_of_other_values(kit: Any, seed: int, values: list[Any]) -> None:
    document = replaced(json.loads(kit.members()["model.sig"]), seed, values)
    raw = json.dumps(document, separators=(",", ":")).encode()
    only_our_errors(lambda: verify_signature(raw, kit.keyring))


@fuzz
@given(seed=st.integers(0, 1 << 32), values=st.lists(json_values, min_size=1, max_size=3), ours=st.booleans())
def test_signed_statement_of_other_values(
    kit: Any, monkeypatch: pytest.MonkeyPatch, seed: int, values: list[Any], ours: bool
) -> None:
    # Past the signature: what a holder of the key could sign by mistake or malice.
    envelope = json.loads(kit.members()["model.sig"])["dsseEnvelope"]
    document = replaced(json.loads(base64.b64decode(envelope["payload"])), seed, values)
    layout: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")} if ours else {"indent": 2}
    payload = json.dumps(document, **layout).encode()
    hint = keyring.key_id(kit.key.public_key())
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    der = kit.key.sign(signature._pae(payload), ec.ECDSA(hashes.SHA256()))
    monkeypatch.setattr(signature, "_open_envelope", lambda _: (hint, payload, der))
    only_our_errors(lambda: verify_signature(b"", kit.keyring))


@fuzz
@given(seed=st.integers(0, 1 << 32), values=st.lists(json_values, min_size=1, max_size=3))
def test_graph_of_other_values(kit: Any, seed: int, values: list[Any]) -> None:
    raw = json.dumps(replaced(json.loads(kit.files["mod.json"]), seed, values))

    def parse() -> None:
        graph = Graph.from_json(raw)
        # An executor can walk every graph that is accepted.
        for node in graph.nodes:
            for entry in node.inputs:
                graph.spec(graph.entry_id(entry))
        assert set(graph.storage_bytes()) == set(graph.storage_id)
        assert Graph.from_json(graph.to_json()) == graph

    only_our_errors(parse)


@fuzz
@given(changes=edits)
def test_graph(kit: Any, changes: list[tuple[str, float, bytes]]) -> None:
    raw = edited(kit.files["mod.json"], changes)
    only_our_errors(lambda: Graph.from_json(raw))


@fuzz
@given(changes=edits)
def test_params(kit: Any, changes: list[tuple[str, float, bytes]]) -> None:
    raw = edited(kit.files["mod.params"], changes)

    def parse() -> None:
        for entry in index_params(raw):
            assert isinstance(entry.spec, TensorSpec)
            assert entry.nbytes == entry.spec.nbytes
            assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(raw)

    only_our_errors(parse)


@fuzz
@given(raw=st.binary(max_size=512))
def test_params_of_anything(raw: bytes) -> None:
    only_our_errors(lambda: index_params(raw))


@fuzz
@given(raw=st.binary(max_size=512), changes=edits)
def test_keys_and_revocations(raw: bytes, changes: list[tuple[str, float, bytes]]) -> None:
    pem = b"-----BEGIN PUBLIC KEY-----\n" + base64.b64encode(raw) + b"\n-----END PUBLIC KEY-----\n"
    for text in (raw, pem, edited(pem, changes)):
        only_our_errors(partial(keyring.parse_public_key, text))
        only_our_errors(partial(keyring.parse_revoked, text))


@fuzz
@given(changes=edits)
def test_edited_key(kit: Any, changes: list[tuple[str, float, bytes]]) -> None:
    from cryptography.hazmat.primitives import serialization

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    raw = edited(kit.key.public_key().public_bytes(serialization.Encoding.PEM, form), changes)
    only_our_errors(lambda: keyring.parse_public_key(raw))


# Depths around Python's own limit: what can be parsed must also be refused with our errors.
@pytest.mark.parametrize("depth", [10, 100, *range(850, 1000, 7), 60000])
def test_depth(kit: Any, depth: int) -> None:
    nest = b"[" * depth + b"]" * depth
    for raw in (
        nest,
        b'{"nodes":' + nest + b"}",
        kit.files["mod.json"].replace(b'"inputs":[]', b'"inputs":' + nest),
    ):
        with pytest.raises(EdgeError):
            Graph.from_json(raw)
    manifest = kit.manifest().to_bytes()
    for raw in (
        nest,
        manifest.replace(b'"softmax"', nest),
        manifest.replace(b"1.2.3", b'x","y":' + nest + b',"z":"'),
    ):
        with pytest.raises(EdgeError):
            Manifest.from_bytes(raw)
    for raw in (nest, kit.members()["model.sig"].replace(b'"keyid":""', b'"keyid":' + nest)):
        with pytest.raises(EdgeError):
            verify_signature(raw, kit.keyring)


def test_document_nested_too_deeply_is_refused() -> None:
    message = r"manifest\.json: nested more than 16 deep"
    with pytest.raises(FormatError, match=message):
        Manifest.from_bytes(b"[" * 17 + b"]" * 17)


def test_wide_documents_take_a_bounded_multiple_of_their_size() -> None:
    for parse, size in ((Graph.from_json, 1 << 20), (Manifest.from_bytes, 500_000)):
        raw = b"[" + b"[],{}," * (size // 6) + b"0]"
        tracemalloc.start()
        with pytest.raises(EdgeError):
            parse(raw)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 60 * size
