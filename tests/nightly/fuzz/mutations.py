"""Small changes to a sound file: of its bytes, or of what they mean.

Each function takes a sound content and a source of random numbers, and returns a changed content. The same
numbers make the same change again. The changes of meaning (`document`, `message`, `lines`, `tables`,
`archive`) keep a file well-formed, so that readers get past their first check: wrong ranks, indices out of
range, cycles, negative and huge extents, NaN, hostile names, members that are missing or there twice.
"""

from __future__ import annotations

import copy
import io
import json
import math
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS: Final = (
    -(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 127, 255, 65536, 1 << 20, 2**31 - 1, 2**31, 2**32 - 1, 2**40,
    2**53, 2**63 - 1, 2**64,
)  # fmt: skip
REALS: Final = (math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-45, 0.0, -0.0, -1.0, 0.5, 1e10)
# A reader that evaluates or runs what it reads makes the file `ran`.
TEXTS: Final = (
    "", " ", "\0", "a\nb", "\x1b[31m", "x" * 70_000, "../../../../etc/passwd", "/dev/zero",
    "é\u202e\U0001f600", "nan", "1e999", "-1", "0x10", "{}", "%s%n", "$(touch ran)",
    "__import__('os').system('touch ran')",
    "os:system", "true", "null",
)  # fmt: skip
_DEEP: Final = (40, 600, 20_000)
_MANY: Final = (2, 10, 1000)


def damaged(raw: bytes, choice: random.Random) -> bytes:
    """Flip, replace, remove, repeat and insert bytes; sometimes cut the end off."""
    changed = bytearray(raw)
    for _ in range(choice.choice([1, 1, 2, 4, 16])):
        if not changed:
            return b""
        place = choice.randrange(len(changed))
        match choice.randrange(6):
            case 0:
                changed[place] ^= 1 << choice.randrange(8)
            case 1:
                changed[place] = choice.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del changed[place : place + choice.choice([1, 2, 8, 64])]
            case 3:
                changed[place:place] = changed[place : place + choice.choice([1, 8, 64])]
            case 4:
                number = struct.pack(choice.choice(["<I", ">I", "<Q"]), choice.choice(NUMBERS) & 0xFFFFFFFF)
                changed[place : place + len(number)] = number
            case _:
                changed[place:place] = bytes(choice.randrange(256) for _ in range(choice.choice([1, 4, 9])))
    return bytes(changed[: choice.randrange(len(changed) + 1)]) if choice.random() < 0.1 else bytes(changed)


def document(value: Any, choice: random.Random) -> Any:
    """Change a document as `json.loads` returns it, in one place or a few."""
    root = [_copied(value)]
    for _ in range(choice.choice([1, 1, 1, 2, 4])):
        holder, key = _place(root, choice)
        found = holder[key]
        match choice.randrange(8):
            case 0:
                del holder[key]
                if not root:
                    return None
            case 1 if isinstance(found, list) and found:
                holder[key] = found * choice.choice(_MANY) if len(found) < 1000 else found[:1]
            case 2 if isinstance(found, list):
                found.insert(choice.randrange(len(found) + 1), _hostile(found[0] if found else 0, choice))
            case 3 if isinstance(found, dict):
                found[choice.choice(TEXTS)] = choice.choice(NUMBERS)
            case 4:
                other, place = _place(root, choice)
                holder[key] = _copied(other[place])
            case 5:
                holder[key] = _nested(choice.choice(_DEEP), is_list=choice.random() < 0.5)
            case _:
                holder[key] = _hostile(found, choice)
    return root[0]


def to_json(value: Any) -> bytes:
    """Write a document as JSON, of any depth."""
    try:
        return json.dumps(value).encode(errors="surrogatepass")
    except (RecursionError, ValueError):  # too deep, or a part of itself, because it was too deep to copy
        return b"[" * 20_000 + b"0" + b"]" * 20_000


def _place(root: list[Any], choice: random.Random) -> tuple[Any, Any]:
    """Choose a place: a container, and a key or an index in it."""
    holder: Any = root
    key: Any = 0
    while True:
        found = holder[key]
        if not isinstance(found, dict | list) or not found or choice.random() < 0.12:
            return holder, key
        holder, key = (
            found,
            (choice.choice(list(found)) if isinstance(found, dict) else choice.randrange(len(found))),
        )


def _hostile(found: Any, choice: random.Random) -> Any:
    """Return something in place of a value, mostly of the same type."""
    if choice.random() < 0.2:
        return choice.choice([None, True, [], {}, [[]], "", 0, -1, 0.5, "1", [0], {"0": 0}])
    if isinstance(found, bool):
        return not found
    if isinstance(found, str) and found.lstrip("-").replace(".", "").replace("E", "").isdigit():
        return str(choice.choice((*NUMBERS, *REALS)))
    if isinstance(found, str):
        return choice.choice(TEXTS)
    if isinstance(found, float):
        return choice.choice((*REALS, *NUMBERS))
    return choice.choice(NUMBERS)


def _copied(value: Any) -> Any:
    """Return a copy; what is nested too deeply for Python to copy stays the same."""
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return value


def _nested(depth: int, *, is_list: bool) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value


def lines(raw: bytes, choice: random.Random) -> bytes:
    """Change a text of lines: their order, or a word of one."""
    found = raw.split(b"\n")
    for _ in range(choice.choice([1, 1, 2, 4])):
        place = choice.randrange(len(found))
        match choice.randrange(7):
            case 0:
                del found[place]
                found = found or [b""]
            case 1:
                found[place:place] = [found[place]] * choice.choice(_MANY)
            case 2:
                other = choice.randrange(len(found))
                found[place], found[other] = found[other], found[place]
            case _:
                found[place] = _other_word(found[place], choice)
    return b"\n".join(found)


def _other_word(line: bytes, choice: random.Random) -> bytes:
    for mark in (b" ", b"=", b",", b":"):
        words = line.split(mark)
        if len(words) > 1 and choice.random() < 0.7:
            place = choice.randrange(len(words))
            match choice.randrange(4):
                case 0:
                    del words[place]
                case 1:
                    words[place] = choice.choice(TEXTS).encode()
                case _:
                    words[place] = str(choice.choice((*NUMBERS, *REALS))).encode()
            return mark.join(words)
    return choice.choice([b"", line * 2, choice.choice(TEXTS).encode(), line + b"=1"])


def message(root: Message, choice: random.Random) -> None:
    """Change a message of protobuf in place: a number, a text, or which parts there are."""
    for _ in range(choice.choice([1, 1, 1, 2, 4])):
        _change_field(root, choice)


def _change_field(found: Message, choice: random.Random) -> None:
    while True:
        fields = found.ListFields()
        if not fields:
            return
        field, value = choice.choice(fields)
        is_message = field.type == FieldDescriptor.TYPE_MESSAGE
        if is_message and choice.random() < 0.9:
            found = choice.choice(value) if field.is_repeated else value
            continue
        break
    if field.is_repeated:
        _change_list(value, choice, field)
    elif is_message or choice.random() < 0.1:
        found.ClearField(field.name)
    else:
        _set(lambda new: setattr(found, field.name, new), getattr(found, field.name), field, choice)


def _change_list(values: Any, choice: random.Random, field: FieldDescriptor) -> None:
    place = choice.randrange(len(values))
    match choice.randrange(4):
        case 0:
            del values[place]
        case 1 if field.type == FieldDescriptor.TYPE_MESSAGE:
            values.add().CopyFrom(values[place])
        case 1:
            values.extend([values[place]] * choice.choice(_MANY))
        case _ if field.type == FieldDescriptor.TYPE_MESSAGE:
            other = choice.randrange(len(values))
            values[place].CopyFrom(values[other])
        case _:
            _set(lambda new: values.__setitem__(place, new), values[place], field, choice)


def _set(put: Callable[[Any], None], found: Any, field: FieldDescriptor, choice: random.Random) -> None:
    if field.type == FieldDescriptor.TYPE_STRING:
        put(choice.choice(TEXTS))
    elif field.type == FieldDescriptor.TYPE_BYTES:
        put(choice.choice([damaged(found, choice), b"", found * 2, choice.choice(TEXTS).encode()]))
    elif isinstance(found, float):
        put(choice.choice(REALS))
    elif field.type == FieldDescriptor.TYPE_ENUM:
        put(choice.choice([number.number for number in field.enum_type.values]))
    else:
        limit = 1 << (31 if field.type == FieldDescriptor.TYPE_INT32 else 63)
        low = 0 if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64) else -limit
        put(choice.choice([number for number in NUMBERS if low <= number < limit]))


