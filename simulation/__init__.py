"""A fleet on a virtual clock: the real policy, prefix index, planner, scheduler and block manager, and no device.

    traffic ──> router (policy, prefix index) ──> decode worker ──> prefill worker      each: an `EngineCore`
                                                       <── blocks over a link ──

    clock      events in the order of their times
    device     steps that take the predicted time, and compute nothing
    link       moves blocks at some bytes a second
    worker     an engine's loop
    router     what a router decides by, and what it has heard
    fleet      workers, requests on their way, and the planner
    outcome    what came of it
    report     the same as a page with pictures

Nothing sleeps and nothing runs beside anything else, so equal seeds give equal results on every machine.
"""
