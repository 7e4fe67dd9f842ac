"""Hooks of mkdocs: add text from code and README, and files outside docs/, to the site.

<!-- README: Heading -->   in a page: that section of the README
<!-- commands -->          in a page: every command, from its help text
../configs/x.yaml          a link of a page: to a copy on the site
../SECURITY.md             a link of a page: to that page, which is on the site, too
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
COPIED = re.compile(r"\]\((?:\.\./)+((?:configs|examples)/[\w./-]+)\)")
LINKS = {"README.md#what-has-run-where": "hardware.md", "docs/": "", "configs": "settings.md"}
"""Links of the pages in the repository's root, and where they lead on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add what is not in docs/."""
    pages = [file.content_string for file in files.documentation_pages()]
    for name in OUTSIDE:
        text = _in_docs((ROOT / name).read_text())
        files.append(File.generated(config, name, content=text))
    for name in sorted({name for text in pages for name in COPIED.findall(text)}):
        files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the marks, and links that lead out of docs/."""
    markdown = re.sub("<!-- README: (.+) -->", lambda found: _section(found[1]), markdown)
    markdown = markdown.replace("<!-- commands -->", "\n".join(_commands()))
    up = "../" * page.file.src_uri.count("/")
    markdown = COPIED.sub(rf"]({up}\1)", markdown)
    for target in (*OUTSIDE, "README.md#what-has-run-where"):
        markdown = markdown.replace(f"](../{up}{target}", f"]({up}{LINKS.get(target, target)}")
    text = r"\[(?:docs/)?(\w+)\.md\](?=\()"
    return re.sub(text, lambda found: f"[{_heading(found[1])}]", markdown)


def _heading(name: str) -> str:
    """Return a page's title, which replaces its file name as the text of a link."""
    folder = ROOT if f"{name}.md" in OUTSIDE else ROOT / "docs"
    return (folder / f"{name}.md").read_text().splitlines()[0].removeprefix("# ")


def _section(heading: str) -> str:
    """Return the text below a heading of the README."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found is not None, heading
    return _in_docs(found[1])


def _in_docs(text: str) -> str:
    """Change links of a page in the root into those of a page in docs/."""
    for name, target in LINKS.items():
        text = re.sub(rf"\]\({re.escape(name)}/?", f"]({target}", text)
    return text


def _commands() -> Iterator[str]:
    """Yield a heading for each group and each command, usage, arguments and options."""
    import typer
    from typer.cli import get_docs_for_click

    from easyrl.cli import PANELS, app

    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="easyrl")
    for panel in PANELS:
        yield f"\n## {panel}\n"
        for name, command in group.commands.items():
            if command.rich_help_panel == panel:
                text = get_docs_for_click(
                    obj=command,
                    ctx=context,
                    name=name,
                    call_prefix="easyrl",
                    title=f"easyrl {name}",
                )
                text = re.sub(r"\(docs/((\w+)\.md)\)", r"([\2](\1))", text)
                yield re.sub(r"\n\* `--help`.*|\*\*Usage\*\*:\n", "", f"##{text}")
