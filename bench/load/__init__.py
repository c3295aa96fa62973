"""One load generator for all benchmarks: when requests come, how long they are, who sends them, and what they took.

arrivals      times at which requests are due, fixed before a run: Poisson, Gamma, bursts, a trace's own
sizes         numbers of tokens: fixed, uniform, log-normal, or a trace's own
loops         sends each request when it is due (open), or keeps so many under way (closed)
clients       clients over REST and gRPC that cost little themselves; http: their connections
percentiles   of what was measured
"""
