"""Text on a narrow screen: which code stays whole, where long names may be broken, and how wide columns are."""

import re
from html import unescape

INLINE = re.compile(r"(?<!<pre>)<code>([^<]*)</code>")  # code within text; blocks have further tags
TABLE = re.compile(r"<table>.*?</table>", re.S)
OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]{1,22}(?![\w-])")
MARKUP = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<[^>]+>)", re.S)
LONG, LONG_IN_CELL = 24, 16  # characters from which on a name may be broken at its separators
# from so many characters of its longest cell on, a column has this class of site.css
WIDTHS = ((90, "w4"), (40, "w3"), (24, "w2"), (12, "w1"))


def laid_out(html: str) -> str:
    """A page's content with inline code, options and tables marked for site.css."""
    tables = TABLE.sub(lambda table: with_widths(marked(table[0], LONG_IN_CELL)), html)
    parts = MARKUP.split(marked(tables, LONG))
    return "".join(p if p.startswith("<") else OPTION.sub(r'<span class="whole">\g<0></span>', p) for p in parts)


def marked(html: str, long: int) -> str:
    """Inline code whose options are not broken at their hyphens, and whose long names are broken at separators only."""

    def token(text: str) -> str:
        if len(unescape(text)) > long:
            return re.sub(r"([/_.,=(\[])(?=[\w(])", r"\1<wbr>", text)
        return f'<span class="whole">{text}</span>' if "-" in text else text

    return INLINE.sub(lambda code: f"<code>{' '.join(map(token, code[1].split(' ')))}</code>", html)


def with_widths(table: str) -> str:
    """The table with a class on each head cell, by the longest text of its column."""
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows]
    longest = [max(map(text_length, column)) for column in zip(*cells, strict=False)]
    classes = iter([next((name for least, name in WIDTHS if length > least), "") for length in longest])

    def with_class(head: re.Match) -> str:
        name = next(classes, "")
        return f'<th class="{name}"{head[1]}>' if name else head[0]

    return re.sub(r"<th((?: style=[^>]*)?)>", with_class, table)


def text_length(cell: str) -> int:
    return len(unescape(re.sub(r"<[^>]+>", "", cell)).strip())
