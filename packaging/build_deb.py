"""Build the agent's Debian packages for all releases, on any Linux workstation.

    python packaging/build_deb.py [--suite bookworm] [--arch arm64] [-o dist]
    python packaging/build_deb.py --lock      after changing the agent's dependencies

Promises the same bytes for the same commit, and writes a list of its contents (an SBOM in CycloneDX's format)
beside each package. It runs no program of the target's architecture and needs no
root. The exception is `--arch armhf`, whose tvm-ffi has to be compiled: on a Debian machine, with Debian's
cross compiler, as root.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from deb import package, sbom, wheels
from deb.release import Release, select

PROJECT = Path(__file__).resolve().parent.parent
LOCKS = PROJECT / "packaging/locks"


def source_date_epoch() -> int:
    """Return SOURCE_DATE_EPOCH, or the time of the last commit."""
    stated = os.environ.get("SOURCE_DATE_EPOCH")
    if stated is None:
        command = ["git", "-C", str(PROJECT), "log", "-1", "--format=%ct"]
        stated = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(stated)


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Build the agent's Debian packages.")
    parser.add_argument("--suite", action="append", default=[], help="bookworm or trixie; default: both")
    parser.add_argument(
        "--arch", action="append", default=[], help="arm64, amd64 or armhf; default: the first two"
    )
    parser.add_argument(
        "--build", type=int, default=0, metavar="N", help="build number, for upgrades of one version"
    )
    parser.add_argument(
        "--compression", choices=("xz", "gzip"), default="xz", help="gzip: larger, but takes only a second"
    )
    parser.add_argument("-o", "--output", type=Path, default=PROJECT / "dist", help="folder for the packages")
    parser.add_argument(
        "--lock", action="store_true", help="resolve the dependencies and write the lock files, build nothing"
    )
    arguments = parser.parse_args()
    releases = select(arguments.suite, arguments.arch)
    if not releases:
        parser.error(f"no such release: suite {arguments.suite}, architecture {arguments.arch}")
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.lock:
            for release in releases:
                wheels.write_lock(release, PROJECT, LOCKS / f"{release.name}.txt", Path(scratch))
        else:
            build_all(releases, Path(scratch), arguments.output, arguments.build, arguments.compression)
    return 0


def build_all(
    releases: tuple[Release, ...], scratch: Path, output: Path, build: int, compression: str
) -> None:
    """Build the packages of `releases` into the folder `output`."""
    epoch = source_date_epoch()
    sources = package.Sources(PROJECT, wheels.build_wheel(PROJECT, scratch, epoch), epoch, build)
    for release in releases:
        root = scratch / release.name
        root.mkdir()
        contents = package.stage(root, release, sources)
        built = package.build(root, release, sources, output, compression)
        about = sbom.deb(sources.version(release), release.arch, release.number)
        sbom.write(built, about, contents, epoch)
        megabytes = (
            f"{built.stat().st_size / 1e6:.1f} MB, {package.installed_bytes(root) / 1e6:.1f} MB unpacked"
        )
        print(f"{built}  {megabytes}")


if __name__ == "__main__":
    sys.exit(main())
