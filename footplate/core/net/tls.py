"""TLS for Footplate's own connections, with a key that each launch makes for itself. Nobody has to manage certificates.

    server                                        client
    {protocol, tls: true}       ───────────►
                                ◄──────────►      TLS 1.3; the client takes any certificate
    the handshake of `handshake.py`, whose proofs cover the digest of the certificate

The certificate names nobody, and no authority has signed it. The token makes it trustworthy: both proofs cover its digest,
as with `tls-server-end-point` in RFC 5929. A stranger between the two ends has to show a certificate of their own. Then
the two ends have seen different certificates, and each other's proofs are wrong.

The first message isn't encrypted, so that a process without TLS can say what it lacks. A side that wants TLS refuses a
connection without it.

`TlsStream` does no input or output: it turns bytes from the network into plain ones, and plain ones into bytes for the
network. So blocking and non-blocking connections use it in the same way.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
import tempfile
import threading
from typing import Any

from footplate.core.net.handshake import PROTOCOL, HandshakeError, check_protocol
from footplate.core.optional import require

ANNOUNCEMENT = {"protocol": PROTOCOL, "tls": True}
_PIECE_BYTES = 1 << 16
# Clocks differ between machines, so the certificate is always valid. Its key ends with the launch.
_VALID_FROM = datetime.datetime(2000, 1, 1)
_VALID_UNTIL = datetime.datetime(2200, 1, 1)


def expect_announcement(message: Any) -> None:
    """Check that the server's first message announces TLS.

    Raises:
        HandshakeError: it doesn't.
    """
    check_protocol(message if isinstance(message, dict) else {})
    if message.get("tls") is not True:
        raise HandshakeError("it doesn't use TLS, and this process does. Give --tls on all machines, or on none")


class TlsStream:
    """One end of a TLS connection. Several threads may use it.

    Args:
        context: of the server or the client.
        binding: the digest of the server's certificate; None on the client, which doesn't know it yet.
    """

    def __init__(self, context: ssl.SSLContext, binding: str | None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=binding is not None)
        self._binding = binding
        self._connected = False
        # Plain bytes that wait for the end of TLS's handshake.
        self._waiting = bytearray()
        self._lock = threading.Lock()
        self._connect()

    @property
    def binding(self) -> str:
        """The digest of the server's certificate. A client knows it when it has received plain bytes."""
        if self._binding is None:
            self._binding = hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").hexdigest()
        return self._binding

    def received(self, data: bytes) -> bytes:
        """Take bytes from the network; return the plain ones that are complete.

        Raises:
            OSError: they aren't TLS, or the other end has ended the connection.
        """
        plain = bytearray()
        with self._lock:
            self._incoming.write(data)
            self._connect()
            try:
                while self._connected:
                    plain += self._tls.read(_PIECE_BYTES)
            except ssl.SSLWantReadError:
                pass
        return bytes(plain)

    def write(self, plain: bytes) -> None:
        """Encrypt bytes, or keep them until TLS's handshake has ended."""
        with self._lock:
            self._waiting += plain
            self._encrypt()

    def outgoing(self) -> bytes:
        """Take the bytes that are due to be sent."""
        with self._lock:
            return self._outgoing.read()

    def _connect(self) -> None:
        if self._connected:
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self._connected = True
        self._encrypt()

    def _encrypt(self) -> None:
        if not self._connected:
            return
        view = memoryview(bytes(self._waiting))
        while view:
            view = view[self._tls.write(view) :]
        self._waiting.clear()


class ServerKey:
    """A new key, and a certificate for it, which live as long as this process keeps them."""

    def __init__(self) -> None:
        pem, self.binding = _new_certificate()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        # No connection is ever resumed.
        self._context.num_tickets = 0
        # Only the owner can read the file, and it is gone after this block. Python's ssl loads keys from files only.
        with tempfile.NamedTemporaryFile(prefix="footplate-") as file:
            file.write(pem)
            file.flush()
            self._context.load_cert_chain(file.name)

    def stream(self) -> TlsStream:
        """The server's end of a connection."""
        return TlsStream(self._context, self.binding)


def client_stream() -> TlsStream:
    """The client's end of a connection. The handshake with the token has to follow, over `binding`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return TlsStream(context, None)


def _new_certificate() -> tuple[bytes, str]:
    """A key with a certificate, as PEM, and the certificate's digest.

    Raises:
        MissingExtra: cryptography isn't installed.
    """
    require("cryptography", "tls", "TLS")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "footplate launch")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    return pem, hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
