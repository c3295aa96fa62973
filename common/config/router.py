"""Settings of a router."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from common.config.base import (
    Address,
    Addresses,
    HealthSettings,
    LogSettings,
    MetricsSettings,
    Positive,
    Settings,
    TlsSettings,
    TraceSettings,
    comma_separated,
)
from common.targets import MAX_TARGET_MS
from common.validation import MAX_PRIORITY

MAX_PROCESSES = 64  # of one router


class PolicySettings(Settings):
    """How a router chooses workers."""

    policy: str = Field("least_load", description="who gets a request")
    prefill_policy: str | None = Field(None, description="which of them chooses prefill workers; --policy if unset")
    decode_policy: str | None = Field(None, description="which of them chooses decode workers; --policy if unset")
    min_remote_tokens: Positive | None = Field(
        None,
        description="fewest prompt tokens without KV for which a prefill worker is asked; one KV block if unset",
    )
    hedge_prefill: bool = Field(
        False,
        description="ask a second prefill worker if the first is much later than others were for as long a prompt; "
        "the first to answer goes on",
    )


class LimitSettings(Settings):
    """How much a router takes on, and from whom."""

    limits_file: str | None = Field(
        None, description="YAML of what keys and tenants may ask for; read again when it changes; no limits if unset"
    )
    max_running: Positive | None = Field(
        None,
        description="answers that workers make at a time; further ones wait here for their turn; no queue if unset",
    )
    max_queued: Positive = Field(256, description="answers that wait for their turn; further ones are refused")
    max_queue_wait: float = Field(
        30.0, gt=0, description="seconds that one may wait for its turn; what would wait longer is refused at once"
    )
    slo_late: Literal["refuse", "best-effort"] = Field(
        "best-effort",
        description="what becomes of a request whose first token no workers can give within its latency target, as "
        "they predict it (docs/latency-targets.md)",
    )


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/:?#@,*]+)(:[0-9]{1,5})?")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def _origins(values: tuple[str, ...]) -> tuple[str, ...]:
    values = tuple(value.lower() for value in values)
    for value in values:
        if value != "*" and not _ORIGIN.fullmatch(value):
            raise ValueError(f"{value!r} should be scheme://host or scheme://host:port without a path, or *")
    return values


def _root_path(value: str) -> str:
    value = value.rstrip("/")
    if not _ROOT_PATH.fullmatch(value):
        raise ValueError("should be a path such as /llm, of letters, digits and . _ ~ -")
    return value


Origins = Annotated[tuple[str, ...], BeforeValidator(comma_separated), AfterValidator(_origins)]
RootPath = Annotated[str, AfterValidator(_root_path)]


class WebSettings(Settings):
    """The page that the router shows itself, pages of other sites, and a proxy in front."""

    cors_origins: Origins = Field(
        (),
        description="sites whose pages may ask over REST (CORS), as https://app.example.com; * for all; none if unset",
    )
    cors_credentials: bool = Field(
        False, description="these pages may let the browser show a TLS client certificate or cookies; not with *"
    )
    ui: bool = Field(
        True, description="a page at /ui of the REST address that shows the fleet; with API keys, to operators' alone"
    )
    root_path: RootPath = Field(
        "", description="path under which a proxy shows REST, as /llm; requests may come with it or without it"
    )


class ObserveSettings(TraceSettings, MetricsSettings):
    """What a router tells of its requests."""

    trace_sample: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the requests without a traceparent that are traced; others are if their callers' traces "
        "are; as OTEL_TRACES_SAMPLER says if unset, or else all",
    )
    trace_content: bool = Field(False, description="spans hold prompts and answers")
    access_log: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the calls that have a line in the log; if not 0, so have all that end with 5xx",
    )
    per_request_metrics: bool = Field(
        False, description="REST answers have metrics, of their own times, unless a request says include_metrics: false"
    )
    slow_request_ms: float | None = Field(
        None, gt=0, description="a request that takes longer has its timeline in the log, as a warning; none if unset"
    )
    slow_target_factor: float | None = Field(
        None,
        gt=0,
        description="so has one that takes longer than so many times one of its latency targets: 1 means each that "
        "misses one; none if unset",
    )


class BatchSettings(Settings):
    """Batches of requests in files (docs/batches.md)."""

    batch_file: str | None = Field(
        None,
        description="SQLite file of uploaded files and batches, made if it is not there; unset: /v1/files and "
        "/v1/batches are not there",
    )
    batch_requests: int = Field(4, ge=1, le=4096, description="requests of batches at a time, in each router process")
    batch_share: float = Field(
        0.02,
        ge=0,
        description="requests of batches for each other request in flight, if there are any: 0.02 lets one run beside "
        "50; further ones make way, and go on later",
    )
    batch_priority: int = Field(
        0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description=f"priority of requests of batches: {MAX_PRIORITY} lets all others go first, if workers have "
        "--queue-policy priority or slo",
    )
    batch_max_file_mb: float = Field(100.0, gt=0, description="MiB of one uploaded file")
    batch_max_stored_mb: float = Field(
        1024.0, gt=0, description="MiB of all files of one tenant, or of one key without a tenant"
    )
    batch_keep_days: float = Field(
        30.0, gt=0, description="days after which files, and batches that have ended, are deleted"
    )


def _reached(value: str | None) -> str | None:
    if value is not None and not _REACHED.fullmatch(value):
        raise ValueError(f"{value!r} should be ip:port, as a Gateway names endpoints")
    return value


_REACHED = re.compile(r"(\d{1,3}(\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


class EndpointPickerSettings(Settings):
    """Choosing for a Gateway which router gets a request, and with it the workers (docs/gateway.md)."""

    endpoint_picker_listen: str | None = Field(
        None,
        description="gRPC address at which a Gateway asks where its requests should go (Envoy's ext_proc, as the "
        "Endpoint Picker Protocol of the Gateway API Inference Extension says); off if unset",
    )
    endpoint_picker_address: Annotated[Address | None, AfterValidator(_reached)] = Field(
        None, description="ip:port at which the Gateway reaches REST of this router; --http-listen if unset"
    )
    endpoint_picker_replicas: Addresses = Field(
        (),
        description="REST of all replicas of this router, which may be named, too: ip:port, dns:///name:port or "
        "k8s:///ns/service:port; this one alone if unset",
    )
    endpoint_picker_key_file: str | None = Field(
        None,
        description="secrets of all replicas, one in a line: the first signs what is chosen for a request, and the "
        "router that gets the request checks it by any of them; read again when it changes; this router's own, which "
        "changes with each start, if unset",
    )
    endpoint_picker_tls: Literal["none", "self-signed", "router"] = Field(
        "none",
        description="that port speaks plain text, TLS with a certificate of its own making (a Gateway then must not "
        "check it), or TLS with --tls-cert",
    )


class ResponseSettings(Settings):
    """Responses that are stored (docs/responses.md)."""

    response_file: str | None = Field(
        None,
        description="SQLite file of responses, made if it is not there: /v1/responses takes store and "
        "previous_response_id; unset: nothing is stored",
    )
    response_keep_hours: float = Field(
        720.0, gt=0, description="hours after which a conversation that was not continued is deleted"
    )
    response_max_mb: float = Field(
        1024.0, gt=0, description="MiB of all stored responses; the conversations used least recently make room"
    )
    response_max_tenant_mb: float = Field(
        256.0, gt=0, description="MiB of those of one tenant, or of one key without a tenant, likewise"
    )


class RouterSettings(
    PolicySettings,
    LimitSettings,
    WebSettings,
    BatchSettings,
    EndpointPickerSettings,
    ResponseSettings,
    ObserveSettings,
    TlsSettings,
    HealthSettings,
    LogSettings,
):
    """`baton router`. With --tls-cert and --tls-key both of its ports speak TLS."""

    prefill: Addresses = Field((), description="prefill workers: host:port, dns:///name:port or k8s:///ns/service:port")
    decode: Addresses = Field((), description="decode workers, spelled likewise (a worker of both roles in both)")
    http_listen: str = Field(
        "127.0.0.1:8000", description="REST address; port 0 takes a free one; unix:/PATH is a unix socket"
    )
    grpc_listen: str = Field("127.0.0.1:50051", description="gRPC address, spelled likewise")
    processes: int = Field(
        1,
        ge=1,
        le=MAX_PROCESSES,
        description="router processes that share both ports (Linux only); limits hold for all of them together",
    )
    tls_client_ca: str | None = Field(
        None, description="CA (PEM) of clients' certificates; --tls-ca's are taken, too; clients need none if unset"
    )
    api_keys_file: str | None = Field(
        None,
        description="file of API keys, of which a client needs one; read again when it changes; all may if unset",
    )
    slo_ttft_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_TARGET_MS,
        description="milliseconds to the first token that a request should take, if neither it nor the limits file "
        "says so; none if unset",
    )
    slo_tpot_ms: float | None = Field(
        None, gt=0, le=MAX_TARGET_MS, description="milliseconds from one token to the next, likewise"
    )
    drain_timeout: float = Field(30.0, ge=0, description="seconds that SIGTERM waits for answers to end")
    request_timeout: float = Field(
        600.0, gt=0, description="deadline in seconds of a request that brings none, and the most that one may ask for"
    )
    max_requests: Positive = Field(
        1024, description="requests in flight, each choice of an answer counted; more are refused with a delay"
    )
    max_requests_per_key: Positive | None = Field(
        None, description="those of one API key; half of --max-requests if unset"
    )
    max_request_mb: float | None = Field(
        None, gt=0, description="MiB of one request's body; from the model's context if unset, over gRPC at most 4"
    )
    max_buffered_mb: float = Field(
        256.0,
        gt=0,
        description="MiB of the bodies of all requests in flight, and of answers that are kept until they are whole",
    )
    max_answer_tokens: Positive | None = Field(
        None,
        description="tokens of all answers to one request: max_tokens, times n (best_of) and prompts, times 1 + "
        "logprobs / 4 rounded up, or 1 + logprobs in answers that are kept until they are whole; prompt tokens whose "
        "logprobs are asked for count likewise. A request that asks for more is refused, one without max_tokens ends "
        "there. If unset, what one answer may need in the model's context, and 2^20 at least",
    )
    max_retain: float = Field(
        3600.0, ge=0, description="seconds for which a request may have its prompt's KV retained; 0: not at all"
    )
    max_connections: Positive = Field(1024, description="connections of clients, of REST and of gRPC each")
    receive_timeout: float = Field(
        30.0,
        gt=0,
        description="seconds that a client may take for its TLS handshake, for the head of a request, and for its body",
    )
    control_tokens: bool = Field(
        False,
        description="control tokens (such as <|im_end|>) in chat messages are control tokens, not text: clients may "
        "then begin and end turns in a message",
    )
    trust_request_chat_template: bool = Field(
        False,
        description="requests may bring a chat template of their own, which is run in a sandbox, within limits: it "
        "writes any control tokens that its client wants",
    )
    also_reasoning: bool = Field(
        False,
        description="messages and deltas of chat answers have their reasoning_content under the name reasoning, too",
    )
    generic_tools: bool = Field(
        True,
        description="tell models whose chat template has no form for tools of them in words, and read calls from their "
        "text; if not, such a request is refused",
    )
    worker_wait: float = Field(
        0.0, ge=0, description="seconds that a request waits while there is no worker (a fleet scaled to zero)"
    )
