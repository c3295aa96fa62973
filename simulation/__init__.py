"""A fleet on a virtual clock: the real limits, queue, policy, prefix index, planner, scheduler and block manager, and
no device.

    traffic ──> router (limits, queue, policy, index) ──> decode worker ──> prefill worker      each: an `EngineCore`
                                                               <── blocks over a link ──

    clock        events in the order of their times
    device       steps that take the predicted time, and compute nothing
    link         moves blocks at some bytes a second
    worker       an engine's loop
    admission    what a router lets in, and when
    router       what a router decides by, and what it has heard
    prefill_leg  a request's way to a prefill worker and back
    fleet_base   what comes, workers that come and go, the planner
    fleet        requests on their way between workers with engines
    step_times   how long steps take, and runs of equal ones
    outcome      what came of it
    report       the same as a page with pictures

Without engines, for large fleets (`--counted`), the same router and planner, and `simulation.counted`.

Nothing sleeps and nothing runs beside anything else, so equal seeds give equal results on every machine.
"""
