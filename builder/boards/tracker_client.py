"""A client of TVM's RPC tracker.

Unlike TVM's own, it reports which board it was given, and its requests have a time limit. The messages are
those of `tvm.rpc.tracker`: a magic number, then JSON preceded by its length.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tvm.rpc import base

from builder.boards.measuring_process import BoardAddress
from builder.errors import FleetError

NO_TRACKER: Final = "give the address of an `edgebundle rpc-tracker` of this version"

DEFAULT_PORT: Final = 9190
CONNECT_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Tracker:
    """A tracker at an address; each request opens a new connection."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Tracker:
        """Parse `host:port`, `[v6]:port`, or `host` with the default port 9190.

        Raises
        ------
        FleetError
            If `text` is malformed.
        """
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+))(?::(\d{1,5}))?", text)
        port = int(match[3] or DEFAULT_PORT) if match else 0
        if match is None or not 1 <= port <= 65535:
            raise FleetError(f"tracker: expected host:port, got {text[:80]!r}", hint="for example lab:9190")
        return cls(match[1] or match[2], port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def servers(self, key: str) -> tuple[str, ...]:
        """Return the names of all boards that are registered under `key`, busy ones included.

        Raises
        ------
        FleetError
            If the tracker does not answer.
        """
        with self._connection(CONNECT_TIMEOUT_S) as sock:
            answer = self._exchange(sock, [base.TrackerCode.SUMMARY])
        try:
            infos = answer[1]["server_info"]
            return tuple(":".join(map(str, i["addr"])) for i in infos if i["key"] == f"server:{key}")
        except (TypeError, KeyError, IndexError) as error:
            raise FleetError(
                f"tracker {self}: expected a summary, got {str(answer)[:80]}", hint=NO_TRACKER
            ) from error

    def request(self, key: str, wait_s: float, session_s: float) -> BoardAddress | None:
        """Ask for a free board.

        Parameters
        ----------
        key
            The key that the board must be registered under.
        wait_s
            How long to wait for a free board.
        session_s
            Time limit that the server must set on the session.

        Returns
        -------
        BoardAddress or None
            None if no board became free in time.

        Raises
        ------
        FleetError
            If the tracker does not answer.
        """
        with self._connection(wait_s) as sock:
            try:
                answer = self._exchange(sock, [base.TrackerCode.REQUEST, key, "", 1])
            except TimeoutError:
                return None
        try:
            host, port, matchkey = answer[1]
            return BoardAddress(str(host), int(port), str(matchkey), session_s)
        except (TypeError, ValueError, IndexError) as error:
            raise FleetError(
                f"tracker {self}: expected a board, got {str(answer)[:80]}", hint=NO_TRACKER
            ) from error

    @contextlib.contextmanager
    def _connection(self, wait_s: float) -> Iterator[socket.socket]:
        try:
            sock = socket.create_connection((self.host, self.port), CONNECT_TIMEOUT_S)
        except OSError as error:
            raise FleetError(
                f"tracker {self}: cannot be reached ({error.strerror or error})",
                hint="start `edgebundle rpc-tracker` there, or open the tunnel with `--ssh`",
            ) from error
        with sock:
            try:
                sock.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                if struct.unpack("<i", base.recvall(sock, 4))[0] != base.RPC_TRACKER_MAGIC:
                    raise FleetError(
                        f"tracker {self}: expected TVM's RPC tracker, got another protocol", hint=NO_TRACKER
                    )
                sock.settimeout(wait_s)
                yield sock
            except OSError as error:
                raise FleetError(
                    f"tracker {self}: the connection broke ({error.strerror or error})", hint=NO_TRACKER
                ) from error

    @staticmethod
    def _exchange(sock: socket.socket, message: list[object]) -> Any:  # noqa: ANN401 - JSON
        base.sendjson(sock, message)
        return base.recvjson(sock)
