"""The desired document: which models should run on a device, retained at `edge/v1/<device>/desired`.

::

    {"version": 7, "models": {"resnet50": {"digest": "sha256:<64 hex>", "size": 102400, "version": "1.0.0",
                                           "job": "<id>", "sources": ["mqtt", "https://host/path"]}},
     "base": "sha256:<64 hex>"}

A higher `version` replaces a lower one, and a model that is absent is taken out of service. `newest_after`
says how much higher it may be, so that no document uses up the numbers, by mistake or in bad faith. `base` is
optional: the digest of the document that this one was written from. With it, two tools that add a model at
the same moment do not undo each other: the agent refuses the second document (`ERR_CONFLICT`), and its tool
writes a new one.

Promises: the reader is strict. A document with a single mistake is refused as a whole.
Leaves to others: whether a source is allowed, and the installation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from agent.bundle.archive import MAX_BUNDLE_BYTES
from agent.bundle.names import LEVEL_NAME, MAX_VERSION_CHARS, MODEL_NAME, format_digest, hex_digest
from agent.errors import EndlessDataError, FormatError
from agent.wire import document

# 64 models with 8 sources of 200 characters each take 100 kB.
MAX_DESIRED_BYTES: Final = 256 * 1024
# One worker process each: none of the supported boards runs more.
MAX_MODELS: Final = 64
MAX_SOURCES: Final = 8
# URLs of this length are accepted by most servers and proxies; a source needs far less.
MAX_SOURCE_CHARACTERS: Final = 2048
MAX_VERSION: Final = document.MAX_SAFE_INTEGER
# Up to here a version may rise by any amount, so it may be the time in milliseconds.
FREE_VERSIONS: Final = 2**41
# Beyond that, a version may rise by this much, so it takes 2^33 documents to use up the rest.
MAX_STEP: Final = 2**20
# The source that stands for blocks over MQTT; all others are https URLs.
MQTT_SOURCE: Final = "mqtt"

# The requester's claim; the version in the signed manifest counts.
_CLAIMED_VERSION: Final = re.compile(rf"[0-9A-Za-z.+-]{{1,{MAX_VERSION_CHARS}}}")
_ENTRY_KEYS: Final = frozenset({"digest", "size", "version", "job", "sources"})


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """One model that should run.

    Attributes
    ----------
    model
        The model's name.
    digest, size
        `sha256:<hex>` and bytes of the bundle.
    version
        The version that the requester expects.
    job
        The deployment's identifier; used once.
    sources
        Where the bundle may be fetched, best first: `mqtt` or https URLs.
    """

    model: str
    digest: str
    size: int
    version: str
    job: str
    sources: tuple[str, ...]

    def to_document(self) -> dict[str, object]:
        """Return the model's entry as a JSON object."""
        members = asdict(self)
        del members["model"]
        return members | {"sources": list(self.sources)}

    @classmethod
    def from_document(cls, name: str, entry: object) -> DesiredModel:
        """Read a model's entry.

        Raises
        ------
        EndlessDataError
            If the bundle is over the size limit.
        FormatError
            If the entry does not have the form that `to_document` returns.
        """
        if not MODEL_NAME.fullmatch(name):
            raise FormatError(f"expected the name of a model, got {document.shown(name)}")
        if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
            keys = ", ".join(sorted(_ENTRY_KEYS))
            raise FormatError(f"{name}: expected exactly {keys}, got {document.shown(entry)}")
        size, sources = entry["size"], entry["sources"]
        if type(size) is not int or size < 1:
            raise FormatError(f"{name}: expected a size in bytes, got {document.shown(size)}")
        if size > MAX_BUNDLE_BYTES:
            raise EndlessDataError(
                f"{name}: expected a bundle of at most {MAX_BUNDLE_BYTES} bytes, got {size}"
            )
        if not isinstance(sources, list) or not 1 <= len(sources) <= MAX_SOURCES:
            raise FormatError(f"{name}: expected 1 to {MAX_SOURCES} sources, got {document.shown(sources)}")
        return cls(
            model=name,
            digest=_digest(name, entry["digest"]),
            size=size,
            version=_string(name, "version", entry["version"], _CLAIMED_VERSION),
            job=_string(name, "job", entry["job"], LEVEL_NAME),
            sources=tuple(_string(name, "source", source, None) for source in sources),
        )


