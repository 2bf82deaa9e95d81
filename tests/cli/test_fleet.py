"""`edgebundle agents`, `deploy`, `infer` and `metrics` with a real broker and agent."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.bundle.manifest import Target
from builder import cli
from builder.bundles import key_files
from builder.bundles.package import Package, digests
from edgebundle import Broker, Client, InputError, Request
from tests.cli.terminal import Edgebundle
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S
from tests.ports import free_port

pytestmark = pytest.mark.slow

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


@dataclass(frozen=True, slots=True)
class Site:
    """A broker, an agent `kitchen` that trusts `pair`, and `digits` deployed on it with counter 5."""

    broker: str
    pair: key_files.KeyPair
    folder: Path

    @property
    def first(self) -> Path:
        return self.folder / "first.bundle"

    def variant(self, name: str, *, key: Path | None = None, **changes: Any) -> Path:
        """Return the first bundle with other fields of the manifest, signed again; nothing is compiled."""
        return signed(self.first, self.folder / f"{name}.bundle", key or self.pair.private, **changes)


def signed(source: Path, path: Path, key: Path, **changes: Any) -> Path:
    package = Package.load(source)
    unsigned = Package(replace(package.manifest, **changes), package.members)
    unsigned.sign(key_files.read_private(key)).save(path)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, digits_bundle: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    pair = key_files.generate(folder / "keys")
    (folder / "keyring").mkdir()
    shutil.copy(pair.public, folder / "keyring" / "test.pub")
    broker = BrokerProcess("mosquitto", folder)
    broker.start()
    (folder / "agent.toml").write_text(
        f'device = "kitchen"\nstate_dir = "state"\n[broker]\nurl = "{broker.url}"\n'
        '[trust]\ndir = "keyring"\n[metrics]\ninterval_s = 1\n'
    )
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            [str(Path(sys.executable).parent / "edge-agent"), "run", "--config", str(folder / "agent.toml")],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    site = Site(broker.url, pair, folder)
    try:
        signed(digits_bundle, site.first, pair.private, security_counter=5)
        give_up = time.monotonic() + PROGRAM_PATIENCE_S
        while cli.main(["deploy", str(site.first), "--agent", "kitchen", "--broker", broker.url]):
            assert time.monotonic() < give_up, (folder / "agent.log").read_text()
        yield site
    finally:
        agent.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(PATIENCE_S)
        agent.kill()
        broker.stop()


def fails(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 4, done
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("edgebundle: error: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in errors[0], errors[0]


# Success


def test_agents_lists_the_agent_its_machine_and_its_models(edgebundle: Edgebundle, site: Site) -> None:
    done = edgebundle("agents", "--broker", site.broker)
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert first.startswith("kitchen  online  edge-agent ")
    assert second.split()[:3] == ["digits", "1.0.0", "ready"]
    [agent] = json.loads(edgebundle("agents", "--broker", site.broker, "--json").stdout)
    assert (agent["name"], agent["models"][0]["name"]) == ("kitchen", "digits")
    assert agent["sandbox"] == {"complete": True, "missing": []}


def test_infer_prints_labels_and_the_latency(edgebundle: Edgebundle, site: Site) -> None:
    done = edgebundle(
        *("infer", "--agent", "kitchen", "--model", "digits", "--broker", site.broker),
        *("--input", DIGITS / "four.png"),
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0][1] == "four"
    assert len(rows) == 3
    parts = r"network ([0-9.]+), queue .*, decode .*, compute .*, encode .*"
    found = re.fullmatch(rf"digits 1\.0\.0, ([0-9.]+) ms \({parts}\)\n", done.stderr)
    assert found is not None, done.stderr
    assert 0 < float(found[2]) <= float(found[1])


def test_infer_repeats_over_one_connection_and_prints_the_latencies(
    edgebundle: Edgebundle, site: Site
) -> None:
    where = ("--agent", "kitchen", "--model", "digits", "--broker", site.broker)
    done = edgebundle("infer", *where, "--input", DIGITS / "four.png", "--repeat", "5", "--json")
    result = json.loads(done.stdout)
    assert (len(result["latencies_s"]), result["top"][0]["label"]) == (5, "four")
    assert result["network_s"] + result["compute_s"] < result["latency_s"]
    done = edgebundle("infer", *where, "--input", DIGITS / "four.png", "--repeat", "5")
    assert re.fullmatch(r"digits 1\.0\.0, 5 answers: .* ms at least, .* ms p50, .* ms p99\n", done.stderr)
    assert edgebundle("infer", *where, "--input", DIGITS / "four.png", "--repeat", "0").returncode == 2


def test_infer_json_has_the_status_and_the_labels(edgebundle: Edgebundle, site: Site) -> None:
    done = edgebundle(
        *("infer", "--agent", "kitchen", "--model", "digits", "--broker", site.broker, "--json"),
        *("--input", DIGITS / "zero.png"),
    )
    result = json.loads(done.stdout)
    assert result["status"] == 200
    assert result["top"][0]["label"] == "zero"


def test_infer_with_arrays_gives_the_same_labels_as_run(
    edgebundle: Edgebundle, site: Site, tmp_path: Path
) -> None:
    np.savez(tmp_path / "in.npz", image=np.full((1, 1, 8, 8), 0.5, np.float32))
    np.savez(tmp_path / "wide.npz", image=np.full((8, 8), 0.5))  # converted: float64, and without ones
    done = edgebundle(
        *("infer", "--agent", "kitchen", "--model", "digits", "--broker", site.broker, "--json"),
        *("--input", tmp_path / "wide.npz"),
    )
    assert done.returncode == 0, done.stderr
    here = json.loads(edgebundle("run", site.first, "--inputs", tmp_path / "in.npz", "--json").stdout)
    assert [row["label"] for row in json.loads(done.stdout)["top"]] == here["answers"]["labels"]


def test_rows_are_asked_by_the_names_of_their_columns(
    edgebundle: Edgebundle, site: Site, tmp_path: Path
) -> None:
    """The digits' bundle with columns instead of a picture, asked by us and by any client."""
    names = tuple(f"p{place}" for place in range(64))
    path, where = tmp_path / "rows.bundle", ("--agent", "kitchen", "--broker", site.broker)
    declared = ("--preprocess", "none", "--columns", ",".join(names), "--name", "rows")
    key = ("--sign-key", site.pair.private)
    assert edgebundle("repack", site.first, *declared, *key, "-o", path).returncode == 0
    done = edgebundle("deploy", path, *where)
    assert done.returncode == 0, done.stderr
    table, answers = tmp_path / "t.csv", tmp_path / "answers.csv"
    rows = np.random.default_rng(0).random((20, 64)).astype(np.float32)
    lines = [",".join(reversed(names)) + ",label", *(",".join([*map(str, row[::-1]), "x"]) for row in rows)]
    table.write_text("\n".join([*lines, lines[1].replace(lines[1].split(",")[0], "warm")]) + "\n")
    done = edgebundle("infer", "--model", "rows", *where, "--inputs", table, "-o", answers)
    assert done.returncode == 4
    assert done.stderr.splitlines()[:2] == [
        "columns that the model does not take: label",
        f"edgebundle: error: {table}:22: column 'p63': expected a number, got 'warm'",
    ]
    local = tmp_path / "local.csv"
    assert edgebundle("run", path, "--inputs", table, "-o", local).returncode == 4
    assert answers.read_text() == local.read_text()
    assert len(answers.read_text().splitlines()) == 21

    with Client(site.broker) as client:
        model = client.model("kitchen", "rows")
        row = {name: float(value) for name, value in zip(names, rows[0], strict=True)}
        label = local.read_text().splitlines()[1].split(",")[1]
        assert model(row=row).labels[0].label == label
        assert model(row=rows[0]).labels[0].label == label
        assert [column.name for column in model.info().columns] == list(names)
        plain = Request("application/json", json.dumps({**row, "linkquality": 120}).encode())
        assert model(plain).labels[0].label == label
        with pytest.raises(InputError, match="expected 64 columns, missing 'p1'"):
            model(row={"p0": 1})
    with Client(Broker(site.broker, protocol="3.1.1")) as client:
        assert client.model("kitchen", "rows")(row={**row, "id": "x"}).labels[0].label == label


