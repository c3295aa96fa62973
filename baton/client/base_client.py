"""What the client and the asyncio client have in common: the connection, and all that does not wait for an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, Unpack

import grpc

from baton.client.messages import Tool
from baton.client.requests import (
    Messages,
    call_hints,
    chat_messages,
    choices_message,
    retain_message,
    sampling_message,
    sampling_options,
    targets_message,
    template_options,
    tool_choice_message,
    tool_messages,
)
from common.cache_hints import Retain
from common.choices import AnswerOptions
from common.errors import ConfigError
from common.grpc.options import CLIENT_CHANNEL_OPTIONS
from common.grpc.transport import channel_credentials, name_options
from common.targets import LatencyTargets
from common.tls import TlsFiles
from protos.baton.v1 import inference_pb2

AnswerT = TypeVar("AnswerT")
Metadata = tuple[tuple[str, str], ...]


class BaseClient(ABC, Generic[AnswerT]):
    """`router` is host:port. `timeout` is each request's deadline in seconds; the router's own limit if None.

    TLS is spoken with `tls`, or if any of the files is given: `tls_ca` is whom to trust (the public CAs if None),
    `tls_cert` and `tls_key` what to show to a router that asks for it, `tls_server_name` the name in the router's
    certificate if that is not the host of `router`. Raises `ConfigError` and `StartupError` for files of no use.
    """

    def __init__(
        self,
        router: str = "127.0.0.1:50051",
        *,
        timeout: float | None = None,
        api_key: str | None = None,
        tls: bool = False,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_server_name: str | None = None,
    ) -> None:
        self._router = router
        self._timeout = timeout
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError("api_key", "is of printable ASCII without spaces")
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        options = [*CLIENT_CHANNEL_OPTIONS, *name_options(tls_server_name)]
        if tls or tls_ca is not None or tls_cert is not None or tls_key is not None:
            self._connect(channel_credentials(TlsFiles(tls_cert, tls_key, tls_ca)), options)
        elif tls_server_name is not None:
            raise ConfigError("tls_server_name", "is for TLS: tls or tls_ca is missing")
        else:
            self._connect(None, options)

    @abstractmethod
    def _connect(self, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, Any]]) -> None:
        """Makes the channel to `self._router`, in plain text if there are no credentials."""

    @abstractmethod
    def _ask_chat(self, request: inference_pb2.ChatRequest, hints: Metadata) -> AnswerT: ...

    @abstractmethod
    def _ask_generate(self, request: inference_pb2.GenerateRequest, hints: Metadata) -> AnswerT: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        add_special_tokens: bool = True,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        retain: Retain | None = None,
        priority: int = 0,
        slo: LatencyTargets | None = None,
        slo_class: str = "",
        session: str = "",
        explain: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> AnswerT:
        """Continues a prompt, given as text or as token ids. `options` are sampling parameters, and those of
        `common.choices`: with `n=3` the answer has three `results()`, and chunks tell them apart by `index`.

        `slo` are latency targets, and `slo_class` is a class of them that the router knows. Requests of one `session`
        go to one worker, if the router's policy minds sessions. With `explain` the result's `report.routing` says why
        the request went where it went."""
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            model=model,
            prompt=prompt if isinstance(prompt, str) else "",
            prompt_token_ids=() if isinstance(prompt, str) else prompt,
            add_special_tokens=add_special_tokens,
            sampling_params=sampling_message(sampling_options(options)),
            choices=choices_message(options),
            cache_salt=cache_salt,
            retain=retain_message(retain),
            priority=priority,
            slo=targets_message(slo),
            slo_class=slo_class,
        )
        return self._ask_generate(request, call_hints(session, explain=explain))

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        allowed_tools: Sequence[str] = (),
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        chat_template: str = "",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        retain: Retain | None = None,
        priority: int = 0,
        slo: LatencyTargets | None = None,
        slo_class: str = "",
        session: str = "",
        explain: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> AnswerT:
        """Answers a conversation: (role, content) pairs and messages, or one question.

        `tool_choice`: auto, none, required, or the name of the tool that has to be called. `allowed_tools`: those that
        may be called, if these are not all that the model is told of. With `continue_final_message` the answer goes on
        with the last message, which is the assistant's. `chat_template`: in place of the model's, where the router
        allows it. `slo`, `session`, `explain` and `options` as in `generate`."""
        request = inference_pb2.ChatRequest(
            request_id=request_id,
            model=model,
            messages=chat_messages(messages),
            tools=tool_messages(tools),
            tool_choice=tool_choice_message(tool_choice, allowed_tools),
            parallel_tool_calls=parallel_tool_calls,
            chat_template_kwargs=template_options(chat_template_kwargs),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            sampling_params=sampling_message(sampling_options(options)),
            choices=choices_message(options),
            cache_salt=cache_salt,
            retain=retain_message(retain),
            priority=priority,
            slo=targets_message(slo),
            slo_class=slo_class,
        )
        return self._ask_chat(request, call_hints(session, explain=explain))
