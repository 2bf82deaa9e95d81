"""A model that runs code in its framework can harm nothing and read nothing of the user's."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest

from builder.errors import ModelError
from builder.importer.frameworks import confinement
from builder.importer.frameworks.process import FrameworkProcess

PROGRAM = """
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    try:
        exec(request["code"])
        reply = {"done": True}
    except BaseException as error:
        reply = {"done": False, "errno": getattr(error, "errno", None), "error_type": type(error).__name__}
    print(json.dumps(reply), flush=True)
"""
WRITE = "open({path!r}, 'a').write('x')"
REFUSED = {
    "write beside the folder": WRITE,
    "read beside the folder": "open({path!r}).read()",
    "list the user's folder": "os.listdir(os.path.dirname({path!r}))",
    "remove": "os.remove({path!r})",
    "rename": "os.rename({path!r}, 'stolen')",
    "link": "os.link({path!r}, 'linked')",
    "through a link": "os.symlink({path!r}, 'l'); open('l').read()",
    "through another program": "import subprocess; subprocess.run(['cat', {path!r}], check=True)",
    "mode": "os.chmod({path!r}, 0o777)",
    "owner": "os.chown({path!r}, os.getuid(), os.getgid())",
    "time": "os.utime({path!r})",
    "write to the installation": "open(os.path.join(sys.prefix, 'x.pth'), 'w')",
    "network": "import socket; socket.socket()",
    "programs of this machine": "import socket; socket.socket(socket.AF_UNIX)",
    "signal": "os.kill(os.getppid(), 0)",
    "memory of another process": "open(f'/proc/{{os.getppid()}}/environ').read()",
    "temporary files of others": "open('/tmp/edgebundle-probe', 'w')",
    "a secret of the environment": "os.environ['EDGEBUNDLE_TEST_SECRET']",
}
# Refused by the filter, whatever the kernel's Landlock knows: datagrams, a signal by way of a descriptor's
# owner, limits of others, memory that others share, namespaces, and emptying a file.
LIBC = "import ctypes; c = ctypes.CDLL(None, use_errno=True); n = "
FAILED = "\nif n < 0: raise OSError(ctypes.get_errno(), '')"
FILTERED = {
    "a pair of datagram sockets": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "another end of a stream": "import socket; socket.socketpair()[0].connect('/dev/log')",
    "owner of a descriptor": "import fcntl; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "owner of a socket": "import fcntl, socket; fcntl.ioctl(socket.socketpair()[0], 0x8901, b'1234')",
    "limit of another process": "import resource as r; r.prlimit(os.getppid(), r.RLIMIT_CPU, (9, 9))",
    "priority": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "processors": "os.sched_setaffinity(os.getppid(), [0])",
    "memory of other programs": LIBC + "c.shmget(0, 4096, 0o1600)" + FAILED,
    "a session of its own": LIBC + "c.setsid()" + FAILED,
    "namespace": LIBC + "c.unshare(0x10000000)" + FAILED,
    "what another program opens": LIBC + "c.inotify_init1(0)" + FAILED,
    "what happens in a folder": "import fcntl; fcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, 1)",
    "a group of its own": LIBC + "c.setpgid(0, 0)" + FAILED,
    "empty a file": "os.truncate({path!r}, 0)",
    "empty without opening": "os.open({path!r}, 3 | os.O_TRUNC)",
    "empty while reading": "os.open({path!r}, os.O_RDONLY | os.O_TRUNC)",
}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "program").mkdir()
    program = tmp_path / "program" / "framework.py"
    program.write_text(PROGRAM)
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "secret").write_text("secret")

    monkeypatch.setenv("EDGEBUNDLE_TEST_SECRET", "secret")

    def ask(code: str, *, trusted: bool = False) -> dict[str, Any]:
        code = code.format(path=str(tmp_path / "user" / "secret"))
        with FrameworkProcess(sys.executable, program, "Keras", "m.keras", trusted=trusted) as started:
            return started.ask("run", code=code)

    return ask


@pytest.mark.parametrize("attack", REFUSED)
def test_what_a_model_must_not_do_is_refused(attack: str, asked: Any, tmp_path: Path) -> None:
    assert not asked(REFUSED[attack])["done"]
    assert (tmp_path / "user" / "secret").read_text() == "secret"
    assert (tmp_path / "user" / "secret").stat().st_mode & 0o777 != 0o777


@pytest.mark.parametrize("attack", FILTERED)
def test_what_landlock_does_not_see_is_refused(attack: str, asked: Any, tmp_path: Path) -> None:
    assert asked(FILTERED[attack])["errno"] == errno.EPERM
    assert (tmp_path / "user" / "secret").read_text() == "secret"


def test_what_a_model_started_ends_with_it(asked: Any) -> None:
    reply = asked("import subprocess; raise OSError(subprocess.Popen(['sleep', '1000']).pid, 'its number')")
    while Path(f"/proc/{reply['errno']}").exists():  # until init has seen its end
        stat = Path(f"/proc/{reply['errno']}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] == "Z":
            break


@pytest.mark.parametrize(
    "code",
    [
        "open('model.onnx', 'w').write('x'); os.rename('model.onnx', 'other'); os.remove('other')",
        "import tempfile; tempfile.NamedTemporaryFile(); os.makedirs(os.path.expanduser('~/.cache/x'))",
        "import numpy; numpy.savez('outputs.npz', a=numpy.ones(3))",
        "import threading; t = threading.Thread(target=os.getpid); t.start(); t.join()",
        "import subprocess; subprocess.run(['true'], check=True)",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.sched_setaffinity(0, [0])",
        "os.truncate(os.open('a', os.O_RDWR | os.O_CREAT | os.O_TRUNC), 3); open('a', 'w').close()",
        "import multiprocessing as m; p = m.Process(target=os.getpid); p.start(); p.join()",
        "open('/proc/cpuinfo').read(); os.cpu_count(); os.urandom(3); open(os.devnull, 'w').write('x')",
        "import getpass; getpass.getuser()",
    ],
)
def test_what_a_framework_needs_works(code: str, asked: Any) -> None:
    assert asked(code) == {"done": True}


def test_a_model_that_is_trusted_is_not_confined(asked: Any, tmp_path: Path) -> None:
    assert asked(WRITE, trusted=True)["done"]
    assert (tmp_path / "user" / "secret").read_text() == "secretx"


def test_without_landlock_nothing_is_opened(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = tmp_path / "lacking.py"
    text = Path(confinement.__file__).read_text()
    text = text.replace("parents[3]", f"parents[0] and Path({str(Path(confinement.__file__).parents[3])!r})")
    lacking.write_text(
        text.replace("landlock.restrict(", "raise OSError(38, 'Function not implemented')\n    print(")
    )
    monkeypatch.setattr(confinement, "__file__", str(lacking))
    with pytest.raises(ModelError, match=r"Keras cannot be confined .*Function not implemented") as caught:
        asked("pass")
    assert "--trust-model" in str(caught.value.hint)


def test_a_failure_for_want_of_a_file_says_how_to_trust(asked: Any) -> None:
    with pytest.raises(ModelError, match="Permission denied") as caught:
        asked("os.write(2, b'PermissionError: [Errno 13] Permission denied'); os._exit(1)")
    assert "--trust-model" in str(caught.value.hint)
