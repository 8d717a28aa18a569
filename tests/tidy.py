"""House rules that no linter has: each takes a file and yields what is wrong with it, in words."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FILE_LINES_MAX = 300
FUNCTION_LINES_MAX = 60
SPEC_FIELDS_MAX = 15

OURS = ("protocol", "roles", "node")
"""The packages that are shipped; some rules hold for these only."""

MAY_CATCH_ALL = {
    "roles/verifier/rewards/code_driver.py": "runs the program under test, which may raise anything",
    "roles/verifier/rewards/latex.py": "the parser raises bare Exception on text that it cannot read",
    "roles/tasks/environment.py": "an environment may raise anything while it is opened",
    "roles/turns/functions.py": "a module of a tool may raise anything while it is imported",
    "roles/turns/tool_host.py": "a tool may raise anything, and the model is told",
    "node/runtime.py": "turns the crash of a role into a log line and an exit status",
    "node/cli/main.py": "hands whatever ended the process to node/runtime.py:explain",
    "node/cli/show.py": "the same, for commands that show progress",
    "node/off_loop.py": "carries what a thread raises to the caller who waits for it",
}
"""Catching everything and raising it again is cleaning up, and needs no entry here."""

MAY_SLEEP = {
    "tests/contract/brokers.py": "asks a real broker until it has done what it announces to nobody",
    "tests/roles/verifier/rewards/reward_functions.py": "a reward function that takes too long",
    "tests/vllm_stub.py": "a server that takes its time for a token",
}
"""Tests that wait for the clock, with the reason why there is no event to wait for."""

_BESIDE = ("bench/*", "examples/*", "scripts/*", "deploy/*")
MAY_PRINT = (
    "node/cli/*",
    "node/runtime.py",  # the last word of a process goes to the person
    "tests/roles/verifier/rewards/reward_functions.py",  # a reward function that talks
    *_BESIDE,
)
MAY_READ_ENVIRONMENT = ("node/settings.py", "tests/*", *_BESIDE)

_TORCH = (
    "roles/base_model.py",
    "roles/torch_*.py",
    "roles/learner/torch_*.py",
    "roles/verifier/torch_*.py",
    "roles/policy/adapter_shapes.py",
    "roles/sampler/transformers_*.py",
    *(f"node/{name}.py" for name in ("devices", "models", "tiny_model", "try_adapter")),
)
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "click": ("node/cli/*.py",),
    "datasets": ("roles/tasks/*.py",),
    "hf_xet": ("node/hub_*.py",),
    "httpx2": ("node/hub_*.py", "roles/sampler/vllm_*.py"),
    "huggingface_hub": ("node/hub_*.py", "node/models.py"),
    "jinja2": ("roles/tasks/prompts.py", "roles/turns/frames.py"),
    "latex2sympy2_extended": ("roles/verifier/rewards/*.py",),
    "math_verify": ("roles/verifier/rewards/*.py",),
    "matplotlib": ("node/plot.py",),
    "nacl": ("protocol/identity.py",),
    "nats": ("node/nats_*.py",),
    "nats_server": ("node/broker*.py",),
    "nkeys": ("protocol/identity.py", "node/nats_jwt.py"),
    **dict.fromkeys(("numpy", "pydantic"), ("*",)),
    **dict.fromkeys(("peft", "torch", "transformers"), _TORCH),
    "pydantic_core": ("protocol/*.py",),
    "reasoning_gym": ("roles/tasks/*.py", "roles/verifier/rewards/*.py"),
    "rich": ("node/cli/*.py", "node/watch*.py"),
    "safetensors": ("roles/policy/*.py", "roles/learner/*.py", "node/*.py"),
    "structlog": ("roles/*", "node/*"),
    "sympy": ("roles/verifier/rewards/*.py",),
    "typer": ("node/cli/*.py",),
    "verifiers": ("roles/tasks/environment.py", "roles/verifier/rewards/environment.py"),
    "vllm": ("roles/sampler/vllm_*.py",),
}
"""Which shipped files may import what: a dependency stays behind its port."""


@dataclass(frozen=True)
class Source:
    """A file by its path from the root, with ``/``."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed module."""
        return ast.parse(self.text, self.path)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """All nodes of these kinds."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def matches(self, patterns: tuple[str, ...]) -> bool:
        """Whether the path fits one of the patterns (``*`` also spans ``/``)."""
        return any(fnmatch(self.path, pattern) for pattern in patterns)

    @property
    def is_ours(self) -> bool:
        """Whether it is shipped."""
        return self.path.split("/")[0] in OURS

    @property
    def is_test(self) -> bool:
        """Whether it lies under tests."""
        return self.path.startswith("tests/")


Rule = Callable[[Source], Iterator[str]]


def opens_with_a_docstring(source: Source) -> Iterator[str]:
    """Each file says what it is, in its first line."""
    if not re.match(r'r?"""\S', source.text):
        yield "the first line is not a docstring that says what the file is"


def is_short(source: Source) -> Iterator[str]:
    """A file that cannot be read in one go is two files."""
    lines = source.text.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{lines} lines; at most {FILE_LINES_MAX}: split it"


def has_short_functions(source: Source) -> Iterator[str]:
    """A function fits on a screen."""
    for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{node.name} has {lines} lines; at most {FUNCTION_LINES_MAX}"


