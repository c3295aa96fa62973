"""gRPC ports and channels, plain text or TLS.

This module, `common.grpc.server`, `common.grpc.calls` and `common.grpc.health` are all of this package that knows grpc:
the ports and channels of every other package have to agree, and this package is below all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from common.config import TlsSettings
from common.grpc.options import CHANNEL_OPTIONS, HEALTH_SERVER_OPTIONS, MAX_HEALTH_CALLS, Options, sharing
from common.grpc.server import make_server
from common.tls import Pem, TlsFiles, peer_files


def add_port(server: grpc.aio.Server, address: str, tls: TlsFiles | None) -> int:
    """Binds, and returns the port. Raises RuntimeError, as gRPC does, if the address is taken."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _server_credentials(tls))


def _server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """gRPC asks at each handshake, on threads of its own, whether the files have changed.

    It must hear of a certificate only if they have: gRPC puts what makes handshakes in the place of the last one even
    while another thread begins a handshake by it, and a process to which several peers connected at once crashed.
    """
    pem, shown = tls.versioned()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        pem, version = tls.versioned()
        if version == shown:
            return None
        shown = version
        return _server_configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(pem),
        changed,  # type: ignore[arg-type] # the stubs lack None, which gRPC documents
        require_client_authentication=pem.ca is not None,
    )


def _server_configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None  # noqa: S101 - `serving_files` gives ports nothing else
    assert pem.cert is not None  # noqa: S101
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    pem = tls.current()
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)


def name_options(server_name: str | None) -> Options:
    """Peers are reached by address, but their certificates hold a name."""
    return [] if server_name is None else [("grpc.ssl_target_name_override", server_name)]


class Channels:
    """Opens channels to other processes of the fleet.

    An open channel keeps what the files held when it was made, and shows it again when it reconnects. So the owner of a
    channel compares `version` before the channel connects anew, and opens another channel if `version` has changed.
    """

    def __init__(self, settings: TlsSettings | None = None) -> None:
        """Without settings, channels are plain text. Raises `ConfigError` and `StartupError`."""
        self._tls = peer_files(settings) if settings is not None else None
        self._options = [*CHANNEL_OPTIONS, *name_options(settings.tls_server_name if settings else None)]

    @property
    def version(self) -> int:
        return 0 if self._tls is None else self._tls.version

    def open(self, address: str) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        return grpc.aio.secure_channel(address, channel_credentials(self._tls), options=self._options)


def health_server(
    address: str, interceptors: Sequence[grpc.aio.ServerInterceptor] = (), *, shared_port: bool = False
) -> grpc.aio.Server:
    """A server for health checks alone, in plain text: kubelets' gRPC probes speak no TLS and have no certificate.

    Raises RuntimeError if the address is taken. The caller adds the servicer.
    """
    server = make_server(sharing(HEALTH_SERVER_OPTIONS, shared_port), interceptors, MAX_HEALTH_CALLS)
    if server.add_insecure_port(address) == 0:
        raise RuntimeError(f"cannot bind {address}")
    return server
