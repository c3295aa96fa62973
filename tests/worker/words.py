"""First tokens of prompts that the fake engine knows, and its model's shape."""

from __future__ import annotations

ANSWER = 1  # one token, and the end
WAIT = 2  # nothing, ever
FLOOD = 3  # 200 events of 500 tokens, at once
REMOTE = 4  # asks for a prefill worker; answers once none is left
GARBAGE = 5  # the engine says what its front does not understand

VOCAB_SIZE = 100
BLOCK_SIZE = 4
