"""TLS: the certificate that a process shows and the CAs that it trusts, from PEM files that are read again when they
change.

One set of settings serves both directions. A port with `cert` and `key` speaks TLS, and with `ca` as well it asks for a
certificate of that CA (mTLS). A channel speaks TLS if anything is given: it trusts `ca`, or the public CAs without,
and shows `cert` if it has one. This module knows no grpc; see `grpc_transport`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from common.config import TlsSettings
from common.errors import ConfigError, StartupError
from common.process.watched_files import WatchedFiles, read_file


@dataclass(slots=True, frozen=True)
class Pem:
    cert: bytes | None = None  # the chain, own certificate first
    key: bytes | None = None
    ca: bytes | None = None


class TlsFiles:
    """Raises `ConfigError` for settings that do not go together, and `StartupError` for files that cannot be used."""

    def __init__(
        self,
        cert: str | None,
        key: str | None,
        ca: str | None,
        *,
        ca_field: str = "tls_ca",
        fleet_ca: str | None = None,
    ) -> None:
        """`fleet_ca` is trusted beside `ca`."""
        if (cert is None) != (key is None):
            raise ConfigError("tls_key" if key is None else "tls_cert", "--tls-cert and --tls-key go together")
        self._cert, self._key = cert, key
        # By setting.
        self._cas = {field: path for field, path in ((ca_field, ca), ("tls_ca", fleet_ca)) if path is not None}
        paths = [path for path in (cert, key, *self._cas.values()) if path is not None]
        self._watched = WatchedFiles("tls", paths, self._load)

    def current(self) -> Pem:
        return self._watched.current()[0]

    def versioned(self) -> tuple[Pem, int]:
        """What the files hold, and a number that differs after each change of them."""
        (pem, _), version = self._watched.versioned()
        return pem, version

    @property
    def version(self) -> int:
        return self.versioned()[1]

    def server_context(self) -> ssl.SSLContext:
        """The context of servers that use Python's own TLS. Each handshake uses what the files hold at that moment."""
        context = self._current_context()

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _given: ssl.SSLContext) -> None:
            connection.context = self._current_context()

        # Called at the start of each handshake, with or without a server name.
        context.sni_callback = choose
        return context

    def _current_context(self) -> ssl.SSLContext:
        return self._watched.current()[1]

    def _load(self) -> tuple[Pem, ssl.SSLContext]:
        cert = None if self._cert is None else read_file("tls_cert", self._cert)
        key = None if self._key is None else read_file("tls_key", self._key)
        cas = [read_file(field, path) for field, path in self._cas.items()]
        pem = Pem(cert, key, b"\n".join(cas) if cas else None)
        return pem, self._check(pem)

    def _check(self, pem: Pem) -> ssl.SSLContext:
        """Refuses what no handshake could use, naming the setting."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._cert is not None and self._key is not None:
            if b"-----BEGIN CERTIFICATE-----" not in (pem.cert or b""):
                raise StartupError(f"tls_cert: {self._cert} holds no PEM certificate")
            if b"PRIVATE KEY-----" not in (pem.key or b""):
                raise StartupError(f"tls_key: {self._key} holds no PEM private key")
            try:
                context.load_cert_chain(self._cert, self._key, password="")  # one with a password is refused, not asked
            except ssl.SSLError as error:
                if error.reason == "KEY_VALUES_MISMATCH":
                    raise StartupError(f"tls_key: {self._key} is not the key of {self._cert}") from error
                raise StartupError(f"tls_cert: {self._cert} and its key cannot be used: {error}") from error
            except (OSError, ValueError) as error:
                raise StartupError(f"tls_cert: {self._cert} and its key cannot be used: {error}") from error
        for field, path in self._cas.items():
            try:
                context.load_verify_locations(path)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise StartupError(f"{field}: {path} holds no PEM certificate") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def peer_files(settings: TlsSettings) -> TlsFiles | None:
    """The files for channels to other processes of the fleet; None if the channels are plain text."""
    if settings.tls_cert is None and settings.tls_key is None and settings.tls_ca is None:
        if settings.tls_server_name is not None:
            raise ConfigError("tls_server_name", "is for TLS: --tls-ca or --tls-cert is missing")
        return None
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)


def serving_files(settings: TlsSettings, client_ca: str | None, *, ca_field: str = "tls_ca") -> TlsFiles | None:
    """The files for ports; None if the ports are plain text. With `client_ca`, clients need a certificate of it, or one
    of the fleet: an autoscaler is a router's client, too."""
    if settings.tls_cert is None and settings.tls_key is None:
        if client_ca is not None:
            raise ConfigError(ca_field, "a port that asks for certificates needs --tls-cert and --tls-key")
        return None
    fleet_ca = settings.tls_ca if client_ca is not None else None
    return TlsFiles(settings.tls_cert, settings.tls_key, client_ca, ca_field=ca_field, fleet_ca=fleet_ca)
