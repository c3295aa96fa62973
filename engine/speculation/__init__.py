"""Speculation: tokens of answers are guessed, and one step of the model checks all guesses of a request at once.

    token_ids      ... x          the last token, whose KV the step computes as always
    draft              | a | b | c
    rows of the step   x   a   b   c     each a sequence of one token, at its own position
    drawn              a   b   q   .     a and b are what was guessed, q is not: the answer goes on with a, b, q

Each row draws with its request's own parameters, the tokens before it counted, and the random number of its position.
So the tokens are those that the request would have got one by one, greedy or drawn, with any seed. What was computed
for `c` is overwritten by the next step: `num_computed_tokens` ends before it, and no block that holds it gets a name.

`ngram` and `draft_model` guess. `record` decides how many tokens, by what became of the request's guesses so far and by
how many requests share the step. `speculation` puts them together, `checks` makes the rows and takes what came of them.
"""
