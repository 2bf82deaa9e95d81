from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from agent.bundle.keyring import Keyring, key_id
from agent.bundle.signature import make_signature, verify_signature
from agent.errors import BundleError, EndlessDataError, FormatError, KeyRevokedError, SignatureError
from tests.agent.bundle.documents import put

FILES = {"manifest.json": "a" * 64, "mod.so": "b" * 64, "samples/inputs.params": "c" * 64}
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def canonical(statement: Any) -> bytes:
    return json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()


def envelope(key: ec.EllipticCurvePrivateKey, payload: bytes, *, low: bool = True) -> bytes:
    """Return a model.sig of any payload, as another writer or an attacker with the key would make it."""
    pae = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    r, s = decode_dss_signature(key.sign(pae, ec.ECDSA(hashes.SHA256())))
    s = min(s, ORDER - s) if low else max(s, ORDER - s)
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": key_id(key.public_key())}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [{"sig": base64.b64encode(encode_dss_signature(r, s)).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle, separators=(",", ":")).encode()


def payload_of(raw: bytes) -> bytes:
    return base64.b64decode(json.loads(raw)["dsseEnvelope"]["payload"])


def test_statement_lists_what_was_signed_and_by_whom(kit: Any) -> None:
    statement = verify_signature(make_signature(FILES, kit.key), kit.keyring)
    assert statement.resources == FILES
    assert statement.key_id == key_id(kit.key.public_key())


def test_signing_twice_gives_the_same_bytes(kit: Any) -> None:
    assert make_signature(FILES, kit.key) == make_signature(dict(reversed(FILES.items())), kit.key)


def test_payload_is_a_model_signing_statement(kit: Any) -> None:
    statement = json.loads(payload_of(make_signature(FILES, kit.key, name="pets")))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://model_signing/signature/v1.0"
    assert statement["subject"][0]["name"] == "pets"
    assert [resource["name"] for resource in statement["predicate"]["resources"]] == sorted(FILES)


def test_unknown_key_is_refused(kit: Any) -> None:
    stranger = ec.derive_private_key(99, ec.SECP256R1())
    with pytest.raises(SignatureError, match="not trusted") as error:
        verify_signature(make_signature(FILES, stranger), kit.keyring)
    assert error.value.hint is not None
    assert error.value.code == "ERR_ARBITRARY_SOFTWARE"


def test_strangers_signature_under_a_trusted_hint_is_refused(kit: Any) -> None:
    stranger = ec.derive_private_key(99, ec.SECP256R1())
    raw = make_signature(FILES, stranger)
    hint, own = key_id(stranger.public_key()).encode(), key_id(kit.key.public_key()).encode()
    with pytest.raises(SignatureError, match="not valid for key"):
        verify_signature(raw.replace(hint, own), kit.keyring)


def test_revoked_key_is_refused_as_revoked(kit: Any) -> None:
    revoked = Keyring.of([kit.key.public_key()], [key_id(kit.key.public_key())])
    with pytest.raises(KeyRevokedError) as error:
        verify_signature(make_signature(FILES, kit.key), revoked)
    assert error.value.code == "ERR_KEY_REVOKED"


def test_the_other_of_two_valid_signatures_is_refused(kit: Any) -> None:
    raw = make_signature(FILES, kit.key)
    sig = base64.b64decode(json.loads(raw)["dsseEnvelope"]["signatures"][0]["sig"])
    r, s = decode_dss_signature(sig)
    assert s <= ORDER // 2
    other = raw.replace(base64.b64encode(sig), base64.b64encode(encode_dss_signature(r, ORDER - s)))
    assert other != raw
    with pytest.raises(FormatError, match="lower"):
        verify_signature(other, kit.keyring)


def _sig_bits(raw: bytes) -> bytes:
    """Return the same DER in another base64, with the unused bits of the last character set."""
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    at = raw.rindex(b'","keyid"')
    end = at - (len(raw[:at]) - len(raw[:at].rstrip(b"=")))
    assert end < at, "the test's key must give a signature whose base64 is padded"
    return raw[: end - 1] + alphabet[alphabet.index(raw[end - 1]) ^ 1 :][:1] + raw[end:]


def _long_der(raw: bytes) -> bytes:
    old = json.loads(raw)["dsseEnvelope"]["signatures"][0]["sig"].encode()
    der = base64.b64decode(old)
    return raw.replace(old, base64.b64encode(der[:1] + b"\x81" + der[1:]))


