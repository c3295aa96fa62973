"""How many files and connections a process may have open: shells often allow 1024, the system itself far more."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)


def allow_open_files(num: int) -> int:
    """Raises the limit to `num`, as far as the system allows, and returns the limit. Logs a warning if the limit stays
    lower: beyond it new connections fail, including this process's own."""
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
