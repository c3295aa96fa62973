"""A fleet whose workers are plain numbers, without engines (`--counted`).

    job           a request on one worker
    worker        what comes, and the steps that follow
    owner         what a worker says of its requests, at once
    under_way     the step that is computed now, or the run of steps of decodes alone
    prompts       who waits, computes a prompt, or waits for KV of another worker
    fetches       who waits for blocks that are fetched for another job
    decodes       who draws a token in each step, and the blocks that they need next
    job_blocks    which blocks a job owns
    block_counts  blocks as counts, the prefix cache as names
    block_names   names without tokens
    router        loads that are looked at when a decision is asked for
    fleet         requests on their way between workers

What `simulation.worker` does with an engine is done here without a token or a block.
"""
