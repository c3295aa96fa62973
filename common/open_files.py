"""How many files and connections a process may have open: shells often allow 1024, the system itself far more."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)


def allow_open_files(num: int) -> int:
    """Makes room for `num`, as far as the system lets this process; how many it may have now. Less is logged: beyond
    it, new connections fail, this process's own among them."""
    if sys.platform == "win32":
        return num
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = num if hard == resource.RLIM_INFINITY else min(num, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < num:
        log.warning("fewer files may be open than this process may need", extra={"limit": soft, "needed": num})
        return soft
    return num
