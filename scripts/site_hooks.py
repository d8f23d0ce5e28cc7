"""Hooks for mkdocs: links from docs/ to other files lead to copies in the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
COPIES = "project"  # the site's folder for the copies
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add a copy of each file outside docs/ that a page links to.

    For a folder, add a list of its files.
    """
    for page in [file for file in files if file.src_uri.endswith(".md")]:
        for target in sorted(_outside(page.src_uri, Path(str(page.abs_src_path)).read_text("utf-8"))):
            if files.get_file_from_path(_copy_of(target)) is None:
                files.append(File.generated(config, _copy_of(target), content=_content(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links that leave docs/ into links to the copies."""

    def turned(found: re.Match[str]) -> str:
        target = _target(page.file.src_uri, found[2])
        if target is None or not _is_outside(target):
            return found[0]
        return f"{found[1]}{posixpath.relpath(_copy_of(target), posixpath.dirname(page.file.src_uri) or '.')})"

    return _LINK.sub(turned, markdown)


def _outside(page: str, markdown: str) -> set[str]:
    targets = (_target(page, found[2]) for found in _LINK.finditer(markdown))
    return {target for target in targets if target is not None and _is_outside(target)}


def _target(page: str, link: str) -> str | None:
    """Return the path of a page's link, from the project's root.

    Returns None for an external link.
    """
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))


def _is_outside(target: str) -> bool:
    is_kept = target.startswith("docs/") and not target.startswith(("docs/results", "docs/plots"))
    return not is_kept and (ROOT / target).exists()


def _copy_of(target: str) -> str:
    suffix = ".txt" if (ROOT / target).is_dir() or target.endswith((".md", ".toml", ".py")) else ""
    return f"{COPIES}/{target}{suffix}"


def _content(target: str) -> str | bytes:
    path = ROOT / target
    return "\n".join(sorted(inside.name for inside in path.iterdir())) + "\n" if path.is_dir() else path.read_bytes()
