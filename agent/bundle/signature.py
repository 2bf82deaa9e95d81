"""model.sig: an OpenSSF Model Signing v1.0 signature, method `key`, EC P-256, SHA-256.

Promises to return a statement only if a trusted key signed it, and only from bytes that `make_signature` or
the reference writer (model_signing 1.1.1) would have written. Leaves to `verify` whether the files are those
that the statement lists.

The layers, from the outside in: a Sigstore bundle v0.3 (JSON) holds a DSSE envelope, whose payload is an
in-toto statement v1 (JSON), whose predicate lists every file's SHA-256. No signature covers the outer layers.
There the reference *verifier* accepts whitespace, duplicate keys and loose base64; this one refuses them.
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
from typing import TYPE_CHECKING, Final, Protocol

from agent.bundle import canonical_json
from agent.bundle.archive import MAX_MEMBER_BYTES, MAX_MEMBERS, SIGNATURE, max_member_bytes
from agent.bundle.keyring import Keyring, key_id
from agent.bundle.names import SHA256
from agent.errors import EndlessDataError, FormatError, KeyRevokedError, SignatureError

# `cryptography` takes 8 MiB of memory, so it is imported only where it is used.
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

_MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"
# Paths that a statement may leave out: model.sig itself, and those that the reference writer always leaves
# out, which a bundle never contains.
_IGNORABLE: Final = frozenset({SIGNATURE, ".git", ".gitattributes", ".github", ".gitignore"})
# Order of the group of P-256 (SEC 2, 2.4.2).
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_SUBJECT: Final = re.compile(r"[ -~]{1,256}")


@dataclass(frozen=True, slots=True)
class Statement:
    """The key that signed a list of files, and the SHA-256 (hexadecimal) of every member except model.sig."""

    resources: Mapping[str, str]
    key_id: str


class SigningKey(Protocol):
    """What signs: a private key of `cryptography`, or a key that lies elsewhere and only signs."""

    @property
    def curve(self) -> ec.EllipticCurve:
        """P-256, or else the key is refused."""

    def public_key(self) -> ec.EllipticCurvePublicKey:
        """Return the key that verifies the signatures."""

    def sign(self, data: bytes, signature_algorithm: ec.EllipticCurveSignatureAlgorithm) -> bytes:
        """Return the signature in DER."""


def make_signature(files: Mapping[str, str], private_key: SigningKey, *, name: str = "bundle") -> bytes:
    """Return model.sig for these files; the same arguments, with a private key, always give the same bytes.

    Parameters
    ----------
    files
        Name -> SHA-256 (hexadecimal) of every member except model.sig.
    private_key
        A key on P-256.
    name
        The statement's name for its subject, which is only informative.

    Raises
    ------
    FormatError
        If `files` has a name that no member of a bundle can have.
    ValueError
        If the key is not on P-256, there are no files, or `name` is empty, longer than 256 characters or not
        printable ASCII.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

    if not isinstance(private_key.curve, ec.SECP256R1):
        raise ValueError(f"expected a key on P-256, got one on {private_key.curve.name}")  # noqa: TRY004 - the type is right
    if not files or not _SUBJECT.fullmatch(name):
        raise ValueError(
            f"expected one file or more and a printable name, got {len(files)} files and {name!r:.80}"
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
    # (r, s) and (r, n - s) are both valid: we write the one with the lower s, and accept only that one from
    # our own writer.
    der = encode_dss_signature(r, min(s, _ORDER - s))
    return _envelope(key_id(private_key.public_key()), payload, der)


def verify_signature(raw: bytes, keyring: Keyring) -> Statement:
    """Check the content of a model.sig, untrusted, against the trusted and the revoked keys.

    Raises FormatError if neither our writer nor the reference writer would have written these bytes,
    SignatureError if no trusted key made the signature, or it leaves files out, KeyRevokedError if a revoked
    key made it, and EndlessDataError if it is larger than 64 KiB, or lists more files than a bundle may have.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    if len(raw) > MAX_MEMBER_BYTES[SIGNATURE]:
        raise EndlessDataError(
            f"model.sig: expected at most {MAX_MEMBER_BYTES[SIGNATURE]} bytes, got {len(raw)}"
        )
    hint, payload, der = _open_envelope(raw)
    key = keyring.keys.get(hint)
    if key is None:
        raise SignatureError(
            f"the bundle is signed by key {hint}, which is not trusted",
            hint="give the signer's public key with --trust, or put it into the agent's keyring",
        )
    try:
        key.public_key.verify(der, _pae(payload), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise SignatureError(f"the signature is not valid for key {key.key_id}") from error
    if keyring.revokes(key):
        raise KeyRevokedError(
            f"the bundle is signed by key {key.key_id}, which is revoked",
            hint="deploy a bundle that another key has signed",
        )
    # The payload is parsed only now that its signature is valid.
    statement, ours = _statement(payload)
    if ours and decode_dss_signature(der)[1] > _ORDER // 2:
        raise FormatError("model.sig: expected the lower of the two valid signatures, got the higher")
    return Statement(_resources(statement), key.key_id)


def claimed_key_id(raw: bytes) -> str:
    """Return the id of the key that a signature file says it was made with; nothing is verified.

    Raises
    ------
    FormatError
        If it is not a signature file.
    """
    return _open_envelope(raw)[0]


def _pae(payload: bytes) -> bytes:
    # DSSE 1.0.2, protocol.md: PAE(type, body) = "DSSEv1" SP LEN(type) SP type SP LEN(body) SP body
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)


def _root_digest(files: Mapping[str, str]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(files[name]) for name in sorted(files))).hexdigest()


def _envelope(hint: str, payload: bytes, der: bytes) -> bytes:
    # Both writers write this: the reference writer's order of keys, without spaces. Nothing else is accepted.
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
            raise FormatError("model.sig: expected a signature in DER")
    except (KeyError, IndexError, TypeError, ValueError, binascii.Error) as error:
        raise FormatError(
            "model.sig: expected a Sigstore bundle with one DSSE envelope and one signature"
        ) from error
    if not isinstance(hint, str) or not SHA256.fullmatch(hint):
        raise FormatError(
            f"model.sig: expected the SHA-256 of a key's PEM as publicKey.hint, got {hint!r:.80}"
        )
    if _envelope(hint, payload, der) != raw:
        raise FormatError("model.sig: expected the keys, order, spacing and base64 that its writers use")
    return hint, payload, der


def _statement(payload: bytes) -> tuple[object, bool]:
    """Parse the payload; return True with it if it is in our encoding, False if in the reference writer's."""
    statement = canonical_json.parse(payload, "signed statement")
    if canonical_json.encode(statement) == payload:
        return statement, True
    # The reference writer indents by two, and the order of its keys changes from run to run.
    if json.dumps(statement, indent=2).encode("ascii") == payload:
        return statement, False
    raise FormatError("signed statement: expected the layout that one of its writers uses")


def _resources(statement: object) -> Mapping[str, str]:
    predicate, root = _predicate(statement)
    serialization = dict(_object(predicate["serialization"]))
    ignored = serialization.pop("ignore_paths", [])
    # `is not False`, since 0 and 0.0 are equal to False but are other encodings.
    links = serialization.pop("allow_symlinks", None)
    if serialization != {"method": "files", "hash_type": "sha256"} or links is not False:
        raise FormatError(
            f"signed statement: expected method files, sha256 and no links, got {serialization!r:.120}"
        )
    if not isinstance(ignored, list):
        raise FormatError(f"signed statement: expected a list of paths as ignore_paths, got {ignored!r:.80}")
    for path in ignored:
        if not isinstance(path, str) or path not in _IGNORABLE:
            raise SignatureError(
                f"the signature leaves out {path!r:.80}, so it would not cover the whole bundle"
            )
    if len(set(ignored)) != len(ignored):
        raise FormatError("signed statement: ignore_paths has a path twice")
    entries = _entries(predicate["resources"])
    names = [name for name, _ in entries]
    if not 1 <= len(names) <= MAX_MEMBERS:
        raise EndlessDataError(f"signed statement: expected 1 to {MAX_MEMBERS} files, got {len(names)}")
    if any(not a < b for a, b in itertools.pairwise(names)):
        raise FormatError("signed statement: expected resources sorted by name, each once")
    for name, digest in entries:
        max_member_bytes(name)
        if name == SIGNATURE or not SHA256.fullmatch(digest):
            raise FormatError(
                f"signed statement: expected a member and its SHA-256, got {name} with {digest!r:.80}"
            )
    resources = dict(entries)
    if _root_digest(resources) != root:
        raise FormatError("signed statement: its subject is not the digest of its resources")
    return MappingProxyType(resources)


def _predicate(statement: object) -> tuple[Mapping[str, object], object]:
    """Check the outer keys of a statement; return its predicate and the digest of its subject."""
    fields = _object(statement)
    if fields.keys() != {"_type", "subject", "predicateType", "predicate"}:
        raise FormatError("signed statement: expected exactly the keys of in-toto v1")
    if (fields["_type"], fields["predicateType"]) != (_STATEMENT_TYPE, _PREDICATE_TYPE):
        raise FormatError(
            f"signed statement: expected predicateType {_PREDICATE_TYPE}, got {fields['predicateType']!r:.80}"
        )
    subjects = fields["subject"]
    if not isinstance(subjects, list) or len(subjects) != 1:
        raise FormatError("signed statement: expected one subject")
    subject = _object(subjects[0])
    if subject.keys() != {"name", "digest"} or not isinstance(subject["name"], str):
        raise FormatError("signed statement: expected a name and a digest as subject")
    digest = _object(subject["digest"])
    predicate = _object(fields["predicate"])
    if digest.keys() != {"sha256"} or predicate.keys() != {"resources", "serialization"}:
        raise FormatError("signed statement: expected exactly the keys sha256, resources and serialization")
    return predicate, digest["sha256"]


def _entries(resources: object) -> list[tuple[str, str]]:
    entries = []
    for resource in resources if isinstance(resources, list) else [None]:
        fields = _object(resource)
        if fields.keys() != {"name", "algorithm", "digest"} or fields["algorithm"] != "sha256":
            raise FormatError(
                f"signed statement: expected a resource with name, sha256 and digest, got {fields!r:.120}"
            )
        name, digest = fields["name"], fields["digest"]
        if not isinstance(name, str) or not isinstance(digest, str):
            raise FormatError(f"signed statement: expected strings as name and digest, got {fields!r:.120}")
        entries.append((name, digest))
    return entries


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise FormatError(f"signed statement: expected an object, got {value!r:.80}")
    return value
