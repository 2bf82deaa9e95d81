"""model.sig: an OpenSSF Model Signing v1.0 signature, method `key`, EC P-256, SHA-256.

Promises that a statement comes out only if a trusted key signed it, and only from bytes that `make_signature`
or the reference writer (model_signing 1.1.1) would have written. Leaves to `verify` whether the files are
those that the statement lists.

The layers, from outside: a Sigstore bundle v0.3 (JSON) holds a DSSE envelope, whose payload is an in-toto
statement v1 (JSON), whose predicate lists every file's SHA-256. The reference *verifier* takes whitespace,
duplicate keys and loose base64 in the outer layers, which no signature covers; this one takes nothing of the
kind.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from agent.bundle import canonical_json
from agent.bundle.archive import MAX_MEMBER_BYTES, MAX_MEMBERS, SIGNATURE, max_member_bytes
from agent.bundle.keyring import Keyring, key_hint
from agent.bundle.names import SHA256
from agent.errors import EndlessDataError, FormatError, KeyRevokedError, SignatureError

if TYPE_CHECKING:  # 8 MiB of memory: imported where it is used
    from cryptography.hazmat.primitives.asymmetric import ec

_MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"
# What the reference writer leaves out of every signature, and what there never is in a bundle, but model.sig
# itself.
_IGNORABLE: Final = frozenset({SIGNATURE, ".git", ".gitattributes", ".github", ".gitignore"})
# Order of the group of P-256 (SEC 2, 2.4.2).
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

_SUBJECT: Final = re.compile(r"[ -~]{1,256}")


@dataclass(frozen=True, slots=True)
class Statement:
    """What a trusted key signed: file name -> SHA-256 (hexadecimal), and which key it was."""

    resources: Mapping[str, str]
    key_id: str


def make_signature(
    files: Mapping[str, str], private_key: ec.EllipticCurvePrivateKey, *, name: str = "bundle"
) -> bytes:
    """Return model.sig for these files: always the same bytes for the same files and key.

    Parameters
    ----------
    files
        Name -> SHA-256 (hexadecimal) of every member but model.sig.
    private_key
        On P-256.
    name
        What the statement calls its subject; it informs and decides nothing.

    Raises
    ------
    FormatError
        If a bundle has no such member.
    ValueError
        If the key is on another curve, or there are no files.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

    if not isinstance(private_key.curve, ec.SECP256R1):
        raise ValueError(f"a key is on P-256, not on {private_key.curve.name}")  # noqa: TRY004 - the type is right
    if not files or not _SUBJECT.fullmatch(name):
        raise ValueError(
            f"a signature is over one file or more, and a printable name, not {len(files)} and {name!r:.80}"
        )
    for file in files:
        max_member_bytes(file)
    resources = [{"algorithm": "sha256", "digest": files[file], "name": file} for file in sorted(files)]
    payload = canonical_json.encode(
        {
            "_type": _STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": _root_digest(files)}}],
            "predicateType": _PREDICATE_TYPE,
            "predicate": {
                "resources": resources,
                "serialization": {
                    "method": "files",
                    "hash_type": "sha256",
                    "allow_symlinks": False,
                    "ignore_paths": [SIGNATURE],
                },
            },
        }
    )
    # RFC 6979: the nonce follows from key and message.
    der = private_key.sign(_pae(payload), ec.ECDSA(hashes.SHA256(), deterministic_signing=True))
    r, s = decode_dss_signature(der)
    # (r, s) and (r, n - s) are both valid: we write, and of our own take, the lower one.
    der = encode_dss_signature(r, min(s, _ORDER - s))
    return _envelope(key_hint(private_key.public_key()), payload, der)


