"""Ensures that clients' texts stay text: tokens that mark structure (`<|im_end|>`) come from the template alone.

A tokenizer takes such a token wherever its text stands, so a message that holds the text could end its own turn and
begin another's. Text can be told from structure only before they are joined:

    messages ── hide ──> messages with marks ── template ──> prompt with marks ── encode ──> token ids
                control tokens of clients          the template's control tokens are          marks are text again,
                are marks that nobody can guess    the only ones left: they get other names   the other names are tokens

A second tokenizer knows the control tokens by those other names only, and is the same in all else. So text around them
is split and merged as ever, and messages without control tokens give the same ids by both.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tokenizers import Tokenizer as RustTokenizer

from common.errors import InvalidArgumentError

ValueT = TypeVar("ValueT")

_MARK_BASE = 0xE000  # private use: no letters, no white space, nothing that JSON escapes
_MARK_DIGIT = 4096
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # what byte fallback looks up by name


class Hidden:
    """The control tokens in the texts of one conversation, and the marks that replace them."""

    def __init__(self, texts: Iterable[str]) -> None:
        """`texts`: all of the conversation's; no mark occurs in them. They are looked at once there is a mark."""
        self._marks: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._all_texts = texts
        self._nonce = ""

    def __bool__(self) -> bool:
        return bool(self._marks)

    def mark(self, text: str) -> str:
        if not self._nonce:
            self._nonce = _nonce_beside([*self._all_texts])
        if text not in self._marks:
            mark = self._marks[text] = self._nonce + _digits(len(self._marks), 2)
            self._texts[mark] = text
        return self._marks[text]

    def shown(self, text: str) -> str:
        """`text` with each mark replaced by its control token's text."""
        if not self:  # of most conversations: nothing is compiled for them
            return text
        return re.sub(f"{self._nonce}(..)", lambda match: self._texts[match[0]], text, flags=re.DOTALL)


