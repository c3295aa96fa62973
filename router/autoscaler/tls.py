"""TLS towards the API server: a certificate that it trusts, and the certificate that it has to show.

Without files each process makes a certificate of its own and adds it to the APIService's CA bundle (see kubernetes.py),
so no private key is ever stored or shared, and several replicas stand side by side in one bundle.
"""

from __future__ import annotations

import logging
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.certificates import cryptography, self_signed
from common.errors import StartupError
from router.api.rest.http.protocol import LimitedProtocol

log = logging.getLogger(__name__)

INSTEAD = "give --external-metrics-cert and --external-metrics-key"
BUNDLE_LIMIT = 8  # certificates kept in a CA bundle, the youngest


@dataclass(slots=True, frozen=True)
class FrontProxy:
    """Says who counts as the API server: a client with a certificate of this CA that has one of these common names, or
    any common name if `names` is empty."""

    ca_pem: str
    names: frozenset[str]


def make_certificate(service: str, namespace: str) -> tuple[bytes, bytes]:
    """(certificate, key) in PEM for a Service's names, signed by itself. Raises `StartupError` without the package."""
    names = [
        service,
        f"{service}.{namespace}",
        f"{service}.{namespace}.svc",
        f"{service}.{namespace}.svc.cluster.local",
    ]
    return self_signed("baton-autoscaler", names, INSTEAD)


def merged_bundle(bundle: bytes, certificate: bytes) -> bytes:
    """`bundle` with `certificate` in it, without expired ones and without more than `BUNDLE_LIMIT`. A bundle that holds
    it already comes back as it is."""
    x509 = cryptography("x509", INSTEAD)
    serialization = cryptography("hazmat.primitives.serialization", INSTEAD)
    try:
        known = list(x509.load_pem_x509_certificates(bundle)) if bundle.strip() else []
    except ValueError:
        log.warning("the APIService's CA bundle was no PEM, it is replaced")
        known = []
    own = x509.load_pem_x509_certificate(certificate)
    if own in known:
        return bundle
    now = datetime.now(UTC)
    alive = [one for one in known if one.not_valid_after_utc > now]
    alive.sort(key=lambda one: one.not_valid_before_utc)
    kept = [*alive[-(BUNDLE_LIMIT - 1) :], own]
    return b"".join(bytes(one.public_bytes(serialization.Encoding.PEM)) for one in kept)


def load_ca(context: ssl.SSLContext, ca_pem: str) -> None:
    """Has `context` trust this CA from the next connection on. Raises `StartupError` if the PEM cannot be read."""
    try:
        context.load_verify_locations(cadata=ca_pem)
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(f"the front proxy's CA cannot be read: {error}") from error


def load_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """What `context` shows from the next connection on. Raises `StartupError` for PEM that cannot be read."""
    # The ssl module reads certificates from files only; these live for a moment, readable by us alone.
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "tls.crt"), Path(folder, "tls.key")
        for path, content in zip(paths, (certificate, key), strict=True):
            path.touch(mode=0o600)
            path.write_bytes(content)
        try:
            context.load_cert_chain(*paths)
        except (ssl.SSLError, OSError) as error:
            raise StartupError(f"the serving certificate cannot be used: {error}") from error


def common_name(certificate: Any) -> str:
    """The subject's common name, from the form that `getpeercert()` gives; empty if there is none."""
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return ""


def front_proxy_protocol(allowed: Callable[[], frozenset[str]]) -> type[LimitedProtocol]:
    """uvicorn's HTTP/1.1, for those only who have one of the `allowed` names (any, if there are none)."""

    class FrontProxyProtocol(LimitedProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            name = common_name(transport.get_extra_info("peercert"))
            if allowed() and name not in allowed():
                log.warning("a client that is not the API server was turned away", extra={"common_name": name})
                transport.abort()

    return FrontProxyProtocol
