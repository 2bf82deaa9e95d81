"""Build the client for other computers: a wheel for Python, and a package for npm.

    python packaging/build_client.py [-o dist]

Promises the same bytes for the same commit, and an SBOM in CycloneDX's format beside each. The wheel has the
whole project; without an extra, pip installs only what the client needs (docs/decisions/0033).
"""

from __future__ import annotations

import argparse
import gzip
import json
import tarfile
import tempfile
from pathlib import Path

from build_deb import source_date_epoch
from deb import sbom, wheels

PROJECT = Path(__file__).resolve().parent.parent


def build_npm(folder: Path, into: Path, epoch: int) -> Path:
    """Pack the client for JavaScript, as `npm pack` does.

    npm only links a folder that it installs, and node then looks for mqtt beside the folder.
    """
    package = json.loads((folder / "package.json").read_text("utf-8"))
    path = into / f"{package['name']}-{package['version']}.tgz"
    with (
        path.open("wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", mtime=epoch, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name in ("package.json", *package["files"]):
            member = tarfile.TarInfo(f"package/{name}")
            member.mtime, member.mode = epoch, 0o644
            member.size = (folder / name).stat().st_size
            with (folder / name).open("rb") as content:
                archive.addfile(member, content)
    return path


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Build the client for other computers.")
    parser.add_argument("-o", "--output", type=Path, default=PROJECT / "dist", help="folder for the packages")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    epoch = source_date_epoch()
    with tempfile.TemporaryDirectory(dir=output, prefix=".client-") as scratch:
        built = wheels.build_wheel(PROJECT, Path(scratch), epoch)
        wheel = built.replace(output / built.name)
    npm = build_npm(PROJECT / "javascript", output, epoch)
    sbom.write(wheel, sbom.of_archive(wheel), sbom.required_by_wheel(wheel), epoch)
    sbom.write(npm, sbom.npm(PROJECT / "javascript"), sbom.required_by_npm(PROJECT / "javascript"), epoch)
    for path in (wheel, npm):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
