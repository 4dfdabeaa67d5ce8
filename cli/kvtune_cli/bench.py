"""`kvtune bench`: simulated engines."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from kvtune_telemetry.vocabulary import Role


class FailurePolicy(StrEnum):
    """Choices of `--failure-policy`."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class ConnectorKind(StrEnum):
    """Choices of `--connector`."""

    KVTUNE = "kvtune"
    STOCK = "stock"


def engine(
    role: Annotated[Role, typer.Option(help="Its part in the pair.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port; 0 takes any free one.")] = 0,
    side_channel_port: Annotated[int, typer.Option(help="Port for other engines; 0 takes any free one.")] = 0,
    model: Annotated[str, typer.Option(help="qwen3-32b, glm-5-fp8, or a calibration file (JSON).")] = "qwen3-32b",
    served_model_name: Annotated[str | None, typer.Option(help="Model name in the API; default: the model's.")] = None,
    time_scale: Annotated[
        str | None, typer.Option(help="Model seconds a second: FACTOR, or FACTOR@MONOTONIC@UNIX to share a clock.")
    ] = None,
    ttl: Annotated[float, typer.Option(help="decoder_kv_blocks_ttl (s).")] = 480.0,
    threshold: Annotated[int, typer.Option(help="kv_recompute_threshold (tokens).")] = 64,
    bidirectional: Annotated[bool, typer.Option(help="bidirectional_kv_xfer.")] = True,
    failure_policy: Annotated[
        FailurePolicy, typer.Option(help="kv_load_failure_policy; matters with --connector stock.")
    ] = FailurePolicy.FAIL,
    connector: Annotated[
        ConnectorKind, typer.Option(help="kvtune: verified reuse; stock: as vLLM 0.32 behaves by itself.")
    ] = ConnectorKind.KVTUNE,
    stream_params: Annotated[
        bool, typer.Option(help="Put kv_transfer_params on a stream's last chunk; stock 0.32 does not.")
    ] = True,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse KV of earlier requests of this engine.")] = True,
    pool_tokens: Annotated[int | None, typer.Option(help="KV pool (tokens); default: the model's.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; NIXL series count each.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of noise and faults.")] = 0,
    noise: Annotated[float, typer.Option(help="Sigma of the log-normal noise on durations.")] = 0.1,
    instant: Annotated[bool, typer.Option("--instant", help="No model delays at all, for load tests.")] = False,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens a stream chunk; default: at most 32 chunks.")] = None,
    log_level: Annotated[str, typer.Option(help="Log level on stderr.")] = "WARNING",
) -> None:
    """Run a simulated vLLM engine: OpenAI's API, vLLM's bidirectional KV contract, no GPU."""
    from kvtune_bench.engine import EngineConfig
    from kvtune_bench.engine_server import run_engine
    from kvtune_telemetry.clock import clock_from_spec
    from kvtune_telemetry.vocabulary import Role

    try:
        clock_from_spec(time_scale)
        config = EngineConfig(
            role=Role(role.value),
            host=host,
            port=port,
            side_channel_port=side_channel_port,
            model=model,
            served_model_name=served_model_name,
            time_scale=time_scale,
            ttl_s=ttl,
            threshold_tokens=threshold,
            bidirectional=bidirectional,
            failure_policy=failure_policy.value,
            connector=connector.value,
            stream_params=stream_params,
            prefix_caching=prefix_caching,
            pool_tokens=pool_tokens,
            block_size=block_size,
            tp=tp,
            seed=seed,
            noise=noise,
            instant=instant,
            chunk_tokens=chunk_tokens,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(run_engine(config, log_level=log_level))
