"""Look into a file of PyTorch without PyTorch: which kind it is, and whether it is safe to hand over.

A `.pt2` is a zip archive of a graph in JSON and of weights. Promises that an archive that passes has bounded
sizes, no objects that are unpickled, and no expression in a shape but arithmetic, because PyTorch evaluates
those as Python. PyTorch reads archives with another library, which may find other members in the same bytes;
so it gets a new archive of the members that were checked. Also tells what a `.pt` or
`.pth` file is; never unpickles anything.

Formats: `torch.export.pt2_archive` (PyTorch 2.8 and newer), `serialized_exported_program.json` (up to 2.7).
"""

from __future__ import annotations

import json
import lzma
import pickletools
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from builder.errors import ModelError
from builder.importer.model_file import MAX_MODEL_BYTES
from builder.spelling import READABLE

# ResNet-50 has 320 members; each weight is one.
MAX_MEMBERS: Final = 100_000
# All documents together. The graph of BERT-base has 3 MB: stack traces and module paths for each node.
MAX_JSON_BYTES: Final = 64 << 20
# Python's values take up to thirty times the text that they are read from; these keep that below 2 GiB.
_MOST: Final = {b"{": 1 << 20, b"[": 1 << 21, b'"': 1 << 23}
_MAX_PICKLE_BYTES: Final = 1 << 20
# Arithmetic of symbols, also as SymPy's `srepr` writes it: names in quotes, no attribute, no index.
_EXPRESSION: Final = re.compile(r"(?:[A-Za-z0-9_+\-*/%(), .<>=!&|~]|'[\w.+\-]*'){0,16384}")
# What may be called in a shape: the functions of torch.utils._sympy, and SymPy's own for arithmetic.
_CALLED: Final = re.compile(
    r"Abs|Add|And|CeilDiv|CeilToInt|CleanDiv|Eq|Equality|Float|FloatPow|FloatTrueDiv|FloorDiv|"
    r"FloorToInt|Ge|GreaterThan|Gt|Identity|IntTrueDiv|Integer|IntegerInfinity|LShift|Le|"
    r"LessThan|Lt|Max|Min|Mod|ModularIndexing|Mul|Ne|NegativeIntegerInfinity|Not|Or|Pow|"
    r"PowByNatural|PythonMod|RShift|Rational|RoundDecimal|RoundToInt|StrictGreaterThan|"
    r"StrictLessThan|Symbol|ToFloat|TruncToFloat|TruncToInt|Unequality|Where|ceiling|floor"
)
EXPORT: Final = (
    "torch.export.save(torch.export.export(model.eval(), (example,)), 'MODEL.pt2') in Python makes a .pt2"
)
_DAMAGED: Final = "export it again: " + EXPORT
# What zipfile and json raise for damaged bytes.
_DAMAGES: Final = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    OSError,
    LookupError,
    EOFError,
    RuntimeError,
    RecursionError,
)
_BLOCK_BYTES: Final = 1 << 20
_WEIGHT_CLASSES: Final = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_\w+|torch _?\w*Storage|torch\.\w+ \w*Storage|torch \w+|"
    r"torch\.storage \w+|torch\.nn\.parameter Parameter|numpy[\w.]* \w+|_codecs encode"
)


def check_pt2(path: Path) -> None:
    """Check that a `.pt2` file may be handed to PyTorch.

    Raises `ModelError` if it is not an archive of an exported program, is too large, or could run code.
    """
    with _open(path) as archive:
        members = archive.infolist()
        _check_sizes(members, path)
        names = [member.filename for member in members]
        if not any(map(_is_graph, names)):
            raise _other_kind(archive, names, path)
        _check_names(members, path)
        documents = [member for member in members if member.filename.endswith(".json")]
        if sum(member.file_size for member in documents) > MAX_JSON_BYTES:
            raise ModelError(
                f"{path}: expected at most {MAX_JSON_BYTES} bytes of JSON, got more", hint=_DAMAGED
            )
        marks = dict.fromkeys(_MOST, 0)
        for name in [member.filename for member in documents]:
            document = _read_json(archive, name, marks, path)
            if _is_graph(name):
                _check_expressions(document, path)
            for pickled in _pickled(document):
                raise ModelError(
                    f"{path}: expected tensors as plain numbers, got '{pickled:.80}' as a pickled object, "
                    f"which "
                    "may run any code when it is loaded",
                    hint="replace tensor subclasses and script objects before the export, with unwrap_tensor_"
                    "subclass of torchao.utils for quantised weights",
                )


