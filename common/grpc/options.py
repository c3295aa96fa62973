"""gRPC channel and server options that every hop of Baton shares. Plain tuples: this package knows no grpc.

Keepalive is what ends a lease when a peer vanishes without closing its connection: a ping after KEEPALIVE_TIME of
silence, and the connection is dead when no answer came within KEEPALIVE_TIMEOUT. Within the fleet that is quick, as a
request waits for it; with clients, whose networks and machines are not ours, it is patient.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 2**20
REQUEST_TOKEN_BYTES = 5  # of a token id in a message to a worker, at most
REQUEST_OTHER_BYTES = 256 * 2**10  # sampling parameters, names and addresses of the largest request to a worker
SAMPLING_BYTES = REQUEST_OTHER_BYTES - 2**14  # of these, what sampling parameters may take
KEEPALIVE_TIME_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 3_000
LOSS_NOTICED_S = (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1000  # at the latest, by each end of a broken connection
DEADLINE_SLACK_S = 0.05  # gRPC's clock and a process's own may differ by so much
CLIENT_KEEPALIVE_TIME_MS = 10_000
CLIENT_KEEPALIVE_TIMEOUT_MS = 10_000

Options = list[tuple[str, int | str]]

REUSE_PORT = "grpc.so_reuseport"

MAX_PEERS = 1024  # connections of a fleet's processes to one of them
MAX_HEALTH_CALLS = 256  # at a time
MAX_PENDING_CALLS = 8 * 2**10  # of one method, that came while the event loop was busy: some 16 KiB each


def _common(time_ms: int, timeout_ms: int, *, max_message_bytes: int, lookahead_bytes: int) -> Options:
    """`max_message_bytes` are of messages received, `lookahead_bytes` what a stream may have in flight to this end."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),  # of what was sent and is not acknowledged: TCP_USER_TIMEOUT
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # gRPC gives keepalive pings this, not keepalive_timeout
        # Flow control has pings of its own, sent while data flows. Their answers queue behind that data, and with a
        # short ping timeout a peer that is behind with sending would be taken for dead. Keepalive pings are sent in
        # silence only. Without flow control's pings nobody measures the link, so the lookahead is fixed.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", lookahead_bytes),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _channel(time_ms: int, timeout_ms: int) -> Options:
    return [
        *_common(time_ms, timeout_ms, max_message_bytes=MAX_MESSAGE_BYTES, lookahead_bytes=4 * 2**20),
        ("grpc.enable_http_proxy", 0),  # workers and routers are neighbours; a proxy for the web only gets in the way
    ]


def _server(
    time_ms: int, timeout_ms: int, *, max_message_bytes: int, max_connections: int, max_streams: int, min_ping_ms: int
) -> Options:
    """`min_ping_ms`: a peer may ping no more often while it has no calls."""
    return [
        # A call whose message is not read, for want of a key or of room, holds as much of it as the lookahead.
        *_common(time_ms, timeout_ms, max_message_bytes=max_message_bytes, lookahead_bytes=64 * 2**10),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", max_streams),
        # gRPC ends calls beyond it with CANCELLED, whoever's they are. Left to itself, it begins with some of them at
        # 1000, which one connection may bring.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_handshake_timeout_ms", 20_000),
        # Endless headers and rapid resets cost as much with a settings_timeout of 2 s, a max_requests_per_read of 4 and
        # a ping_on_rst_stream_percent of 100. A short settings_timeout would cut off clients that are slow to connect.
        ("grpc.max_metadata_size", 8 * 2**10),  # beyond it calls are refused more and more often,
        ("grpc.absolute_max_metadata_size", 16 * 2**10),  # and beyond this one always
        ("grpc.http2.min_ping_interval_without_data_ms", min_ping_ms),
        ("grpc.http2.max_ping_strikes", 4),
        ("grpc.keepalive_permit_without_calls", 1),  # connections without calls are pinged: their peers may be gone
        (REUSE_PORT, 0),  # a taken port is an error, not a share of its connections
    ]


def sharing(options: Options, shared_port: bool) -> Options:
    """The options of a server whose port is shared or not. If it is shared, each of the processes of this user that
    listen on it gets its part of the connections."""
    return [(name, int(shared_port) if name == REUSE_PORT else value) for name, value in options]


# Between the processes of a fleet.
CHANNEL_OPTIONS: Options = [
    *_channel(KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
]

# Between a client and a router.
CLIENT_CHANNEL_OPTIONS: Options = _channel(CLIENT_KEEPALIVE_TIME_MS, CLIENT_KEEPALIVE_TIMEOUT_MS)


def worker_server_options(*, max_message_bytes: int, max_streams: int) -> Options:
    """The options of a worker's port, which the processes of its fleet reach. `max_streams`: calls in one connection at
    a time."""
    return _server(
        KEEPALIVE_TIME_MS,
        KEEPALIVE_TIMEOUT_MS,
        max_message_bytes=max_message_bytes,
        max_connections=MAX_PEERS,
        max_streams=max_streams,
        min_ping_ms=500,
    )


# Of a port in plain text that answers health checks and nothing else.
HEALTH_SERVER_OPTIONS: Options = [
    *worker_server_options(max_message_bytes=64 * 2**10, max_streams=MAX_HEALTH_CALLS // 4),
    ("grpc.max_connection_idle_ms", 120_000),
]


def client_server_options(
    *, max_message_bytes: int, max_connections: int, max_streams: int, shared_port: bool = False
) -> Options:
    """The options of a port that anybody may reach. `max_streams`: calls in one connection at a time."""
    options = [
        *_server(
            CLIENT_KEEPALIVE_TIME_MS,
            CLIENT_KEEPALIVE_TIMEOUT_MS,
            max_message_bytes=max_message_bytes,
            max_connections=max_connections,
            max_streams=max_streams,
            min_ping_ms=CLIENT_KEEPALIVE_TIME_MS // 2,
        ),
        ("grpc.max_connection_idle_ms", 120_000),  # a client without a call connects again when it has one
    ]
    return sharing(options, shared_port)
