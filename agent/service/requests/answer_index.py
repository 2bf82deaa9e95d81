"""Where the remembered answers of one class are, and whose they are.

Promises: no I/O; the client with the most is found in microseconds. Leaves the answers to `answers`.
"""

from __future__ import annotations

from typing import Final

# More clients than this share one account, so that the one with the most is found in microseconds.
_MAX_ACCOUNTS: Final = 256
SHARED: Final = ""


class _Account:
    """The numbers of a client's answers, the oldest first, and their bytes together."""

    __slots__ = ("nbytes", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.nbytes = 0


class AnswerIndex:
    """Where the answers of one class are, by key, and whose, and the bytes of all."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.nbytes = 0
        self._accounts: dict[str, _Account] = {}
        self._clients: dict[int, str] = {}

    def add(self, key: bytes, number: int, client: str, nbytes: int) -> None:
        """Enter an answer, the newest."""
        self.numbers[key] = number
        self.nbytes += nbytes
        if client not in self._accounts and len(self._accounts) >= _MAX_ACCOUNTS:
            client = SHARED
        account = self._accounts.setdefault(client, _Account())
        account.numbers[number] = nbytes
        account.nbytes += nbytes
        self._clients[number] = client

    def remove(self, key: bytes, number: int) -> None:
        """Take out an answer, if it is here."""
        client = self._clients.pop(number, None)
        if client is None:
            return
        self.numbers.pop(key, None)
        account = self._accounts[client]
        nbytes = account.numbers.pop(number)
        account.nbytes -= nbytes
        self.nbytes -= nbytes
        if not account.numbers:
            del self._accounts[client]

    def surplus(self, newest: int, *, in_bytes: bool) -> int:
        """Return the number of the oldest answer of the client with the most, which is not `newest`."""
        full = [each for each in self._accounts.values() if next(iter(each.numbers)) != newest]
        most = max(full, key=lambda each: each.nbytes if in_bytes else len(each.numbers))
        return next(iter(most.numbers))
