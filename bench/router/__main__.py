"""`python -m bench.router` is `baton bench router`, even if Baton is not installed."""

import sys

from bench.router.command import router

if __name__ == "__main__":
    sys.exit(router.main(prog_name="baton bench router", standalone_mode=False))
