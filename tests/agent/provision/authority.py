"""A certificate authority for tests: certificates that are valid, expired or not yet valid, for any name."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """Issues certificates; its own is `ca.pem` in its folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.ca = self._issue("ca", self._key, None, -400, 400)

    def server(self, name: str, *, since: int = -1, until: int = 90) -> str:
        """Issue a certificate for a host name or address; return mosquitto's configuration for it."""
        self.client("server", host=name, since=since, until=until)
        return f"certfile {self.folder}/server.pem\nkeyfile {self.folder}/server.key\n"

    def client(self, name: str, *, host: str | None = None, since: int = -1, until: int = 90) -> Path:
        """Issue a certificate and return its path; the key is next to it. Days count from today."""
        return self._issue(name, ec.generate_private_key(ec.SECP256R1()), host or name, since, until)

    def _issue(
        self, name: str, key: ec.EllipticCurvePrivateKey, host: str | None, since: int, until: int
    ) -> Path:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(
                self._name if host is None else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
            )
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + since * DAY)
            .not_valid_after(now + until * DAY)
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        )
        if host is not None:
            try:
                other: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
            except ValueError:
                other = x509.DNSName(host)
            builder = builder.add_extension(x509.SubjectAlternativeName([other]), critical=False)
        path = self.folder / f"{name}.pem"
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.with_suffix(".key").write_bytes(private)
        path.with_suffix(".key").chmod(0o644)  # mosquitto may have given up being root
        return path
