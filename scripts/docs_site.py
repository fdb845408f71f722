"""Hooks of mkdocs: pages of the repository's root, its other files that pages link to, runbooks under alerts' links."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the runbooks in the navigation, so that a new one is a file and nothing else."""
    runbooks = sorted(Path(config.docs_dir).glob("runbooks/*.md"))
    section = next(each for each in config.nav or [] if "Runbooks" in each)
    section["Runbooks"] = [{page.stem: f"runbooks/{page.name}"} for page in runbooks]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and each file outside docs/ that a page links to, under `repository/`."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    linked = {
        _in_repository(page, link)
        for page in files.documentation_pages()
        for link in _LINK.findall(page.content_string)
    }
    for path in sorted(linked):
        if not path.startswith("docs/") and path not in (*ROOT_PAGES, "README.md") and (ROOT / path).is_file():
            files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to files outside docs/ leading to their copies, and those to folders to this page."""

    def link(found: re.Match[str]) -> str:
        path = _in_repository(page.file, found[1])
        if path.startswith("docs/"):
            own = path.removeprefix("docs/")
        elif path in ROOT_PAGES:
            own = ROOT_PAGES[path]
        elif path == "README.md":
            own = "index.md"
        else:
            own = f"repository/{path}"
        if (ROOT / path).is_dir():
            return "#"
        return posixpath.relpath(own, posixpath.dirname(page.file.src_uri))

    return _LINK.sub(link, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Let `…/runbooks/<Alert>.md` lead to its page.

    Alerts and dashboards name files, `gpuwatch rules --runbooks URL` gives the rest of the link.
    """
    site = Path(config.site_dir)
    for source in [*Path(config.docs_dir).glob("runbooks/*.md"), Path(config.docs_dir) / "concepts/causes.md"]:
        folder = site / source.relative_to(config.docs_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url=../{source.stem}/">\n')


def _in_repository(page: File, link: str) -> str:
    """Return the path of a link's target from the repository's root."""
    source = next((root for root, own in ROOT_PAGES.items() if own == page.src_uri), f"docs/{page.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
