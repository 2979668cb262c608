"""The page in one piece: HTML, style and script put together, for the server or as a file of its own."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from shoal.dashboard.answers import answer
from shoal.dashboard.run_log import RunLog

SCRIPTS = ("core.js", "chart.js", "heat.js", "timeline.js", "panels.js", "main.js")
EXPORT_SPANS = 40_000
EXPORT_POINTS = "2000"


def page(data: str = "null") -> tuple[str, str]:
    """The page, and its Content-Security-Policy: no script but its own, and no request to anywhere else."""
    web, nonce = files("shoal.dashboard") / "web", secrets.token_urlsafe(12)
    script = "\n".join((web / name).read_text("utf-8") for name in SCRIPTS)
    text = (web / "page.html").read_text("utf-8").replace("NONCE", nonce)
    text = text.replace("/*STYLE*/", (web / "style.css").read_text("utf-8")).replace("/*SCRIPT*/", script)
    text = text.replace("/*DATA*/", f"const EXPORTED = {data};")  # last: it may hold any text
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:"
    return text, policy + "; connect-src 'self'; base-uri 'none'; form-action 'none'"


def export(runs: Sequence[RunLog], path: Path) -> None:
    """Write the page with all that it shows as one file, which needs nothing but a browser."""
    data: dict[str, object] = {
        "runs": answer(runs, "runs", {}),
        "differences": answer(runs, "differences", {}),
    }
    for number, run in enumerate(runs):
        names = ",".join(
            ["loss,lr,grad_norm,samples_per_second", *(f"log:{name}" for name in run.columns.values())]
        )
        which = {"run": str(number)}
        data[f"series/{number}"] = answer(runs, "series", {**which, "names": names, "points": EXPORT_POINTS})
        for name in ("heat", "split", "memory", "servers", "marks", "pipeline"):
            data[f"{name}/{number}"] = answer(runs, name, which)
        spans = answer(runs, "spans", {**which, "most": str(EXPORT_SPANS)})
        assert isinstance(spans, bytes)
        data[f"spans/{number}"] = base64.b64encode(spans).decode()
    text, policy = page(script_safe(data))
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    path.write_text(text.replace("<!--POLICY-->", meta), encoding="utf-8")


def script_safe(value: object) -> str:
    """JSON that can stand in a script, whatever text is in it.

    >>> script_safe({"name": "</script><b>"})
    '{"name": "\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
