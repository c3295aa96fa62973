"""The command line of a module that generates a file."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(module: str, description: str | None, path: Path, text: str) -> int:
    """Writes `text` to `path` if asked to; the exit code says whether the file is current then."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--write", action="store_true", help="write the file; without, say whether it is current")
    if parser.parse_args().write:
        path.write_text(text)
    return 0 if path.read_text() == text else 1