def tables(raw: bytes, choice: random.Random) -> bytes:
    """Change a file of FlatBuffers: a field of a table, where it leads to, or whether it is there."""
    changed = bytearray(raw)
    found = _tables(raw)
    if not found:
        return damaged(raw, choice)
    for _ in range(choice.choice([1, 1, 2, 3])):
        table, vtable, count = choice.choice(found)
        if not count:
            continue
        entry = vtable + 4 + 2 * choice.randrange(count)
        (offset,) = struct.unpack_from("<H", raw, entry)
        place = table + offset
        if not offset or place + 8 > len(raw):
            continue
        match choice.randrange(6):
            case 0:
                struct.pack_into("<H", changed, entry, 0)
            case 1:
                struct.pack_into("<H", changed, entry, choice.choice([1, 2, 0x7FFF, 0xFFFF, offset + 1]))
            case 2:  # to another table, which may lead back to this one
                target = choice.choice(found)[0]
                struct.pack_into("<I", changed, place, (target - place) & 0xFFFFFFFF)
            case 3:
                (leads,) = struct.unpack_from("<I", raw, place)
                if place + leads + 8 <= len(raw):
                    number = choice.choice(NUMBERS) & 0xFFFFFFFF
                    struct.pack_into("<I", changed, place + leads + choice.choice([0, 4]), number)
            case 4:
                changed[place] = choice.choice([0, 1, 2, 9, 0x7F, 0x80, 0xFF])
            case _:
                struct.pack_into("<I", changed, place, choice.choice(NUMBERS) & 0xFFFFFFFF)
    return bytes(changed)


