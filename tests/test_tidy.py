"""The house rules of ``tidy.py``, held against every file, and each against a file that breaks it."""

from __future__ import annotations

import subprocess

import pytest

from tests.tidy import (
    MAY_CATCH_ALL,
    MAY_SLEEP,
    PYTHON_RULES,
    ROOT,
    TEXT_RULES,
    Rule,
    Source,
    numbers_its_decision,
)

BAD: dict[str, tuple[str, str]] = {
    "opens_with_a_docstring": ("node/a.py", "import os\n"),
    "is_short": ("node/a.py", '"""A."""\n' * 301),
    "has_short_functions": ("node/a.py", "def f():\n" + "    pass\n" * 60),
    "has_small_specs": ("node/a.py", "class A(Spec):\n" + "".join(f"    f{i}: int\n" for i in range(16))),
    "is_no_drawer": ("node/utils.py", ""),
    "has_no_globals": ("node/a.py", "def f():\n    global x\n"),
    "catches_what_it_knows": ("node/a.py", "try:\n    f()\nexcept (KeyError, Exception):\n    pass\n"),
    "uses_no_mocks": ("tests/a.py", "from unittest.mock import patch\n"),
    "awaits_events": ("tests/a.py", "await asyncio.sleep(0.1)\n"),
    "logs_instead_of_printing": ("roles/a.py", "print('hello')\n"),
    "reads_no_environment": ("node/a.py", "import os\nx = os.environ['A']\n"),
    "keeps_third_parties_apart": ("protocol/a.py", "def f():\n    import torch.nn\n"),
    "names_no_machine": ("docs/a.md", "see /ho" + "me/ada/notes\n"),
    "has_links_that_resolve": ("docs/a.md", "[b](no-such-file.md)\n"),
    "numbers_its_decision": ("docs/adr/0001-a.md", "# A decision\n"),
}


def tracked(*patterns: str) -> list[Source]:
    """Files that git knows or would add, as text."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [(name, ROOT / name) for name in listed.split("\0") if name]
    return [Source(name, file.read_text("utf-8", errors="replace")) for name, file in files if file.is_file()]


PYTHON = tracked("*.py")
TEXT = tracked(
    "*.py", "*.md", "*.toml", "*.txt", "*.sh", "*.yml", "*.yaml", "*.json", "justfile", ".ci/*", ".gitignore"
)


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_every_python_file(rule: Rule):
    assert PYTHON
    assert [f"{source.path}: {fault}" for source in PYTHON for fault in rule(source)] == []


@pytest.mark.parametrize("rule", TEXT_RULES, ids=lambda rule: rule.__name__)
def test_every_text_file(rule: Rule):
    assert [f"{source.path}: {fault}" for source in TEXT for fault in rule(source)] == []


@pytest.mark.parametrize("rule", [*PYTHON_RULES, *TEXT_RULES], ids=lambda rule: rule.__name__)
def test_each_rule_can_fail(rule: Rule):
    path, text = BAD[rule.__name__]
    assert list(rule(Source(path, text)))


def test_sleeping_for_no_time_is_allowed():
    rule = next(rule for rule in PYTHON_RULES if rule.__name__ == "awaits_events")
    assert list(rule(Source("tests/a.py", "await asyncio.sleep(0)\n"))) == []


def test_catching_everything_to_clean_up_is_allowed():
    rule = next(rule for rule in PYTHON_RULES if rule.__name__ == "catches_what_it_knows")
    assert list(rule(Source("node/a.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise\n"))) == []


def test_a_link_to_a_missing_heading_is_found():
    rule = next(rule for rule in TEXT_RULES if rule.__name__ == "has_links_that_resolve")
    assert list(rule(Source("docs/adr/0000-template.md", "[a](0000-template.md#nowhere)")))


def test_decisions_are_numbered_without_gaps():
    decisions = sorted(source.path for source in TEXT if source.path.startswith("docs/adr/"))
    assert [path.split("/")[-1][:4] for path in decisions] == [f"{i:04}" for i in range(len(decisions))]
    assert all(not list(numbers_its_decision(Source(p, f"# {p[9:13]}: x\n"))) for p in decisions)


def test_exceptions_to_rules_are_still_needed():
    known = {source.path for source in PYTHON}
    assert [path for path in (*MAY_SLEEP, *MAY_CATCH_ALL) if path not in known] == []
    assert all(reason for reason in (*MAY_CATCH_ALL.values(), *MAY_SLEEP.values()))


def test_every_folder_of_tests_is_a_package():
    folders = {source.path.rpartition("/")[0] for source in PYTHON if source.is_test}
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []
