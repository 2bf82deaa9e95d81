"""Certificate authorities for tests, and a TLS front for a broker that records client certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOUR = datetime.timedelta(hours=1)


class Authority:
    """Issues certificates into a folder: `<file>.pem` and `<file>.key`, its own as `<name>.pem`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        builder = self._builder(self._name, self._key.public_key(), -HOUR, 24 * HOUR)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = builder.sign(self._key, hashes.SHA256())
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        file: str,
        host: str = "127.0.0.1",
        *,
        since: datetime.timedelta = -HOUR,
        until: datetime.timedelta = HOUR,
    ) -> int:
        """Issue a certificate for a host, and return its serial number."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            alternative = x509.DNSName(host)
        builder = self._builder(_named(file), key.public_key(), since, until)
        builder = builder.add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        (self.folder / f"{file}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (self.folder / f"{file}.key").chmod(0o600)
        (self.folder / f"{file}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return certificate.serial_number

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        since: datetime.timedelta,
        until: datetime.timedelta,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + since)
            .not_valid_after(now + until)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


class TlsFront:
    """TLS in front of a plain broker: requires certificates, and records the serial number of each.

    Parameters
    ----------
    upstream
        The broker's port.
    server
        Its certificate, without the suffix; the key lies beside it.
    ca
        The authority whose client certificates are accepted.
    """

    def __init__(self, upstream: int, server: Path, ca: Path) -> None:
        self.serials: list[int] = []
        self.port = 0
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.use(server, ca)

    def use(self, server: Path, ca: Path) -> None:
        """Show another certificate and accept another authority's from the next start on."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(server.with_suffix(".pem"), server.with_suffix(".key"))
        self._context.load_verify_locations(ca)
        self._context.verify_mode = ssl.CERT_REQUIRED

    async def start(self) -> None:
        """Listen; again at the same port after `stop`."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut every connection and stop listening."""
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0.05)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("ssl_object").getpeercert()
        self.serials.append(int(peer["serialNumber"], 16))
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        self._writers |= {writer, there_writer}
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
        self._writers -= {writer, there_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
