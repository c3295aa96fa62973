"""Settings of the commands that talk to a running stack."""

from __future__ import annotations

from pydantic import Field

from common.choices import MAX_BEST_OF, MAX_N
from common.config.base import Settings, TlsSettings


class ClientSettings(TlsSettings):
    """What every command that talks to a running stack needs."""

    router: str = Field("127.0.0.1:50051", description="the router's gRPC address")
    tls: bool = Field(False, description="speak TLS and trust the public CAs; --tls-ca trusts its own instead")
    api_key: str | None = Field(None, description="API key; better given as variable: command lines are seen by others")
    timeout: float | None = Field(
        None, gt=0, description="seconds until the request is given up; the router's limit if unset"
    )


class ChatSettings(ClientSettings):
    """`baton chat`, without the sampling parameters."""

    system: str | None = Field(None, description="system message that the conversation starts with")
    timeline: bool = Field(False, description="print where each answer's time went")


class ChoiceSettings(Settings):
    """`common.choices.Choices`. Unset is the server's to decide, and the server says which values are good."""

    n: int | None = Field(None, description=f"answers to the prompt, at most {MAX_N}; 1 if unset")
    best_of: int | None = Field(
        None, description=f"answers computed, at most {MAX_BEST_OF}: the n with the highest logprob per token are shown"
    )
    use_beam_search: bool | None = Field(
        None, description="the answers are the n best sequences of a beam search of width n"
    )
    length_penalty: float | None = Field(
        None, description="of a beam search: above 0, longer sequences are preferred; 1 if unset"
    )
    early_stopping: bool | None = Field(
        None, description="a beam search ends as soon as n sequences have, and not when no other is likely to be better"
    )


class GenerateSettings(ChoiceSettings, ClientSettings):
    """`baton generate`, without the sampling parameters."""

    timeline: bool = Field(False, description="print where the answer's time went, to standard error")
