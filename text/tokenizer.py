"""The served model's tokenizer, made from the files that a worker sends.

The `tokenizers` library does the work; the transformers library is imported only for a model that has no
`tokenizer.json`, or whose answers have parts (`answer_parser`), since it takes seconds to load.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as RustTokenizer

from common.chat_templates import DEFAULT, FOLDER, TOOL_USE, TemplateSource, compile_error, template_sources
from common.errors import InvalidArgumentError, UnavailableError
from text.chat_template import BaseTemplate, ChatTemplate
from text.control_tokens import ControlTokens, Hidden
from text.conversation import Conversation, Tools, texts_of
from text.response_templates import Template, generic_template, response_template

if TYPE_CHECKING:
    from text.answer_parser import ModelAnswers

log = logging.getLogger(__name__)

DEFAULT_CLASS = "PreTrainedTokenizerFast"
SHORT_DECODE = 256  # tokens; decoded in less than a millisecond

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(slots=True, frozen=True)
class ChatForm:
    """How conversations are written, and how their answers are read."""

    template: BaseTemplate | None
    answers: ModelAnswers | None = None  # None if answers are nothing but text
    error: str = ""  # why there is no template, if there should be one

    def needs_generic_tools(self, conversation: Conversation) -> bool:
        """Whether this form has no words for the conversation's tools, calls or results."""
        tools = conversation.tools
        if self.template is None:
            return False
        if not tools.shown:
            return not self.template.knows_calls and conversation.has_calls
        if tools.is_forced:  # such an answer is read without knowing the model's own calls
            return not self.template.knows_tools
        return not (self.template.knows_tools and self.answers is not None and self.answers.knows_calls)

    @property
    def always_asks_answer(self) -> bool:
        """Whether the template writes the same whether or not an answer is asked for."""
        return self.template is not None and "add_generation_prompt" not in self.template.variables