class ControlTokens:
    """Made once for each tokenizer; takes about as long and as much memory as loading it did."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        """`definition`: the tokenizer's JSON."""
        added = [token for token in definition.get("added_tokens") or () if token["content"]]
        special = {
            token["content"]: token["id"]
            for token in added
            if token["special"] and not _BYTE_TOKEN.fullmatch(token["content"])
        }
        self._ids = special
        nonce = secrets.token_hex(16)  # letters and digits: normalizers leave them alone
        self._names = {content: f"{nonce}{index:06d}" for index, content in enumerate(special)}
        self._pattern = re.compile(_any_of([token["content"] for token in added]), re.DOTALL)
        self._beginnings = {text[:end] for text in special for end in range(1, len(text))}
        self._endings = {text[start:] for text in special for start in range(1, len(text))}
        self._longest = max(map(len, special), default=0)
        self._first_chars = frozenset(text[0] for text in self._beginnings)
        self._last_chars = frozenset(text[-1] for text in self._endings)
        self.tokenizer = self._renamed(definition) if special else None
        normalizes = definition.get("normalizer") is not None
        is_found_later = any(token["special"] and token["normalized"] for token in added)
        # A normalizer may make a control token of what was none (of full-width letters, for one).
        self.may_be_normalized_into = normalizes and bool(special) and (is_found_later or self._is_in(definition))

    def hide(self, value: ValueT, hidden: Hidden) -> ValueT:
        """`value`, JSON of any depth, with marks instead of control tokens in all of its texts."""
        if isinstance(value, str):
            return self._hide(value, hidden)  # type: ignore[return-value]
        result: Any = value
        hide: Callable[[Any], Any] = lambda item: self.hide(item, hidden)  # noqa: E731
        if isinstance(value, Mapping):
            result = {hide(key): hide(item) for key, item in value.items()}
        elif isinstance(value, list | tuple):
            result = [hide(item) for item in value]
        return result  # type: ignore[no-any-return]

    def _hide(self, text: str, hidden: Hidden) -> str:
        text = self._pattern.sub(lambda match: hidden.mark(match[0]) if match[0] in self._names else match[0], text)
        # A control token may also be completed by what the template writes beside the text, which it may trim.
        trimmed = text.rstrip()
        for size in self._sizes(trimmed[-self._longest :], self._first_chars):
            if (end := trimmed[-size:]) in self._beginnings:
                text = trimmed[:-size] + hidden.mark(end) + text[len(trimmed) :]
                break
        trimmed = text.lstrip()
        for size in self._sizes(trimmed[: self._longest], self._last_chars):
            if (start := trimmed[:size]) in self._endings:
                text = text[: len(text) - len(trimmed)] + hidden.mark(start) + trimmed[size:]
                break
        return text

    def _sizes(self, edge: str, chars: frozenset[str]) -> Iterable[int]:
        """Possible lengths of a part of a control token at this edge of a text, longest first. Empty if the edge has
        none of `chars`."""
        return () if chars.isdisjoint(edge) else range(len(edge), 0, -1)

    def encode(self, prompt: str, hidden: Hidden) -> list[int]:
        """Token ids of a rendered `prompt`: each control token that stands in it is one, and marks are text.

        Raises `InvalidArgumentError` for `messages` if the tokenizer is of a kind for which this cannot be done.
        """
        if self.tokenizer is None:
            raise InvalidArgumentError(
                "messages", "hold text of a control token, which this model's tokenizer cannot take as text"
            )
        is_token = [True] * sum(1 for match in self._pattern.finditer(prompt) if match[0] in self._names)
        while True:
            text, spans = self._named(prompt, hidden, is_token)
            ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
            counts = Counter(ids)
            wanted = Counter(self._ids[content] for content, _ in spans.values())
            if all(counts[token_id] >= number for token_id, number in wanted.items()):
                return ids
            # Some stand where the tokenizer would not have taken them either (within a word, for one): they are text.
            encoding = self.tokenizer.encode_batch([text], add_special_tokens=False)[0]
            taken = {
                (position, token_id)
                for (start, end), token_id in zip(encoding.offsets, encoding.ids, strict=True)
                if token_id in wanted
                for position in range(start + 1, end + 1)
            }
            lost = [number for end, (content, number) in spans.items() if (end, self._ids[content]) not in taken]
            if not lost:
                return ids
            for number in lost:
                is_token[number] = False

    def _named(self, prompt: str, hidden: Hidden, is_token: Sequence[bool]) -> tuple[str, dict[int, tuple[str, int]]]:
        """The prompt with other names for control tokens, and for the end of each name what it stands for."""
        parts: list[str] = []
        spans: dict[int, tuple[str, int]] = {}
        position, length, number = 0, 0, 0
        for match in self._pattern.finditer(prompt):
            if match[0] not in self._names:
                continue
            before = hidden.shown(prompt[position : match.start()])
            named = self._names[match[0]] if is_token[number] else match[0]
            parts += (before, named)
            length += len(before) + len(named)
            if is_token[number]:
                spans[length] = (match[0], number)
            position, number = match.end(), number + 1
        parts.append(hidden.shown(prompt[position:]))
        return "".join(parts), spans

    def _is_in(self, definition: Mapping[str, Any]) -> bool:
        """Whether the tokenizer's model itself knows control tokens, so that it may find them in text that is not split
        at them."""
        vocab = definition["model"].get("vocab") or ()
        words = vocab if isinstance(vocab, Mapping) else {entry[0] for entry in vocab}
        return any(content in words for content in self._names)

    def _renamed(self, definition: Mapping[str, Any]) -> RustTokenizer | None:
        """The same tokenizer with other names for its control tokens; None if there cannot be one."""
        names = self._names
        model = dict(definition["model"])
        if isinstance(model.get("vocab"), Mapping):
            vocab = dict(model["vocab"])
            for content in names.keys() & vocab.keys():
                vocab[names[content]] = vocab.pop(content)
            model["vocab"] = vocab
        elif model.get("vocab"):
            model["vocab"] = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if model.get("merges") and self._is_in(definition):
            model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
        added = [
            {**token, "content": names.get(token["content"], token["content"])} for token in definition["added_tokens"]
        ]
        changed = {**definition, "model": model, "added_tokens": added, "post_processor": None}
        try:
            rust = RustTokenizer.from_str(json.dumps(changed))
        except Exception:  # `tokenizers` raises bare Exception; messages with control tokens are refused then
            return None
        is_same = all(rust.token_to_id(names[content]) == token_id for content, token_id in self._ids.items())
        return rust if is_same else None


def _nonce_beside(texts: Collection[str]) -> str:
    """A text that occurs in none of these."""
    nonce = _digits(secrets.randbits(120), 10)
    while any(nonce in text for text in texts):
        nonce = _digits(secrets.randbits(120), 10)
    return nonce


def _digits(number: int, length: int) -> str:
    return "".join(chr(_MARK_BASE + number // _MARK_DIGIT**place % _MARK_DIGIT) for place in range(length))


def _touches(merge: str | Sequence[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _any_of(texts: Sequence[str]) -> str:
    """A regular expression for the leftmost longest of `texts`, as a trie: many that begin alike cost no more than
    one. It matches nothing if there are none."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}

    def expression(node: Mapping[str, Any]) -> str:
        follow = [re.escape(char) + expression(after) for char, after in node.items() if char]
        if not follow:
            return ""
        return f"(?:{'|'.join(follow)})" + ("?" if "" in node else "")

    return expression(root) or "(?!)"
