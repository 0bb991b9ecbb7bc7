"""The parts of a Markdown page that a program writes, between comments that no reader sees."""

from __future__ import annotations

__all__ = ["replace_section"]


def replace_section(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between ``<!-- name: begin -->`` and ``<!-- name: end -->``.

    Raises:
        ValueError: The two aren't there.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"the page has no {begin} with an {end} behind it")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