def rewrite_pt2(path: Path, to: Path) -> None:
    """Copy the members of an archive, in their order, into a new archive.

    Raises `ModelError` if it is not an archive, is too large, or a member cannot be read.
    """
    with _open(path) as archive:
        members = archive.infolist()
        _check_sizes(members, path)
        try:
            with zipfile.ZipFile(to, "w") as copy:
                for member in members:
                    plain = zipfile.ZipInfo(member.filename)
                    plain.file_size = member.file_size
                    with archive.open(member) as source, copy.open(plain, "w") as target:
                        shutil.copyfileobj(source, target, _BLOCK_BYTES)
        except OSError as error:
            raise ModelError(
                f"cannot copy {path}: {error.strerror or error}",
                hint="free some space for temporary files, or set TMPDIR to another folder",
            ) from error
        except _DAMAGES as error:
            raise _damaged(path) from error


def describe_pt(path: Path) -> ModelError:
    """Return why a `.pt` or `.pth` file cannot be imported, by what it is."""
    expected = "expected a program of torch.export (.pt2), got"
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
    except OSError as error:
        return ModelError(f"cannot read {path}: {error.strerror or error}", hint=READABLE)
    if not start.startswith(b"PK\x03\x04"):
        return ModelError(f"{path}: {expected} a file that torch.save wrote, or another format", hint=EXPORT)
    try:
        with _open(path) as archive:
            names = [member.filename for member in archive.infolist()[:MAX_MEMBERS]]
            if any(_is_graph(name) for name in names):
                return ModelError(
                    f"{path}: expected the suffix .pt2 for a program of torch.export, got {path.suffix}",
                    hint=f"mv {path} {path.with_suffix('.pt2')}",
                )
            return _other_kind(archive, names, path)
    except ModelError as error:
        return error


def _open(path: Path) -> zipfile.ZipFile:
    try:
        if path.stat().st_size > MAX_MODEL_BYTES:
            raise ModelError(
                f"expected a model of at most {MAX_MODEL_BYTES} bytes, got {path.stat().st_size}: {path}",
                hint="quantise or prune the model: larger ones do not fit the supported devices",
            )
        return zipfile.ZipFile(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}", hint=READABLE) from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError, LookupError) as error:
        raise ModelError(
            f"{path}: expected a program saved by torch.export.save, got a damaged file or another format",
            hint=_DAMAGED,
        ) from error


def _check_sizes(members: list[zipfile.ZipInfo], path: Path) -> None:
    if len(members) > MAX_MEMBERS:
        raise ModelError(f"{path}: expected at most {MAX_MEMBERS} members, got {len(members)}", hint=_DAMAGED)
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED and member.file_size > MAX_JSON_BYTES:
            raise ModelError(
                f"{path}: expected compressed members of at most {MAX_JSON_BYTES} bytes, got "
                f"{member.file_size}",
                hint=_DAMAGED,
            )
    total = sum(member.file_size for member in members)
    if total > MAX_MODEL_BYTES + MAX_JSON_BYTES:
        raise ModelError(
            f"{path}: expected at most {MAX_MODEL_BYTES} bytes of weights, got {total}",
            hint="quantise or prune the model: larger ones do not fit the supported devices",
        )


def _check_names(members: list[zipfile.ZipInfo], path: Path) -> None:
    """Refuse names that PyTorch's library takes for each other: it ignores case, and reads up to a NUL."""
    seen: set[str] = set()
    for member in members:
        name = member.filename.lower()
        if name in seen or member.orig_filename != member.filename:
            raise ModelError(
                f"{path}: expected members with different names, got '{name:.80}' twice or cut", hint=_DAMAGED
            )
        seen.add(name)


def _is_graph(name: str) -> bool:
    return name.endswith("serialized_exported_program.json") or bool(
        re.search(r"(^|/)models/[^/]+\.json$", name)
    )