def test_metrics_are_prometheus_text(edgebundle: Edgebundle, site: Site) -> None:
    done = edgebundle("metrics", "--agent", "kitchen", "--broker", site.broker, "--match", "resident|ready")
    assert done.returncode == 0, done.stderr
    samples = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert samples['edge_model_ready{model="digits"}'] == "1"
    assert float(samples["edge_agent_resident_memory_bytes"]) > 1e6
    assert all("resident" in name or "ready" in name for name in samples)


def test_metrics_json(edgebundle: Edgebundle, site: Site) -> None:
    result = json.loads(edgebundle("metrics", "--agent", "kitchen", "--broker", site.broker, "--json").stdout)
    assert result["edge_agent_uptime_seconds"] > 0


def test_newer_version_is_deployed_and_reported(edgebundle: Edgebundle, site: Site) -> None:
    path = site.variant("newer", version="1.1.0")
    done = edgebundle("deploy", path, "--agent", "kitchen", "--broker", site.broker)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("digits 1.1.0 is in service on kitchen (")
    assert "verifying" in done.stderr.splitlines()
    again = edgebundle("deploy", site.first, "--agent", "kitchen", "--broker", site.broker)
    assert again.returncode == 0, again.stderr  # an equal counter allows the older version


def test_labels_of_a_device_cannot_control_the_terminal(edgebundle: Edgebundle, site: Site) -> None:
    escapes = "\x1b]0;owned\x07\x1b[2J\x1b[1Gedgebundle: error: forged"
    package = Package.load(site.first)
    members = {**package.members, "labels.txt": "".join(f"{escapes} {n}\n" for n in range(10)).encode()}
    manifest = replace(package.manifest, name="hostile", files=digests(members))
    path = site.folder / "hostile.bundle"
    Package(manifest, members).sign(key_files.read_private(site.pair.private)).save(path)
    where = ("--agent", "kitchen", "--broker", site.broker)
    done = [edgebundle("deploy", path, *where)]
    pictures = [("--input", DIGITS / name) for name in ("four.png", "zero.png")]
    for given in (pictures[0], (*pictures[0], *pictures[1])):
        done.append(edgebundle("infer", *where, "--model", "hostile", *given))
        assert "]0;owned" in done[-1].stdout
    for each in done:
        assert each.returncode == 0, each.stderr
        assert all(line.isprintable() for line in (each.stdout + each.stderr).split("\n"))


