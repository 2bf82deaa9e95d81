from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.bundle import archive
from tests.agent.bundle.flip_bits import BASE64_END
from tests.bundles import public_pem, signed_members
from tests.patience import PROGRAM_PATIENCE_S


@pytest.mark.slow
def test_every_flipped_bit_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    bundle, key = tmp_path / "echo.bundle", tmp_path / "signing.pub"
    members = signed_members()
    bundle.write_bytes(archive.pack(members))
    key.write_bytes(public_pem())
    script = Path(__file__).with_name("flip_bits.py")
    run = subprocess.run(
        [sys.executable, script, bundle, key],
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["accepted"] == []
    assert report["loaded"] == []
    assert report["leaked"] == 0
    results = report["results"]
    flips = {region: sum(counts.values()) for region, counts in results.items()}
    payload = len(json.loads(members["model.sig"])["dsseEnvelope"]["payload"]) - BASE64_END
    every_bit = 2 * 512 + len(members["model.sig"]) - payload
    assert sum(flips.values()) == len(archive.pack(members)) + 7 * every_bit
    assert flips["header"] == 512 * (len(members) + 7 * 2)
    assert flips["payload"] == payload
    assert flips["signature"] == 8 * (len(members["model.sig"]) - payload)
    assert set(results["padding"]) == {"FormatError"}
    assert set(results["end"]) == {"FormatError"}
    assert set(results["manifest"]) == {"MixAndMatchError"}
    assert set(results["data"]) == {"MixAndMatchError"}
    assert set(results["payload"]) == {"FormatError", "SignatureError"}
    assert set(results["signature"]) == {"FormatError", "SignatureError"}
    # A flip can turn a name or a size into another valid one; the data is then wrong, or too large.
    assert set(results["header"]) <= {"FormatError", "EndlessDataError", "MixAndMatchError"}
