"""What should run: the document that is retained at `desired`, read strictly.

::

    {"version": 7, "models": {"resnet50": {"digest": "sha256:<64 hex>", "size": 102400, "version": "1.0.0",
                                           "job": "<id>", "sources": ["mqtt", "https://host/path"]}},
     "base": "sha256:<64 hex>"}

`base` is optional: the digest of the document that this one was written from. With it, two tools that add
a model at the same moment do not undo each other: the second is refused (`ERR_CONFLICT`) and writes its
own anew.

Promises: bytes in, a frozen value or a `FormatError` out; nothing is taken from a document that has
one thing wrong with it. A higher `version` replaces a lower one; a model that is absent is taken out of
service.
Leaves to others: whether a source is allowed, and everything that happens then.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final

from agent.bundle.archive import MAX_BUNDLE_BYTES
from agent.bundle.names import LEVEL_NAME, MODEL_NAME, hex_digest
from agent.deploy.fetch.allow_list import MAX_URL_CHARACTERS
from agent.deploy.jobs import Request
from agent.deploy.store.active import Origin
from agent.errors import EndlessDataError, FormatError

# 64 models with 8 sources of 200 characters each are 100 kB.
MAX_DESIRED_BYTES: Final = 256 * 1024
# One worker process each: no board that this is for runs more.
MAX_MODELS: Final = 64
MAX_SOURCES: Final = 8
# JavaScript's limit, so that any tool can write the version.
MAX_VERSION: Final = 2**53 - 1
MQTT_SOURCE: Final = "mqtt"

_VERSION: Final = re.compile(r"[0-9A-Za-z.+-]{1,64}")
_ENTRY_KEYS: Final = {"digest", "size", "version", "job", "sources"}


@dataclass(frozen=True, slots=True)
class Desired:
    """A desired document."""

    version: int
    models: tuple[Request, ...]
    base: str | None = None

    @property
    def digest(self) -> str:
        """What the next document's `base` is: of this one's members but `base`, as canonical JSON."""
        raw = json.dumps(self.to_document(), sort_keys=True, separators=(",", ":")).encode()
        return f"sha256:{hashlib.sha256(raw).hexdigest()}"

    def get(self, model: str) -> Request | None:
        """Return what should run as `model`, or None."""
        return next((request for request in self.models if request.model == model), None)

    def to_document(self) -> dict[str, object]:
        """Return the document again, without what it was written from."""
        return {
            "version": self.version,
            "models": {
                request.model: {
                    "digest": request.digest,
                    "size": request.size,
                    "version": request.version,
                    "job": request.job,
                    "sources": list(request.sources),
                }
                for request in self.models
            },
        }


def parse_desired(raw: bytes) -> Desired:
    """Read a desired document.

    Raises
    ------
    EndlessDataError
        If it is over a limit.
    FormatError
        If it is not such a document.
    """
    if len(raw) > MAX_DESIRED_BYTES:
        raise EndlessDataError(
            f"a desired document of {len(raw)} bytes, at most {MAX_DESIRED_BYTES} are read"
        )
    try:
        document = json.loads(raw, object_pairs_hook=_object_without_duplicates, parse_constant=_no_constant)
    except RecursionError as error:
        raise FormatError("the desired document is nested too deeply") from error
    except ValueError as error:
        raise FormatError(f"the desired document is not JSON: {error}") from error
    return desired_from_document(document)


def desired_from_document(document: object) -> Desired:
    """Read a desired document that has been taken apart already.

    Raises
    ------
    EndlessDataError, FormatError
        If as in `parse_desired`.
    """
    if not isinstance(document, dict) or document.keys() - {"base"} != {"version", "models"}:
        raise FormatError("expected a desired document with version and models")
    version, models, base = document["version"], document["models"], document.get("base")
    if base is not None:
        base = _digest("the desired base", base)
    if type(version) is not int or not 0 <= version <= MAX_VERSION:
        raise FormatError(f"the desired version: expected a number from 0 to 2^53-1, got {_shown(version)}")
    if not isinstance(models, dict):
        raise FormatError(f"the desired models: expected an object, got {_shown(models)}")
    if len(models) > MAX_MODELS:
        raise EndlessDataError(f"{len(models)} models are desired, at most {MAX_MODELS} are run")
    requests = tuple(_request(name, entry) for name, entry in models.items())
    jobs = [request.job for request in requests]
    if len(set(jobs)) != len(jobs):
        raise FormatError("two desired models have the same job")
    return Desired(version, requests, base)


def _request(name: str, entry: object) -> Request:
    if not MODEL_NAME.fullmatch(name):
        raise FormatError(f"expected the name of a model, got {_shown(name)}")
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise FormatError(f"{name}: expected exactly {', '.join(sorted(_ENTRY_KEYS))}, got {_shown(entry)}")
    size, sources = entry["size"], entry["sources"]
    if type(size) is not int or size < 1:
        raise FormatError(f"{name}: expected a size in bytes, got {_shown(size)}")
    if size > MAX_BUNDLE_BYTES:
        raise EndlessDataError(f"{name}: a bundle of {size} bytes, at most {MAX_BUNDLE_BYTES} are taken")
    if not isinstance(sources, list) or not 1 <= len(sources) <= MAX_SOURCES:
        raise FormatError(f"{name}: expected 1 to {MAX_SOURCES} sources, got {_shown(sources)}")
    return Request(
        job=_string(name, "job", entry["job"], LEVEL_NAME),
        model=name,
        digest=_digest(name, entry["digest"]),
        size=size,
        version=_string(name, "version", entry["version"], _VERSION),
        sources=tuple(_string(name, "source", source, None) for source in sources),
        origin=Origin.DESIRED,
    )


def _digest(name: str, value: object) -> str:
    try:
        hex_digest(digest := _string(name, "digest", value, None))
    except ValueError as error:
        raise FormatError(f"{name}: {error}") from error
    return digest


def _string(name: str, what: str, value: object, pattern: re.Pattern[str] | None) -> str:
    if not isinstance(value, str) or len(value) > MAX_URL_CHARACTERS or not value.isprintable():
        raise FormatError(f"{name}: expected a {what}, got {_shown(value)}")
    if pattern is not None and not pattern.fullmatch(value):
        raise FormatError(f"{name}: expected a {what}, got {_shown(value)}")
    return value


def _object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Two values under one key would let two readers see two documents."""
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("duplicate key")
    return document


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
