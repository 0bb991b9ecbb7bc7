"""The few SVG elements that the timeline is drawn with, as text; lengths in pixels."""

from html import escape


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str = "none",
    stroke: str = "none",
    opacity: float = 1,
    radius: float = 0,
    dashes: str = "none",
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
        f'fill="{fill}" fill-opacity="{opacity}" stroke="{stroke}" stroke-width="1.8" '
        f'stroke-dasharray="{dashes}"/>'
    )


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    *,
    stroke: str,
    width: float = 1,
    dashes: str = "none",
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{stroke}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    )


def circle(x: float, y: float, radius: float, *, fill: str, stroke: str = "none") -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f'<circle {place} fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'


def cross(x: float, y: float, *, stroke: str) -> str:
    arms = f"M {x - 5:.1f} {y - 5:.1f} l 10 10 m -10 0 l 10 -10"
    return f'<path d="{arms}" stroke="{stroke}" stroke-width="2.5" fill="none"/>'


def text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{escape(words)}</text>'
