"""The flags of the verbs that talk to agents: which agent, which broker, with which credentials."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.cli.arguments import seconds
from builder.cli.flags import flag

if TYPE_CHECKING:
    from edgebundle.broker import Broker


def agent_flag() -> Any:  # noqa: ANN401 - a field of any type
    """Declare `--agent`."""
    return flag(
        "--agent",
        required=True,
        metavar="NAME",
        help="the agent's name: `device` in its configuration, the first column of `edgebundle agents`",
    )


@dataclass(frozen=True, slots=True)
class BrokerFlags:
    """The flags for the broker and this client's credentials."""

    broker: str = flag(required=True, metavar="URL", help="mqtt[s]://[USER@]HOST[:PORT]")
    password_file: Path | None = flag(type=Path, metavar="FILE", help="file with the password of USER")
    cafile: Path | None = flag(
        type=Path, metavar="PEM", help="CA certificates for mqtts (default: the system's)"
    )
    cert: Path | None = flag(type=Path, metavar="PEM", help="client certificate")
    key: Path | None = flag(type=Path, metavar="PEM", help="private key of the client certificate")
    mqtt_version: str = flag(
        choices=("auto", "5", "3.1.1"),
        default="auto",
        help="auto tries 5, then 3.1.1 if the broker refuses (default: %(default)s)",
    )

    def made(self) -> Broker:
        """Return the broker that the flags describe."""
        from edgebundle.broker import Broker

        return Broker(
            url=self.broker,
            cafile=self.cafile,
            certificate=self.cert,
            key=self.key,
            password_file=self.password_file,
            protocol=self.mqtt_version,
        )


def wait_flag(default_s: float, what: str) -> Any:  # noqa: ANN401 - a field of any type
    """Declare `--wait`: how long to wait for `what`."""
    return flag(
        "--wait",
        type=seconds,
        default=default_s,
        metavar="SECONDS",
        help=f"how long to wait for {what} (default: %(default)g)",
    )
