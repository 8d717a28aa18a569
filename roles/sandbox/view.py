"""What code in the sandbox may see of the file system: Python, its libraries, nothing of the user's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SCRATCH = "/scratch"
"""Inside the sandbox: a file system of its own, where no library lies that it would hide."""
TEMPORARY = "/tmp"  # noqa: S108 where programs look for it
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/bin", "/usr/local/lib", "/usr/local/bin")
_LINKS = ("/bin", "/lib", "/lib32", "/lib64")
_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_OF_A_PREFIX = ("bin", "lib", "lib64", "pyvenv.cfg")


def readable_paths(packages: Sequence[str] = ()) -> tuple[str, ...]:
    """Existing paths that Python needs to start and import; ``packages`` are directories besides those.

    Of a prefix only its programs and libraries count, so that a project which lies beside them stays hidden.
    """
    prefixes = {
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        *map(os.path.realpath, (sys.base_prefix, sys.prefix)),
    }
    of_prefixes = [
        f"{prefix}/{part}" for prefix in sorted(prefixes) for part in _OF_A_PREFIX if prefix != "/usr"
    ]
    sites = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    programs = [str(Path(sys.executable).parent), str(Path(os.path.realpath(sys.executable)).parent)]
    wanted = [*_SYSTEM, *_LINKS, *_FILES, *of_prefixes, *sites, *programs, *packages]
    return tuple(dict.fromkeys(path for path in wanted if Path(path).exists()))
