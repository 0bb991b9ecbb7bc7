"""The documentation site: `make docs` builds it into build/docs, without network."""

from __future__ import annotations

from typing import Final

from celery_singleton_lock import __version__

project = "celery-singleton-lock"
author = "the celery-singleton-lock authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["benchmarks/*.json"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

# A block without a language is a command or its output.
highlight_language = "none"

html_theme = "furo"
html_title = f"{project} {release}"
# The pages' sources are in the repository; a second copy in the site would not be read.
html_copy_source = False
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

# `-n` reports every reference without a target. Those to other projects have none: an inventory of
# theirs would have to be downloaded. Type variables have none either.
nitpick_ignore_regex: Final = [(r"py:.*", r"(?!celery_singleton_lock\.).*|.*\.[A-Z]")]
