"""`python -m baton` is the `baton` command."""

import sys

from baton.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
