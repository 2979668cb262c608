"""For mkdocs: links that leave docs/ become the path of the file; on the repository's host they stay links."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def plain(text: str, folder: str) -> str:
    """Markdown in which links out of docs/, and links to folders, are text."""

    def one(match: re.Match[str]) -> str:
        label, target = match.groups()
        if re.match(r"\w+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path.startswith("docs/") and path.endswith(".md"):
            return match[0]
        return f"`{path}`" if label.strip("`") == path else f"{label} (`{path}`)"

    parts = FENCE.split(text)
    return "".join(part if number % 2 else LINK.sub(one, part) for number, part in enumerate(parts))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return plain(markdown, posixpath.dirname(page.file.src_uri))
