"""gRPC channel and server options that every hop of Baton shares. Plain tuples: this package knows no grpc.

Keepalive is what ends a lease when a peer vanishes without closing its connection: a ping after KEEPALIVE_TIME of
silence, and the connection is dead when no answer came within KEEPALIVE_TIMEOUT.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 2**20
KEEPALIVE_TIME_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 3_000
LOSS_NOTICED_S = (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1000  # at the latest, by each end of a broken connection

Options = list[tuple[str, int | str]]

NO_OTHER_PINGS: Options = [
    # Flow control has pings of its own, sent while data flows. Their answers queue behind that data, and with a short
    # ping timeout a peer that is behind with sending would be taken for dead. Keepalive pings are sent in silence only.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 2**20),  # what a stream may have in flight, now that nobody measures the link
]

_COMMON: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # gRPC gives keepalive pings this, not keepalive_timeout
    *NO_OTHER_PINGS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: Options = [
    *_COMMON,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # workers are neighbours
]

SERVER_OPTIONS: Options = [
    *_COMMON,
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a share of its connections
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]
