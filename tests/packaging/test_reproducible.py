"""Two builds in two environments have the same bytes: `make client`, and a .deb with hardly any contents.

`test_deb.py` builds a whole .deb twice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from deb import package, wheels
from deb.release import RELEASES, Release

from tests.packaging.conftest import EPOCH, PROJECT, foreign_environment
from tests.packaging.test_client import build

pytestmark = pytest.mark.slow


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_client_built_by_another_user_in_another_folder_has_the_same_bytes(
    shared_file: Callable[[str, Callable[[Path], None]], Path], tmp_path: Path
) -> None:
    here = contents(shared_file("client", build))
    clone, environment = foreign_environment(tmp_path)
    # Whatever setuptools this user has: it is not the one that builds.
    (tmp_path / "own").mkdir()
    (tmp_path / "own/setuptools.py").write_text("raise SystemExit('not the locked setuptools')")
    environment |= {"SOURCE_DATE_EPOCH": "1750000000", "PYTHONPATH": str(tmp_path / "own")}
    subprocess.run(
        [sys.executable, clone / "packaging/build_client.py", "-o", tmp_path / "dist"],
        check=True,
        env=environment,
        umask=0o077,
    )
    there = contents(tmp_path / "dist")
    assert sorted(here) == sorted(there)
    assert [name for name in here if here[name] != there[name]] == []
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert {info.external_attr >> 16 & 0o777 for info in zipfile.ZipFile(wheel).infolist()} <= {0o644, 0o664}


@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]], ids=lambda release: release.name)
def test_deb_built_with_another_umask_has_the_same_bytes_and_can_be_read_by_the_service(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "edgebundle-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("agent/__init__.py", "")

    def unpack(release: Release, archives: list[Path], into: Path) -> None:
        for each in archives:
            zipfile.ZipFile(each).extractall(into)

    monkeypatch.setattr(wheels, "download_locked", lambda *_: None)
    monkeypatch.setattr(wheels, "unpack", unpack)
    sources = package.Sources(PROJECT, wheel, EPOCH)
    built = []
    before = os.umask(0o022)
    try:
        for umask in (0o022, 0o077):
            os.umask(umask)
            root = tmp_path / f"root-{umask:o}"
            root.mkdir()
            package.stage(root, release, sources)
            built.append(package.build(root, release, sources, tmp_path / f"dist-{umask:o}", "gzip"))
            paths = [path for path in root.rglob("*") if not path.is_symlink()]
            assert {path.stat().st_mode & 0o777 for path in paths} == {0o755, 0o644}
            shutil.rmtree(root)
    finally:
        os.umask(before)
    assert built[0].read_bytes() == built[1].read_bytes()
