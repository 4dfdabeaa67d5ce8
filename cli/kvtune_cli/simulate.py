"""`kvtune simulate`: replay recorded conversations at other settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

LARGEST = 1e12
"""Numbers that are asked for are below this."""


def _numbers(text: str, option: str, kind: type = float, least: float = 0.0) -> tuple[Any, ...]:
    from kvtune_cli.errors import fail

    found = []
    for part in text.split(","):
        try:
            value = kind(part.strip())
        except ValueError:
            what = "whole number" if kind is int else "number"
            fail(f"{option}: {part.strip()!r} is not a {what}; write e.g. {option} 60,120,480", code=2)
        if not least <= value < LARGEST:
            fail(f"{option}: {part.strip()} is out of range (at least {least:g}, below {LARGEST:g})", code=2)
        found.append(value)
    return tuple(dict.fromkeys(found))


def simulate(
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Conversations; none: a sample.")] = None,
    trace_option: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="The same.")] = None,
    ttl: Annotated[str | None, typer.Option("--ttl", metavar="S,S,...", help="TTLs to try, seconds.")] = None,
    threshold: Annotated[str, typer.Option("--threshold", metavar="N,N,...", help="Thresholds to try, tokens.")] = "64",
    rate: Annotated[
        str, typer.Option("--rate", metavar="R,R,...", help="Turns per second of a decode engine.")
    ] = "0.4",
    pool_tokens: Annotated[
        str | None, typer.Option("--pool-tokens", metavar="N,N,...", help="KV pool of decode [the model's].")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="qwen3-32b, glm-5-fp8 or a calibration file.")] = "qwen3-32b",
    policy: Annotated[
        str | None, typer.Option("--policies", metavar="NAME,...", help="Rules to compare; all or none [all].")
    ] = None,
    current_ttl: Annotated[
        float, typer.Option("--current-ttl", metavar="S", help="In force where the suggestion looks.")
    ] = 480.0,
    duration: Annotated[str, typer.Option("--duration", metavar="DURATION", help="Of what is measured.")] = "4h",
    warmup: Annotated[str, typer.Option("--warmup", metavar="DURATION", help="Before it.")] = "30m",
    prefill: Annotated[int, typer.Option("--prefill", help="Prefill engines.", min=1)] = 1,
    prefill_cache: Annotated[
        bool, typer.Option("--prefill-cache/--no-prefill-cache", help="Prefill keeps the last prompt.")
    ] = False,
    explore: Annotated[
        float,
        typer.Option(
            "--explore", metavar="SHARE", help="Of references (0..0.05) to try the other path with, near the threshold."
        ),
    ] = 0.0,
    noise: Annotated[float, typer.Option("--noise", help="Sigma of the factor on every time.", min=0, max=2)] = 0.1,
    seed: Annotated[int, typer.Option("--seed", help="Of traffic and noise.")] = 1,
    jobs: Annotated[int, typer.Option("--jobs", help="Processes [one a core].", min=0)] = 0,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--snapshot", metavar="DIR", help="Write what the deployment would have exposed, a scrape a minute."
        ),
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="The deployment has no kvtune: only vLLM's series are exposed.")
    ] = False,
    charts: Annotated[
        Path | None, typer.Option("--charts", metavar="DIR", help="Write charts (SVG and PNG) there.")
    ] = None,
    output: Annotated[str, typer.Option("--format", metavar="table|json", help="What to print.")] = "table",
) -> None:
    """Replay recorded conversations against a model of a prefill/decode deployment, at other settings.

    Prints, for every TTL and threshold asked for and for the rules a suggestion competes with, reuse, time to first
    token and retained KV. All of it is simulated. Traces are described in docs/simulate.md.
    """
    from kvtune_bench.calibration import CalibrationError
    from kvtune_bench.replay.model import ReplayError
    from kvtune_bench.replay.run import POLICIES, Request, simulate, to_json
    from kvtune_bench.traces import TraceError
    from kvtune_cli.errors import fail
    from kvtune_tuning.errors import TuningError, UsageError
    from kvtune_tuning.run import seconds

    if output not in ("table", "json"):
        fail(f"--format: unknown format {output!r}; choose table or json", code=2)
    if trace is not None and trace_option is not None:
        fail("the trace is given twice", code=2)
    _numbers(repr(current_ttl), "--current-ttl")
    _numbers(repr(noise), "--noise")
    compared: tuple[str, ...] = POLICIES
    if snapshot is not None or policy == "none":
        compared = ()
    elif policy not in (None, "all"):
        compared = tuple(part.strip() for part in policy.split(","))
    try:
        request = Request(
            trace=trace or trace_option, model=model,
            ttls_s=_numbers(ttl, "--ttl") if ttl else ((current_ttl,) if snapshot is not None else ()),
            thresholds=_numbers(threshold, "--threshold", int), rates=_numbers(rate, "--rate", least=1e-6),
            pools=_numbers(pool_tokens, "--pool-tokens", int, 1) if pool_tokens else (), compared=compared, seed=seed,
            duration_s=seconds(duration, "--duration"), warmup_s=seconds(warmup, "--warmup"),
            prefill_engines=prefill, prefill_cache=prefill_cache, noise=noise, current_ttl_s=current_ttl,
            explore=explore, snapshot=snapshot, stock=stock, learning=charts is not None, jobs=jobs,
        )  # fmt: skip
        if not request.compared and not request.ttls_s:
            fail("nothing to replay: give --ttl, or --policies", code=2)
        with _bar() as progress:
            document = simulate(request, progress)
        if charts is not None:
            from kvtune_bench.replay.charts import draw

            for path, world in draw(document, charts).items():
                typer.echo(f"wrote {path} ({world})", err=True)
    except TraceError as error:
        fail(str(error), code=2, kind="bad_trace")
    except CalibrationError as error:
        fail(str(error), code=2, kind="bad_model")
    except ReplayError as error:
        fail(str(error), code=2, kind="bad_replay")
    except TuningError as error:
        fail(error.message, code=2 if isinstance(error, UsageError) else 1, kind=error.code, hint=error.hint or "")
    if output == "json":
        typer.echo(to_json(document))
    else:
        from kvtune_bench.replay.table import render

        sys.stdout.write(render(document, color=sys.stdout.isatty()))


def _bar() -> Any:
    """A progress bar on stderr, if somebody looks."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    @contextmanager
    def shown() -> Any:
        console = Console(stderr=True)
        columns = (
            TextColumn("replays"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)

    return shown()
