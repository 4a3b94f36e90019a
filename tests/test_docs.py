"""What README and docs/ name is there: commands with their options, files, tests, pages."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest

from supervisor import ctl

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PACKAGES = ("supervisor", "gateway", "worker", "cachestore")
AN_END = re.compile(r"[#;|`&>]|\s{3,}|,\s|\.(\s|$)|…")
"""Where a command in a text ends."""


def commands_in(text: str) -> Iterator[list[str]]:
    """Each `omlxctl …` that a reader may type, without its comment."""
    code = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL) + re.findall(
        r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    )
    for found in re.finditer(r"omlxctl ([^ \n][^\n]*)", "\n".join(code)):
        yield AN_END.split(found[1], maxsplit=1)[0].replace("[", "").replace("]", "").split()


def problem_of(words: list[str]) -> str | None:
    """Why omlxctl would not know these words; what is in capitals or quotes is the reader's own."""
    command: click.Command = ctl.omlxctl
    options: set[str] = set()
    for word in words:
        options |= {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        if word.startswith("-"):
            if word.split("=")[0] not in options | {"--help"}:
                return f"{command.name} has no option {word}"
        elif isinstance(command, click.Group) and re.fullmatch(r"[a-z]+", word):
            if word not in command.commands:
                return f"{command.name} has no command {word}"
            command = command.commands[word]
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_is_one(page: Path) -> None:
    found = list(commands_in(page.read_text()))
    assert {" ".join(words): problem for words in found if (problem := problem_of(words))} == {}
    if page.name in ("README.md", "quickstart.md", "service.md"):
        assert len(found) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_map_names_no_file_that_is_not_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for package in PACKAGES:
        section = text.split(f"\n**{package}/**\n")[1].split("\n\n")[0]
        named = set(re.findall(r"`([a-z0-9_*]+(?:\.py|\*))`", section))
        files = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py", "__main__.py"}
        assert {name for name in named if not any(fnmatch(file, name) for file in files)} == set(), package
        assert len(named) > len(files) / 2, package


def test_every_test_that_the_table_of_faults_names_is_there() -> None:
    tests = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    table = (ROOT / "docs" / "faults.md").read_text().split("## Which test shows it")[1]
    named = re.findall(r"(test_\w+\.py)|::(test_\w+)|`(test_\w+)…?`", table)
    assert len(named) > 20
    for file, of_file, alone in named:
        name = of_file or alone
        assert file in tests if file else any(f"def {name}" in text for text in tests.values()), file or name


def test_every_seam_to_macos_is_on_the_list_of_what_to_verify_on_a_mac() -> None:
    checklist = (ROOT / "docs" / "mac-checklist.md").read_text()
    seam = re.compile(r'"darwin"|\bmetal\.is_available|has_metal\(')
    seams = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).glob("*.py")
        if seam.search(path.read_text())
    }
    assert len(seams) >= 8
    assert {name for name in seams if name not in checklist} == set()
