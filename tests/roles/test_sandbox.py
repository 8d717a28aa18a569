"""The sandbox: what it shows of the file system is whole, wherever on this machine it lies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roles.sandbox.view import SCRATCH, TEMPORARY

LOOK = """
import json, sys
from pathlib import Path
from roles.sandbox.confinement import isolate
from roles.sandbox.view import readable_paths
library = sys.argv[1]
if not isolate(readable_paths([library])):
    sys.exit(77)
Path("note").write_text("here")
seen = (Path(library) / "module.py").read_text()
print(json.dumps([Path.cwd().as_posix(), seen, Path(sys.argv[2]).exists()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_a_library_below_the_temporary_directory_is_seen_and_its_neighbours_are_not(tmp_path: Path):
    assert tmp_path.is_relative_to(TEMPORARY), "pytest makes its directories there"
    library, secret = tmp_path / "library", tmp_path / "secret.txt"
    library.mkdir()
    (library / "module.py").write_text("x = 1")
    secret.write_text("mine")
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(library), str(secret)], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("this kernel gives no namespaces to users")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f'["{SCRATCH}", "x = 1", false]'
