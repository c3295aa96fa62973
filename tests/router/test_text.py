"""Tokens to text, stop strings, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from common import model_files
from common.chat_templates import template_error
from common.errors import InvalidArgumentError, UnavailableError
from tests.router.tiny_tokenizer import byte_ids, eos_id, ids_of, tiny_tokenizer, tokenizer_files, vocab_size
from text.chat_template import ChatTemplate
from text.conversation import Conversation, Tool, Tools
from text.detokenizer import MAX_PENDING, REPLACEMENT, Detokenizer
from text.stop_strings import StopStrings
from text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "hello world",
    "naïve café",
    "東京 日本語",
    "😀👩‍👩‍👧",
    "e\u0301",
    "a\u00a0b",
    "tab\tnewline\n",
    "\U0001f1eb\U0001f1f7",
]


def deltas(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("split", [ids_of, byte_ids])
def test_text_comes_out_whole(text: str, split: object) -> None:
    ids = ids_of(text) if split is ids_of else byte_ids(text)
    pieces = deltas(tiny_tokenizer(), ids_of("prompt"), ids)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.text(max_size=40), st.text(max_size=10))
def test_any_text_in_bytes_comes_out_whole(text: str, prompt: str) -> None:
    assert "".join(deltas(tiny_tokenizer(), ids_of(prompt), byte_ids(text))) == text


@given(st.lists(st.integers(0, vocab_size() - 1), max_size=60), st.lists(st.integers(0, vocab_size() - 1), max_size=12))
def test_any_tokens_give_their_full_decoding(ids: list[int], prompt: list[int]) -> None:
    """Even if the bytes are not UTF-8 at all; only an unfinished tail is dropped. The prompt must end in a whole
    character, or its last bytes and the first ones of the answer are one character to a decoder."""
    tokenizer = tiny_tokenizer()
    prompt = [*prompt, *ids_of(".")]
    whole = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
    assert "".join(deltas(tokenizer, prompt, ids)).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)


def test_an_unfinished_tail_is_dropped() -> None:
    assert "".join(deltas(tiny_tokenizer(), [], byte_ids("a😀")[:-1])) == "a"


def test_invalid_bytes_do_not_pile_up() -> None:
    lone = byte_ids("é")[1]
    detokenizer = Detokenizer(tiny_tokenizer(), [])
    shown = "".join(detokenizer.add(lone) for _ in range(100))
    assert len(shown) >= 90


def test_special_tokens_have_no_text() -> None:
    ids = [*ids_of("a"), eos_id(), *ids_of(" b"), eos_id()]
    assert "".join(deltas(tiny_tokenizer(), [], ids)) == "a b"


def metaspace_tokenizer() -> Tokenizer:
    """As SentencePiece models decode: `▁` is a space, unknown characters are bytes, the first space is dropped."""
    words = ["<unk>", "▁Hello", "▁world", "▁", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: index for index, word in enumerate(words)}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(rust, None)


def test_spaces_and_bytes_of_sentencepiece_models() -> None:
    tokenizer = metaspace_tokenizer()
    ids = [2, 4, *(5 + byte for byte in "東".encode()), 2]
    assert "".join(deltas(tokenizer, [1], ids)) == " worlds東 world"
    assert "".join(deltas(tokenizer, [], ids)) == "worlds東 world"
    assert tokenizer.token_bytes(5 + 0xE6) == b"\xe6"


@pytest.mark.parametrize("make", [tiny_tokenizer, metaspace_tokenizer])
@given(data=st.data())
def test_no_tokens_make_the_window_grow(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    """A few tokens over and over, as `logit_bias` can force them: tokens that never end at the end of a
    character, bytes of no character, ids that pad the vocabulary."""
    tokenizer = make()
    vocab = range(tokenizer.rust.get_vocab_size())
    parts = [token_id for token_id in vocab if REPLACEMENT in tokenizer.decode([token_id])]
    ids = st.one_of(st.sampled_from(vocab), st.sampled_from(parts), st.just(10**6))
    few = data.draw(st.lists(ids, min_size=1, max_size=4))
    stream = data.draw(st.lists(st.sampled_from(few), max_size=60))
    prompt = [tokenizer.rust.encode("world").ids[-1]]
    detokenizer = Detokenizer(tokenizer, prompt)
    text = ""
    for token_id in stream:
        text += detokenizer.add(token_id)
        assert len(detokenizer._window) <= 3 * MAX_PENDING
    text += detokenizer.flush()
    if tokenizer is tiny_tokenizer():  # byte fallback makes bytes of no character of a whole run, once it sees it whole
        whole = tokenizer.decode(prompt + stream)[len(tokenizer.decode(prompt)) :]
        assert text.replace(REPLACEMENT, "") == whole.replace(REPLACEMENT, "")


def llama_tokenizer() -> Tokenizer:
    """As `metaspace_tokenizer`, with more words: some begin with spaces, some hold what decoders write for no text."""
    words = ["<unk>", "▁", "▁▁", "▁Hello", "▁world", "s", "東", "é▁x", REPLACEMENT, "a" + REPLACEMENT, "."]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    rust = RustTokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[], byte_fallback=True))
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens(["<s>"])
    rust.add_tokens(["added words"])
    return Tokenizer(rust, None)


@pytest.mark.parametrize("make", [tiny_tokenizer, metaspace_tokenizer, llama_tokenizer])
@given(data=st.data())
def test_the_table_of_whole_characters_gives_what_decoding_gives(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    """Piece by piece, whatever the tokens are and whatever the prompt ends in."""
    by_table, by_decoding = make(), make()
    vocab = range(by_table.rust.get_vocab_size() + 2)
    parts = [i for i in vocab if REPLACEMENT in by_table.decode([i])]
    ids = st.one_of(st.sampled_from(vocab), st.sampled_from(parts), st.sampled_from(vocab[:12]))
    prompt, stream = data.draw(st.lists(ids, max_size=10)), data.draw(st.lists(ids, max_size=40))
    shown = frozenset(data.draw(st.lists(st.sampled_from(vocab[:3]), max_size=1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "whole_text", lambda _self, _token_id: None)
        slow = Detokenizer(by_decoding, prompt, shown)
        wanted = [*(slow.add(token_id) for token_id in stream), slow.flush()]
    fast = Detokenizer(by_table, prompt, shown)
    assert [*(fast.add(token_id) for token_id in stream), fast.flush()] == wanted


@pytest.mark.parametrize("make", [tiny_tokenizer, llama_tokenizer])
def test_most_text_needs_no_decoding(make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make()
    whole = [token_id for token_id in range(tokenizer.rust.get_vocab_size()) if tokenizer.whole_text(token_id)]
    detokenizer = Detokenizer(tokenizer, whole[-1:])
    words = [token_id for token_id in whole if tokenizer.decode([token_id]).strip()]
    monkeypatch.setattr(tokenizer, "decode", lambda *_: pytest.fail("decodes"))
    assert "".join(detokenizer.add(token_id) for token_id in words)


def test_decoders_of_other_kinds_have_no_table() -> None:
    rust = RustTokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    rust.decoder = decoders.WordPiece()
    assert Tokenizer(rust, None).whole_text(1) is None
    rust.decoder = None
    assert Tokenizer(rust, None).whole_text(1) is None


def test_a_token_across_characters_comes_out_as_it_goes() -> None:
    """The end of one character and the begin of the next, over and over: text never ends in a whole character."""
    tokenizer = tiny_tokenizer()
    across = next(
        token_id
        for token_id in range(vocab_size())
        if len(data := tokenizer.token_bytes(token_id)) == 3 and max(data[:2]) < 0xC0 and 0xE0 <= data[2] < 0xF0
    )
    detokenizer = Detokenizer(tokenizer, [])
    shown = 0
    for number in range(200):
        shown += len(detokenizer.add(across))
        assert shown >= number - 2 * MAX_PENDING


def test_token_bytes_joined_are_the_text() -> None:
    tokenizer = tiny_tokenizer()
    for text in TEXTS:
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids_of(text)) == text.encode()
    assert tokenizer.token_bytes(eos_id()) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


# ------------------------------------------------------------------------------------------- stop strings


def stop_text(stop: list[str], pieces: list[str]) -> tuple[str, str | None]:
    stops = StopStrings(stop)
    shown = ""
    for piece in pieces:
        result = stops.add(piece)
        shown += result.text
        if result.matched is not None:
            return shown, result.matched
    return shown + stops.flush(), None


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.text("abc", max_size=4)))
def test_stop_strings_against_find(stop: list[str], pieces: list[str]) -> None:
    """However the text is cut: the first stop string to be complete wins, of equal ends the longest."""
    text = "".join(pieces)
    found = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    expected = (text, None) if not found else (text[: min(found)[1]], min(found)[2])
    assert stop_text(stop, pieces) == expected
    assert stop_text(stop, list(text)) == expected


def test_nothing_of_a_possible_stop_string_is_shown() -> None:
    stops = StopStrings(["</s>"])
    assert stops.add("hello <").text == "hello "
    assert stops.add("/").text == ""
    assert stops.add("p>").text == "</p>"
    assert stops.add("</s").text == ""
    assert stops.flush() == "</s"


def test_unarmed_text_is_never_cut() -> None:
    stops = StopStrings(["ab"])
    assert stops.add("xab", armed=False).text == "xab"
    assert stops.add("ya").text == "y"
    assert stops.add("b").matched == "ab"


# ------------------------------------------------------------------------------------------- chat templates


def test_templates_render_as_transformers_does() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{{ bos_token }}\n"
        "{%- for message in messages %}\n"
        "    {%- if loop.index > 9 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ message.role }}: {{ message['content'] | tojson }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{% set ns = namespace(last=messages[-1].content.strip()) %}"
        "{{ ns.last }}{{ messages | length }}{{ {'k': '<é>'} | tojson(indent=2) }}\n"
        "{% if add_generation_prompt %}assistant:{% endif %}\n"
        "{% if tools %}tools{% endif %}"
    )
    messages = [{"role": "user", "content": ' "quoted" <b>é</b>\n'}, {"role": "assistant", "content": "東京"}]
    theirs, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, bos_token="<s>")
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(Conversation(messages=messages)) == theirs[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[9].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ 1 / 0 }}",
        "{% for x in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_that_refuses_names_the_messages(source: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ChatTemplate(source, {}).render(Conversation(messages=[{"role": "user", "content": "x"}]))
    assert caught.value.field == "messages"


def test_templates_are_found_where_publishers_put_them() -> None:
    files = tokenizer_files()
    del (files := dict(files))["chat_template.jinja"]
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        load_tokenizer(files).render_chat(Conversation(messages=messages))
    files["tokenizer_config.json"] = b'{"chat_template": "{{ bos_token }}C", "bos_token": {"content": "B"}}'
    assert load_tokenizer(files).render_chat(Conversation(messages=messages)) == "BC"
    files["tokenizer_config.json"] = (
        b'{"chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]}'
    )
    assert load_tokenizer(files).render_chat(Conversation(messages=messages)) == "D"


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": b"{"}, {"tokenizer_config.json": b"\xff"}])
def test_files_that_make_no_tokenizer(files: dict[str, bytes]) -> None:
    with pytest.raises(UnavailableError, match="tokenizer"):
        load_tokenizer(files)


def test_a_template_for_tools_is_taken_as_transformers_does() -> None:
    files = {name: data for name, data in tokenizer_files().items() if name != "chat_template.jinja"}
    config = json.loads(files["tokenizer_config.json"])
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools }}"}]
    in_config = {**files, "tokenizer_config.json": json.dumps({**config, "chat_template": named}).encode()}
    in_files = {
        **in_config,  # which files of their own replace
        "chat_template.jinja": b"plain file",
        "additional_chat_templates/tool_use.jinja": b"file with {{ tools }}",
        "additional_chat_templates/rag.jinja": b"{% broken",
    }
    ask = [{"role": "user", "content": "x"}]
    tools = Tools(tools=(Tool(name="f"),))
    for one, plain in ((in_config, "plain"), (in_files, "plain file")):
        tokenizer = load_tokenizer(one)
        assert tokenizer.render_chat(Conversation(messages=ask)) == plain
        assert tokenizer.render_chat(Conversation(messages=ask, tools=replace(tools, choice="none"))) == plain
        assert "'name': 'f'" in tokenizer.render_chat(Conversation(messages=ask, tools=tools))


def test_templates_are_read_from_a_model_directory(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"{% broken")
    read = model_files.tokenizer_files(tmp_path)
    assert sorted(read) == ["additional_chat_templates/tool_use.jinja", "tokenizer.json"]
    assert "additional_chat_templates/tool_use.jinja cannot be compiled at line 1" in template_error(read)
