"""From what a client wrote to a request that workers take: validated, rendered, tokenized."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from common.cache_hints import Retain, check_num_tokens, check_retain, check_retain_s
from common.choices import Choices
from common.errors import InvalidArgumentError
from common.grpc_options import SAMPLING_BYTES
from common.guided import Guided, check_grammar
from common.sampling import (
    MAX_BANNED_SEQUENCES,
    MAX_BANNED_TOKENS,
    MAX_LOGPROBS,
    FieldName,
    Given,
    SamplingParams,
    TokenSequence,
    resolve,
)
from common.validation import (
    check_cache_salt,
    check_messages,
    check_model,
    check_priority,
    check_prompt,
    check_request_id,
    check_text,
    check_token_count,
    check_token_ids,
)
from protos.baton.v1 import embed_pb2, types_pb2
from protos.messages import message_of
from router.fleet.served_model import ServedModel
from router.serving.answer_parts import Reading
from router.serving.beams import MAX_BLOCKS, beam_params, beam_sampling, most_tokens
from router.serving.clients import ApiClient, CallHints
from router.serving.conversation import Conversation, texts_of
from router.serving.embedding import MAX_DIMENSIONS, MAX_INPUTS, EmbedRequest
from router.serving.fair_queue import name_of
from router.serving.forced_calls import forced_guide, forced_reading
from router.serving.prefix_hints import PrefixHint
from router.serving.request import GenerationRequest, Prompt, new_request_id
from router.serving.threads import SHORT, TextThreads
from router.serving.tokenizer import Tokenizer

MAX_ANSWER_TOKENS = 2**20  # unless one answer as long as the context is more
LOGPROBS_OF_A_TOKEN = 4  # so many are as much work for the router as one more token: they only have to be written out
MAX_GOOD_GRAMMARS = 64
ONE_ANSWER = Choices()
MESSAGE_CHARS = 64  # rendering a message takes about as long as tokenizing this many characters


class Preparation:
    """Shared by both interfaces of a router. Counts and sizes are checked before any work is done on a text, and long
    texts are worked on in `threads`, one of a request at a time. Grammars are parsed in `grammar_threads`: a costly one
    takes half a second, and should hold up no text."""

    def __init__(
        self,
        *,
        request_timeout_s: float,
        control_tokens: bool,
        threads: TextThreads,
        grammar_threads: TextThreads | None = None,
        max_answer_tokens: int | None = None,
        max_retain_s: float = math.inf,
    ) -> None:
        """`control_tokens`: whether text of control tokens in messages becomes control tokens. `max_answer_tokens`: of
        all answers to one body, and of prompts whose logprobs are asked for, each four logprobs beside a token counted
        as one more; None: as many as one answer may need, and MAX_ANSWER_TOKENS at least. `max_retain_s`: for so long
        a request may have its prompt's KV retained."""
        self._request_timeout_s = request_timeout_s
        self._max_answer_tokens = max_answer_tokens
        self._max_retain_s = max_retain_s
        self._control_tokens = control_tokens
        self._threads = threads
        self._grammar_threads = grammar_threads or threads
        self._good_grammars: dict[Guided, None] = {}  # the last ones

    async def prompts(
        self, model: ServedModel, prompts: Sequence[str | list[int]], field: str, *, add_special_tokens: bool = True
    ) -> list[Prompt]:
        """Each is a text or token ids. The first that is wrong or too long ends it: none is tokenized after it."""
        size = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text(prompt, model.limits, field)
                size += len(prompt)
            else:
                check_prompt(prompt, model.limits, field)
        made = []
        for prompt in prompts:
            if not isinstance(prompt, str):
                made.append(Prompt(prompt, field))
                continue
            encode = partial(model.tokenizer.encode, prompt, add_special_tokens=add_special_tokens)
            token_ids = await self._threads.run(size, encode)
            check_prompt(token_ids, model.limits, field)
            made.append(Prompt(token_ids, field))
        return made

    async def chat_prompt(self, model: ServedModel, conversation: Conversation, field: str = "messages") -> Prompt:
        """The template writes special tokens out itself, so none are added. `field`: the client's name for messages."""
        messages, tools = conversation.messages, conversation.tools
        check_messages(len(messages), model.limits, field)
        total = "".join(texts_of([list(messages), dict(conversation.template_options)]))
        if total:
            check_text(total, model.limits, field)
        described = "".join(texts_of([tool.as_json() for tool in tools.tools]))
        if described:
            check_text(described, model.limits, "tools")
        reader, guided = model.tokenizer.reader, None
        if tools.shown and not tools.is_forced:
            if reader is None or not reader.knows_calls:
                raise InvalidArgumentError("tools", "the shape in which this model writes calls of tools is not known")
            guided = reader.strict.guide(tools)
        encode = partial(
            model.tokenizer.encode_chat,
            conversation,
            control_tokens=self._control_tokens,
            check=lambda text: check_text(text, model.limits, field),
        )
        size = len(total) + len(described) + MESSAGE_CHARS * len(messages)
        try:
            token_ids, text = await self._threads.run(size, encode)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(field if error.field == "messages" else error.field, error.reason) from error
        check_prompt(token_ids, model.limits, field)
        if tools.is_forced:
            return Prompt(token_ids, field, forced_reading(tools), forced_guide(tools))
        return Prompt(token_ids, field, None if reader is None else reader.reading(text, tools), guided)

    async def check_guided(self, params: SamplingParams, name: FieldName) -> None:
        """Parses the grammar of guided text. Raises `InvalidArgumentError`. A worker may refuse it still, for a token
        that its model lacks, say."""
        guided = params.guided
        if guided is None or guided in self._good_grammars:
            return
        try:
            await self._grammar_threads.run(SHORT + 1, partial(check_grammar, guided))
        except ValueError as error:
            raise InvalidArgumentError(name("guided"), str(error)) from error
        self._good_grammars[guided] = None
        while len(self._good_grammars) > MAX_GOOD_GRAMMARS:
            del self._good_grammars[next(iter(self._good_grammars))]

    async def tokenize(self, model: ServedModel, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        if text:
            check_text(text, model.limits, field)
        encode = partial(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._threads.run(len(text), encode)

    async def detokenize(
        self, model: ServedModel, token_ids: Sequence[int], field: str, *, skip_special_tokens: bool
    ) -> str:
        check_token_count(len(token_ids), model.limits, field)
        check_token_ids(token_ids, model.limits, field)
        decode = partial(model.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._threads.run(len(token_ids), decode)

    def request(
        self,
        model: ServedModel,
        prompt: Prompt,
        sampling: Given,
        *,
        model_name: str = "",
        request_id: str = "",
        cache_salt: str = "",
        retain: Retain | None = None,
        priority: int = 0,
        arrived_at: float,
        timeout_s: float | None = None,
        default_max_tokens: int | None = None,
        name: FieldName = str,
        client: ApiClient | None = None,
        hints: CallHints | None = None,
        choices: Choices = ONE_ANSWER,
        choices_name: FieldName = str,
        num_prompts: int = 1,
    ) -> GenerationRequest:
        """Validates all of it. `timeout_s` is the client's own deadline, counted from `arrived_at` and no longer than
        the router's; `client` is whose key came with the request, `hints` what came beside it; `choices` are asked for
        to each of `num_prompts` in the same body, and `choices_name` says how the client calls their fields."""
        check_model(model_name, model.limits)
        if request_id:
            check_request_id(request_id)
        check_cache_salt(cache_salt)
        check_priority(priority)
        if retain is not None:
            check_retain(retain, self._max_retain_s)
        if prompt.guided is not None:
            sampling, name = _with_calls(sampling, prompt.guided, name)
        if choices.use_beam_search:
            sampling = beam_sampling(sampling, name)
        num_answers = num_prompts * choices.num_candidates
        num_logprobs = _num_logprobs(sampling, "logprobs")
        counted = num_answers * _weight(num_logprobs)  # for each of max_tokens
        allowed = self._max_answer_tokens or max(MAX_ANSWER_TOKENS, model.limits.max_model_len * _weight(MAX_LOGPROBS))
        num_of_prompt = 0
        if sampling.get("prompt_logprobs") is not None:
            num_of_prompt = num_answers * len(prompt.token_ids) * _weight(_num_logprobs(sampling, "prompt_logprobs"))
        if num_of_prompt + counted > allowed and num_of_prompt:
            raise InvalidArgumentError(
                name("prompt_logprobs"),
                f"those of {len(prompt.token_ids)} prompt tokens for {num_answers} answers, and one token of each, "
                f"count as {num_of_prompt + counted}: this router allows one request {allowed}",
            )
        most = max(1, (allowed - num_of_prompt) // counted)
        if choices.use_beam_search:
            most_of_search = most_tokens(num_answers, len(prompt.token_ids), model.block_size)
            most = max(1, min(most, most_of_search))
        params = resolve(
            sampling,
            model.limits,
            num_prompt_tokens=len(prompt.token_ids),
            draw_seed=lambda: secrets.randbits(63),
            default_max_tokens=most if default_max_tokens is None else min(default_max_tokens, most),
            name=name,
        )
        if params.max_tokens * counted + num_of_prompt > allowed:
            is_for_min = "max_tokens" not in sampling and params.min_tokens > most
            of_prompt = f", and its prompt's as {num_of_prompt}" if num_of_prompt else ""
            raise InvalidArgumentError(
                name("min_tokens" if is_for_min else "max_tokens"),
                f"{params.max_tokens} tokens of {num_answers} answers with {num_logprobs} logprobs count as "
                f"{params.max_tokens * counted}{of_prompt}: this router allows one request {allowed}",
            )
        if choices.use_beam_search and params.max_tokens > most_of_search:
            raise InvalidArgumentError(
                name("max_tokens"),
                f"each of {params.max_tokens} tokens of {num_answers} beams is a request with the whole prompt: after "
                f"{len(prompt.token_ids)} tokens {most_of_search} tokens are the most, so that all requests name "
                f"{MAX_BLOCKS} of its KV blocks at most",
            )
        _check_size(params, name)
        if params.bad_words:
            params = replace(params, bad_words_ids=_bad_words_ids(model, params, name))
            _check_size(params, name, "bad_words")
        return GenerationRequest(
            request_id=request_id or new_request_id(),
            model=model,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            cache_salt=client.cache_salt(cache_salt) if client else cache_salt,
            retain=retain,
            priority=priority,
            arrived_at=arrived_at,
            deadline=arrived_at + min(self._request_timeout_s, math.inf if timeout_s is None else timeout_s),
            client=client.name if client else "",
            tenant=client.tenant if client else "",
            session=_session(client, hints),
            explain=hints is not None and hints.explain,
            prompt_field=prompt.field,
            reading=prompt.reading if prompt.guided is not None else _reading(prompt.reading, params.guided),
            sampling_field=name,
            beams=beam_params(choices, params, model.eos_token_ids, choices_name) if choices.use_beam_search else None,
        )

    def prefix_hint(
        self,
        model: ServedModel,
        prompt: Prompt,
        *,
        num_tokens: int = 0,
        cache_salt: str = "",
        seconds: float | None = None,
        client: ApiClient | None = None,
        hints: CallHints | None = None,
    ) -> PrefixHint:
        """Of the prompt's first `num_tokens`; 0: of all. `seconds`: to retain them for, if that is what is asked; 0: no
        longer."""
        check_cache_salt(cache_salt)
        check_num_tokens(num_tokens, "num_tokens")
        if seconds:
            check_retain_s(seconds, self._max_retain_s, "seconds")
        return PrefixHint(
            model=model,
            token_ids=prompt.token_ids[: num_tokens or len(prompt.token_ids)],
            cache_salt=client.cache_salt(cache_salt) if client else cache_salt,
            session=_session(client, hints),
            seconds=seconds or 0.0,
            tenant=name_of(client.name, client.tenant) if client else name_of("", ""),
            charged=(client.name, client.tenant) if client else ("", ""),
        )

    def embed_request(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        *,
        request_id: str = "",
        pooling: embed_pb2.Pooling.ValueType = embed_pb2.POOLING_LAST,
        dimensions: int = 0,
        normalize: bool = True,
        cache_salt: str = "",
        arrived_at: float,
        timeout_s: float | None = None,
        client: ApiClient | None = None,
    ) -> EmbedRequest:
        """As `request`, for the embeddings of `prompts`. `dimensions` 0: all."""
        if request_id:
            check_request_id(request_id)
        check_cache_salt(cache_salt)
        if not 0 <= dimensions <= MAX_DIMENSIONS:
            raise InvalidArgumentError("dimensions", f"must be in [1, {MAX_DIMENSIONS}], not {dimensions}")
        return EmbedRequest(
            request_id=request_id or new_request_id(),
            model=model,
            prompts=prompts,
            pooling=pooling,
            dimensions=dimensions,
            normalize=normalize,
            cache_salt=client.cache_salt(cache_salt) if client else cache_salt,
            deadline=arrived_at + min(self._request_timeout_s, math.inf if timeout_s is None else timeout_s),
            client=client.name if client else "",
            tenant=client.tenant if client else "",
        )


def _session(client: ApiClient | None, hints: CallHints | None) -> str:
    """Of different tenants never the same one."""
    return json.dumps([client.tenant if client else "", hints.session]) if hints and hints.session else ""


def check_num_inputs(num_inputs: int, field: str) -> None:
    """Of texts to be embedded."""
    if not 1 <= num_inputs <= MAX_INPUTS:
        raise InvalidArgumentError(field, f"must have 1 to {MAX_INPUTS} entries, not {num_inputs}")


def _reading(reading: Reading | None, guided: Guided | None) -> Reading | None:
    """Of an answer whose form the client gives: reasoning that the prompt began has no room in it, and neither have
    calls if it is JSON or a choice."""
    if reading is None or guided is None:
        return reading
    if guided.json_schema or guided.json_object or guided.choice:
        return None
    return replace(reading, parser=reading.fresh_parser)


def _num_logprobs(sampling: Given, name: str) -> int:
    """What the client asked for, whether it may or not."""
    given = sampling.get(name)
    return min(max(given, 0), MAX_LOGPROBS) if isinstance(given, int) else 0


def _weight(num_logprobs: int) -> int:
    """What one token counts, with so many logprobs beside it."""
    return 1 + math.ceil(num_logprobs / LOGPROBS_OF_A_TOKEN)


def _bad_words_ids(model: ServedModel, params: SamplingParams, name: FieldName) -> tuple[TokenSequence, ...]:
    """Those that the client gave, and each bad word as the model writes it, with a space before and without."""
    try:
        sequences = tuple(dict.fromkeys((*params.bad_words_ids, *_written(model.tokenizer, params.bad_words))))
    except ValueError as error:
        raise InvalidArgumentError(name("bad_words"), str(error)) from None
    if len(sequences) > MAX_BANNED_SEQUENCES:
        raise InvalidArgumentError(
            name("bad_words"),
            f"with bad_words_ids these are {len(sequences)} sequences of tokens: {MAX_BANNED_SEQUENCES} are the most",
        )
    return sequences


@lru_cache(maxsize=8)  # all prompts of a body have the same words
def _written(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
    """Raises `ValueError` at the first word that is too long."""
    sequences = []
    for word in words:
        for text in (word, f" {word}"):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) > MAX_BANNED_TOKENS:
                raise ValueError(f"{word[:40]!r} has {len(token_ids)} tokens: {MAX_BANNED_TOKENS} are the most")
            sequences.append(TokenSequence(token_ids=tuple(token_ids)))
    return tuple(sequences)


def _check_size(params: SamplingParams, name: FieldName, field: str = "") -> None:
    """Workers take no larger parameters. `field`: what has just made them larger; else the largest one is to blame."""
    if not (params.bad_words or params.bad_words_ids or params.guided):  # all others together are never so large
        return
    message = message_of(params, types_pb2.SamplingParams)
    if message.ByteSize() <= SAMPLING_BYTES:
        return
    field = field or max((one.name for one, _ in message.ListFields()), key=partial(_size, message))
    raise InvalidArgumentError(
        name(field),
        f"is too large: the sampling parameters take {message.ByteSize()} bytes on their way to a worker, and "
        f"{SAMPLING_BYTES} are the most",
    )


def _size(message: types_pb2.SamplingParams, field: str) -> int:
    others = types_pb2.SamplingParams()
    others.CopyFrom(message)
    others.ClearField(field)  # type: ignore[arg-type]
    return message.ByteSize() - others.ByteSize()


def _with_calls(sampling: Given, guided: Guided, name: FieldName) -> tuple[Given, FieldName]:
    """Parameters of an answer whose form the tools give. What is wrong with its form is wrong with the tools."""
    if sampling.get("guided") is not None:
        raise InvalidArgumentError(
            name("guided"), "cannot be together with a tool_choice that forces a call, or with strict tools"
        )
    return {**sampling, "guided": guided}, lambda given: "tools" if given == "guided" else name(given)
