"""Runs inside the emulated machine: requests to bundles, answered as a worker answers them, between marks.

    requests.py ENGINE FOLDER...

A folder has the members of a bundle, its `manifest.json`, and `requests.npz` with the inputs of each request
as `<k>/<name>`. Marks are numbered over all folders: an even one before each request, an odd one after it.
All requests of a folder are answered once before the first is counted. ENGINE is not used: there is only
ours.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

import numpy as np

from agent.bundle.manifest import Manifest
from agent.wire.content_types import RAW
from agent.wire.tensors import format_tensor
from agent.worker.frames import Load, Request
from agent.worker.model import Members, Model, Prepared, load_kernels, load_model

MARK: Final = 24302  # the system call that counter.c watches; no kernel has it
OK: Final = 200


def load(place: Path) -> tuple[Manifest, Model]:
    """Load the bundle in a folder as a worker does, without its sandbox."""
    manifest = Manifest.from_bytes((place / "manifest.json").read_bytes())
    files = {name: os.open(place / name, os.O_RDONLY) for name in manifest.files}
    members = Members(files)
    prepared = Prepared(manifest, Load(tuple(files)), members)
    return manifest, load_model(prepared, members, load_kernels(members, 1))


def requests_of(place: Path, manifest: Manifest) -> list[tuple[Request, bytes]]:
    """Read the requests in a folder."""
    with np.load(place / "requests.npz") as file:
        given = {name: file[name] for name in file.files}
    found = []
    for k in range(len({name.partition("/")[0] for name in given})):
        arrays = [(spec, given[f"{k}/{spec.name}"]) for spec in manifest.inputs]
        tensors = tuple(format_tensor(spec.name, spec.datatype, array.shape) for spec, array in arrays)
        found.append((Request(k, RAW, tensors), b"".join(array.tobytes() for _, array in arrays)))
    return found


def main(places: list[Path]) -> None:
    """Answer the requests of all folders."""
    system_call = ctypes.CDLL(None).syscall
    mark = 0
    for place in places:
        manifest, model = load(place)
        requests = requests_of(place, manifest)
        for request, payload in requests:
            answer, _ = model.answer(request, memoryview(payload))
            if answer.status != OK:
                raise ValueError(f"{place.name}: {answer.message}")
        for request, payload in requests:
            system_call(MARK, mark)
            model.answer(request, memoryview(payload))
            system_call(MARK, mark + 1)
            mark += 2


os.environ["EDGE_NUM_THREADS"] = "1"
main([Path(place) for place in sys.argv[2:]])
