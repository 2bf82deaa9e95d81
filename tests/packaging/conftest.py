"""Debian roots, the packages and bundles that run in them, and the running agent.

A root is made once and cached (packaging/debian-root.sh). Each test gets an overlay of it, so that it can
change anything without leaving a trace. This needs root privileges; `make test-arm` runs these tests in their
own mount namespace, so that no mount outlives them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S

PROJECT = Path(__file__).resolve().parents[2]
DIGITS = PROJECT / "examples/digits"
# Compressing a package takes half a minute on an idle core.
BUILD_LIMIT_S = 2 * PROGRAM_PATIENCE_S
EPOCH = 1_790_000_000
# The processors of a Raspberry Pi 4, and of a Raspberry Pi 2 for 32 bits.
CPUS = {"arm64": "cortex-a72", "armhf": "cortex-a7"}

sys.path.insert(0, str(PROJECT / "packaging"))

from deb import wheels  # noqa: E402 - importable since the line above
from deb.release import RELEASES  # noqa: E402

from builder.fleet.agents import agents  # noqa: E402
from edgebundle import Broker  # noqa: E402
from tests.conftest import BrokerProcess  # noqa: E402


class Root:
    """An overlay of a cached Debian root, with /proc and /dev, to run programs in."""

    def __init__(self, lower: Path, folder: Path) -> None:
        self.path = folder / "root"
        # The emulator's default processor is far slower, because it computes pointer authentication.
        self._cpu = f"QEMU_CPU={CPUS.get(lower.name.partition('-')[0], 'max')}"
        self._upper = folder / "upper"
        for part in (self.path, self._upper, folder / "work"):
            part.mkdir()
        options = f"lowerdir={lower},upperdir={self._upper},workdir={folder / 'work'}"
        _run(["mount", "-t", "overlay", "overlay", "-o", options, str(self.path)])
        _run(["mount", "-t", "proc", "proc", str(self.path / "proc")])
        _run(["mount", "--bind", "/dev", str(self.path / "dev")])

    def unmount_system(self) -> None:
        """Unmount /proc and /dev, for a container that mounts its own."""
        for part in ("proc", "dev"):
            if os.path.ismount(self.path / part):
                _run(["umount", "--lazy", str(self.path / part)])

    def close(self) -> None:
        self.unmount_system()
        _run(["umount", "--lazy", str(self.path)])
        shutil.rmtree(self.path.parent)

    def command(self, *words: str | Path, user: str | None = None) -> list[str]:
        chroot = ["chroot", *([f"--userspec={user}"] if user else []), str(self.path)]
        environment = ["-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", self._cpu]
        return [*chroot, "/usr/bin/env", *environment, *map(str, words)]

    def run(self, *words: str | Path, ok: bool = True, only_stdout: bool = False) -> str:
        """Run a program in the root and return its output; `ok=False` accepts any exit status."""
        done = subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=PROGRAM_PATIENCE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if ok and done.returncode:
            pytest.fail(f"{words} in the root gave {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout if only_stdout else done.stdout + done.stderr

    def files(self) -> dict[str, bytes | str]:
        """Return all files and links of the root, except those that a running system writes."""
        volatile = (
            "/var/log/",
            "/var/lib/apt/",
            "/var/lib/dpkg/",
            "/var/cache/",
            "/tmp/",
            "/proc/",
            "/dev/",
            "/run/",
        )
        found: dict[str, bytes | str] = {}
        for folder, folders, names in os.walk(self.path):
            if folder in (str(self.path / "proc"), str(self.path / "dev")):
                folders.clear()
                continue
            for name in names + [link for link in folders if (Path(folder) / link).is_symlink()]:
                path = Path(folder) / name
                inside = "/" + str(path.relative_to(self.path))
                if inside.startswith(volatile) or inside.endswith("-"):  # passwd- is a backup
                    continue
                if path.is_symlink():
                    found[inside] = str(path.readlink())
                elif path.is_file():
                    found[inside] = (
                        path.read_bytes() if inside.startswith("/etc/") else str(path.stat().st_size)
                    )
        return found


class RunningAgent:
    """`edge-agent run` in a root, and its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[RunningAgent]:
    """Run a program until the block ends, then send SIGTERM and check that it stops."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    agent = RunningAgent(process, log)
    try:
        yield agent
    except BaseException:
        print(agent.log[-6000:])
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            pytest.fail(f"the agent did not stop on SIGTERM:\n{agent.log[-4000:]}")


def wait_for(what: str, condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.2)


def wait_until_online(name: str, broker: Broker) -> None:
    """Wait until the broker knows an agent: it serves before its first connection, and may be emulated."""
    wait_for(
        f"{name} to be online",
        lambda: any((each.name, each.state) == (name, "online") for each in agents(broker)),
        PROGRAM_PATIENCE_S,
    )


def edgebundle(*words: str | Path, ok: bool = True) -> str:
    """Run `edgebundle` on this machine and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "builder", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if ok and done.returncode:
        pytest.fail(f"edgebundle {words} gave {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{command} gave {done.returncode}: {done.stderr}")
    return done.stdout


