"""`kvtune demo`: the main job in a minute or two, without GPU, Prometheus or Grafana."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    engine: Annotated[str, typer.Option("--engine", help="sim, or vllm: a real pair on this machine's CPUs")] = "sim",
    model: Annotated[str, typer.Option("--model", help="qwen3-32b, glm-5-fp8 or a calibration file")] = "qwen3-32b",
    prefill: Annotated[int, typer.Option("--prefill", help="prefill engines")] = 1,
    decode: Annotated[int, typer.Option("--decode", help="decode engines")] = 1,
    ttl: Annotated[float, typer.Option("--ttl", help="decoder_kv_blocks_ttl, seconds")] = 480.0,
    threshold: Annotated[int, typer.Option("--threshold", help="kv_recompute_threshold, tokens")] = 64,
    pool_tokens: Annotated[int | None, typer.Option("--pool-tokens", help="KV pool of an engine, tokens")] = None,
    prefill_cache: Annotated[
        bool, typer.Option("--prefill-cache/--no-prefill-cache", help="P's own prefix cache; off as published")
    ] = False,
    conversations: Annotated[
        int | None, typer.Option("--conversations", help="conversations at once [32; vllm: 4]")
    ] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", help="model seconds to replay [1500; vllm: 90]")
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option("--time-scale", help="model seconds in a wall second [20; vllm: 1]")
    ] = None,
    holdout: Annotated[float, typer.Option("--holdout", help="share served without reuse, to compare")] = 0.2,
    seed: Annotated[int, typer.Option("--seed", help="of conversations and noise")] = 1,
    trace: Annotated[Path | None, typer.Option("--trace", help="conversations (CSV) instead of the sample")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="directory for report, snapshots and logs; an earlier demo's are replaced"),
    ] = None,
    vllm_python: Annotated[
        str | None, typer.Option("--vllm-python", help="interpreter that has vLLM, NIXL and kvtune [this one]")
    ] = None,
    vllm_model: Annotated[Path | None, typer.Option("--vllm-model", help="a model's directory")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="write all figures and the advice here")] = None,
) -> None:
    """Simulated engines, the real router, real conversations; then what `kvtune suggest` makes of the scrapes.

    Prints the advice on stdout and writes an HTML report. Ends by itself and leaves no process behind.
    """
    import orjson

    from kvtune_bench.calibration import CalibrationError
    from kvtune_bench.demo import DemoError, DemoSettings, default_out, run_to_end, statement
    from kvtune_bench.process import ProcessError
    from kvtune_bench.traces import TraceError
    from kvtune_cli.errors import fail

    real = engine == "vllm"
    usual = (4, 90.0, 1.0) if real else (32, 1500.0, 20.0)
    conversations = usual[0] if conversations is None else conversations
    duration = usual[1] if duration is None else duration
    time_scale = usual[2] if time_scale is None else time_scale
    try:
        settings = DemoSettings(
            engine=engine, vllm_python=vllm_python or sys.executable, vllm_model=vllm_model,
            model=model, prefill=prefill, decode=decode, ttl_s=ttl, threshold_tokens=threshold,
            pool_tokens=pool_tokens, prefill_cache=prefill_cache, conversations=conversations, duration_s=duration,
            time_scale=time_scale, holdout=holdout, seed=seed, trace=trace,
        )  # fmt: skip
        from kvtune_bench.calibration import calibration

        known = calibration(model)
    except (DemoError, CalibrationError) as error:
        fail(str(error), code=2)
    for path in (out, json.parent if json else None):
        if path is not None and path.exists() and not path.is_dir():
            fail(f"{path} is not a directory", code=2)
    if json is not None and not json.parent.is_dir():
        fail(f"--json: there is no directory {json.parent}", code=2)
    typer.echo(statement(known, settings), err=True)
    directory = out or default_out()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            result = run_to_end(settings, directory)
        except (KeyboardInterrupt, DemoError, TraceError):
            if out is None:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        from kvtune_bench.report import render_report

        report = directory / "report.html"
        report.write_text(render_report(result), encoding="utf-8")
        if json is not None:
            json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))
    except (DemoError, TraceError, ProcessError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write {error.filename or directory}: {error.strerror}")
    from kvtune_tuning.render import render_table

    typer.echo(render_table(result["suggest"]))
    books = result["books"]
    typer.echo(f"report: {report}")
    unanswered = [turn for turn in result["turns"] if not turn["answered"]]
    if unanswered:
        why = unanswered[0]["error"]
        fail(f"{len(unanswered)} of {books['turns']} turns were not answered, the first because: {why}")
    wrong = [name for name, good in books["checks"].items() if not good]
    if wrong:
        fail("the books do not add up: " + "; ".join(wrong))
