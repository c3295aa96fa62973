"""External metrics as part of the cluster's API: the TLS server, its certificate, and the trust in both directions."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path

from common.certificates import VALIDITY
from common.config import AutoscalerSettings
from common.errors import StartupError
from router.autoscaler import http, tls
from router.autoscaler.board import Board
from router.autoscaler.external_metrics import ExternalMetrics
from router.autoscaler.kubernetes import CONFLICT, Cluster
from router.fleet.discovery.kubernetes import Backoff, KubernetesError

log = logging.getLogger(__name__)

REFRESH_S = 60.0  # certificate files, the APIService's CA bundle, whom the API server says it is
RENEW_S = VALIDITY.total_seconds() / 2


class AggregatedApi:
    """Takes its port when made; serves while `run` runs, from when it knows whom to trust."""

    def __init__(self, settings: AutoscalerSettings, board: Board, cluster: Cluster | None) -> None:
        self._settings = settings
        self._cluster = cluster
        service = settings.external_metrics_service or "/"
        self._service_namespace, _, self._service = service.partition("/")
        namespace = settings.namespace or self._service_namespace or (cluster.namespace if cluster else "")
        if not namespace:
            raise StartupError("namespace: is needed for external metrics")
        self._own_certificate: bytes | None = None
        self._made_at = 0.0
        self._files: tuple[bytes, bytes] | None = None
        self._names: frozenset[str] = frozenset()
        # Nobody gets in before a CA is known: see `run`.
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server = http.Server(
            settings.external_metrics_listen or "",
            ExternalMetrics(board, namespace),
            context=self._context,
            protocol=tls.front_proxy_protocol(lambda: self._names),
        )
        self.address = self._server.address

    async def run(self) -> None:
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._show_certificate()
        await self._learn_whom_to_trust()
        keeping = asyncio.create_task(self._keep_trusted())
        serving = asyncio.create_task(self._server.run())
        try:
            await asyncio.wait({keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (keeping, serving):
                if task.done():
                    task.result()
        finally:
            keeping.cancel()
            serving.cancel()
            await asyncio.gather(keeping, serving, return_exceptions=True)

    async def close(self) -> None:
        await self._server.close()

    # ----------------------------------------------------------------------------------- who we are

    def _show_certificate(self) -> None:
        """A certificate of our own making, or the files' if they have changed. Raises `StartupError`."""
        settings = self._settings
        if settings.external_metrics_cert is None or settings.external_metrics_key is None:
            if self._own_certificate is not None and time.monotonic() - self._made_at < RENEW_S:
                return
            certificate, key = tls.make_certificate(self._service, self._service_namespace)
            self._own_certificate, self._made_at = certificate, time.monotonic()
            tls.load_certificate(self._context, certificate, key)
            return
        try:
            files = Path(settings.external_metrics_cert).read_bytes(), Path(settings.external_metrics_key).read_bytes()
        except OSError as error:
            raise StartupError(f"the serving certificate cannot be read: {error}") from error
        if files != self._files:
            tls.load_certificate(self._context, *files)
            self._files = files
            log.info("serving certificate loaded", extra={"file": settings.external_metrics_cert})

    async def _keep_trusted(self) -> None:
        """Keeps our certificate in the APIService, and both certificates current."""
        backoff = Backoff(0.2, 10.0)
        while True:
            try:
                self._show_certificate()
                own, cluster = self._own_certificate, self._cluster
                if own is not None and cluster is not None and await cluster.trust(own):
                    log.info("certificate added to the APIService")
                backoff.reset()
                await asyncio.sleep(REFRESH_S)
                await self._learn_whom_to_trust()
            except KubernetesError as error:
                if error.status != CONFLICT:  # another replica was faster; this is not worth a line
                    log.warning("the APIService does not know our certificate", extra={"reason": str(error)})
                await backoff.wait()
            except StartupError as error:  # half-written files: the old ones are still shown
                log.warning("certificates were not renewed", extra={"reason": error.message})
                await asyncio.sleep(REFRESH_S)

    # ----------------------------------------------------------------------------------- who they are

    async def _learn_whom_to_trust(self) -> None:
        """Returns once it is known. Raises `StartupError` if it cannot be."""
        settings = self._settings
        if settings.front_proxy_ca is not None:
            self._trust(tls.FrontProxy(_read(settings.front_proxy_ca), frozenset(settings.front_proxy_names)))
            return
        if self._cluster is None:
            raise StartupError("front_proxy_ca: is needed outside of a cluster")
        backoff = Backoff()
        while True:
            try:
                self._trust(await self._cluster.front_proxy())
            except KubernetesError as error:
                log.warning("cannot ask who the API server is", extra={"reason": str(error)})
                await backoff.wait()
            else:
                return

    def _trust(self, front_proxy: tls.FrontProxy) -> None:
        """CAs are added, never taken away: an old one ends with its own validity, or with this process."""
        tls.load_ca(self._context, front_proxy.ca_pem)
        self._names = front_proxy.names


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"the front proxy's CA cannot be read: {error}") from error
