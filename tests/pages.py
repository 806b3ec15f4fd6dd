"""Reports as a browser reads them: tags, attributes, text, pictures."""

from __future__ import annotations

import base64
from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags that were opened, attributes, text between tags; refuses tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def pictures(page: str) -> list[bytes]:
    prefix = "data:image/png;base64,"
    found = [value or "" for name, value in Page(page).attributes if name == "src"]
    assert all(value.startswith(prefix) for value in found)
    return [base64.b64decode(value.removeprefix(prefix)) for value in found]
