"""The amd64 package's service under a real systemd: it serves, it recovers, and it is confined."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest

from benchmarks.architectures import generate
from builder import run
from builder.fleet.agents import agents
from builder.fleet.deploy import deploy
from edgebundle import Broker, ClientError
from tests.asking import ask
from tests.conftest import BrokerProcess
from tests.packaging.booted import Booted
from tests.packaging.conftest import DIGITS, PROJECT, Root, edgebundle, wait_for, wait_until_online

pytestmark = pytest.mark.systemd

PROBE = Path(__file__).with_name("sandbox_probe.py")
SEVEN = DIGITS / "seven.png"
DROP_IN = "/etc/systemd/system/edge-agent.service.d/test.conf"


class Device:
    """A booted system with the package, and the broker that it is configured for."""

    def __init__(self, root: Root, system: Booted, broker: BrokerProcess) -> None:
        self.root = root
        self.system = system
        self.broker = Broker(broker.url)

    def answers(self) -> bool:
        try:
            answer = ask("board", "digits", SEVEN, self.broker, deadline_s=5)
        except ClientError:
            return False
        return answer.labels[0].label == "seven"

    def main_pid(self) -> str:
        return self.system.show("MainPID")["MainPID"]

    def watchdog_s(self) -> float:
        """Return the time of the agent's last report to the watchdog, in seconds since boot."""
        return int(self.system.show("WatchdogTimestampMonotonic")["WatchdogTimestampMonotonic"]) / 1e6

    def worker_pids(self) -> list[str]:
        """Return the process ids of the workers, oldest first."""
        group = self.system.show("ControlGroup")["ControlGroup"]
        # Not the agent, and not the template of its workers.
        each = "while read pid; do grep -qx edge-worker /proc/$pid/comm && echo $pid; done"
        pids = self.system.run("sh", "-c", f"{each} < /sys/fs/cgroup{group}/cgroup.procs", ok=False).split()
        # 0 is a process of a machine that an interrupted run left behind; `kill 0` would end this process.
        return sorted(set(pids) - {self.main_pid(), "0"}, key=int)


@pytest.fixture(scope="module")
def device(
    make_root: Callable[[str, str], Root],
    build_deb: Callable[..., Path],
    own_broker: BrokerProcess,
    keys: Path,
    compiled: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Device]:
    """A system installed before it boots and configured afterwards, like a new device; it serves digits."""
    root = make_root("amd64", "bookworm")
    shutil.copy(build_deb("bookworm", "amd64"), root.path / "tmp/edge-agent.deb")
    root.run("apt-get", "install", "--yes", "/tmp/edge-agent.deb")
    system = Booted(root, tmp_path_factory.mktemp("booted") / "console.log")
    try:
        waiting = system.show("ActiveState", "ConditionResult", "UnitFileState")
        assert waiting == {"ActiveState": "inactive", "ConditionResult": "no", "UnitFileState": "enabled"}
        assert system.run("systemctl", "is-system-running").strip() == "running"

        system.run("install", "-d", str(Path(DROP_IN).parent))
        # A prepared card: files on its boot partition install the package (again) and enroll the device.
        boot = root.path / "boot/firmware"
        boot.mkdir(parents=True)
        (boot / "cmdline.txt").write_text("console=tty1 root=PARTUUID=1\n")
        (boot / "user-data").write_text("#cloud-config\nhostname: board\n")
        enrollment = tmp_path_factory.mktemp("card") / "enrollment.toml"
        enrollment.write_text(
            f'device = "board"\nbroker = "{own_broker.url}"\nusername = "board"\npassword = "hunter2"\n'
            f'trust = """\n{(keys / "signing.pub").read_text()}"""\n'
        )
        prepare = [str(PROJECT / "packaging/sd-card/prepare-card.sh"), str(boot)]
        subprocess.run([*prepare, str(build_deb("bookworm", "amd64")), str(enrollment)], check=True)
        assert "first-boot.sh" in (boot / "user-data").read_text()
        system.run("sh", "/boot/firmware/edge-agent/first-boot.sh")
        wait_for(
            "the enrollment and the service",
            lambda: system.show("ActiveState")["ActiveState"] == "active",
        )
        wait_for("the file with the password to go", lambda: not (boot / "edge-agent/enroll.toml").exists())
        wait_for(
            "the enrollment to have ended",
            lambda: (
                system.show("ActiveState", "Result", unit="edge-agent-enroll")
                == {"ActiveState": "inactive", "Result": "success"}
            ),
        )
        device = Device(root, system, own_broker)
        wait_until_online("board", device.broker)
        done = deploy(compiled("host"), "board", device.broker, wait_s=90)
        assert (done.status, done.code, done.message) == ("SUCCEEDED", "", ""), system.journal()
        yield device
    finally:
        system.stop()


