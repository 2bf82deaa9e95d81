"""Keys that sign bundles: a file, or a program that has the key or can reach it.

Promises that a program's public key is asked for first, and that each of its signatures is verified with it.
`PROGRAM public-key` writes a public key in PEM; `PROGRAM sign` reads a message and writes its ECDSA signature
with SHA-256 in DER. So the private key can stay in a key service, on a smart card, or with another user.
"""

from __future__ import annotations

import shlex
import subprocess
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.signature import SigningKey
from builder.bundles.key_files import MAX_KEY_FILE_BYTES, read_private
from builder.errors import KeyFileError

EXEC: Final = "exec:"
# For each question: somebody may have to find a card and touch it.
ANSWER_LIMIT_S: Final = 120.0
_HINT: Final = "docs/signing.md says what the program is asked and what it answers"


def open_signer(name: str, *, limit_s: float = ANSWER_LIMIT_S) -> SigningKey:
    """Return the key of this name: the path of a key file, or `exec:` and a command.

    Parameters
    ----------
    name
        `keys/signing.key`, or, for instance, `exec:./kms-sign --key edge`, in words as a shell has them; no
        shell is started.
    limit_s
        How long the program may take for each answer, in seconds.

    Raises
    ------
    KeyFileError
        If the file cannot be used (`read_private`); if the program cannot be run, fails, takes too long, or
        writes anything but a public key on P-256.
    """
    return _ProgramKey(name.removeprefix(EXEC), limit_s) if name.startswith(EXEC) else read_private(name)


class _ProgramKey:
    """A key that only a program can use; a `SigningKey`."""

    def __init__(self, command: str, limit_s: float) -> None:
        self._limit_s = limit_s
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise KeyFileError(
                f"{EXEC}{command}: expected words as a shell reads them: {error}", hint=_HINT
            ) from error
        if not self._words:
            raise KeyFileError(f"expected a program behind {EXEC}, got nothing", hint=_HINT)
        pem = self._ask("public-key")
        try:
            key = serialization.load_pem_public_key(pem)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise self._fault("public-key", "expected a public key in PEM") from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise self._fault("public-key", "expected an EC P-256 key, got another kind")
        self._public = key

    @property
    def curve(self) -> ec.EllipticCurve:
        return self._public.curve

    def public_key(self) -> ec.EllipticCurvePublicKey:
        return self._public

    def sign(self, data: bytes, signature_algorithm: ec.EllipticCurveSignatureAlgorithm) -> bytes:  # noqa: ARG002 - the only one
        signature = self._ask("sign", data)
        try:
            self._public.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature as error:
            raise self._fault(
                "sign", "expected an ECDSA signature with SHA-256, in DER, by the key of `public-key`"
            ) from error
        return signature

    def _ask(self, verb: str, message: bytes = b"") -> bytes:
        try:
            done = subprocess.run(  # noqa: S603 - the user's own program
                [*self._words, verb],
                input=message,
                stdout=subprocess.PIPE,
                timeout=self._limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise self._fault(verb, f"no answer within {self._limit_s:.0f} s") from error
        except (OSError, ValueError) as error:  # a null byte in a word is a ValueError
            reason = getattr(error, "strerror", None) or error
            raise self._fault(verb, f"cannot be run: {reason}") from error
        if done.returncode != 0:
            raise self._fault(verb, f"ended with status {done.returncode}")
        if len(done.stdout) > MAX_KEY_FILE_BYTES:
            raise self._fault(verb, f"expected at most {MAX_KEY_FILE_BYTES} bytes, got {len(done.stdout)}")
        return done.stdout

    def _fault(self, verb: str, reason: str) -> KeyFileError:
        return KeyFileError(f"{self._words[0]} {verb}: {reason}", hint=_HINT)
