"""TLS 1.3 around the connections of a run, below the handshake and the tags that every link has anyway.

    off      nothing is hidden: an observer of the network reads rows, but can change and forge nothing
    auto     a certificate of this run, which all of its processes make for themselves from the run's token
    DIR      cert.pem, key.pem and ca.pem of DIR, on every host

`auto` needs nothing to be sent around: the key of the certificate is derived from the token, which everybody of the run
holds and nobody else. Both sides show that certificate and accept no other; so both are verified, and names and clocks
of hosts do not matter. Keys of connections are ephemeral, as always in TLS 1.3: who gets the token later cannot read
what was recorded before.
"""

from __future__ import annotations

import datetime
import hmac
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from regrow.errors import UserError

CERT, KEY, CA = "cert.pem", "key.pem", "ca.pem"
# For the handshake of TLS alone, before that of the link begins. Too small: a busy machine is taken for a silent one.
# Too large: whoever connects and says nothing is kept that long.
TLS_SECONDS_MAX = 10.0
LABEL = b"regrow tls key"
BORN, DIES = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """What both ends of a connection need."""

    accepting: ssl.SSLContext
    dialing: ssl.SSLContext


def make_tls(wish: str, token: bytes) -> Tls | None:
    """None: off. UserError where a directory has not what is needed."""
    if wish == "off":
        return None
    if wish == "auto":
        with tempfile.TemporaryDirectory(prefix="regrow-t-") as directory:  # 0700, and gone when they are read
            _write_own(Path(directory), token)
            return _read(Path(directory))
    return _read(Path(wish))


def _read(directory: Path) -> Tls:
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the token says who is who; hosts of a cluster often have no names
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(directory / CERT, directory / KEY)
            context.load_verify_locations(directory / CA)
        except (OSError, ssl.SSLError) as error:
            what = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            hint = f"it must have {CERT}, {KEY} and {CA}, and this user must be able to read them"
            raise UserError(f"--tls {directory}: {what}", hint=hint) from None
        contexts.append(context)
    return Tls(accepting=contexts[0], dialing=contexts[1])


def _write_own(directory: Path, token: bytes) -> None:
    """The certificate of this run and its key, the same in all of its processes."""
    from cryptography import x509  # late: only where it is wanted
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(token, LABEL, "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "regrow run")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(BORN)
        .not_valid_after(DIES)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    for name_of_file, data in ((CERT, pem), (CA, pem), (KEY, secret)):
        number = os.open(directory / name_of_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "wb") as file:
            file.write(data)