@dataclass(slots=True, frozen=True)
class WholeText:
    """The text of a token that stands for whole characters."""

    added: str  # behind other text
    alone: str  # if nothing is before it


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(
        self,
        rust: RustTokenizer,
        chat_template: BaseTemplate | None,
        answers: ModelAnswers | None = None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        error: str = "",
        tool_form: ChatForm | None = None,
        response_template: object = None,
        class_name: str = DEFAULT_CLASS,
    ) -> None:
        """`answers`: of answers that have parts. `special_tokens` by their roles: `bos_token`, `eos_token`, ...
        `error`: why there is no template, if there should be one. `tool_form`: of conversations with tools, if it is
        another one. `response_template`: the tokenizer's own. `class_name`: of transformers' tokenizer for it."""
        self.rust = rust
        self.chat_template = chat_template
        self._form = ChatForm(chat_template, answers, error)
        self._tool_form = tool_form
        self._response_template = response_template
        self._class_name = class_name
        self.special_tokens = dict(special_tokens or {})
        rust.no_truncation()
        rust.no_padding()
        self.max_token_bytes = max((len(token.encode()) for token in rust.get_vocab(True)), default=1)
        definition = json.loads(rust.to_str())
        self._control = ControlTokens(definition)
        decoder = definition.get("decoder")
        self._byte_level = "ByteLevel" in json.dumps(decoder)
        self._byte_fallback = "ByteFallback" in json.dumps(decoder)
        self._joins_tokens = _joins_tokens(decoder)
        self._known_answers: dict[str, ModelAnswers] = {}  # by what they read, which is of a few kinds
        self._whole_texts: dict[int, WholeText | None] = {}
        self._special_ids = frozenset(
            token_id for token_id, token in rust.get_added_tokens_decoder().items() if token.special
        )

    def described(self) -> dict[str, str | None]:
        """Each special token's text, the chat template and the class in transformers, for programs that make prompts
        themselves."""
        template = None if self.chat_template is None else self.chat_template.source
        special = {role: self.special_tokens.get(role) for role in _SPECIAL_TOKENS}
        return {**special, "chat_template": template, "tokenizer_class": self._class_name}

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """The tokens as the vocabulary spells them."""
        return [self.rust.id_to_token(token_id) for token_id in token_ids]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, which is valid Unicode. Other threads run meanwhile: alone of the library's functions,
        those for batches let go of the interpreter."""
        ids: list[int] = self.rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_chat(
        self,
        conversation: Conversation,
        *,
        control_tokens: bool,
        check: Callable[[str], None],
        form: ChatForm | None = None,
    ) -> tuple[list[int], str]:
        """(token ids of the conversation as the model's template writes it, control tokens and all; its text). `form`:
        another one than the model's.

        If `control_tokens`, the text of a control token in a message becomes that token, as in transformers; else it
        stays text.
        `check` sees the prompt before it is tokenized. Raises `InvalidArgumentError` for `messages`, and for the
        conversation's `continued_field` if the template does not write the last message's text.
        """
        form = form or self.chat_form(conversation.tools)
        hidden = Hidden(_texts(conversation))
        if not control_tokens:
            conversation = self._hide(conversation, hidden)
        try:
            render = _render_continued if conversation.continues_last else _render
            text = render(form, conversation)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(error.field, hidden.shown(error.reason)) from error
        shown = hidden.shown(text)
        check(shown)
        if hidden or (not control_tokens and self._control.may_be_normalized_into):
            return self._control.encode(text, hidden), shown
        return self.encode(text, add_special_tokens=False), shown

    def _hide(self, conversation: Conversation, hidden: Hidden) -> Conversation:
        """Hides control tokens in all texts that a client wrote. Roles are left alone: they are checked to be one of a
        few words."""
        hide = self._control.hide
        messages = [
            {"role": message["role"], **hide({k: v for k, v in message.items() if k != "role"}, hidden)}
            for message in conversation.messages
        ]
        tools = conversation.tools
        if tools.tools:
            shown = [
                replace(tool, description=hide(tool.description, hidden), parameters=hide(tool.parameters, hidden))
                for tool in tools.tools
            ]
            tools = replace(tools, tools=tuple(shown))
        options = hide(conversation.template_options, hidden)
        if not hidden:  # most conversations are as they were
            return conversation
        return replace(conversation, messages=messages, tools=tools, template_options=options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) <= SHORT_DECODE:  # a batch costs more, and this is done for every token of an answer
            text: str = self.rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        else:
            text = self.rust.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        return text

    def has_text(self, token_id: int) -> bool:
        """False for a token that marks structure, and for an id with which a model pads its vocabulary."""
        return token_id not in self._special_ids and self.is_token(token_id)

    def is_token(self, token_id: int) -> bool:
        """False for an id with which a model pads its vocabulary."""
        return self.rust.id_to_token(token_id) is not None

    def whole_text(self, token_id: int) -> WholeText | None:
        """What the token adds to any text that does not end in the middle of a character, if that is known without
        looking at the text; None for a part of a character, and for a token that `has_text` denies."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            found = self._whole_text(token_id)
            if self.has_text(token_id):  # the table is no longer than the vocabulary
                self._whole_texts[token_id] = found
            return found

    def _whole_text(self, token_id: int) -> WholeText | None:
        if not self._joins_tokens or not self.has_text(token_id):
            return None
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(str(self.rust.id_to_token(token_id))):
            return None
        alone = self.decode([token_id])
        after = self.decode([token_id, token_id])[len(alone) :]  # some decoders drop the first space of a text
        return None if not after or "\ufffd" in after else WholeText(after, alone)

    def render_chat(self, conversation: Conversation) -> str:
        """The conversation as prompt text, special tokens written out.

        Raises `InvalidArgumentError` for `messages` if the model has no template, or its template refuses.
        """
        return _render(self.chat_form(conversation.tools), conversation)

    def chat_form(self, tools: Tools) -> ChatForm:
        return self._tool_form if tools.shown and self._tool_form is not None else self._form

    def form_of(self, template: BaseTemplate) -> ChatForm:
        """Of a template that is not the model's. Blocking: a first call may take a second."""
        read = response_template(self._response_template, template.source)
        return ChatForm(template, None if read is None else self._answers_by(read))

    def has_generic_answers(self, form: ChatForm) -> bool:
        return _key(self._generic(form)) in self._known_answers

    def generic_answers(self, form: ChatForm) -> ModelAnswers:
        """Of answers to conversations with generic tools. Blocking: a first call may take a second."""
        return self._answers_by(self._generic(form))

    def _generic(self, form: ChatForm) -> Template:
        source = "" if form.template is None else form.template.source
        return generic_template(response_template(self._response_template, source))

    def _answers_by(self, template: Template) -> ModelAnswers:
        if (made := self._known_answers.get(key := _key(template))) is None:
            made = self._known_answers[key] = _model_answers(template, self.rust)
        return made

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, even if that is only a part of a character."""
        token = self.rust.id_to_token(token_id)
        if token is None:  # models pad their vocabulary beyond the tokenizer's
            return b""
        if token_id in self._special_ids:
            return str(token).encode()
        if self._byte_level and all(char in _byte_of_char() for char in token):
            return bytes(_byte_of_char()[char] for char in token)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        if (whole := self.whole_text(token_id)) is not None:
            return whole.added.encode()  # with the space before it, which decoders drop at the beginning of a text
        return self.decode([token_id], skip_special_tokens=False).encode()


def _render(form: ChatForm, conversation: Conversation) -> str:
    if form.template is None:
        reason = form.error or "the served model has no chat template"
        raise InvalidArgumentError("messages", f"{reason}; send a prompt instead")
    return form.template.render(conversation)


def _render_continued(form: ChatForm, conversation: Conversation) -> str:
    """The prompt up to the end of the last message's text: nobody but the template knows where that is, so a mark that
    occurs nowhere else goes through it."""
    *earlier, last = conversation.messages
    content, mark = str(last["content"]), secrets.token_hex(16)
    marked = replace(conversation, messages=[*earlier, {**last, "content": f"{content}{mark} "}])
    try:
        text = _render(form, marked)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(error.field, error.reason.replace(mark, "")) from error
    before, found, after = text.rpartition(mark)
    if not found or mark in before:
        reason = "the chat template does not write the last message as it is"
        raise InvalidArgumentError(conversation.continued_field, reason)
    if not after.startswith(" ") and (trimmed := content.rstrip()):  # the template trims texts
        before = before[: len(before) - (len(content) - len(trimmed))]
    return before


def _key(template: Template) -> str:
    return json.dumps(template, sort_keys=True)


def _joins_tokens(decoder: object) -> bool:
    """Whether a text is the concatenation of its tokens' texts, except for characters that are split between tokens and
    a space at the very beginning. This holds for byte-level vocabularies, and for SentencePiece's in llama's form."""
    if not isinstance(decoder, dict):
        return False
    if decoder["type"] == "ByteLevel":
        return True
    steps = decoder.get("decoders") or []
    kinds = [step["type"] for step in steps]
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return False
    replaced, last = steps[0], steps[-1]
    stripped = (last["content"], last["start"], last["stop"]) if last["type"] == "Strip" else (" ", 0, 0)
    is_replaced = (replaced["pattern"], replaced["content"]) == ({"String": "\u2581"}, " ")
    return is_replaced and stripped in ((" ", 0, 0), (" ", 1, 0))


def _texts(conversation: Conversation) -> Iterator[str]:
    for tool in conversation.tools.tools:
        yield from texts_of(tool.as_json())
    yield from texts_of(list(conversation.messages))
    yield from texts_of(conversation.template_options)


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of BPE vocabularies: printable Latin-1 stands for itself, the rest is moved up to
    U+0100 and on, in order (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


def load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """`files` by bare name, as in a Hugging Face model directory. Blocking: takes up to a second.

    Raises `UnavailableError` with one line if they make no tokenizer.
    """
    if not files:
        raise UnavailableError("the worker has no tokenizer files")
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        sources = template_sources(files)
        special_tokens = _special_tokens(files, config)
        if "tokenizer.json" in files:
            rust = RustTokenizer.from_str(files["tokenizer.json"].decode())
        else:
            rust = _convert(files)
    except UnavailableError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception
        raise UnavailableError(f"the worker's tokenizer files cannot be loaded: {error}") from error
    own = config.get("response_template")
    forms = {
        name: _chat_form(source, own, rust, special_tokens)
        for name, source in sources.items()
        if name in (DEFAULT, TOOL_USE)
    }
    form = forms.get(DEFAULT, ChatForm(None, _answers_of(own, "", rust)))
    return Tokenizer(
        rust,
        form.template,
        form.answers,
        special_tokens,
        error=form.error,
        tool_form=forms.get(TOOL_USE),
        response_template=own,
        class_name=str(config.get("tokenizer_class") or DEFAULT_CLASS),
    )


def _chat_form(source: TemplateSource, own: object, rust: RustTokenizer, special_tokens: Mapping[str, str]) -> ChatForm:
    """A template that cannot be compiled keeps chats from being served, and nothing else."""
    try:
        template = ChatTemplate(source.text, special_tokens)
    except UnavailableError as error:
        reason = compile_error(source, error.__cause__ or error)
        log.error("no chats are served with a broken template", extra={"file": source.file, "reason": reason})
        return ChatForm(None, error=reason)
    return ChatForm(template, _answers_of(own, source.text, rust))


def _answers_of(own: object, chat_template: str, rust: RustTokenizer) -> ModelAnswers | None:
    template = response_template(own, chat_template)
    return None if template is None else _model_answers(template, rust)


def _model_answers(template: Template, rust: RustTokenizer) -> ModelAnswers:
    from text.answer_parser import ModelAnswers

    return ModelAnswers(template, rust)


def _special_tokens(files: Mapping[str, bytes], config: Mapping[str, object]) -> dict[str, str]:
    merged = {**json.loads(files.get("special_tokens_map.json", b"{}")), **config}
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _convert(files: Mapping[str, bytes]) -> RustTokenizer:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="baton-tokenizer-") as directory:
        for name, content in files.items():
            if name.startswith(FOLDER):
                continue
            if Path(name).name != name:
                raise UnavailableError(f"the worker sent a tokenizer file that is not a bare name: {name!r}")
            (Path(directory) / name).write_bytes(content)
        tokenizer = AutoTokenizer.from_pretrained(directory, use_fast=True)
        return RustTokenizer.from_str(tokenizer.backend_tokenizer.to_str())
