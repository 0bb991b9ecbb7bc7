"""The documentation site: `make docs` builds it into build/docs, without network."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from sphinx import addnodes

from celery_singleton_lock import __version__
from celery_singleton_lock.errors import DOCS

project = "celery-singleton-lock"
author = "the celery-singleton-lock authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Pages for contributors are read in the repository.
exclude_patterns = ["benchmarks/*.json", "dev"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

# A block without a language is a command or its output.
highlight_language = "none"

# Straight quotes: many stand in Python that is not marked as code.
smartquotes_action = "De"

# An index of two modules helps nobody, and is wider than a phone.
html_domain_indices = False
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"{project} {release}"
# The pages' sources are in the repository; a second copy in the site would not be read.
html_copy_source = False
html_show_copyright = False
html_search_scorer = str(Path(__file__).with_name("search.js"))

autodoc_member_order = "bysource"
# The list next to the text is narrow.
toc_object_entries_show_parents = "hide"
autodoc_typehints = "description"
autodoc_typehints_description_target = "all"
autodoc_type_aliases = {"holds.hold": "celery_singleton_lock.hold"}

# `-n` reports every reference without a target. Those to other projects have none: an inventory of
# theirs would have to be downloaded. Type variables have none either.
nitpick_ignore_regex: Final = [(r"py:.*", r"(?!celery_singleton_lock\.).*|.*\.([A-Z]|Reply)")]


_README: Final = Path(__file__).parents[1] / "README.md"


def front_page(readme: str) -> str:
    """The README without badges, and with links within the site."""
    readme = re.sub(r"^\[!\[.*\n", "", readme, flags=re.MULTILINE)
    readme = readme.replace(f"{DOCS}_images/", "images/")
    return re.sub(rf"\({re.escape(DOCS)}([\w/-]+)\.html", r"(\1.md", readme)


def _read(app: Any, page: str, source: list[str]) -> None:
    if page == "index":
        source[0] = source[0].replace("<!-- README -->", front_page(_README.read_text()))


_OPTION: Final = re.compile(r"(?<![\w`-])--?[a-zA-Z][\w-]*")
_END_OF_PART: Final = re.compile(r"(?<=[\w)]{4})[_.=:/(](?=(?:&quot;)?\w{4})")
_LONG: Final = 14  # for a column of a narrow window
_VERY_LONG: Final = 24  # for one of a wide window, too


def breakable(body: str) -> str:
    """A page whose long names in code may break after a part, and whose ``--options`` may not.

    Else a column is as wide as its longest name, and a narrow window shows that column alone.
    """

    def mark(found: re.Match[str]) -> str:
        word = _OPTION.sub(r'<span class="option">\g<0></span>', found[2])
        length = len(unescape(word)) if word == found[2] else 0
        if length >= _LONG:
            place = "<wbr>" if length >= _VERY_LONG else '<wbr class="narrow">'
            word = _END_OF_PART.sub(rf"\g<0>{place}", word)
        return found[1] + word

    return re.sub(r'(<span class="pre">)([^<]*)', mark, body)


def _finish(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if "body" in context:
        context["body"] = breakable(context["body"])


def _link_pictures(app: Any, doctree: Any) -> None:
    """Sphinx links pictures that have a width to their files, which show them in full."""
    for picture in doctree.findall(nodes.image):
        picture["width"] = "100%"
        if picture["uri"].endswith(".svg"):
            # Those in images/ have colors for dark windows, too, but for what the demo plots.
            drawn = picture["uri"].startswith("images/") and not picture["uri"].endswith("demo.svg")
            picture["classes"].append("drawing" if drawn else "plot")


_ANYTHING: Final = {"Any", "~typing.Any", "~typing.~P", "P.args", "P.kwargs"}


def _omit_empty(app: Any, domain: str, kind: str, content: Any) -> None:
    """Leave out what autodoc adds to a docstring and what says nothing.

    That is a parameter without a description if it can be anything, or if others are described (or
    attributes, in a class); and the return type of what returns nothing or is a context manager.
    """
    lists = [part for part in content if isinstance(part, nodes.field_list)]
    found = [{field[0].astext(): field for field in one} for one in lists]
    is_described = any(
        name.startswith("param ") and field[1].astext()
        for one in found
        for name, field in one.items()
    ) or (kind in ("class", "exception") and any(content.findall(addnodes.desc)))
    yields = any("Yields" in one for one in found)
    for one in found:
        for name in [name for name in one if name.startswith("param ")]:
            type_ = one[f"type {name[6:]}"]
            if not one[name][1].astext() and (is_described or type_[1].astext() in _ANYTHING):
                type_.parent.remove(type_)
                one[name].parent.remove(one[name])
        if "rtype" in one and (yields or one["rtype"][1].astext() in ("None", *_ANYTHING)):
            one["rtype"].parent.remove(one["rtype"])
    for empty in [one for one in lists if not len(one)]:
        content.remove(empty)


def setup(app: Any) -> None:
    app.connect("object-description-transform", _omit_empty, priority=900)
    app.connect("source-read", _read)
    app.connect("doctree-read", _link_pictures)
    app.connect("html-page-context", _finish)
