"""`shoal page` and `shoal trace`: a run in a browser."""

from __future__ import annotations

import re
import secrets
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from shoal.errors import ConfigError

Folders = Annotated[list[Path], typer.Argument(help="Folders of runs, live or dead.", show_default=False)]
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")


def page(
    runs: Folders,
    port: Annotated[int, typer.Option(help="On 127.0.0.1; 0 takes a free one.")] = 0,
    html: Annotated[
        Path | None, typer.Option(help="Write one file that needs nothing but a browser, and stop.")
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(help="Write Prometheus' text once into this file, as for node_exporter, and stop."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Take the token from here; made if it is not there.")
    ] = None,
) -> None:
    """Show runs in a browser: a read-only page on 127.0.0.1, whose address has a token in it.

    \b
    shoal page runs/first
    shoal page runs/first runs/second
    shoal page runs/first --html first.html
    """
    from shoal.dashboard.metrics import write_textfile
    from shoal.dashboard.page import export
    from shoal.dashboard.run_log import RunLog
    from shoal.dashboard.server import PageServer

    logs = [RunLog(folder) for folder in runs]
    if html is not None or metrics is not None:
        loaded = [log.load() for log in logs]
        if html is not None:
            export(loaded, html)
            print(f"wrote {html} ({html.stat().st_size / 1e3:.0f} KB)")
        if metrics is not None:
            write_textfile(metrics, loaded)
        return
    token = _token(token_file) if token_file is not None else ""
    with ExitStack() as stack:
        for log in logs:
            stack.enter_context(log)
        try:
            server = PageServer(logs, port, token)
        except OSError as error:
            raise ConfigError(
                f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); try --port 0."
            ) from None
        print(f"shoal: the page is at {server.url}  (Ctrl-C ends it)", flush=True)
        signal.signal(signal.SIGTERM, _end)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            pass
        finally:
            server.closing.set()
            server.server_close()


def trace(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    steps: Annotated[str, typer.Option(help='Which steps, as "100:110".')] = "",
    out: Annotated[Path, typer.Option(help="Where to; a name that ends in .gz is compressed.")] = Path(
        "trace.json"
    ),
) -> None:
    """Write every rank's spans as a trace for chrome://tracing or ui.perfetto.dev, on one clock.

    \b
    shoal trace runs/first --steps 100:110
    """
    from shoal.dashboard.run_log import RunLog
    from shoal.dashboard.trace import write_trace
    from shoal.report.span_table import step_range

    found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", steps) if steps else None
    if steps and found is None:
        raise ConfigError(f'--steps {steps}: give the first and the last, as "100:110".')
    log = RunLog(run).load()
    last = max((step_range(run, rank)[1] for rank in log.ranks()), default=0)
    first, last = (int(found[1]), int(found[2])) if found is not None else (max(1, last - 9), last)
    count = write_trace(log, first, last, out)
    print(f"wrote {out}: {count} spans of steps {first} to {last}", file=sys.stderr)


def _token(path: Path) -> str:
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_urlsafe(24) + "\n")
    token = path.read_text().strip()
    if _TOKEN.fullmatch(token) is None:
        raise ConfigError(f"{path} holds no token: it takes 16 or more letters, digits, '-' or '_'.")
    return token


def _end(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
