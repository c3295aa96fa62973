"""The limit of open files, in a process of its own: what is lowered cannot always be raised again."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys
from common.process.open_files import allow_open_files
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_open_files(wanted), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "allowed", "soft_after"),
    [(128, 900, 500, 500, 500), (128, 300, 500, 300, 300), (700, 900, 500, 500, 700)],
)
def test_room_is_made_as_far_as_the_system_lets(
    soft: int, hard: int, wanted: int, allowed: int, soft_after: int
) -> None:
    command = [sys.executable, "-c", CODE, str(soft), str(hard), str(wanted)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.split() == [str(allowed), str(soft_after), str(hard)]
