"""`baton bench serve`, `sweep` and `compare`: load on an endpoint, and how it was answered.

plan       makes the load (load: its requests; texts: their prompts) before the run
run        sends it to an endpoint (openai, grpc_endpoint) and notes an outcome for each request
figures    what the outcomes say: latencies, throughput, goodput, and whether the client was the bottleneck
measure    warm-up, runs, repeats; find_rate: many of them
console    page, files: what is shown and written
"""
