"""The README is short and true: its example prints what it shows, its links also work outside the repository."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

from tests.docs.pages import PAGES, ROOT, fences, program, run_script

README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINKS = re.compile(r"""\]\(([^)]+)\)|\b(?:src|srcset)="([^"]+)\"""")
HOSTS = re.compile(r"https://(?:github\.com/OWNER/rooftile/blob|raw\.githubusercontent\.com/OWNER/rooftile)/main/([^#]+)")


def published() -> str:
    """Returns the README as a package index shows it."""
    text = README.read_text(encoding="utf-8")
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text, count = re.subn(rule["pattern"], rule["replacement"], text)
        assert count, f"{rule['pattern']} matches nothing in the README"
    return text


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 140


def test_the_readme_shows_what_its_example_prints(tmp_path) -> None:
    script = tmp_path / "page.py"
    script.write_text(program(README), encoding="utf-8")
    code, output, errors = run_script(script, tmp_path)
    assert code == 0, errors
    (_, shown), *_ = fences(README, "text")
    assert output.startswith(shown)


def test_published_links_are_absolute_and_lead_to_files() -> None:
    links = [a or b for a, b in LINKS.findall(published())]
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    paths = [match[1] for link in links if (match := HOSTS.match(link))]
    assert len(paths) == len(links)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_repository_has_one_address() -> None:
    urls = PROJECT["project"]["urls"]
    linked = re.findall(r"https://github\.com/[\w/-]+/rooftile\b", published())
    assert set(linked) == {urls["Source"]}
    assert all(url.startswith((urls["Source"], "https://OWNER.github.io/rooftile/")) for url in urls.values())


def commands() -> Iterator[tuple[str, str]]:
    """Yields the page and each line of its shell fences."""
    for page in PAGES:
        for _, code in fences(page, "sh"):
            yield from ((str(page.relative_to(ROOT)), line) for line in code.splitlines())


def test_a_command_has_no_placeholder() -> None:
    found = [f"{page}: {line}" for page, line in commands() if re.search(r"OWNER|<[a-z]+>|\bVERSION\b", line)]
    assert found == []
    assert any("pip install ." in line for page, line in commands() if page == "README.md")


def test_commands_name_the_wheel_and_the_extras_that_there_are() -> None:
    """The wheel is pure Python, so its name follows from the version; a wheel is built where `make wheel` says."""
    name, version = PROJECT["project"]["name"], PROJECT["project"]["version"]
    wheels = {wheel for _, line in commands() for wheel in re.findall(r"[\w/.-]*\.whl", line)}
    assert wheels == {f"dist/{name}-{version}-py3-none-any.whl"}
    assert "--wheel-dir dist" in (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = {extra for _, line in commands() for extra in re.findall(r"pip install \S*\[(\w+)\]", line)}
    assert extras
    assert extras <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_first_pages_say_how_to_install_and_what_all_of_it_is_for() -> None:
    for page in (README, ROOT / "docs" / "index.md"):
        text = page.read_text(encoding="utf-8")
        first = " ".join(text.split("-->")[1].split("<!--")[0].split())
        assert first.count(". ") == 0, "one sentence, of parts"
        for word in ("exact attention", "bounds a program", "training", "formats", "serving", "paged", "approximate", "H200"):
            assert word in first
        assert "pip install ." in text


def test_nobody_is_told_to_install_a_name_that_is_not_registered() -> None:
    """Packages that are missing are named themselves, or ours with its address: the name may belong to somebody else."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("rooftile/**/*.py"), *ROOT.glob("rooftile/**/*.html")]
    told = re.compile(r"""pip install (?:-\S+ )*["'`]?rooftile\b(?!\[\w+\] @ git\+)""")
    assert [str(page.relative_to(ROOT)) for page in pages if told.search(page.read_text(encoding="utf-8"))] == []
    assert told.search("pip install 'rooftile[serve]'")
