"""Certificates that a process makes for itself."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from common.errors import StartupError

VALIDITY = timedelta(days=365)
CLOCK_SKEW = timedelta(hours=1)


def self_signed(common_name: str, names: Sequence[str], instead: str) -> tuple[bytes, bytes]:
    """(certificate, key) in PEM for these DNS names, signed by itself. Raises `StartupError` without the package that
    makes them; it says what to do `instead`."""
    x509 = cryptography("x509", instead)
    hashes = cryptography("hazmat.primitives.hashes", instead)
    serialization = cryptography("hazmat.primitives.serialization", instead)
    ec = cryptography("hazmat.primitives.asymmetric.ec", instead)

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, common_name)])
    now = datetime.now(UTC)
    usage = {
        "digital_signature": True, "key_cert_sign": True, "content_commitment": False, "key_encipherment": False,
        "data_encipherment": False, "key_agreement": False, "crl_sign": False, "encipher_only": False,
        "decipher_only": False,
    }  # fmt: skip
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return bytes(certificate.public_bytes(pem)), bytes(private)


def cryptography(module: str, instead: str) -> Any:
    """A module of the package `cryptography`. Raises `StartupError` if it is not installed."""
    try:
        return importlib.import_module(f"cryptography.{module}")
    except ImportError as error:
        raise StartupError(
            "making a certificate needs the extra `kubernetes`: pip install 'baton-serve[kubernetes]', or " + instead
        ) from error
