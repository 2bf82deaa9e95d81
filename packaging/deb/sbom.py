"""What is in a package, as a file beside it: an SBOM in CycloneDX's JSON.

It names the locked archives that a package was filled with, by the digests that the lock requires, and below
each one the native libraries that its own project says it contains. What a package only requires is named
without a version. The same package and time give the same bytes.
"""

from __future__ import annotations

import datetime
import email.parser
import hashlib
import json
import re
import uuid
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

Component = dict[str, Any]

_SPECIFICATION: Final = "1.6"
_WHEELS_OWN: Final = re.compile(r"[^/]+\.dist-info/sboms/[^/]+\.json")


def write(package: Path, about: Component, contents: Iterable[Component], epoch: int) -> Path:
    """Write the SBOM of a package beside it, and return its path.

    Parameters
    ----------
    package
        The file that is delivered; its digest is stated.
    about
        What it is.
    contents
        What is in it, or what it requires.
    epoch
        Time of the statement, in seconds since 1970.
    """
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    main = {**about, "type": "application", "hashes": [{"alg": "SHA-256", "content": digest}]}
    components = list(contents)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": _SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": main,
        },
        "components": components,
        "dependencies": [{"ref": main["bom-ref"], "dependsOn": [each["bom-ref"] for each in components]}],
    }
    path = package.with_name(f"{package.name}.cdx.json")
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", "utf-8")
    return path


def deb(version: str, arch: str, debian: int) -> Component:
    """Return the agent's Debian package."""
    return _component("deb/edgebundle", "edge-agent", version, f"?arch={arch}&distro=debian-{debian}")


def npm(folder: Path) -> Component:
    """Return the package whose package.json is in `folder`."""
    package = json.loads((folder / "package.json").read_text("utf-8"))
    return _component("npm", package["name"], package["version"])


def of_archive(archive: Path) -> Component:
    """Return a wheel or a source distribution, with its digest and what it says is in it."""
    name, version = archive.name.removesuffix(".tar.gz").split("-")[:2]
    found = _component("pypi", re.sub(r"[-_.]+", "-", name).lower(), version)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    found["hashes"] = [{"alg": "SHA-256", "content": digest}]
    inside = _stated_inside(archive) if archive.suffix == ".whl" else []
    return {**found, "components": inside} if inside else found


def required_by_wheel(wheel: Path) -> list[Component]:
    """Return what pip installs with a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        (path,) = (name for name in opened.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        headers = email.parser.BytesHeaderParser().parsebytes(opened.read(path))
    requirements = [text for text in headers.get_all("Requires-Dist", []) if ";" not in text]
    return [_required("pypi", *re.split(r"(?=[<>=~!])", text, maxsplit=1)) for text in requirements]


def required_by_npm(folder: Path) -> list[Component]:
    """Return what the package whose package.json is in `folder` expects beside it."""
    package = json.loads((folder / "package.json").read_text("utf-8"))
    return [_required("npm", name, text) for name, text in package["peerDependencies"].items()]


def _stated_inside(wheel: Path) -> list[Component]:
    """Return what the SBOMs in a wheel list, each library once."""
    own = "pkg:pypi/" + wheel.name.partition("-")[0]
    found: dict[str, Component] = {}
    with zipfile.ZipFile(wheel) as opened:
        for name in sorted(filter(_WHEELS_OWN.fullmatch, opened.namelist())):
            for each in json.loads(opened.read(name)).get("components", ()):
                purl = each.get("purl", "")
                # Its own parts and paths of the machine that built it say nothing.
                if not purl.startswith(own):
                    part = {key: each[key] for key in ("name", "version", "purl") if key in each}
                    key = f"{part['name']} {part.get('version', '')}"
                    found[key] = {"type": "library", "bom-ref": f"{wheel.name}#{key}", **part}
    return list(found.values())


def _component(kind: str, name: str, version: str, qualifiers: str = "") -> Component:
    purl = f"pkg:{kind}/{name}@{quote(version)}{qualifiers}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _required(kind: str, name: str, versions: str = "") -> Component:
    purl = f"pkg:{kind}/{name.strip()}"
    stated = [{"name": "edgebundle:requires", "value": versions}]
    return {"type": "library", "bom-ref": purl, "name": name.strip(), "purl": purl, "properties": stated}