@dataclass(frozen=True, slots=True)
class Desired:
    """A desired document.

    Attributes
    ----------
    version
        Grows with each document.
    models
        What should run, with unique names.
    base
        The `digest` of the document that this one was written from, or None.
    """

    version: int
    models: tuple[DesiredModel, ...]
    base: str | None = None

    @property
    def digest(self) -> str:
        """The `base` of the next document: SHA-256 of version and models, as JSON with sorted keys."""
        raw = json.dumps(self.to_document(), sort_keys=True, separators=(",", ":")).encode()
        return format_digest(hashlib.sha256(raw).hexdigest())

    def get(self, model: str) -> DesiredModel | None:
        """Return what should run as `model`, or None."""
        return next((entry for entry in self.models if entry.model == model), None)

    def to_document(self) -> dict[str, object]:
        """Return version and models, without `base`, as a JSON object."""
        return {
            "version": self.version,
            "models": {entry.model: entry.to_document() for entry in self.models},
        }

    def to_bytes(self) -> bytes:
        """Write the document."""
        base = {} if self.base is None else {"base": self.base}
        return document.encode({**self.to_document(), **base})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Desired:
        """Read a document.

        Raises
        ------
        EndlessDataError
            If it is over a limit.
        FormatError
            If it is not a desired document.
        """
        return cls.from_document(document.parse_strictly(raw, "the desired document", MAX_DESIRED_BYTES))

    @classmethod
    def from_document(cls, value: object) -> Desired:
        """Read a document that has been parsed already.

        Raises
        ------
        EndlessDataError, FormatError
            If it is not such a document, as in `from_bytes`.
        """
        if not isinstance(value, dict) or value.keys() - {"base"} != {"version", "models"}:
            raise FormatError(
                f"expected a desired document with version and models, got {document.shown(value)}"
            )
        version, models, base = value["version"], value["models"], value.get("base")
        if base is not None:
            base = _digest("the desired base", base)
        if type(version) is not int or not 0 <= version <= MAX_VERSION:
            raise FormatError(
                f"the desired version: expected an integer from 0 to 2^53-1, got {document.shown(version)}"
            )
        if not isinstance(models, dict):
            raise FormatError(f"the desired models: expected an object, got {document.shown(models)}")
        if len(models) > MAX_MODELS:
            raise EndlessDataError(f"expected at most {MAX_MODELS} desired models, got {len(models)}")
        entries = tuple(DesiredModel.from_document(name, entry) for name, entry in models.items())
        jobs = [entry.job for entry in entries]
        if len(set(jobs)) != len(jobs):
            raise FormatError("two desired models have the same job")
        return cls(version, entries, base)


def newest_after(version: int | None) -> int:
    """Return the highest version that may follow `version`, or None, the first document."""
    return max(FREE_VERSIONS, min((version or 0) + MAX_STEP, MAX_VERSION))


def find_version(raw: bytes) -> int:
    """Return the version of a document even if nothing else in it can be read; 0 if it has none.

    A tool that replaces such a document gives its own a higher version.
    """
    try:
        fields: Mapping[str, object] = document.parse_object(raw, "the desired document", MAX_DESIRED_BYTES)
    except (EndlessDataError, FormatError):
        return 0
    version = document.integer(fields.get("version"))
    return version if version is not None and 0 <= version < MAX_VERSION else 0


def _digest(name: str, value: object) -> str:
    try:
        hex_digest(digest := _string(name, "digest", value, None))
    except ValueError as error:
        raise FormatError(f"{name}: {error}") from error
    return digest


def _string(name: str, what: str, value: object, pattern: re.Pattern[str] | None) -> str:
    if (
        not isinstance(value, str)
        or len(value) > MAX_SOURCE_CHARACTERS
        or not value.isprintable()
        or (pattern is not None and not pattern.fullmatch(value))
    ):
        raise FormatError(f"{name}: expected a {what}, got {document.shown(value)}")
    return value