def test_it_serves_a_model_as_its_own_user_without_any_privilege(device: Device) -> None:
    assert device.answers(), device.system.journal()
    worker = device.worker_pids()[0]
    for pid, filters in ((device.main_pid(), 1), (worker, 2)):
        status = dict(
            line.split(":\t", 1)
            for line in device.system.run("cat", f"/proc/{pid}/status").splitlines()
            if ":\t" in line
        )
        assert status["CapEff"].strip("0") == ""
        assert status["CapBnd"].strip("0") == ""
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        # systemd makes several filters; a worker adds its own.
        assert int(status["Seccomp_filters"]) >= filters
    owner = device.system.run("stat", "--format=%U %a", "/var/lib/edge-agent").split()
    assert owner == ["edge-agent", "700"]


def test_the_report_finds_no_fault_in_service_sandbox_and_model(device: Device) -> None:
    report = json.loads(device.system.run("edge-agent", "check", "--json"))
    assert report["counts"]["fail"] == 0, report
    found = {row["subject"]: row for row in report["findings"]}
    assert found["service"]["message"].startswith("active (running), enabled")
    assert found["sandbox"]["level"] == "ok", found["sandbox"]
    assert found["sandbox"]["message"].startswith("workers get landlock")
    assert "is intact, signed" in found["models"]["message"]
    # The agent with this name is the device itself: no warning about a duplicate.
    assert "device" not in found


def test_workers_have_the_complete_sandbox_under_the_unit(device: Device) -> None:
    (listed,) = agents(device.broker)
    assert listed.sandbox_missing == (), device.system.journal()
    assert "sandbox lacks" not in device.system.journal()


def test_a_worker_has_more_filters_than_the_agent(device: Device) -> None:
    def filters(pid: str) -> int:
        found = re.search(r"Seccomp_filters:\t(\d+)", device.system.run("cat", f"/proc/{pid}/status"))
        assert found is not None
        return int(found[1])

    worker = device.worker_pids()[0]
    assert filters(worker) > filters(device.main_pid())


def test_root_installs_a_bundle_from_a_file_while_it_serves(
    device: Device, compiled: Callable[..., Path]
) -> None:
    # Not "digits": of a model that was deployed, the agent returns to the deployed version.
    bundle = compiled("host", name="numerals", version="1.1.0")
    shutil.copy(bundle, device.root.path / "opt/numerals.bundle")
    told = device.system.run("edge-agent", "install", "/opt/numerals.bundle")
    assert "numerals 1.1.0 is in service" in told
    answer = ask("board", "numerals", SEVEN, device.broker, deadline_s=30)
    assert (answer.version, answer.labels[0].label) == ("1.1.0", "seven")


def test_a_resnet_50_fits_into_what_the_unit_grants(device: Device, keys: Path, tmp_path: Path) -> None:
    onnx.save(generate("resnet50-v2"), tmp_path / "resnet50.onnx")
    bundle = tmp_path / "resnet50.bundle"
    edgebundle(
        *("compile", tmp_path / "resnet50.onnx", "--preprocess", "imagenet", "--postprocess", "softmax,top5"),
        *("--sign-key", keys / "signing.key", "-o", bundle),
    )
    workers = len(device.worker_pids())
    done = deploy(bundle, "board", device.broker, wait_s=240)
    assert (done.status, done.code, done.message) == ("SUCCEEDED", "", ""), device.system.journal()
    answer = ask("board", "resnet50", SEVEN, device.broker, deadline_s=60)
    here = run(bundle, SEVEN).answers
    assert here is not None
    assert [row.index for row in answer.labels] == list(here["indices"])
    assert len(device.worker_pids()) == workers + 1
    assert device.answers()


def test_a_killed_worker_is_replaced_and_the_agent_stays(device: Device) -> None:
    main, worker = device.main_pid(), device.worker_pids()[0]
    device.system.run("sh", "-c", f"kill -KILL {worker}")
    wait_for("an answer of the next worker", device.answers)
    assert device.main_pid() == main
    assert worker not in device.worker_pids()


def test_a_killed_agent_is_restarted_and_serves_the_same_model(device: Device) -> None:
    before = int(device.system.show("NRestarts")["NRestarts"])
    device.system.run("sh", "-c", f"kill -KILL {device.main_pid()}")
    wait_for("an answer after the restart", device.answers)
    assert int(device.system.show("NRestarts")["NRestarts"]) == before + 1


