"""The picture of a job as one page of HTML that loads nothing, and as text of SVG. All text from outside is escaped."""

from __future__ import annotations

from html import escape
from xml.etree import ElementTree

from elastic_ext.observe.timeline import sheet
from elastic_ext.observe.timeline.course import Course

# The colours of the picture that follow those of the page.
_OF_PAGE = {
    sheet.INK: "var(--ink)",
    sheet.SOFT: "var(--soft)",
    sheet.FAINT: "var(--faint)",
    sheet.PAPER: "var(--paper)",
    sheet.WARN: "var(--alarm)",
}

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #101112; --soft: #5b5c5d; --faint: #d7d8d9; --paper: #fefdfc; --alarm: #b3122f }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #ececec; --soft: #a9abad; --faint: #3b3d40; --paper: #16181b; --alarm: #ff8087 }}
}}
body {{ margin: 1rem; background: var(--paper); color: var(--ink); font: 14px/1.4 "DejaVu Sans", Verdana, sans-serif }}
.picture {{ overflow-x: auto }}
svg {{ min-width: 60rem; width: 100%; height: auto; font-family: "DejaVu Sans", Verdana, sans-serif }}
svg path:hover {{ opacity: 0.75 }}
.list {{ overflow-x: auto }}
table {{ border-collapse: collapse }}
th, td {{ text-align: left; vertical-align: top; padding: 0.15rem 0.8rem 0.15rem 0; border-bottom: 1px solid var(--faint) }}
td:nth-child(2) {{ white-space: nowrap }}
th, .notes {{ color: var(--soft); font-weight: normal }}
td:first-child {{ color: var(--alarm); font-weight: bold }}
</style>
<div class="picture">{picture}</div>
{failures}
<ul class="notes">{notes}</ul>
</html>
"""


def svg_text(root: ElementTree.Element) -> str:
    """Return a picture as a file of SVG."""
    ElementTree.register_namespace("", "http://www.w3.org/2000/svg")
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def html(of: Course, root: ElementTree.Element) -> str:
    """Return a page with a picture (without its list), which takes its colours from the page, and all failures below it."""
    for element in root.iter():
        if (found := element.get("style")) is not None:
            for color, variable in _OF_PAGE.items():
                found = found.replace(color, variable)
            element.set("style", found)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    return _PAGE.format(
        title=escape(sheet.headline(of)),
        picture=svg_text(root),
        failures=_failures(of),
        notes="".join(f"<li>{escape(note)}</li>" for note in of.notes),
    )


def _failures(of: Course) -> str:
    if not of.marks:
        return "<p>No failures.</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in sheet.COLUMNS)
    rows = (
        "".join(f"<td>{escape(cell)}</td>" for cell in sheet.columns(mark, number, of)) for number, mark in enumerate(of.marks, 1)
    )
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f'<div class="list"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