def _reordered(raw: bytes) -> bytes:
    bundle = json.loads(raw)
    return json.dumps(dict(reversed(bundle.items())), separators=(",", ":")).encode()


def _second_signature(raw: bytes) -> bytes:
    bundle = json.loads(raw)
    bundle["dsseEnvelope"]["signatures"] *= 2
    return json.dumps(bundle, separators=(",", ":")).encode()


def _hint(raw: bytes) -> bytes:
    return json.loads(raw)["verificationMaterial"]["publicKey"]["hint"].encode()


LOOSE: dict[str, Callable[[bytes], bytes]] = {
    "space": lambda raw: raw.replace(b":", b": ", 1),
    "newline at the end": lambda raw: raw + b"\n",
    "newline before": lambda raw: b"\n" + raw,
    "duplicate key": lambda raw: raw.replace(b'"keyid":""', b'"keyid":"","keyid":""'),
    "duplicate payload, the second is ours": lambda raw: raw.replace(
        b'"payload":', b'"payload":"e30=","payload":', 1
    ),
    "unknown key": lambda raw: raw.replace(b'"keyid":""', b'"keyid":"","x":1'),
    "key id": lambda raw: raw.replace(b'"keyid":""', b'"keyid":"k"'),
    "escape": lambda raw: raw.replace(b"application", b"\\u0061pplication", 1),
    "other order": _reordered,
    "two signatures": _second_signature,
    "media type": lambda raw: raw.replace(b"v0.3", b"v0.2"),
    "payload type": lambda raw: raw.replace(b"in-toto+json", b"in-toto+yaml"),
    "log entry": lambda raw: raw.replace(b'"tlogEntries":[]', b'"tlogEntries":[1]'),
    "newline in base64": lambda raw: raw.replace(b'"payload":"', b'"payload":"\\n', 1),
    "space in base64": lambda raw: raw.replace(b'"payload":"', b'"payload":" ', 1),
    "base64 without padding": lambda raw: raw.replace(b'="', b'"'),
    "unused bits of base64": _sig_bits,
    "URL's base64": lambda raw: raw.replace(b"/", b"_").replace(b"+", b"-"),
    "DER with a long length": _long_der,
    "hint in upper case": lambda raw: raw.replace(_hint(raw), _hint(raw).upper()),
    "no hint": lambda raw: raw.replace(b'"' + _hint(raw) + b'"', b"null"),
    "UTF-16": lambda raw: raw.decode().encode("utf-16"),
    "byte order mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "deep": lambda _: b"[" * 60000,
    "number": lambda _: b"1",
    "array": lambda _: b"[]",
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("name", LOOSE)
def test_envelope_in_another_encoding_is_refused(kit: Any, name: str) -> None:
    # Choose a subject so that both signature and payload have padded base64, for the cases about padding.
    raw = next(
        raw
        for raw in (make_signature(FILES, kit.key, name=f"pets-{i}") for i in range(64))
        if b'=","keyid"' in raw and b'=","payloadType"' in raw
    )
    verify_signature(raw, kit.keyring)
    changed = LOOSE[name](raw)
    assert changed != raw
    with pytest.raises(FormatError):
        verify_signature(changed, kit.keyring)


def test_signature_over_the_limit_is_refused_before_it_is_parsed(kit: Any) -> None:
    with pytest.raises(EndlessDataError):
        verify_signature(b"[" * 65537, kit.keyring)


SERIALIZATION = ("predicate", "serialization")
RESOURCE = ("predicate", "resources", 0)
BAD: dict[str, tuple[type[BundleError], Callable[[Any], None]]] = {
    "hides the code": (SignatureError, put(*SERIALIZATION, "ignore_paths", to=["model.sig", "mod.so"])),
    "hides all samples": (SignatureError, put(*SERIALIZATION, "ignore_paths", to=["samples"])),
    "hides everything": (SignatureError, put(*SERIALIZATION, "ignore_paths", to=["."])),
    "hides from outside": (SignatureError, put(*SERIALIZATION, "ignore_paths", to=["../bundle/mod.so"])),
    "hides something that is not a string": (
        SignatureError,
        put(*SERIALIZATION, "ignore_paths", to=[["mod.so"]]),
    ),
    "ignores twice": (FormatError, put(*SERIALIZATION, "ignore_paths", to=["model.sig", "model.sig"])),
    "ignore_paths not a list": (FormatError, put(*SERIALIZATION, "ignore_paths", to="model.sig")),
    "shards": (FormatError, put(*SERIALIZATION, "method", to="shards")),
    "another hash": (FormatError, put(*SERIALIZATION, "hash_type", to="blake2b")),
    "links": (FormatError, put(*SERIALIZATION, "allow_symlinks", to=True)),
    "links as a number": (FormatError, put(*SERIALIZATION, "allow_symlinks", to=0)),
    "serialization with another key": (FormatError, put(*SERIALIZATION, "shard_size", to=1)),
    "serialization missing": (FormatError, put(*SERIALIZATION, to={})),
    "predicate with another key": (FormatError, put("predicate", "x", to=1)),
    "another predicate": (FormatError, put("predicateType", to="https://model_signing/Digests/v0.1")),
    "another statement": (FormatError, put("_type", to="https://in-toto.io/Statement/v0.1")),
    "two subjects": (FormatError, lambda d: d["subject"].append(d["subject"][0])),
    "no subject": (FormatError, put("subject", to=[])),
    "another root digest": (FormatError, put("subject", 0, "digest", "sha256", to="0" * 64)),
    "two root digests": (FormatError, put("subject", 0, "digest", "sha512", to="0" * 128)),
    "resources not a list": (FormatError, put("predicate", "resources", to={})),
    "no resources": (EndlessDataError, put("predicate", "resources", to=[])),
    "resource of another hash": (FormatError, put(*RESOURCE, "algorithm", to="sha512")),
    "resource in upper case": (FormatError, put(*RESOURCE, "digest", to="A" * 64)),
    "resource not a string": (FormatError, put(*RESOURCE, "digest", to=7)),
    "resource outside": (FormatError, put(*RESOURCE, "name", to="../mod.so")),
    "resource absolute": (FormatError, put(*RESOURCE, "name", to="/etc/passwd")),
    "resource with another key": (FormatError, put(*RESOURCE, "x", to=1)),
    "resource twice": (
        FormatError,
        lambda d: d["predicate"]["resources"].insert(0, d["predicate"]["resources"][0]),
    ),
    "resources not sorted": (FormatError, lambda d: d["predicate"]["resources"].reverse()),
    "signature of itself": (FormatError, put("predicate", "resources", 1, "name", to="model.sig")),
    "predicate not an object": (FormatError, put("predicate", to=[])),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    "layout", [canonical, lambda d: json.dumps(d, indent=2).encode()], ids=["ours", "theirs"]
)
def test_statement_that_does_not_cover_a_whole_bundle_is_refused_even_if_signed(
    kit: Any, name: str, layout: Callable[[Any], bytes]
) -> None:
    expected, change = BAD[name]
    statement = json.loads(payload_of(make_signature(FILES, kit.key)))
    verify_signature(envelope(kit.key, layout(statement)), kit.keyring)
    change(statement)
    with pytest.raises(expected):
        verify_signature(envelope(kit.key, layout(statement)), kit.keyring)


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: payload + b"\n",
        lambda payload: payload.replace(b'"_type":', b'"_type":"x","_type":'),
        lambda payload: payload.replace(b",", b", ", 1),
        lambda payload: payload.replace(b"sha256", b"sh\\u0061256", 1),
        lambda payload: json.dumps(json.loads(payload), indent=4).encode(),
        lambda payload: json.dumps(json.loads(payload), indent=2).encode() + b"\n",
        lambda _: b"\xff",
        lambda _: b"",
    ],
)
def test_statement_in_another_layout_is_refused_even_if_signed(
    kit: Any, change: Callable[[bytes], bytes]
) -> None:
    payload = payload_of(make_signature(FILES, kit.key))
    with pytest.raises(FormatError):
        verify_signature(envelope(kit.key, change(payload)), kit.keyring)


def test_reference_writers_layout_is_accepted_with_either_signature(kit: Any) -> None:
    # The reference writer has no rule for s: half of its signatures have the higher one.
    payload = json.dumps(json.loads(payload_of(make_signature(FILES, kit.key))), indent=2).encode()
    for low in (True, False):
        assert verify_signature(envelope(kit.key, payload, low=low), kit.keyring).resources == FILES


def test_key_on_another_curve_and_files_of_no_bundle_are_not_signed(kit: Any) -> None:
    with pytest.raises(ValueError, match="secp384r1"):
        make_signature(FILES, ec.derive_private_key(5, ec.SECP384R1()))
    with pytest.raises(FormatError):
        make_signature({"../x": "a" * 64}, kit.key)
    with pytest.raises(ValueError, match="one file"):
        make_signature({}, kit.key)