def test_the_watchdog_ends_a_hanging_agent(device: Device) -> None:
    (device.root.path / DROP_IN[1:]).write_text("[Service]\nWatchdogSec=3\nTimeoutAbortSec=2\n")
    try:
        device.system.run("systemctl", "daemon-reload")
        device.system.run("systemctl", "restart", "edge-agent")
        wait_for("an answer before the hang", device.answers)
        hung = device.main_pid()
        # For more than two watchdog periods, a healthy agent reports to the watchdog and is not killed.
        first = device.watchdog_s()
        wait_for("reports to the watchdog", lambda: device.watchdog_s() > first + 7)
        assert device.main_pid() == hung
        device.system.run("sh", "-c", f"kill -STOP {hung}")
        wait_for("another agent", lambda: device.main_pid() not in ("0", hung))
        wait_for("an answer after the hang", device.answers)
        assert "Watchdog timeout" in device.system.journal()
    finally:
        (device.root.path / DROP_IN[1:]).unlink()
        device.system.run("systemctl", "daemon-reload")
        device.system.run("systemctl", "restart", "edge-agent")


def test_a_wrong_configuration_is_reported_and_tried_again_slowly(device: Device) -> None:
    config = device.root.path / "etc/edge-agent/agent.toml"
    right = config.read_text()
    try:
        config.write_text(right.replace("[broker]", "[broker]\nurll = 1", 1))
        device.system.run("systemctl", "restart", "edge-agent", ok=False)
        wait_for("the second restart", lambda: int(device.system.show("NRestarts")["NRestarts"] or 0) >= 2)
        assert device.system.show("ExecMainStatus")["ExecMainStatus"] in ("78", "0")
        assert "broker.urll: no such key" in device.system.journal()
    finally:
        config.write_text(right)
    wait_for("an answer with the right configuration, without a hand on the device", device.answers)


REFUSED = (
    "write /etc",
    "write /usr",
    "write /home",
    "write the keyring",
    "write /proc/sys",
    "read /etc/shadow",
    "see other processes",
    "netlink socket",
    "packet socket",
    "new user namespace",
    "new network namespace",
    "mount",
    "become root",
    "give files away",
    "real-time priority",
    "32-bit personality",
    "keyring of the kernel",
    "io_uring",
    "writable and executable memory",
    "memory made executable",
    "run a written program",
)


def test_the_sandbox_refuses_what_root_could_do_and_allows_what_workers_need(device: Device) -> None:
    shutil.copy(PROBE, device.root.path / "usr/lib/edge-agent/probe.py")
    unit = (device.root.path / "usr/lib/systemd/system/edge-agent.service").read_text()
    command = "/usr/lib/edge-agent/current/bin/python -I /usr/lib/edge-agent/probe.py"
    unit = re.sub(r"(?m)^ExecStart=.*$", f"ExecStart={command}", unit)
    unit = re.sub(r"(?m)^(Type|Restart|WatchdogSec)=.*$", "", unit).replace(
        "[Service]", "[Service]\nType=oneshot"
    )
    (device.root.path / "etc/systemd/system/probe.service").write_text(unit)
    device.system.run("systemctl", "daemon-reload")
    device.system.run("systemctl", "start", "probe")
    inside = json.loads(device.system.run("journalctl", "-u", "probe", "-o", "cat", "--grep", r"^\{"))
    outside = json.loads(device.system.run("systemd-run", "--quiet", "--pipe", "--wait", *command.split()))

    assert {name for name, done in inside.items() if not done} == set(REFUSED)
    # Root can do all but this outside the unit in the same container, so it is the unit that refuses.
    assert {name for name in REFUSED if not outside[name]} <= {"write /proc/sys"}


def test_upgrade_keeps_serving_remove_stops_and_purge_leaves_nothing(
    device: Device, build_deb: Callable[..., Path]
) -> None:
    old = device.main_pid()
    shutil.copy(build_deb("bookworm", "amd64", 1), device.root.path / "opt/newer.deb")
    device.system.run("apt-get", "install", "--yes", "/opt/newer.deb")
    wait_for("an answer of the newer agent", device.answers)
    assert device.main_pid() not in ("0", old)
    assert "+deb12u1" in device.system.run("dpkg-query", "--show", "edge-agent")
    # The new version serves from its own folder, and the old one is gone.
    (version,) = (device.root.path / "usr/lib/edge-agent").glob("*.??????")
    assert "+deb12u1." in version.name
    command = device.system.run("cat", f"/proc/{device.main_pid()}/cmdline")
    assert command.startswith(f"/usr/lib/edge-agent/{version.name}/bin/python")

    device.system.run("dpkg", "--remove", "edge-agent")
    assert device.system.show("ActiveState")["ActiveState"] in ("inactive", "failed")
    assert device.worker_pids() == []
    assert (device.root.path / "etc/edge-agent/keyring/trusted.pub").exists()
    assert (device.root.path / "var/lib/edge-agent").is_dir()

    device.system.run("dpkg", "--purge", "edge-agent")
    assert not (device.root.path / "etc/edge-agent").exists()
    assert not (device.root.path / "var/lib/edge-agent").exists()
    assert "edge-agent" not in device.system.run("getent", "passwd")
    assert "edge-agent" not in device.system.run("systemctl", "list-unit-files", "--no-pager")