def _tables(raw: bytes) -> list[tuple[int, int, int]]:
    """The tables that the root leads to, as far as known: place, place of the vtable, number of fields."""
    if len(raw) < 8:
        return []
    waiting, seen = [struct.unpack_from("<I", raw, 0)[0]], set[int]()
    found: list[tuple[int, int, int]] = []
    while waiting and len(found) < 2000:
        table = waiting.pop()
        if table in seen or table + 4 > len(raw):
            continue
        seen.add(table)
        vtable = table - struct.unpack_from("<i", raw, table)[0]
        if not 0 <= vtable <= len(raw) - 4:
            continue
        size, _ = struct.unpack_from("<HH", raw, vtable)
        if size % 2 or not 4 <= size <= 200 or vtable + size > len(raw):
            continue
        count = (size - 4) // 2
        found.append((table, vtable, count))
        for offset in struct.unpack_from(f"<{count}H", raw, vtable + 4):
            place = table + offset
            if not offset or place + 4 > len(raw):
                continue
            target = place + struct.unpack_from("<I", raw, place)[0]
            waiting.append(target)
            if target + 4 <= len(raw):
                length = struct.unpack_from("<I", raw, target)[0]
                ends = range(target + 4, min(target + 4 + 4 * min(length, 64), len(raw) - 4), 4)
                waiting.extend(at + struct.unpack_from("<I", raw, at)[0] for at in ends)
    return found


def archive(raw: bytes, choice: random.Random, change: Callable[[bytes, random.Random], bytes]) -> bytes:
    """Change a zip archive: the content of a member by `change`, or which members there are."""
    with zipfile.ZipFile(io.BytesIO(raw)) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    prefix = b""
    for _ in range(choice.choice([1, 1, 2])):
        place = choice.randrange(len(members))
        name, content = members[place]
        match choice.randrange(9):
            case 0:
                del members[place]
                if not members:
                    return b""
            case 1:
                members.append((name, change(content, choice)))
            case 2:
                members.append((name.upper(), change(content, choice)))
            case 3:
                members[place] = (choice.choice(TEXTS)[:60000] or "x", content)
            case 4:
                prefix = raw
            case 5:
                members[place] = (name, choice.choice([b"", b"[" * 100_000, b" " * (8 << 20), b"{}"]))
            case _:
                members[place] = (name, change(content, choice))
    stream = io.BytesIO()
    kind = choice.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", kind) as new:
        warnings.simplefilter("ignore")  # duplicate names are wanted
        for name, content in members:
            new.writestr(zipfile.ZipInfo(name), content, compress_type=kind)
    return prefix + stream.getvalue()
