"""Lay report.html out: one file with its style sheet and charts inside, no script and nothing to load."""

from html import escape

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1e293b; --soft: #64748b; --grid: #e2e8f0; --card: #f8fafc;
  --good: #15803d; --bad: #b91c1c; --line0: #2563eb; --line1: #ea580c; --line2: #16a34a; --line3: #7c3aed;
  --line4: #db2777; --line5: #0891b2; }
@media (prefers-color-scheme: dark) { :root { --back: #0f172a; --ink: #e2e8f0; --soft: #94a3b8; --grid: #334155;
  --card: #1e293b; --good: #4ade80; --bad: #f87171; --line0: #60a5fa; --line1: #fb923c; --line2: #4ade80;
  --line3: #a78bfa; --line4: #f472b6; --line5: #22d3ee; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.5rem; } h2 { margin: 2rem 0 .6rem; font-size: 1.1rem; }
.sub { color: var(--soft); margin: .2rem 0 1rem; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem; }
.tiles div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.tiles b { display: block; font-size: 1.2rem; } .tiles span { color: var(--soft); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: .5rem; padding: .6rem; }
figcaption { font-weight: 600; padding: 0 .2rem; } svg { width: 100%; height: auto; display: block; }
svg text { font-family: inherit; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--grid);
  overflow-wrap: anywhere; } td { min-width: 4.5rem; } td:first-child, th { overflow-wrap: normal; }
th { color: var(--soft); font-weight: 500; }
code, pre { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .9em; }
pre { background: var(--card); border-radius: .5rem; padding: .7rem; margin: .4rem 0; white-space: pre-wrap;
  overflow-wrap: anywhere; }
summary { cursor: pointer; } li { overflow-wrap: anywhere; }
"""


def page(title: str, subtitle: str, sections: list[str]) -> str:
    """Return the whole page. Args: subtitle, sections: HTML; title: text."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f'<h1>{escape(title)}</h1>\n<p class="sub">{subtitle}</p>',
        *filter(None, sections),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def section(title: str, body: str) -> str:
    """Return a titled section; "" for an empty body. Args: body: HTML."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def tiles(values: dict[str, str | None]) -> str:
    """Return a row of values with their names; those that are None are left out."""
    cells = [f"<div><b>{escape(v)}</b><span>{escape(name)}</span></div>" for name, v in values.items() if v is not None]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def charts(drawn: dict[str, str]) -> str:
    """Return the charts side by side, each with its title. Args: drawn: title -> SVG, "" for none."""
    figures = [f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in drawn.items() if svg]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table of texts; "" without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def bullets(sentences: list[str]) -> str:
    """Return a list of sentences; "" for none."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>" if sentences else ""


def code(lines: list[str]) -> str:
    """Return lines as a block of code; "" for none."""
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""


def folded(title: str, body: str) -> str:
    """Return HTML that a click opens; "" for an empty body."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""
