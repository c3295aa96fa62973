"""One load generator for all benchmarks: who sends requests, and what they took. `common.traffic` says which come, and
when.

loops         sends each request when it is due (open), or keeps so many under way (closed)
clients       clients over REST and gRPC that cost little themselves
http          connections and answers of all HTTP; sse: the events of streamed ones
percentiles   of what was measured
"""
