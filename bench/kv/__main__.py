"""`python -m bench.kv` is `baton bench kv`, even if Baton is not installed."""

import sys

from bench.kv.command import kv

if __name__ == "__main__":
    sys.exit(kv.main(prog_name="baton bench kv", standalone_mode=False))