@pytest.fixture(scope="session")
def kept_root() -> Callable[[str, str], Path]:
    """Return the cached root of an architecture and a suite; it is made on the first call."""

    def find(arch: str, suite: str) -> Path:
        if os.geteuid():
            pytest.fail("these tests need root privileges: run them with `make test-arm`")
        return Path(_run([str(PROJECT / "packaging/debian-root.sh"), arch, suite]).split()[-1])

    return find


@pytest.fixture(scope="module")
def make_root(
    kept_root: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Root]]:
    """Make fresh overlays, which are removed at the end of the test file."""
    with contextlib.ExitStack() as stack:

        def make(arch: str, suite: str) -> Root:
            root = Root(kept_root(arch, suite), tmp_path_factory.mktemp(f"{arch}-{suite}"))
            stack.callback(root.close)
            return root

        yield make


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A mosquitto broker on this machine's loopback, for all tests of a file."""
    broker = BrokerProcess("mosquitto", tmp_path_factory.mktemp("broker"))
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own wheel."""
    return wheels.build_wheel(PROJECT, tmp_path_factory.mktemp("wheel"), EPOCH)


def foreign_environment(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return a copy of the sources as another user has them, and that user's variables, below a folder.

    Start programs there with the umask 0o077.
    """
    clone, home = folder / "Fremder Ordner é", folder / "home"
    listed = subprocess.run(
        ["git", "-C", PROJECT, "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if name.startswith(("tests/", "benchmarks/", "docs/")) or not (PROJECT / name).is_file():
            continue
        copy = clone / name
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(PROJECT / name, copy)
        executable = (PROJECT / name).stat().st_mode & 0o100
        copy.chmod(0o700 if executable else 0o600)
        os.utime(copy, (1_500_000_000, 1_500_000_000))
    home.mkdir()
    (home / ".pydistutils.cfg").write_text("[bdist_wheel]\nbuild_number=7\n")
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "XDG_"))
    }
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    foreign = {"HOME": str(home), "TZ": "Asia/Tokyo", "LC_ALL": "C", "LANG": "de_DE", "COLUMNS": "300"}
    return clone, {**kept, **foreign, "XDG_CACHE_HOME": cache, "USER": "somebody", "PYTHONHASHSEED": "7"}


@pytest.fixture(scope="session")
def build_deb(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a package for a release, once per build number; `again` builds it in another environment."""
    built: dict[tuple[str, str, int], Path] = {}

    def build(suite: str, arch: str, number: int = 0, *, again: bool = False) -> Path:
        key = (suite, arch, number)
        if key not in built or again:
            folder = tmp_path_factory.mktemp("deb")
            sources, variables = PROJECT, dict(os.environ)
            if again:
                sources, variables = foreign_environment(tmp_path_factory.mktemp("foreign"))
            command = [sys.executable, str(sources / "packaging/build_deb.py"), "-o", str(folder)]
            command += ["--suite", suite, "--arch", arch, "--build", str(number)]
            if number:  # used only for upgrades: need not be small
                command += ["--compression", "gzip"]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=BUILD_LIMIT_S,
                env=variables | {"SOURCE_DATE_EPOCH": str(EPOCH)},
                umask=0o077 if again else 0o022,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            print(done.stdout)
            (package,) = folder.glob("*.deb")
            built[key] = package
        return built[key]

    return build


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with signing.key and signing.pub."""
    folder = tmp_path_factory.mktemp("keys")
    edgebundle("keygen", folder / "keys")
    return folder / "keys"


@pytest.fixture(scope="session")
def digits_onnx() -> Path:
    """The demo's classifier; its pictures are in the same folder."""
    return DIGITS / "digits.onnx"


@pytest.fixture(scope="session")
def compiled(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile and sign the classifier for a target, each variant once; `plain` uses tensors only."""
    folder = tmp_path_factory.mktemp("bundles")

    def bundle(
        target: str,
        *,
        plain: bool = False,
        name: str = "digits",
        version: str = "1.0.0",
        counter: int = 0,
    ) -> Path:
        path = folder / f"{name}-{target}-{version}-{counter}{'-plain' * plain}.bundle"
        declared: list[str | Path] = ["--preprocess", DIGITS / "preprocess.toml"]
        declared += ["--postprocess", "softmax,top3", "--labels", DIGITS / "labels.txt"]
        if not path.exists():
            edgebundle(
                *("compile", DIGITS / "digits.onnx", "--target", target, *([] if plain else declared)),
                *("--sign-key", keys / "signing.key", "--name", name, "--model-version", version),
                *("--security-counter", str(counter), "-o", path),
            )
        return path

    return bundle


@pytest.fixture(scope="session")
def locked_wheels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Download the agent's locked dependencies for a release, and return their folder."""

    def download(suite: str, arch: str) -> Path:
        folder = tmp_path_factory.mktemp("wheels")
        release = next(r for r in RELEASES if (r.suite, r.arch) == (suite, arch))
        wheels.download_locked(release, PROJECT / f"packaging/locks/{release.name}.txt", folder)
        return folder

    return download
