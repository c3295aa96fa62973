"""Envoy's messages of `ext_proc`, as an endpoint picker reads and writes them. Names of headers and metadata are those
of the Endpoint Picker Protocol 1.0 (Gateway API Inference Extension, proposal 004).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import grpc
import msgspec
from google.protobuf import struct_pb2

from common.errors import BatonError, InvalidArgumentError
from protos.envoy import external_processor_pb2 as pb
from router.api.endpoint_picker.picker import Choice
from router.api.rest.http.error_body import anthropic_body, error_body, has_anthropic_errors
from router.api.rest.http.errors import error_headers, request_id_headers
from router.limits.clients import PICK_HEADER, REQUEST_ID_HEADER
from router.running.request import new_request_id

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
LOAD_BALANCING = "envoy.lb"  # namespace of metadata
SUBSET_HINT, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
CHUNK_BYTES = 60_000  # of a body on its way back: some proxies take less than 64 KiB in one message
MAX_SUBSET = 4096  # addresses that are looked at
MAX_HEADERS = 1024


class MessageError(InvalidArgumentError):
    """A message of the proxy is none of Envoy's, or comes out of order. The stream ends with it."""


def headers_of(given: pb.HttpHeaders) -> dict[str, str]:
    """By names in lower case. Of a header that came several times, the values one after the other. Raises
    `MessageError`."""
    if len(given.headers.headers) > MAX_HEADERS:
        raise MessageError("request_headers", f"are more than {MAX_HEADERS}")
    found: defaultdict[str, list[str]] = defaultdict(list)
    for one in given.headers.headers:
        found[one.key.lower()].append(one.raw_value.decode("latin-1") if one.raw_value else one.value)
    return {name: ", ".join(values) for name, values in found.items()}


def subset_of(metadata: pb.Metadata) -> frozenset[str] | None:
    """The endpoints that a proxy allows, as a list or as text with commas; None if it allows all."""
    fields = metadata.filter_metadata[SUBSET_HINT].fields if SUBSET_HINT in metadata.filter_metadata else {}
    return frozenset(_addresses(fields[SUBSET])) if SUBSET in fields else None


def _addresses(value: struct_pb2.Value) -> Iterator[str]:
    values = value.list_value.values[:MAX_SUBSET] if value.WhichOneof("kind") == "list_value" else (value,)
    for one in values:
        for address in one.string_value.split(",", MAX_SUBSET)[:MAX_SUBSET]:
            if stripped := address.strip():
                yield stripped


def served_by(metadata: pb.Metadata) -> str:
    """The endpoint that the response came from; empty if the proxy does not say it."""
    if LOAD_BALANCING not in metadata.filter_metadata:
        return ""
    fields = metadata.filter_metadata[LOAD_BALANCING].fields
    return fields[SERVED].string_value if SERVED in fields else ""


def chosen(choice: Choice) -> pb.ProcessingResponse:
    """The answer to a request's headers."""
    destination = ",".join(choice.addresses)
    mutation = _mutation({DESTINATION: destination, **choice.headers})
    if PICK_HEADER not in choice.headers:
        mutation.remove_headers.append(PICK_HEADER)
    response = pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation, clear_route_cache=True))
    )
    response.dynamic_metadata.get_or_create_struct(LOAD_BALANCING)[DESTINATION] = destination
    return response


def refused(error: BatonError, headers: Mapping[str, str], path: str) -> pb.ProcessingResponse:
    """Ends the request with `error`, in the form of the interface at `path`."""
    told = error_headers(error) | {"content-type": "application/json"}
    request_id = headers.get(REQUEST_ID_HEADER, "")
    if has_anthropic_errors(path):
        request_id = request_id or new_request_id()
        body = anthropic_body(error.message, error.http_status, request_id)
    else:
        body = error_body(error)
    if request_id:
        told |= request_id_headers(request_id, path)
    immediate = pb.ImmediateResponse(
        status=pb.HttpStatus(code=error.http_status),
        headers=_mutation({name.lower(): value for name, value in told.items()}),
        body=msgspec.json.encode(body),
        details=f"baton_endpoint_picker_{error.grpc_code.lower()}",
    )
    if headers.get("content-type", "").startswith("application/grpc"):
        immediate.grpc_status.status = grpc.StatusCode[error.grpc_code].value[0]
    return pb.ProcessingResponse(immediate_response=immediate)


def _mutation(headers: Mapping[str, str]) -> pb.HeaderMutation:
    """Sets headers, in place of what a client may have sent by these names."""
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")),
                append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in headers.items()
        ]
    )


def request_body(data: bytes, *, is_end: bool) -> Iterator[pb.ProcessingResponse]:
    """A request's whole body on its way back. `is_end`: nothing follows, so there is a last piece even of no bytes."""
    for start in range(0, max(len(data), int(is_end)), CHUNK_BYTES):
        is_last = is_end and start + CHUNK_BYTES >= len(data)
        yield pb.ProcessingResponse(request_body=_streamed(data[start : start + CHUNK_BYTES], is_last=is_last))


def response_body(body: pb.HttpBody) -> pb.ProcessingResponse:
    """A piece of a response's body on its way back."""
    return pb.ProcessingResponse(response_body=_streamed(body.body, is_last=body.end_of_stream))


def _streamed(data: bytes, *, is_last: bool) -> pb.BodyResponse:
    piece = pb.StreamedBodyResponse(body=data, end_of_stream=is_last)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece)))