def _read_json(archive: zipfile.ZipFile, name: str, marks: dict[bytes, int], path: Path) -> object:
    """Read a document; `marks` counts what documents are made of."""
    try:
        with archive.open(name) as stream:
            raw = stream.read(MAX_JSON_BYTES)
        for mark, most in _MOST.items():
            marks[mark] += raw.count(mark)
            if marks[mark] > most:
                raise ModelError(
                    f"{path}: expected at most {most} times {mark.decode()} in JSON, got more", hint=_DAMAGED
                )
        document: object = json.loads(raw)
    except _DAMAGES as error:
        raise _damaged(path) from error
    return document


def _damaged(path: Path) -> ModelError:
    return ModelError(
        f"{path}: expected a program saved by torch.export.save, got a damaged file", hint=_DAMAGED
    )


def _check_expressions(document: object, path: Path) -> None:
    for text in _expressions(document):
        # A word is tried only at its beginning: from each of its characters, a long one would take minutes.
        called = re.findall(r"(?<![\w.])([\w.]+)\s*\(", text)
        plain = _EXPRESSION.fullmatch(text) and not re.search(r"__|\.\s*[A-Za-z_]", text)
        if not plain or not all(_CALLED.fullmatch(name) for name in called):
            raise ModelError(
                f"{path}: expected arithmetic as the size of a dimension, got {text[:60]!r}", hint=_DAMAGED
            )


def _expressions(document: object) -> Iterator[str]:
    """Yield the expressions of a graph: PyTorch hands those to SymPy, which evaluates them as Python."""
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "expr_str" and isinstance(inner, str):
                    yield inner
                elif key == "range_constraints" and isinstance(inner, dict):
                    yield from (str(name) for name in inner)
                    waiting.append(inner)
                else:
                    waiting.append(inner)
        elif isinstance(value, list):
            waiting.extend(value)


def _pickled(document: object) -> Iterator[str]:
    """Yield the names of tensors and constants that are stored as pickled objects."""
    config = document.get("config") if isinstance(document, dict) else None
    for name, entry in config.items() if isinstance(config, dict) else ():
        if isinstance(entry, dict) and entry.get("use_pickle"):
            yield str(name)


def _other_kind(archive: zipfile.ZipFile, names: list[str], path: Path) -> ModelError:
    """Explain an archive that is no exported program."""
    expected = f"{path}: expected a program of torch.export (.pt2), got"
    if any(name.endswith((".so", ".cpp")) for name in names):
        return ModelError(
            f"{expected} compiled code of AOTInductor, which runs on one kind of machine only", hint=EXPORT
        )
    if any("/code/" in name or name.endswith("constants.pkl") for name in names):
        return ModelError(f"{expected} TorchScript", hint=f"from the model that it was made of: {EXPORT}")
    pickles = [name for name in names if name.endswith("data.pkl")]
    if not pickles:
        return ModelError(f"{expected} another archive", hint=EXPORT)
    classes = _classes(archive, pickles[0])
    foreign = [name for name in classes if not _WEIGHT_CLASSES.fullmatch(name)]
    foreign.sort(key=lambda name: (name.startswith(("__builtin__", "builtins", "torch.")), name))
    if foreign:
        name = foreign[0].replace(" ", ".")
        return ModelError(
            f"{expected} a pickled object ({name:.80}), which may run any code when it is loaded",
            hint=f"only if you trust it: model = torch.load('{path}', weights_only=False), then {EXPORT}",
        )
    return ModelError(
        f"{expected} weights without a model (a state_dict)",
        hint=f"model.load_state_dict(torch.load('{path}', weights_only=True)), then {EXPORT}",
    )


def _classes(archive: zipfile.ZipFile, name: str) -> set[str]:
    """Return the classes and functions that a pickle names, without loading it."""
    found: set[str] = set()
    strings: list[str] = []
    try:
        with archive.open(name) as stream:
            raw = stream.read(_MAX_PICKLE_BYTES)
        for code, argument, _ in pickletools.genops(raw):
            if code.name == "GLOBAL":
                found.add(str(argument))
            elif code.name == "STACK_GLOBAL" and len(strings) > 1:
                found.add(" ".join(strings[-2:]))
            elif isinstance(argument, str):
                strings = [*strings[-1:], argument]
    except (ValueError, OSError, zipfile.BadZipFile, zlib.error, LookupError, EOFError, RuntimeError):
        pass  # cut or damaged: what was named so far decides
    return found
