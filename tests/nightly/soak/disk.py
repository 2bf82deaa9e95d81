"""A device's disk that loses what was not synced, fills up, and turns read-only, as an SD card does.

It is an ext4 file system in a file, on a loop device. A power cut is a copy of that file: what was not yet
written to it is lost, and everything that was synced is there. The kernel replays the
journal of the copy, as it would after a real cut. A fault of the card is the kernel's own
(`trigger_fs_error`): with `errors=remount-ro`, Debian's default, the file system is read-only from then on.
Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.durable import sync_folder

_BYTES: Final = 64 << 20
# Where the kernel's faults are triggered; the name is that of the loop device.
_EXT4: Final = Path("/sys/fs/ext4")
_BALLAST: Final = "ballast"


class Disk:
    """A disk that is mounted at `path`.

    Parameters
    ----------
    folder
        Where the image is kept and mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "disk"
        self._images = folder / "images"
        self._number = 0
        self.path.mkdir()
        self._images.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self.mount()

    @property
    def _image(self) -> Path:
        return self._images / f"{self._number}.img"

    def mount(self, *, read_only: bool = False) -> None:
        """Check the file system and mount it, as a boot does."""
        done = subprocess.run(["e2fsck", "-p", str(self._image)], capture_output=True, check=False)
        if done.returncode > 1:  # e2fsck(8): 1 is "errors were corrected"
            raise OSError(f"e2fsck found damage: {done.stdout!r}")
        options = "loop,errors=remount-ro,noatime" + (",ro" if read_only else "")
        _run("mount", "-o", options, str(self._image), str(self.path))

    def cut_power(self) -> None:
        """Lose everything that was not synced. No process may use the disk; it is not mounted afterwards."""
        following = self._images / f"{self._number + 1}.img"
        # The copy is made before the file system is unmounted, which would write everything.
        shutil.copyfile(self._image, following)
        self.unmount()
        self._image.unlink()
        self._number += 1

    def unmount(self) -> None:
        """Unmount it, even if a process that is being killed still uses it."""
        subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True, check=False)

    def fail(self) -> None:
        """Make the file system read-only, as the kernel does after an error of the card."""
        device = subprocess.run(
            ["findmnt", "-n", "-o", "SOURCE", str(self.path)], capture_output=True, text=True, check=True
        ).stdout.strip()
        (_EXT4 / Path(device).name / "trigger_fs_error").write_text("a fault of the card")

    def fill(self) -> None:
        """Leave no free space."""
        with contextlib.suppress(OSError), (self.path / _BALLAST).open("ab") as file:
            for size in (1 << 20, 1 << 12):  # down to the blocks of the file system
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
                        file.flush()
                        os.fsync(file.fileno())

    def empty(self) -> None:
        """Give the space back, durably: a power cut must not bring the file back."""
        with contextlib.suppress(OSError):
            (self.path / _BALLAST).unlink(missing_ok=True)
            sync_folder(self.path)


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Disk | None]:
    """Make a disk for the block; None if this machine or this user cannot."""
    try:
        made = Disk(folder) if os.geteuid() == 0 else None
    except (OSError, subprocess.CalledProcessError):
        made = None
    try:
        yield made
    finally:
        if made is not None:
            made.unmount()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