def test_rollback_returns_to_the_version_before_after_a_confirmation(
    edgebundle: Edgebundle, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--agent", "kitchen", "--broker", site.broker)
    assert edgebundle("deploy", site.variant("next", version="1.2.0"), *where).returncode == 0
    verb = ("rollback", *where, "--model", "digits")
    fails(edgebundle(*verb), "expected a confirmation, got none")
    monkeypatch.setattr("sys.stdin", Answers("\n", "yes\n"))
    done = edgebundle(*verb)
    assert (done.returncode, done.stdout) == (4, "")
    assert "? [y/N] edgebundle: error: nothing was changed" in done.stderr
    done = edgebundle(*verb)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("digits 1.0.0 is in service on kitchen (")
    assert done.stderr.startswith("return digits on kitchen to the version that ran before? [y/N] ")
    again = edgebundle(*verb, "--yes", "--json")
    assert again.returncode == 0
    document = json.loads(again.stdout)
    assert (document["version"], document["status"], document["sent_bytes"]) == ("1.2.0", "SUCCEEDED", 0)
    assert edgebundle(*verb, "-y").returncode == 0
    fails(edgebundle("rollback", *where, "--model", "faces", "-y"), "kitchen reports no model faces")
    fails(edgebundle("rollback", *where, "--model", "../x", "-y"), "expected the names")
    missing = ("--agent", "attic", "--broker", site.broker)
    fails(edgebundle("rollback", *missing, "--model", "digits", "-y"), "no agent called attic is known")


class Answers(io.StringIO):
    """A terminal on which somebody types these lines."""

    def __init__(self, *lines: str) -> None:
        super().__init__("".join(lines))

    def isatty(self) -> bool:
        return True


# Refused by the agent: the code is reported, and the old version stays in service


def refused(edgebundle: Edgebundle, site: Site, path: Path, code: str) -> None:
    done = edgebundle("deploy", path, "--agent", "kitchen", "--broker", site.broker, "--wait", "30")
    fails(done, f"({code})")
    picture = ("--input", DIGITS / "seven.png")
    after = edgebundle("infer", "--agent", "kitchen", "--model", "digits", "--broker", site.broker, *picture)
    assert (after.returncode, after.stdout.split()[1]) == (0, "seven")


def test_older_counter_is_a_rollback(edgebundle: Edgebundle, site: Site) -> None:
    refused(edgebundle, site, site.variant("older", security_counter=4), "ERR_ROLLBACK")


def test_bundle_signed_with_an_unknown_key(edgebundle: Edgebundle, site: Site, tmp_path: Path) -> None:
    other = key_files.generate(tmp_path / "other")
    path = site.variant("stranger", security_counter=6, key=other.private)
    refused(edgebundle, site, path, "ERR_ARBITRARY_SOFTWARE")


def test_bundle_for_another_machine(edgebundle: Edgebundle, site: Site) -> None:
    target = Target("aarch64-linux-gnu", "cortex-a72", ("asimd",))
    path = site.variant("pi", security_counter=6, target=target, compatible=("linux-aarch64",))
    refused(edgebundle, site, path, "ERR_INCOMPATIBLE")


def test_bundle_for_another_device_type(edgebundle: Edgebundle, site: Site) -> None:
    path = site.variant("robot", security_counter=6, compatible=("acme,robot",))
    refused(edgebundle, site, path, "ERR_INCOMPATIBLE")


def test_changed_byte_is_refused(edgebundle: Edgebundle, site: Site, tmp_path: Path) -> None:
    data = bytearray((site.first).read_bytes())
    data[data.index(b"\x7fELF") + 4000] ^= 1
    (tmp_path / "changed.bundle").write_bytes(data)
    refused(edgebundle, site, tmp_path / "changed.bundle", "ERR_MIX_AND_MATCH")


# Refused before anything is sent, or wrong requests


def test_missing_broker_is_one_error_line(edgebundle: Edgebundle, site: Site) -> None:
    broker = ("--broker", f"mqtt://127.0.0.1:{free_port()}")
    fails(edgebundle("agents", *broker), "127.0.0.1")
    fails(edgebundle("metrics", "--agent", "kitchen", *broker), "127.0.0.1")
    fails(edgebundle("deploy", site.first, "--agent", "kitchen", *broker), "127.0.0.1")
    picture = ("--input", DIGITS / "seven.png", "--deadline", "3")
    fails(edgebundle("infer", "--agent", "kitchen", "--model", "digits", *picture, *broker), "127.0.0.1")


@pytest.mark.parametrize(
    "url", ["localhost", "http://localhost", "mqtt://", "mqtt://localhost:port", "mqtt://h:99999"]
)
def test_invalid_broker_url(edgebundle: Edgebundle, url: str) -> None:
    done = edgebundle("agents", "--broker", url)
    assert done.returncode in {2, 4}
    assert done.stderr.startswith("edgebundle: error: ")
    assert "internal error" not in done.stderr


def test_a_broker_without_agents_is_told_with_a_hint(
    edgebundle: Edgebundle, mosquitto: BrokerProcess
) -> None:
    done = edgebundle("agents", "--broker", mosquitto.url, "--wait", "0.3")
    assert (done.returncode, done.stdout) == (0, "")
    message, hint = done.stderr.splitlines()
    assert message == "no agents at this broker"
    assert hint.startswith("hint: check that edge-agent runs with this broker")


def test_absent_agent(edgebundle: Edgebundle, site: Site) -> None:
    where = ("--agent", "cellar", "--broker", site.broker)
    fails(edgebundle("deploy", site.first, *where, "--wait", "2"), "cellar")
    done = edgebundle("infer", "--model", "digits", "--input", DIGITS / "seven.png", *where)
    fails(done, "no agent called cellar is known")
    assert "hint: use one of the agents at this broker: kitchen" in done.stderr


@pytest.mark.parametrize("name", ["a/b", "#", "", "groups", "x" * 65])
def test_name_that_no_agent_can_have(edgebundle: Edgebundle, site: Site, name: str) -> None:
    where = (f"--agent={name}", "--broker", site.broker)
    fails(edgebundle("deploy", site.first, *where))
    fails(edgebundle("metrics", *where))
    fails(edgebundle("infer", "--model", "digits", "--input", DIGITS / "seven.png", *where))


def test_unknown_model(edgebundle: Edgebundle, site: Site) -> None:
    done = edgebundle(
        *("infer", "--agent", "kitchen", "--model", "faces", "--broker", site.broker),
        *("--input", DIGITS / "seven.png"),
    )
    fails(done, "404")
    assert "hint: use one of the models of kitchen: digits" in done.stderr


@pytest.mark.parametrize(
    ("arrays", "status"),
    [
        ({"picture": np.zeros((1, 1, 8, 8), np.float32)}, "does not have an input 'picture'"),
        ({"image": np.zeros((1, 1, 9, 9), np.float32)}, "400"),
        ({"image": np.zeros((1, 1, 8, 8), np.complex128)}, "expected float32, got complex128"),
    ],
    ids=["name", "shape", "dtype"],
)
def test_arrays_that_do_not_fit(
    edgebundle: Edgebundle, site: Site, tmp_path: Path, arrays: dict[str, object], status: str
) -> None:
    np.savez(tmp_path / "in.npz", **arrays)  # type: ignore[arg-type]
    done = edgebundle(
        *("infer", "--agent", "kitchen", "--model", "digits", "--broker", site.broker),
        *("--input", tmp_path / "in.npz"),
    )
    fails(done, status)


@pytest.mark.parametrize("name", ["in.png", "in.npz", "in.json", "in.txt"])
def test_unreadable_input(edgebundle: Edgebundle, site: Site, tmp_path: Path, name: str) -> None:
    where = ("--agent", "kitchen", "--model", "digits", "--broker", site.broker, "--deadline", "10")
    (tmp_path / name).write_bytes(b"what is this?")
    fails(edgebundle("infer", *where, "--input", tmp_path / name))
    fails(edgebundle("infer", *where, "--input", tmp_path / "absent" / name), name)


def test_file_that_is_not_a_bundle_is_not_sent(edgebundle: Edgebundle, site: Site, tmp_path: Path) -> None:
    (tmp_path / "no.bundle").write_bytes(b"hello")
    where = ("--agent", "kitchen", "--broker", site.broker)
    fails(edgebundle("deploy", tmp_path / "no.bundle", *where), "bundle")
    fails(edgebundle("deploy", tmp_path / "absent.bundle", *where), "absent.bundle")


@pytest.mark.parametrize("text", ["(", "*"])
def test_invalid_pattern_is_a_usage_error(edgebundle: Edgebundle, text: str) -> None:
    done = edgebundle("metrics", "--agent", "a", "--broker", "mqtt://localhost", "--match", text)
    assert done.returncode == 2
    assert "regular expression" in done.stderr
