"""Flip bits of a bundle one by one, verify it after each flip, and print the results as JSON.

It runs in a separate process, so that its audit hook sees nothing else.
Usage: python flip_bits.py BUNDLE PUBLIC_KEY
"""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path

from agent.bundle.archive import read_index
from agent.bundle.keyring import Keyring
from agent.bundle.verify import verify
from agent.errors import BundleError

# Events of loading or running something (Python's "Audit events table"). They include "import", because by
# then the verifier has imported everything it needs.
LOADS = (
    "import",
    "exec",
    "compile",
    "ctypes.",
    "subprocess.",
    "os.exec",
    "os.posix_spawn",
    "os.system",
    "os.fork",
    "socket.",
)

WHOLE_HEADERS = 2
# The last characters of the payload's base64, which could be written in several ways.
BASE64_END = 4


def regions(raw: bytes, fd: int) -> dict[str, list[range]]:
    out: dict[str, list[range]] = collections.defaultdict(list)
    end = 0
    for member in read_index(fd):
        out["header"].append(range(member.offset - 512, member.offset))
        end = member.offset + member.size
        if member.name == "model.sig":
            payload = raw.index(b'"payload":"', member.offset) + len('"payload":"')
            end_of_most = raw.index(b'"', payload) - BASE64_END
            out["payload"].append(range(payload, end_of_most))
            out["signature"] += [range(member.offset, payload), range(end_of_most, end)]
        else:
            kind = "manifest" if member.name == "manifest.json" else "data"
            out[kind].append(range(member.offset, end))
        out["padding"].append(range(end, end + member.padding))
        end += member.padding
    out["end"].append(range(end, len(raw)))
    assert sum(len(part) for parts in out.values() for part in parts) == len(raw)
    return out


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def main(path: str, key: str) -> None:
    raw = Path(path).read_bytes()
    keyring = Keyring.from_files([key])
    fd = os.memfd_create("bundle")
    os.write(fd, raw)
    loaded: list[str] = []
    watching = False

    def hook(event: str, args: tuple[object, ...]) -> None:
        if watching and event.startswith(LOADS):
            loaded.append(f"{event} {args!r:.200}")

    sys.addaudithook(hook)
    verify(fd, keyring).close()
    watching = True
    verify(fd, keyring).close()
    descriptors = open_descriptors()
    results: dict[str, collections.Counter[str]] = {}
    accepted = []
    for region, parts in regions(raw, fd).items():
        results[region] = collections.Counter()
        for number, at in ((number, at) for number, part in enumerate(parts) for at in part):
            # Each bit of the signature's envelope and of two headers (the others have the same reader); of
            # every other byte one bit, which changes with the offset.
            whole = region == "signature" or (region == "header" and number < WHOLE_HEADERS)
            for bit in range(8) if whole else (at % 8,):
                os.pwrite(fd, bytes([raw[at] ^ 1 << bit]), at)
                try:
                    verify(fd, keyring).close()
                    accepted.append((region, at, bit))
                except BundleError as error:
                    results[region][type(error).__name__] += 1
            os.pwrite(fd, raw[at : at + 1], at)
    watching = False
    verify(fd, keyring).close()
    report = {
        "accepted": accepted,
        "loaded": loaded,
        "results": results,
        "leaked": open_descriptors() - descriptors,
        "bytes": len(raw),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
