"""Which rank of a worker this is, on which host, and where ranks meet: from settings, and what LeaderWorkerSet tells a
pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.config import EngineSettings
from common.errors import ConfigError

DEFAULT_PORT = 50065  # at which rank 0 waits, if LeaderWorkerSet names its host
MIN_SECRET_BYTES = 16
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # by what listens everywhere


@dataclass(slots=True, frozen=True, kw_only=True)
class Place:
    num_hosts: int
    index: int  # of this host
    ranks_per_host: int = 1
    number: int = 0  # of this rank, among those of its host
    host: str  # of rank 0; where it listens, if this is rank 0
    port: int
    timeout_s: float  # until all ranks have to be there
    secret: bytes = field(repr=False)

    @property
    def rank(self) -> int:
        """Ranks of a host are neighbours."""
        return self.index * self.ranks_per_host + self.number

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    def of_rank(self, number: int) -> Place:
        """Of another rank of this host."""
        host = _LOOPBACK.get(self.host, self.host) if self.rank == 0 else self.host
        return replace(self, number=number, host=host)


def host_index(settings: EngineSettings, environ: Mapping[str, str]) -> int:
    """0 is the host that serves. Raises `ConfigError`."""
    if settings.num_hosts == 1:
        if settings.host_index:
            raise ConfigError("--host-index", f"is {settings.host_index}, but --num-hosts is 1")
        return 0
    if settings.host_index is not None:
        index = settings.host_index
    elif (text := environ.get("LWS_WORKER_INDEX", "")).isdecimal():
        index = int(text)
    else:
        raise ConfigError("--host-index", "is needed: 0 on the host that serves, 1 and so on for the others")
    if index >= settings.num_hosts:
        raise ConfigError(
            "--host-index", f"is {index}, but --num-hosts is {settings.num_hosts}: it is the last one + 1"
        )
    return index


def place_of(settings: EngineSettings, environ: Mapping[str, str]) -> Place:
    """Of this host's first rank. Raises `ConfigError` that names the flag which is missing or wrong."""
    index = host_index(settings, environ)
    if settings.pipeline_parallel_size > 1:
        raise ConfigError("--num-hosts", "does not go with --pipeline-parallel-size")
    if settings.data_parallel_size > 1:
        raise ConfigError("--num-hosts", "does not go with --data-parallel-size")
    if settings.tensor_parallel_size % settings.num_hosts:
        raise ConfigError(
            "--num-hosts",
            f"is {settings.num_hosts}, but --tensor-parallel-size is {settings.tensor_parallel_size}: "
            "all hosts have as many ranks",
        )
    if (pods := environ.get("LWS_GROUP_SIZE")) and pods != str(settings.num_hosts):
        raise ConfigError("--num-hosts", f"is {settings.num_hosts}, but the group has {pods} pods (LWS_GROUP_SIZE)")
    address = settings.ranks_address
    if not address and (leader := environ.get("LWS_LEADER_ADDRESS")):
        # The leader's own name may be known to others before it is known to itself.
        address = f"{leader if index else '0.0.0.0'}:{DEFAULT_PORT}"
    if not address:
        raise ConfigError("--ranks-address", "is needed: host:port at which rank 0 waits for the ranks of other hosts")
    host, _, port = address.rpartition(":")
    return Place(
        num_hosts=settings.num_hosts,
        index=index,
        ranks_per_host=settings.tensor_parallel_size // settings.num_hosts,
        host=host.strip("[]"),
        port=int(port),
        timeout_s=settings.ranks_timeout,
        secret=_read_secret(settings.ranks_secret_file),
    )


def _read_secret(file: str | None) -> bytes:
    flag = "--ranks-secret-file"
    if file is None:
        raise ConfigError(flag, "is needed: a file with a secret that all hosts of this worker have, and nobody else")
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(flag, f"{file} cannot be read: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(flag, f"{file} has {len(secret)} bytes; a secret has at least {MIN_SECRET_BYTES}")
    return secret
