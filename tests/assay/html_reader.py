"""Reads a page as a tree of tags and text."""

import html.parser
import re

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


class Reader(html.parser.HTMLParser):
    """The page as a tree of tags: an unclosed one, or one closed twice, raises."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes), tuple(self.open)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))

    def visible_text(self, *, without=("style",)):
        return re.sub(r"\s+", " ", "".join(data for tag, data in self.text if tag not in without))
