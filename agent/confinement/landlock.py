"""Landlock: which files the calling thread, and what it starts from then on, may open.

References: linux/landlock.h; Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from agent.confinement.raw_call import call

# The same numbers on every architecture.
CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
RESTRICT_SELF: Final = 446

_CREATE_RULESET_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1
# Rights that Landlock handles, and so refuses, each with the version of the ABI that introduced them.
_FS: Final = ((1, 0x1FFF), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
_NET: Final = ((4, 0b11),)
_SCOPED: Final = ((6, 0b11),)
# EXECUTE, READ_FILE and READ_DIR.
_READ: Final = 0b1101
# EXECUTE, WRITE_FILE, READ_FILE, TRUNCATE and IOCTL_DEV: what a rule for a file, and no folder, may grant.
_OF_FILES: Final = 0b111 | 1 << 14 | 1 << 15


def restrict(readable: Iterable[Path] = (), writable: Iterable[Path] = ()) -> int:
    """Refuse all files but those below some paths, connections over TCP, and signals to other processes.

    Parameters
    ----------
    readable
        Folders and files that may be read and executed. Those that are missing are left out.
    writable
        Folders and files with which everything may be done.

    Returns
    -------
    int
        The version of the kernel's ABI: network since 4, signals since 6.

    Raises
    ------
    OSError
        If the kernel has no Landlock.
    """
    version = call(CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    files, *others = (
        sum(bits for since, bits in rights if version >= since) for rights in (_FS, _NET, _SCOPED)
    )
    # struct landlock_ruleset_attr; an older kernel accepts a longer one if its end is zero.
    attr = struct.pack("=QQQ", files, *others)
    ruleset = call(CREATE_RULESET, attr, len(attr), 0)
    try:
        for paths, rights in ((readable, _READ), (writable, files)):
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    _allow(ruleset, path, rights & files)
        call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: Path, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        # struct landlock_path_beneath_attr, which is packed.
        call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)
