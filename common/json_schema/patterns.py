"""A regular expression of the texts that match some patterns and do not match others.

llguidance intersects patterns and has no complement. Here patterns become one deterministic automaton (subset
construction), whose complement is the same one with other accepting states, and which becomes a regular expression
again (state elimination). Patterns mean what they mean to llguidance: `.` is anything but a line feed, `\\d` and `\\w`
are of ASCII, `\\s` is white space of Unicode.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_NODES = 4000  # of one automaton, as patterns say it
MAX_STATES = 400
MAX_CLASSES = 64  # of characters that patterns tell apart
MAX_CHARS = 6000  # of the regular expression that comes out
_LAST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included; in order, with gaps between them

_DIGIT: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = (
    *((9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_ESCAPES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


class UnreadError(ValueError):
    """A pattern that cannot be read here, or becomes too large."""


@functools.lru_cache(maxsize=1024)
def texts(matching: frozenset[str], others: frozenset[str]) -> str | None:
    """A pattern of the texts that match all of `matching` and none of `others`; None if there are none. Raises
    `UnreadError`."""
    machines = [_Automaton(pattern) for pattern in sorted(matching)]
    machines += [_Automaton(pattern) for pattern in sorted(others)]
    moves, accepting, classes = _determined(machines, len(matching))
    moves, accepting = _minimal(moves, accepting)
    found = _expression(moves, accepting, classes)
    return None if found is None else f"^{found if _is_group(found) else f'(?:{found})'}$"


@functools.lru_cache(maxsize=4096)
def has_match(pattern: str, text: str) -> bool:
    """Whether a text has the pattern somewhere. Raises `UnreadError`."""
    machine = _Automaton(pattern)
    nodes = machine.closure([machine.begin], at_begin=True, at_end=not text)
    for at, char in enumerate(text, 1):
        after = {
            node
            for one in nodes
            for ranges, node in machine.chars[one]
            if any(first <= ord(char) <= last for first, last in ranges)
        }
        nodes = machine.closure(after, at_begin=False, at_end=at == len(text))
    return machine.end in nodes


def lookaheads(pattern: str) -> tuple[list[str], list[str]] | None:
    """Patterns that a text has to have, and such that it must not have, in place of one that begins with `(?=...)` or
    `(?!...)`. None if it does not."""
    matching: list[str] = []
    others: list[str] = []
    at = len(pattern) - len(pattern.removeprefix("^"))
    if not at or _has_choice(_plain(pattern)):
        return None
    while pattern.startswith(("(?=", "(?!"), at):
        end = _closing(pattern, at)
        if end is None or pattern[end + 1 : end + 2] in ("*", "+", "?", "{"):
            return None
        (matching if pattern[at + 2] == "=" else others).append(f"^(?:{pattern[at + 3 : end]})")
        at = end + 1
    return ([f"^{pattern[at:]}", *matching], others) if at > 1 else None


_PIECE = re.compile(r"\\(.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]", re.DOTALL)


def unsupported(pattern: str) -> str:
    """What llguidance lacks of all that `pattern` has; empty if it lacks nothing known."""
    for found in _PIECE.finditer(pattern):
        if found[0].startswith("(?"):
            return f"look-around ({found[0]})"
        if found[1] is not None and found[1] in "bB":
            return f"look-around ({found[0]})"
        if found[1] is not None and found[1] in "123456789k":
            return f"a back-reference ({found[0]})"
    return ""


def has_inner_anchor(pattern: str) -> bool:
    """Whether a `^` or `$` stands inside a group."""
    depth = 0
    for char in _plain(pattern):
        depth += (char == "(") - (char == ")")
        if depth and char in "^$":
            return True
    return False


def _plain(pattern: str) -> str:
    """As long as `pattern`, with other characters for escapes and classes."""
    found, at, is_class = [], 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            found.append("__"[: len(pattern) - at])
            at += 2
            continue
        is_class = (is_class or char == "[") and not (is_class and char == "]")
        found.append("_" if is_class or char == "]" else char)
        at += 1
    return "".join(found)


def _closing(pattern: str, at: int) -> int | None:
    """Where the bracket that opens at `at` closes."""
    depth = 0
    for index, char in enumerate(_plain(pattern)):
        depth += ((char == "(") - (char == ")")) * (index >= at)
        if index > at and depth == 0:
            return index
    return None


# ------------------------------------------------------------------------------------------------------- patterns


@dataclass(slots=True)
class _Automaton:
    """Nodes with edges: over characters, over nothing, and over nothing at the beginning or end of the text alone."""

    pattern: str
    chars: list[list[tuple[Ranges, int]]] = field(default_factory=list)
    free: list[list[tuple[str, int]]] = field(default_factory=list)  # ("", "^" or "$", node)
    begin: int = 0
    end: int = 0
    _at: int = 0

    def __post_init__(self) -> None:
        first, last = self._choice()
        if self._at < len(self.pattern):
            raise UnreadError("has a bracket too many")
        self.begin, self.end = self._node(), self._node()
        for node in (self.begin, self.end):  # it is searched for
            self.chars[node].append((((0, _LAST),), node))
        self.free[self.begin].append(("", first))
        self.free[last].append(("", self.end))

    def closure(self, nodes: Iterable[int], *, at_begin: bool, at_end: bool) -> frozenset[int]:
        found, waiting = set(nodes), list(nodes)
        while waiting:
            for condition, node in self.free[waiting.pop()]:
                passes = not condition or (at_begin if condition == "^" else at_end)
                if passes and node not in found:
                    found.add(node)
                    waiting.append(node)
        return frozenset(found)

    def _node(self) -> int:
        if len(self.chars) >= MAX_NODES:
            raise UnreadError("is too large")
        self.chars.append([])
        self.free.append([])
        return len(self.chars) - 1

    def _over(self, ranges: Ranges) -> tuple[int, int]:
        first, last = self._node(), self._node()
        self.chars[first].append((ranges, last))
        return first, last

    def _peek(self) -> str:
        return self.pattern[self._at : self._at + 1]

    def _next(self) -> str:
        if not (char := self._peek()):
            raise UnreadError("ends too early")
        self._at += 1
        return char

    def _skip(self, text: str) -> bool:
        if is_there := self.pattern.startswith(text, self._at):
            self._at += len(text)
        return is_there

    def _choice(self) -> tuple[int, int]:
        first, last = self._node(), self._node()
        while True:
            begin, end = self._sequence()
            self.free[first].append(("", begin))
            self.free[end].append(("", last))
            if not self._skip("|"):
                return first, last

    def _sequence(self) -> tuple[int, int]:
        first = last = self._node()
        while self._peek() and self._peek() not in "|)":
            begin_at = self._at
            begin, end = self._atom()
            begin, end = self._repeated(begin, end, begin_at)
            self.free[last].append(("", begin))
            last = end
        return first, last

    def _atom(self) -> tuple[int, int]:
        match self._next():
            case "(":
                if self._skip("?") and not self._skip(":"):
                    raise UnreadError("has a group that looks around, has a name or changes flags")
                inner = self._choice()
                if not self._skip(")"):
                    raise UnreadError("has an open bracket")
                return inner
            case "^" | "$" as anchor:
                first, last = self._node(), self._node()
                self.free[first].append((anchor, last))
                return first, last
            case ".":
                return self._over(_complement(((10, 10),)))
            case "[":
                return self._over(self._class())
            case "\\":
                return self._over(self._escape())
            case "*" | "+" | "?" | "{":
                raise UnreadError("repeats nothing")
            case char:
                return self._over(((ord(char), ord(char)),))

    def _repeated(self, begin: int, end: int, begin_at: int) -> tuple[int, int]:
        end_at = self._at
        if self._skip("*"):
            least, most = 0, None
        elif self._skip("+"):
            least, most = 1, None
        elif self._skip("?"):
            least, most = 0, 1
        elif self._skip("{"):
            least, most = self._counts()
        else:
            return begin, end
        self._skip("?")  # lazy: the same texts
        if self._peek() and self._peek() in "*+?{":
            raise UnreadError("repeats a repetition")
        after = self._at
        first = last = self._node()
        for number in range(most if most is not None else max(least, 1)):
            if number:
                self._at = begin_at  # read once more: a copy
                begin, end = self._atom()
                if self._at != end_at:
                    raise UnreadError("has a repetition that is not clear")
            if number >= least:
                begin = self._optional(begin, end)
            self.free[last].append(("", begin))
            last = end
        if most is None:
            self.free[end].append(("", begin))
        self._at = after
        return first, last

    def _optional(self, begin: int, end: int) -> int:
        first = self._node()
        self.free[first] += [("", begin), ("", end)]
        return first

    def _counts(self) -> tuple[int, int | None]:
        least = self._number()
        most: int | None = least
        if self._skip(","):
            most = None if self._peek() == "}" else self._number()
        if not self._skip("}") or (most is not None and most < least):
            raise UnreadError("has a repetition that is not clear")
        return least, most

    def _number(self) -> int:
        begin = self._at
        while self._peek() and self._peek() in "0123456789":
            self._at += 1
        if not 0 < self._at - begin < 5:
            raise UnreadError("has a repetition that is not clear")
        return int(self.pattern[begin : self._at])

    def _class(self) -> Ranges:
        is_negated = self._skip("^")
        found: list[tuple[int, int]] = []
        if self._peek() == "]":
            raise UnreadError("has an empty class")
        while not self._skip("]"):
            one = self._one_of_class()
            if self._peek() == "-" and self.pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                other = self._one_of_class()
                if len(one) != 1 or len(other) != 1 or one[0][0] != one[0][1] or other[0][0] != other[0][1]:
                    # A set is no end of a range: the hyphen stands for itself.
                    found += [*one, (45, 45), *other]
                    continue
                one = ((one[0][0], other[0][0]),)
                if one[0][0] > one[0][1]:
                    raise UnreadError("has a range whose end is before its begin")
            found += one
        ranges = _sorted(found)
        return _complement(ranges) if is_negated else ranges

    def _one_of_class(self) -> Ranges:
        char = self._next()
        if char == "\\":
            return self._escape()
        if char == "[" or (char in "&~-" and self._peek() == char):
            raise UnreadError("has a class whose meaning is not clear")
        return ((ord(char), ord(char)),)

    def _escape(self) -> Ranges:
        char = self._next()
        if (ranges := _CLASSES.get(char.lower())) is not None:
            return ranges if char.islower() else _complement(ranges)
        if char in _ESCAPES:
            point = _ESCAPES[char]
        elif char in "xu":
            point = self._hex(2 if char == "x" else 4)
        elif char.isascii() and not char.isalnum():
            point = ord(char)
        else:
            raise UnreadError(f"has the escape \\{char}")
        return ((point, point),)

    def _hex(self, num: int) -> int:
        if self._skip("{"):
            text, closes, _ = self.pattern[self._at : self._at + 8].partition("}")
            self._at += len(text) + 1
        else:
            text, closes = self.pattern[self._at : self._at + num], "}" if self._at + num <= len(self.pattern) else ""
            self._at += num
        if not closes or not text or not set(text) <= set("0123456789abcdefABCDEF") or int(text, 16) > _LAST:
            raise UnreadError("has an escape that is not clear")
        return int(text, 16)


def _sorted(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def _complement(ranges: Ranges) -> Ranges:
    found, at = [], 0
    for first, last in ranges:
        if first > at:
            found.append((at, first - 1))
        at = last + 1
    return (*found, (at, _LAST)) if at <= _LAST else tuple(found)


# ------------------------------------------------------------------------------------------------------- automata

Moves = list[list[int]]  # by state and class of characters


def _determined(machines: Sequence[_Automaton], num_matching: int) -> tuple[Moves, list[bool], list[Ranges]]:
    """A text leads from state 0 to one that accepts if the first machines take it, and the others do not."""
    ranges = {one for machine in machines for edges in machine.chars for one, _ in edges}
    begins = sorted(
        {0} | {point for some in ranges for first, last in some for point in (first, last + 1)} - {_LAST + 1}
    )
    if len(begins) > 8 * MAX_CLASSES:
        raise UnreadError("tells too many characters apart")
    # Intervals that no edge tells apart are one class.
    classes: dict[frozenset[Ranges], list[tuple[int, int]]] = {}
    for first, after in itertools.pairwise([*begins, _LAST + 1]):
        key = frozenset(some for some in ranges if any(low <= first <= high for low, high in some))
        classes.setdefault(key, []).append((first, after - 1))
    if len(classes) > MAX_CLASSES:
        raise UnreadError("tells too many characters apart")
    begin = tuple(machine.closure([machine.begin], at_begin=True, at_end=False) for machine in machines)
    # State 0 is at the beginning alone, where more may hold than for the same nodes later.
    numbers: dict[tuple[frozenset[int], ...], int] = {}
    waiting: list[tuple[frozenset[int], ...]] = [begin]
    moves: Moves = []
    accepting = [_accepts(machines, begin, num_matching, at_begin=True)]
    for state in waiting:
        row = []
        for key in classes:
            nodes_after = tuple(
                machine.closure(
                    {node for one in nodes for some, node in machine.chars[one] if some in key},
                    at_begin=False,
                    at_end=False,
                )
                for machine, nodes in zip(machines, state, strict=True)
            )
            if nodes_after not in numbers:
                if len(waiting) >= MAX_STATES:
                    raise UnreadError("has too many states")
                numbers[nodes_after] = len(waiting)
                waiting.append(nodes_after)
                accepting.append(_accepts(machines, nodes_after, num_matching, at_begin=False))
            row.append(numbers[nodes_after])
        moves.append(row)
    return moves, accepting, [_sorted(some) for some in classes.values()]


def _accepts(
    machines: Sequence[_Automaton], state: tuple[frozenset[int], ...], num_matching: int, *, at_begin: bool
) -> bool:
    for number, (machine, nodes) in enumerate(zip(machines, state, strict=True)):
        is_match = machine.end in machine.closure(nodes, at_begin=at_begin, at_end=True)
        if is_match != (number < num_matching):
            return False
    return True


def _minimal(moves: Moves, accepting: list[bool]) -> tuple[Moves, list[bool]]:
    """States that no text tells apart become one (Moore's algorithm)."""
    group = [int(one) for one in accepting]
    num_groups = len(set(group))
    while True:
        keys: dict[tuple[int, ...], int] = {}
        group = [
            keys.setdefault((group[state], *(group[after] for after in row)), len(keys))
            for state, row in enumerate(moves)
        ]
        if len(keys) == num_groups:
            break
        num_groups = len(keys)
    found: dict[int, int] = {}
    for state, number in enumerate(group):
        found.setdefault(number, state)
    return [[group[after] for after in moves[found[number]]] for number in range(num_groups)], [
        accepting[found[number]] for number in range(num_groups)
    ]


def _expression(moves: Moves, accepting: list[bool], classes: list[Ranges]) -> str | None:
    """Of the texts that lead from state 0 to one that accepts. State 0 is numbered first by `_minimal`."""
    alive = _alive(moves, accepting)
    if 0 not in alive:
        return None
    begin, end = -1, -2
    edges: dict[int, dict[int, str]] = {begin: {0: ""}, end: {}}
    for state in alive:
        to: dict[int, list[tuple[int, int]]] = {}
        for some, after in zip(classes, moves[state], strict=True):
            if after in alive:
                to.setdefault(after, []).extend(some)
        edges[state] = {after: _set(_sorted(some)) for after, some in to.items()}
        if accepting[state]:
            edges[state][end] = ""
    left = set(alive)
    while left:
        state = min(left, key=lambda one: (_weight(edges, one), one))
        left.remove(state)
        out = edges.pop(state)
        loop = out.pop(state, None)
        again = "" if loop is None else _star(loop)
        for one in edges.values():
            if (into := one.pop(state, None)) is None:
                continue
            for after, text in out.items():
                way = _then(into, again, text)
                one[after] = way if after not in one else _either(one[after], way)
                if len(one[after]) > MAX_CHARS:
                    raise UnreadError("becomes too large")
    return edges[begin][end]


def _alive(moves: Moves, accepting: list[bool]) -> list[int]:
    """States from which some text leads to one that accepts."""
    before: dict[int, set[int]] = {}
    for state, row in enumerate(moves):
        for after in row:
            before.setdefault(after, set()).add(state)
    found = {state for state, accepts in enumerate(accepting) if accepts}
    waiting = list(found)
    while waiting:
        for state in before.get(waiting.pop(), set()) - found:
            found.add(state)
            waiting.append(state)
    return sorted(found)


def _weight(edges: dict[int, dict[int, str]], state: int) -> int:
    """About how many characters come with its removal (Delgado and Morais, 2004)."""
    out = [len(text) for after, text in edges[state].items() if after != state]
    into = [len(one[state]) for before, one in edges.items() if before != state and state in one]
    loop = len(edges[state].get(state, ""))
    return sum(into) * (len(out) - 1) + sum(out) * (len(into) - 1) + loop * (len(into) * len(out) - 1)


# ---------------------------------------------------------------------------------------------------- expressions


def _set(ranges: Ranges) -> str:
    negated = _complement(ranges)
    if not negated:
        return "(?s:.)"
    is_negated = len(negated) < len(ranges) or any(first <= 0xD800 <= last for first, last in ranges)
    some = negated if is_negated else ranges
    text = "".join(_char(first) if first == last else f"{_char(first)}-{_char(last)}" for first, last in some)
    if not is_negated and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return text
    return f"[{'^' if is_negated else ''}{text}]"


def _char(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else f"\\u{{{point:x}}}"


def _is_group(text: str) -> bool:
    """Whether a repetition or a neighbour may follow as it is."""
    if not text or (text[0] not in "([\\" and len(text) > 1):
        return False
    if len(text) == 1:
        return True
    if text[0] == "\\":
        return text.index("}") == len(text) - 1
    if text[0] == "[":
        return text.index("]") == len(text) - 1
    depth = 0
    for at, char in enumerate(text):  # what stands for itself is escaped with hexadecimal digits
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at == len(text) - 1
    return False


def _has_choice(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False


def _star(text: str) -> str:
    if not text:
        return ""
    return f"{text if _is_group(text) else f'(?:{text})'}*"


def _then(*parts: str) -> str:
    return "".join(f"(?:{part})" if _has_choice(part) else part for part in parts)


def _either(one: str, other: str) -> str:
    if one == other:
        return one
    if not one or not other:
        some = one or other
        return f"{some if _is_group(some) else f'(?:{some})'}?"
    return f"{one}|{other}"