def has_small_specs(source: Source) -> Iterator[str]:
    """Settings come in small groups."""
    for node in source.nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        if any(isinstance(base, ast.Name) and base.id.endswith("Spec") for base in node.bases):
            fields = sum(isinstance(item, ast.AnnAssign) for item in node.body)
            if fields > SPEC_FIELDS_MAX:
                yield f"{node.name} has {fields} fields; at most {SPEC_FIELDS_MAX}: split it"


def is_no_drawer(source: Source) -> Iterator[str]:
    """A name that fits everything says nothing."""
    stem = Path(source.path).stem
    if stem.strip("_") in {"utils", "util", "helpers", "helper", "misc", "common", "stuff"}:
        yield f"{stem} is no name; say what is in it"


def has_no_globals(source: Source) -> Iterator[str]:
    """State has an owner."""
    for node in source.nodes(ast.Global):
        yield f"line {_line(node)}: global state; pass it as an argument"


def catches_what_it_knows(source: Source) -> Iterator[str]:
    """Let it crash, once."""
    if source.path in MAY_CATCH_ALL or not (source.is_ours or source.is_test):
        return
    for node in source.nodes(ast.ExceptHandler):
        assert isinstance(node, ast.ExceptHandler)
        last = node.body[-1]
        if isinstance(last, ast.Raise) and last.exc is None:
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        for kind in kinds:
            if kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"}):
                yield f"line {_line(node)}: catches everything; name what can go wrong"


def uses_no_mocks(source: Source) -> Iterator[str]:
    """A fake is shipped and keeps the contract; a mock agrees with anything."""
    if any(name == "mock" or name.startswith("unittest") for name in _imports(source, whole=True)):
        yield "unittest or mock; use the shipped fakes"


def awaits_events(source: Source) -> Iterator[str]:
    """A test that sleeps is slow when all is well and wrong when the machine is busy."""
    if not source.is_test or source.path in MAY_SLEEP:
        return
    for node in source.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if ast.unparse(node.func) in {"time.sleep", "asyncio.sleep"}:
            zero = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if not zero:
                yield f"line {_line(node)}: sleeps; wait for an event"


def logs_instead_of_printing(source: Source) -> Iterator[str]:
    """Only the command line talks to a person."""
    if source.matches(MAY_PRINT):
        return
    for node in source.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {_line(node)}: print; log an event"


def reads_no_environment(source: Source) -> Iterator[str]:
    """The environment is read in one place."""
    if source.matches(MAY_READ_ENVIRONMENT):
        return
    for node in source.nodes(ast.Attribute):
        if ast.unparse(node) in {"os.environ", "os.getenv", "os.environb"}:
            yield f"line {_line(node)}: reads the environment; take it as an argument from node/settings.py"


def keeps_third_parties_apart(source: Source) -> Iterator[str]:
    """Each dependency stays in a few named files."""
    if not source.is_ours:
        return
    for name in sorted(_imports(source) - set(sys.stdlib_module_names) - set(OURS)):
        if name not in THIRD_PARTY:
            yield f"imports {name}, which is no declared dependency (THIRD_PARTY in tests/tidy.py)"
        elif not source.matches(THIRD_PARTY[name]):
            yield f"imports {name}, which belongs into {' or '.join(THIRD_PARTY[name])}"


def names_no_machine(source: Source) -> Iterator[str]:
    """What is written here works on every machine."""
    paths = rf"{re.escape(str(ROOT))}\b|(?<![\w.])/(?:home|Users|root)/\w|[A-Z]:\\+Users\\"
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.search(paths, line):
            yield f"line {number}: a path of one machine"


def has_links_that_resolve(source: Source) -> Iterator[str]:
    """A relative link leads to a file, and its anchor to a heading."""
    if not source.path.endswith(".md"):
        return
    text = re.sub(r"```.*?```|`[^`\n]*`", "", source.text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / source.path).parent / path if path else ROOT / source.path
        if not file.exists():
            yield f"link to {path}, which does not exist"
        elif anchor and file.suffix == ".md" and anchor not in _anchors(file.read_text("utf-8")):
            yield f"link to {target}: no such heading"


def numbers_its_decision(source: Source) -> Iterator[str]:
    """A decision is ``docs/adr/NNNN-name.md`` and begins with ``# NNNN: ``."""
    if not source.path.startswith("docs/adr/"):
        return
    number = re.fullmatch(r"docs/adr/(\d{4})-[a-z0-9-]+\.md", source.path)
    if not number:
        yield "not NNNN-name.md"
    elif not source.text.startswith(f"# {number[1]}: "):
        yield f"does not begin with '# {number[1]}: '"


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _imports(source: Source, *, whole: bool = False) -> set[str]:
    names: set[str] = set()
    for node in source.nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names if whole else {name.split(".")[0] for name in names}


def _anchors(markdown: str) -> set[str]:
    headings = re.findall(r"^#+ +(.+?)\s*$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PYTHON_RULES: tuple[Rule, ...] = (
    opens_with_a_docstring,
    is_short,
    has_short_functions,
    has_small_specs,
    is_no_drawer,
    has_no_globals,
    catches_what_it_knows,
    uses_no_mocks,
    awaits_events,
    logs_instead_of_printing,
    reads_no_environment,
    keeps_third_parties_apart,
)
TEXT_RULES: tuple[Rule, ...] = (names_no_machine, has_links_that_resolve, numbers_its_decision)