def verify_signature(raw: bytes, keyring: Keyring) -> Statement:
    """Check a model.sig against the trusted keys.

    Raises
    ------
    FormatError
        If no writer would have written these bytes.
    SignatureError
        If no trusted key made the signature, or it leaves files out.
    KeyRevokedError
        If a key made it that has been revoked since.
    EndlessDataError
        If it is larger than 64 KiB.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    if len(raw) > MAX_MEMBER_BYTES[SIGNATURE]:
        raise EndlessDataError(
            f"model.sig has at most {MAX_MEMBER_BYTES[SIGNATURE]} bytes, this one {len(raw)}"
        )
    hint, payload, der = _open_envelope(raw)
    key = keyring.keys.get(hint)
    if key is None:
        raise SignatureError(
            f"the bundle is signed by a key that is not trusted here (hint {hint[:16]}...)",
            hint="give the signer's public key with --trust, or put it into the agent's keyring",
        )
    try:
        key.public_key.verify(der, _pae(payload), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise SignatureError(f"the signature does not hold for key {key.key_id[:16]}...") from error
    if key.key_id in keyring.revoked:
        raise KeyRevokedError(f"the bundle is signed by key {key.key_id}, which was revoked")
    # Only now is anything in the payload looked at.
    statement, ours = _statement(payload)
    if ours and decode_dss_signature(der)[1] > _ORDER // 2:
        raise FormatError("model.sig has the higher of its two signatures, expected the lower")
    return Statement(_resources(statement), key.key_id)


def _pae(payload: bytes) -> bytes:
    # DSSE 1.0.2, protocol.md: PAE(type, body) = "DSSEv1" SP LEN(type) SP type SP LEN(body) SP body
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)


def _root_digest(files: Mapping[str, str]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(files[name]) for name in sorted(files))).hexdigest()


def _envelope(hint: str, payload: bytes, der: bytes) -> bytes:
    # The reference writer's order of keys, without spaces; both writers write this, and nothing else is
    # taken.
    bundle = {
        "mediaType": _MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode("ascii"),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(der).decode("ascii"), "keyid": ""}],
        },
    }
    return json.dumps(bundle, separators=(",", ":")).encode("ascii")


def _open_envelope(raw: bytes) -> tuple[str, bytes, bytes]:
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

    bundle = canonical_json.parse(raw, "model.sig")
    try:
        hint = bundle["verificationMaterial"]["publicKey"]["hint"]
        payload = base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True)
        der = base64.b64decode(bundle["dsseEnvelope"]["signatures"][0]["sig"], validate=True)
        if encode_dss_signature(*decode_dss_signature(der)) != der:
            raise FormatError("model.sig has a signature that is not in DER")
    except (KeyError, IndexError, TypeError, ValueError, binascii.Error) as error:
        raise FormatError(
            "model.sig is not a Sigstore bundle with one DSSE envelope and one signature"
        ) from error
    if not isinstance(hint, str) or not SHA256.fullmatch(hint):
        raise FormatError("model.sig names no key: publicKey.hint is the SHA-256 of its PEM")
    if _envelope(hint, payload, der) != raw:
        raise FormatError("model.sig has other keys, spaces, order or base64 than its writers write")
    return hint, payload, der


def _statement(payload: bytes) -> tuple[object, bool]:
    """Parse the payload; True if it is in our encoding, and not in that of the reference writer."""
    statement = canonical_json.parse(payload, "the signed statement")
    if canonical_json.encode(statement) == payload:
        return statement, True
    # The reference writer indents by two, and the order of its keys changes from run to run.
    if json.dumps(statement, indent=2).encode("ascii") == payload:
        return statement, False
    raise FormatError("the signed statement is not laid out as its writers do")


def _resources(statement: object) -> Mapping[str, str]:
    predicate, root = _predicate(statement)
    serialization = dict(_object(predicate["serialization"]))
    ignored = serialization.pop("ignore_paths", [])
    # False is False: 0 and 0.0 are equal to it, and another encoding.
    links = serialization.pop("allow_symlinks", None)
    if serialization != {"method": "files", "hash_type": "sha256"} or links is not False:
        raise FormatError(
            f"the signature is over {serialization!s:.120}, expected files, sha256 and no links"
        )
    if not isinstance(ignored, list):
        raise FormatError("the signed statement's ignore_paths is not a list of paths")
    for path in ignored:
        if not isinstance(path, str) or path not in _IGNORABLE:
            raise SignatureError(
                f"the signature leaves out {path!r:.80}: it would not cover the whole bundle"
            )
    if len(set(ignored)) != len(ignored):
        raise FormatError("the signed statement's ignore_paths has a path twice")
    entries = _entries(predicate["resources"])
    names = [name for name, _ in entries]
    if not 1 <= len(names) <= MAX_MEMBERS:
        raise EndlessDataError(f"a signature is over 1 to {MAX_MEMBERS} files, not {len(names)}")
    if any(not a < b for a, b in itertools.pairwise(names)):
        raise FormatError("the signed statement's resources are not sorted, or one stands there twice")
    for name, digest in entries:
        max_member_bytes(name)
        if name == SIGNATURE or not SHA256.fullmatch(digest):
            raise FormatError(f"the signed statement has {name} with digest {digest!r:.80}")
    resources = dict(entries)
    if _root_digest(resources) != root:
        raise FormatError("the signed statement's subject is not the digest over its resources")
    return MappingProxyType(resources)


def _predicate(statement: object) -> tuple[Mapping[str, object], object]:
    """Return the predicate and the digest over all of it, of a statement that is one of ours in every key."""
    fields = _object(statement)
    if fields.keys() != {"_type", "subject", "predicateType", "predicate"}:
        raise FormatError("the signed statement has other keys than those of in-toto v1")
    if (fields["_type"], fields["predicateType"]) != (_STATEMENT_TYPE, _PREDICATE_TYPE):
        raise FormatError(
            f"the signed statement is {fields['predicateType']!s:.80}, expected {_PREDICATE_TYPE}"
        )
    subjects = fields["subject"]
    if not isinstance(subjects, list) or len(subjects) != 1:
        raise FormatError("the signed statement has not one subject")
    subject = _object(subjects[0])
    if subject.keys() != {"name", "digest"} or not isinstance(subject["name"], str):
        raise FormatError("the signed statement's subject is not a name and a digest")
    digest = _object(subject["digest"])
    predicate = _object(fields["predicate"])
    if digest.keys() != {"sha256"} or predicate.keys() != {"resources", "serialization"}:
        raise FormatError("the signed statement has other keys than sha256, resources and serialization")
    return predicate, digest["sha256"]


def _entries(resources: object) -> list[tuple[str, str]]:
    entries = []
    for resource in resources if isinstance(resources, list) else [None]:
        fields = _object(resource)
        if fields.keys() != {"name", "algorithm", "digest"} or fields["algorithm"] != "sha256":
            raise FormatError(
                f"the signed statement has the resource {fields!s:.120}, expected name and sha256"
            )
        name, digest = fields["name"], fields["digest"]
        if not isinstance(name, str) or not isinstance(digest, str):
            raise FormatError(f"the signed statement has the resource {fields!s:.120}, expected strings")
        entries.append((name, digest))
    return entries


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise FormatError(f"the signed statement has {value!s:.80} where an object is expected")
    return value
