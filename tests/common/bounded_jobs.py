"""`python -m tests.common.bounded_jobs LIMITS SEALED`: a child for tests of `common.bounded_process`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from common.bounded_child import Job, prepare, serve
from common.bounded_process import Limits

kept: list[bytes] = []


def do(job: Job) -> dict[str, object]:
    match job:
        case {"open": str(path)}:
            return {"is_open": _tried(lambda: open(path).close())}
        case {"connect": int(port)}:
            return {"is_open": _tried(lambda: socket.create_connection(("127.0.0.1", port)).close())}
        case {"compute": True}:
            return {"number": 9**9**9 % 10}
        case {"say": str(text)}:
            return {"said": text}
        case {"keep": int(num_bytes)}:
            kept.append(bytes(num_bytes))
            return {"kept": len(kept)}
        case {"signal": int(number)}:
            os.kill(os.getpid(), number)
            signal.pause()
    raise RuntimeError(f"no such job: {job}")


def _tried(work: object) -> str:
    try:
        work()  # type: ignore[operator]
    except OSError as error:
        return error.strerror or "failed"
    return "yes"


if __name__ == "__main__":
    prepare()
    sys.exit(serve(do, Limits(**json.loads(sys.argv[1])), opens_files=sys.argv[2] == "open"))
