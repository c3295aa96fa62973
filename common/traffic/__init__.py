"""Which requests come, and when: for whatever makes load, real or simulated. Pure, and the same for the same seed.

arrivals  times: Poisson, Gamma, bursts, a ramp, a day's curve
sizes     lengths of prompts and answers
requests  what one request is, and what its prompt has in common with others
made      requests from times and lengths, and conversations that come back
traces    those that others recorded: Mooncake's format, Azure's, and texts like ShareGPT's
"""
