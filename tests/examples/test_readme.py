"""The commands, code, links and tables in the README work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from builder import cli
from builder.target.presets import PRESETS
from tests.patience import PROGRAM_PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    """Return the first block; `tests/clients` has the client's."""
    return str(re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the parts of a clone that the commands use."""
    path = tmp_path_factory.mktemp("readme")
    (path / "examples").symlink_to(ROOT / "examples")
    return path


# The security counter is the time of the build: with this one, equal sources give equal bundles.
EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}


@pytest.fixture(scope="module")
def quick_start(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | EPOCH | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["sh", "-eu", "-c", block("sh")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
def test_first_screen_answers_as_it_shows(tmp_path: Path) -> None:
    lines = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[0].splitlines()
    installing, *commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert installing.endswith("&& cd examples/digits")
    project = shutil.copytree(
        ROOT / "examples/digits", tmp_path / "digits", ignore=shutil.ignore_patterns("*.bundle")
    )
    done = subprocess.run(
        ["sh", "-eu", "-c", "\n".join(commands)],
        cwd=project,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = [line for line in lines if not line.startswith("$ ")]
    assert done.stdout.splitlines()[-len(answer) :] == answer


@pytest.mark.slow
def test_quick_start_does_what_it_says(quick_start: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert quick_start.returncode == 0, quick_start.stderr
    assert "verified digits 1.0.0" in quick_start.stdout
    assert "signature   verified, by key" in quick_start.stdout
    assert re.search(r"0\.\d+ +seven", quick_start.stdout)
    assert "Execution time summary:" in quick_start.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["digits.bundle", "examples", "keys"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_python_example_writes_the_same_bundle(folder: Path) -> None:
    before = (folder / "digits.bundle").read_bytes()
    # In a process of its own, as the commands are: these tests may pretend to run on another processor.
    done = subprocess.run(
        [sys.executable, "-c", block("python")],
        cwd=folder,
        env=os.environ | EPOCH,
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "seven" in done.stdout.splitlines()[0]
    assert "mean (ms)" in done.stdout
    assert (folder / "digits.bundle").read_bytes() == before  # compiled again from Python: the same bytes


def test_the_device_gets_the_bundle_that_was_compiled_over_the_broker_that_it_uses() -> None:
    walk = README.partition("\n## From model to answer\n")[2].partition("\n## ")[0]
    compiled, verified = (re.findall(pattern, walk) for pattern in (r" -o (\S+)", r"verify (\S+)"))
    deployed = re.findall(r"deploy (\S+)", walk)
    assert deployed == [*compiled, "older.bundle"]
    assert verified == compiled
    assert len(set(re.findall(r"mqtts?://[a-z.]+", walk))) == 1
    assert len(set(re.findall(r"--agent ([a-z]+)", walk))) == 1


def test_table_of_targets_has_all_presets() -> None:
    rows = re.findall(r"^\| `([a-z][a-z0-9-]*)` \| (.*) \|$", README, re.MULTILINE)
    assert {name for name, _ in rows} == set(PRESETS)


@pytest.mark.parametrize(
    "page",
    [
        str(page.relative_to(ROOT))
        for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
        for page in sorted(ROOT.glob(pattern))
    ],
)
def test_every_relative_link_has_a_target(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"`[^`\n]*`", "", path.read_text())  # code may look like a link
    for link in re.findall(r"\]\(([^)#]+)", text):
        if not link.startswith("https://"):
            assert (path.parent / link).exists(), link


def test_every_verb_in_the_readme_exists() -> None:
    parser = cli._parser()
    for verb in set(re.findall(r"^\$? ?edgebundle ([a-z]+)", README, re.MULTILINE)):
        with pytest.raises(SystemExit) as left:
            parser.parse_args([verb, "--help"])
        assert left.value.code == 0


def test_every_make_target_in_the_documentation_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = README + (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", pages, re.MULTILINE)) <= targets
