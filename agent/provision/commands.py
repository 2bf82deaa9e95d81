"""`edge-agent enroll` and `edge-agent check`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.config.file import DEFAULT_CONFIG
from agent.errors import ConfigError, EnrollmentError
from agent.terminal import note, say, say_json

if TYPE_CHECKING:
    from agent.provision.enrollment import Enrollment

EXIT_FAILED: Final = 1

_ENROLL_EXAMPLE: Final = """\
example:
  sudo edge-agent enroll --device kitchen --broker mqtts://broker.lan \\
       --cafile ca.pem --cert kitchen.pem --key kitchen.key --trust signing.pub --start

On a terminal it asks for missing values. Exit status: 0 if the device is enrolled; 4 if the values are wrong,
do not work, or would replace another enrollment. In that case nothing has changed.
"""
_CHECK_EXAMPLE: Final = """\
example:
  sudo edge-agent check

Exit status: 0 if nothing fails (there may be warnings), 1 if something fails.
"""


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `enroll` and `check` to the command line."""
    form = argparse.RawDescriptionHelpFormatter
    enroll = commands.add_parser(
        "enroll",
        help="give this device its name, broker, credentials and a key to trust",
        epilog=_ENROLL_EXAMPLE,
        formatter_class=form,
    )
    enroll.add_argument("--device", metavar="NAME", help="this device's name (default: the host's name)")
    enroll.add_argument("--broker", metavar="URL", help="mqtts://HOST[:PORT], or mqtt:// for no TLS")
    enroll.add_argument(
        "--trust",
        action="append",
        metavar="KEY.pub|DIR",
        help="public key that your bundles are signed with, or a folder of them; repeatable. Added to "
        "those that are trusted; with --force, in their place",
    )
    enroll.add_argument("--username", metavar="NAME", help="user name at the broker")
    enroll.add_argument("--password-file", metavar="FILE", help="file with the password on its first line")
    enroll.add_argument(
        "--cafile",
        "--ca",
        dest="ca",
        metavar="PEM",
        help="authority that issued the broker's certificate, if not a public one",
    )
    enroll.add_argument(
        "--cert",
        "--certificate",
        dest="certificate",
        metavar="PEM",
        help="this device's own client certificate",
    )
    enroll.add_argument("--key", metavar="PEM", help="private key of the client certificate")
    enroll.add_argument(
        "--group", action="append", metavar="NAME", help="group whose requests this device shares"
    )
    enroll.add_argument("--state-dir", metavar="DIR", help="folder for bundles")
    enroll.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="read all this from a TOML or JSON file"
    )
    enroll.add_argument(
        "--take",
        type=Path,
        metavar="FILE",
        help="only move FILE, and the secrets that it names, to enroll.json beside the configuration, "
        "readable by root, and erase them",
    )
    _add_config(enroll)
    enroll.add_argument(
        "--force", action="store_true", help="replace another enrollment; with --trust, the trusted keys, too"
    )
    enroll.add_argument("--no-connect", action="store_true", help="do not connect to the broker")
    enroll.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for network, clock and broker (default: 0)",
    )
    enroll.add_argument("--start", action="store_true", help="start the service afterwards")
    enroll.set_defaults(command=_enroll)

    check = commands.add_parser(
        "check",
        help="check this device and report what is wrong",
        epilog=_CHECK_EXAMPLE,
        formatter_class=form,
    )
    _add_config(check)
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument("--no-connect", action="store_true", help="do not connect to the broker")
    check.set_defaults(command=_check)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help=f"configuration file, or its folder (default: {DEFAULT_CONFIG})",
    )


def _config_path(path: Path) -> Path:
    path = path.absolute()
    return path if path.suffix == ".toml" and not path.is_dir() else path / DEFAULT_CONFIG.name


def _enroll(options: argparse.Namespace) -> int:
    from agent.provision.checks import service
    from agent.provision.enroll import EnrollOptions, enroll, has_trusted_key
    from agent.provision.files import require_writable
    from agent.provision.questions import ask

    path = _config_path(options.config)
    try:
        require_writable(path)
        if options.take is not None:
            return _take(options.take, path.parent)
        enrollment = _given(options)
        if sys.stdin.isatty() and sys.stdout.isatty() and options.source is None:
            enrollment = ask(enrollment, trusts=has_trusted_key(path))
        result = enroll(
            enrollment,
            EnrollOptions(path, options.force, not options.no_connect, options.wait),
            note,
        )
        for finding in result.findings:
            say(*finding.lines())
        for key in result.removed:
            say(f"no longer trusted: {key}")
        for key in result.trusted:
            say(f"{'trusted' if enrollment.trust else 'still trusted'}: {key}")
        did = "is enrolled" if result.changed else "is already enrolled like this, nothing changed"
        say(f"{result.config.device} {did}: {path}")
        if options.start:
            service.restart()
            say("the service is running: journalctl -u edge-agent")
        elif path == DEFAULT_CONFIG and service.systemd_runs():
            say("start it: sudo systemctl restart edge-agent")
        else:
            # The user's own folder, or a container.
            say(f"start it: edge-agent run --config {path}")
    except EnrollmentError:
        raise
    except ConfigError as error:
        raise EnrollmentError(str(error), hint=error.hint) from error
    except EOFError as error:
        raise EnrollmentError(
            "expected an answer, got the end of the input",
            hint="answer the questions in a terminal, or give all values as flags or with --from",
        ) from error
    return 0


def _take(source: Path, folder: Path) -> int:
    from agent.provision.taking import TAKEN_FILE, take

    erased = take(source.absolute(), folder / TAKEN_FILE)
    say(f"the enrollment is in {folder / TAKEN_FILE}; erased: {', '.join(map(str, erased))}")
    return 0


def _given(options: argparse.Namespace) -> Enrollment:
    from agent.provision.enrollment import Enrollment, read_enrollment

    enrollment = Enrollment() if options.source is None else read_enrollment(options.source)
    given: dict[str, object] = {
        "device": options.device,
        "broker": options.broker,
        "username": options.username,
        "state_dir": options.state_dir,
        "trust": _paths(options.trust),
        "groups": None if options.group is None else tuple(options.group),
        # A path on the command line is relative to the current folder, a path in a file to that file.
        **{name: _absolute(getattr(options, name)) for name in ("password_file", "ca", "certificate", "key")},
    }
    return replace(enrollment, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _paths(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(str(Path(name).absolute()) for name in names)


def _absolute(name: str | None) -> str | None:
    return None if name is None else str(Path(name).absolute())


def _check(options: argparse.Namespace) -> int:
    from agent.provision.checks import doctor
    from agent.provision.finding import Level

    path = _config_path(options.config)
    levels: list[Level] = []
    documents = []
    for finding in doctor.examine(
        path,
        connect=not options.no_connect,
        progress=note,
    ):
        levels.append(finding.level)
        documents.append(finding.document())
        if not options.json:
            say(*finding.lines(), flush=True)
    counts = {level.value: levels.count(level) for level in Level}
    if options.json:
        say_json({"ok": Level.FAIL not in levels, "counts": counts, "findings": documents}, indent=1)
    else:
        say(", ".join(f"{count} {name}" for name, count in counts.items()))
    return EXIT_FAILED if Level.FAIL in levels else 0
