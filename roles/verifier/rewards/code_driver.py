"""Runs a program under test and tells what its calls return. Executed as text, by a Python without packages.

The job comes on one inherited file and findings go to another, a line each behind a mark that the program has
not been told. What is told are plain values, by exact type; nothing is compared here, where the program could
have changed what equality means, and no expected value ever comes here.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing it takes a millisecond, and this starts for every program
    import typing


def main() -> None:  # noqa: C901 one function: its locals are out of the program's plain sight
    """Run the job and leave."""
    import builtins
    import json
    import os
    import sys

    job_file, findings = int(sys.argv[1]), int(sys.argv[2])
    job = json.loads(os.pread(job_file, os.fstat(job_file).st_size, 0))
    os.close(job_file)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as the interpreter has them when it loads packages
    evaluate, build = eval, compile
    dumps, write, leave, mark = json.dumps, os.write, os._exit, job["mark"].encode()

    def tell(**finding: object) -> None:
        write(findings, mark + b" " + dumps(finding).encode() + b"\n")

    def told(value: typing.Any) -> object:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind in (list, tuple, set, frozenset):
            return {kind.__name__: list(map(told, value))}
        if kind is dict:
            return {"dict": [list(map(told, pair)) for pair in value.items()]}
        raise TypeError(f"a {kind.__name__} is no plain value")

    space = {"__name__": "__main__" if job["program"] else "solution"}
    ended = True
    try:
        exec(build(job["code"], "solution.py", "exec"), space)  # noqa: S102 what it is for
    except SystemExit as exc:
        ended = job["program"] and exc.code in (None, 0)
    except BaseException as exc:  # noqa: BLE001 it is anybody's code
        ended = False
        tell(raised=f"{type(exc).__name__}: {exc}"[:200])
    for call in job["calls"] if ended else ():
        try:
            tell(value=told(evaluate(build(call, "test", "eval"), space)))
        except BaseException as exc:  # noqa: BLE001 it is anybody's code
            tell(raised=f"{type(exc).__name__}: {exc}"[:200])
    try:
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 the program may have replaced it
        ended = False
    if ended:
        tell(end=True)
    leave(0)


if __name__ == "__main__":
    main()
