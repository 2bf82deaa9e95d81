"""Runs inside the emulated machine: a network of ncnn's benchmark, one inference between marks.

    ncnn_param.py PARAM WIDTH HEIGHT CHANNELS

Weights are zeros, the input is constant, and the options are the same as in ncnn's `benchncnn`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

import ncnn
import numpy as np

MARK: Final = 24302  # the system call that caches.c watches; no kernel has it


def main(param: str, width: int, height: int, channels: int) -> None:
    """Load and warm up the network, and run it once between two marks."""
    net = ncnn.Net()
    blobs, workspace = ncnn.UnlockedPoolAllocator(), ncnn.PoolAllocator()
    net.opt.num_threads = 1
    net.opt.blob_allocator = blobs
    net.opt.workspace_allocator = workspace
    net.load_param(param)
    net.load_model(ncnn.DataReaderFromEmpty())
    image = ncnn.Mat(np.full((channels, height, width), 0.01, "float32")).clone()
    names = net.output_names()

    def run() -> None:
        extractor = net.create_extractor()
        extractor.input(net.input_names()[0], image)
        for name in names:
            extractor.extract(name)

    run()
    system_call = ctypes.CDLL(None).syscall
    system_call(MARK, 0)
    run()
    system_call(MARK, 1)
    os._exit(0)  # Python would end the allocators before what they allocated


main(sys.argv[1], *map(int, sys.argv[2:]))
