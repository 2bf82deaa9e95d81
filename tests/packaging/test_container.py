"""The container recipe, built and run as in docs/container.md: it serves, and it is confined."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder.fleet.deploy import deploy
from edgebundle import Broker
from tests.asking import ask
from tests.conftest import BrokerProcess
from tests.packaging.conftest import DIGITS, PROJECT, wait_for, wait_until_online
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S

pytestmark = pytest.mark.systemd

IMAGE = "localhost/edge-agent"
# crun supports only the unified hierarchy of control groups; this machine may have both kinds.
UNIFIED = 'umount -R -l /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"'
# The options in docs/container.md; a test compares.
HARDENING = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--tmpfs=/tmp")


class Engine:
    """Podman and buildah with a private store. The base image is a Debian root, so no registry is needed.

    `run` is a folder of its own with a short name: podman refuses one of more than 50 characters, which
    pytest's folders have when tests run in parallel.
    """

    def __init__(self, store: Path, run: Path) -> None:
        self._store = [f"--root={store}", f"--runroot={run}", "--storage-driver=overlay"]

    def buildah(self, *words: str | Path) -> str:
        # Most build machines are containers, in which no other isolation works.
        return self._run("buildah", *self._store, *words, BUILDAH_ISOLATION="chroot")

    def podman(self, *words: str | Path) -> list[str]:
        own = ("unshare", "--mount", "--propagation=private", "sh", "-c", UNIFIED, "sh")
        return [*own, "podman", *self._store, "--cgroup-manager=cgroupfs", *map(str, words)]

    def container(self, *words: str | Path) -> list[str]:
        """Return the documented command that runs the image, with this machine's network."""
        machine = ("--pull=never", "--cgroups=disabled", "--network=host")
        limits = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
        volumes = ("-v=edge-agent-etc:/etc/edge-agent", "-v=edge-agent-state:/var/lib/edge-agent")
        return self.podman("run", "--rm", *machine, *limits, *HARDENING, *volumes, *words)

    def run(self, *words: str | Path) -> str:
        return self._run(*self.container(*words))

    def _run(self, *words: str | Path, **variables: str) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            timeout=PROGRAM_PATIENCE_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
            check=False,
        )
        assert done.returncode == 0, f"{words}:\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def engine(
    kept_root: Callable[[str, str], Path],
    wheel: Path,
    locked_wheels: Callable[[str, str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """The image, built by the recipe from the wheel and the locked dependencies, without a network."""
    folder = tmp_path_factory.mktemp("container")
    short = Path(tempfile.mkdtemp(prefix="run"))
    engine = Engine(folder / "store", short)
    context = folder / "context"
    shutil.copytree(
        PROJECT / "packaging", context / "packaging", ignore=shutil.ignore_patterns("__pycache__")
    )
    (context / "dist").mkdir()
    for file in (wheel, *locked_wheels("bookworm", "amd64").iterdir()):
        shutil.copy(file, context / "dist")
    base = engine.buildah("from", "scratch").strip()
    mounted = engine.buildah("mount", base).strip()
    root = kept_root("amd64", "bookworm")
    subprocess.run(["cp", "-a", f"{root}/.", mounted], check=True)
    engine.buildah("umount", base)
    engine.buildah("commit", "--rm", "--quiet", base, "localhost/base")
    arguments = ("BASE=localhost/base", "SUITE=bookworm", "PIP_OPTIONS=--no-index --find-links=/dist")
    engine.buildah(
        *("build", "--quiet", "-t", IMAGE, "-f", PROJECT / "packaging/container/Containerfile"),
        *(word for argument in arguments for word in ("--build-arg", argument)),
        context,
    )
    yield engine
    subprocess.run(engine.podman("volume", "rm", "--all", "--force"), capture_output=True, check=False)
    shutil.rmtree(short, ignore_errors=True)


def test_a_container_enrolls_serves_and_is_confined(
    engine: Engine,
    keys: Path,
    compiled: Callable[..., Path],
    own_broker: BrokerProcess,
    tmp_path: Path,
) -> None:
    assert engine.run(IMAGE, "version").startswith("edge-agent ")
    assert engine.run("--entrypoint=id", IMAGE).startswith("uid=10001(edge-agent) gid=10001(edge-agent)")
    enroll = ("enroll", "--device", "box", "--broker", own_broker.url, "--trust", "/signing.pub")
    output = engine.run("-v", f"{keys}/signing.pub:/signing.pub:ro", IMAGE, *enroll)
    assert "box is enrolled: /etc/edge-agent/agent.toml" in output
    assert "systemctl" not in output

    process = subprocess.Popen(
        engine.container("--name=box", IMAGE), stdout=subprocess.DEVNULL, stderr=(tmp_path / "log").open("wb")
    )
    try:
        broker = Broker(own_broker.url)
        wait_for(
            "the agent to serve", lambda: "serves as" in (tmp_path / "log").read_text(), PROGRAM_PATIENCE_S
        )
        wait_until_online("box", broker)
        done = deploy(compiled("host"), "box", broker, wait_s=120)
        assert (done.status, done.code, done.message) == ("SUCCEEDED", "", ""), (tmp_path / "log").read_text()
        answer = ask("box", "digits", DIGITS / "seven.png", broker, deadline_s=60)
        assert answer.labels[0].label == "seven"
        report = engine.run(IMAGE, "check")
        assert "fail  " not in report
        assert "workers get landlock" in report
        assert "seccomp, bounded threads" in report
        assert "digits 1.0.0 is intact" in report
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()


def test_the_documented_command_is_tested() -> None:
    text = (PROJECT / "docs/container.md").read_text().replace("=", " ")
    for option in HARDENING:
        assert option.replace("=", " ") in text
