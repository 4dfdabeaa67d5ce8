"""kvtune / Fleet: which engines and routers there are, how they are set, and what the router holds."""

from __future__ import annotations

from typing import Any

from kvtune_dashboards.boards.common import STEP, engine, frame, in_range, per_second, router
from kvtune_dashboards.layout import Column, Section, Sized
from kvtune_dashboards.panels import (
    BAD,
    FAIR,
    GOOD,
    Look,
    Target,
    Threshold,
    spoken,
    stat,
    state_timeline,
    table,
    timeseries,
)
from kvtune_dashboards.promql import Expr, by, increase, metric, re_, sum_by
from kvtune_dashboards.recording import recorded
from kvtune_telemetry.catalogue import BY_NAME

UID = "kvtune-fleet"
RESULTS = {"ok": "#37872d", "refused": "#ff780a", "failed": "#c4162a", "cancelled": "#9fa7b3"}
CODES = {"2xx": "#37872d", "4xx": "#ff780a", "499": "#9fa7b3", "5xx": "#c4162a"}
UP = Look(words={"1": ("up", GOOD), "0": ("down", BAD)})


def _scraped() -> Expr:
    """1 or 0 for each target of the chosen jobs."""
    return by("min", metric("up", job=re_("$job")), "job", "instance")


def _differing() -> Expr:
    """Engine settings that are not the same on all engines of a role: the largest less the smallest value."""
    return recorded("kvtune:connector_setting:spread", model_name=re_("$model"), role=re_("$role")).over(0)


def _differing_routers() -> Expr:
    """The same of the routers of one job."""
    return recorded("kvtune:router_setting:spread", job=re_("$job")).over(0)


def _count(expr: Expr | str) -> str:
    """How many series there are; 0, not nothing, where there are none."""
    return f"count({expr}) or vector(0)"


def _tiles() -> list[Sized]:
    up = router("kvtune_engine_up")
    by_engine = by("max", up, "engine", "role")
    restarts = in_range(router("kvtune_engine_restarts_total"))
    versions = [
        Target(f"count(count by (version) ({router('kvtune_router_build_info')}))", "router", instant=True),
        Target(f"count(count by (version) ({engine('kvtune_connector_build_info')}))", "connector", instant=True),
    ]
    differing = f"{_differing()} or {_differing_routers()}"
    return [
        Sized(
            stat(
                "Engines up",
                "Engines up as the routers see them (by any router), by role.",
                "short",
                [Target(str(by("sum", by_engine, "role")), "{{role}}", instant=True)],
                Look(decimals=0, thresholds=(Threshold(None, BAD), Threshold(1, GOOD))),
                show="value_and_name",
            ),
            4, 4,
        ),
        Sized(
            stat(
                "Engines down",
                "Engines that no router can reach.",
                "short",
                [Target(_count(by_engine.equal_to(0)), instant=True)],
                Look(decimals=0, thresholds=(Threshold(None, GOOD), Threshold(1, BAD))),
            ),
            3, 4,
        ),
        Sized(
            stat(
                "Targets not scraped",
                "Routers and engines whose /metrics Prometheus cannot read: their panels are blind, not idle.",
                "short",
                [Target(_count(_scraped().equal_to(0)), instant=True)],
                Look(decimals=0, thresholds=(Threshold(None, GOOD), Threshold(1, BAD))),
            ),
            4, 4,
        ),
        Sized(
            stat(
                "Engine restarts",
                "Times an engine came back as another incarnation, in the time range shown: what it held is gone.",
                "short",
                [Target(str(restarts), instant=True)],
                Look(decimals=0, thresholds=(Threshold(None, GOOD), Threshold(0.5, FAIR))),
            ),
            3, 4,
        ),
        Sized(
            stat(
                "Settings that differ",
                "Settings that are not the same on all engines of a role (pools apart), or on all routers of a job: a "
                "change that was not finished.",
                "short",
                [Target(_count(differing), instant=True)],
                Look(decimals=0, thresholds=(Threshold(None, GOOD), Threshold(1, FAIR))),
            ),
            3, 4,
        ),
        Sized(
            stat(
                "Versions at work",
                "How many versions of router and connector run at once. More than one is a roll-out.",
                "short",
                versions,
                Look(decimals=0, thresholds=(Threshold(None, GOOD), Threshold(2, FAIR))),
                show="value_and_name",
            ),
            4, 4,
        ),
        Sized(
            stat(
                "Turns in flight",
                "Turns that the routers serve now.",
                "short",
                [Target(str(by("sum", router("kvtune_turns_in_flight"))), instant=True)],
                Look(decimals=0),
            ),
            3, 4,
        ),
    ]  # fmt: skip


def _engines() -> list[Sized]:
    up = by("min", router("kvtune_engine_up"), "role", "engine")
    age = f"time() - {by('max', metric('process_start_time_seconds', job=re_('$job')), 'job', 'instance')}"
    restarts = sum_by(increase(router("kvtune_engine_restarts_total"), STEP), "role", "engine")
    legs = per_second(router("kvtune_engine_requests_total"), "engine", "role", "result").over(0)
    running = Target(str(by("sum", engine("vllm:num_requests_running"), "instance")), "{{instance}}")
    waiting = Target(str(by("sum", engine("vllm:num_requests_waiting"), "instance")), "{{instance}}")
    return [
        Sized(
            state_timeline(
                "Engines, as the routers see them",
                "Whether each configured engine answers; down when any router cannot reach it.",
                [Target(str(up), "{{role}} {{engine}}")],
                UP,
            ),
            12, 7,
        ),
        Sized(
            state_timeline(
                "Targets, as Prometheus sees them",
                "Whether the /metrics of each router and engine could be read.",
                [Target(str(_scraped()), "{{job}} {{instance}}")],
                UP,
            ),
            12, 7,
        ),
        Sized(
            timeseries(
                "Age of each process",
                "Time since each process started. A drop is a restart: an engine's loses what it held, a router's the "
                "conversations it remembered.",
                "dtdurations",
                [Target(age, "{{job}} {{instance}}")],
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Engine restarts, by engine",
                "How often each engine came back as another incarnation in the minutes before, as the routers saw it.",
                "short",
                [Target(str(restarts), "{{role}} {{engine}}")],
                Look(decimals=0, soft_most=1, no_value="No router seen"),
                steps=True, area=True,
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Legs sent to engines",
                "Requests of the routers to each engine, by result.",
                "reqps",
                [Target(str(legs), "{{role}} {{engine}} {{result}}")],
                Look(colours={f"/ {result}$/": colour for result, colour in RESULTS.items() if result != "ok"}),
                stack="normal",
            ),
            8, 8,
        ),
        Sized(
            timeseries("Requests running, by engine", "Requests that each engine works on.", "short", [running]), 12, 7,
        ),
        Sized(
            timeseries(
                "Requests that wait, by engine",
                "Requests that each engine has not begun, in the colours of those that run beside.",
                "short", [waiting],
            ),
            12, 7,
        ),
    ]  # fmt: skip


def _settings() -> list[Column]:
    connector = by("max", engine("kvtune_connector_setting"), "instance", "setting")
    routers = by("max", router("kvtune_router_setting"), "instance", "setting")
    versions = (
        f"{by('max', router('kvtune_router_build_info'), 'job', 'instance', 'version')} or "
        f"{by('max', engine('kvtune_connector_build_info'), 'job', 'instance', 'version')}"
    )
    in_force = [
        Sized(
            table(
                "Engine settings in force",
                "What each engine runs with: "
                "TTL and margins in seconds, threshold and pool in tokens, `bidirectional_kv_xfer` 1 for on.",
                "locale",
                [Target(str(connector))],
                matrix=("setting", "instance"),
                widths={"Setting": 225},
            ),
            14,
            9,
        ),
        Sized(
            table(
                "Router settings in force",
                "What each router runs with; `retain_seconds` 0 leaves the TTL to decode. A `default_ttl_seconds` "
                "above "
                "decode's TTL hands over references to KV that is gone.",
                "locale",
                [Target(str(routers))],
                matrix=("setting", "instance"),
                widths={"Setting": 225},
            ),
            14,
            8,
        ),
    ]
    sameness = [
        Sized(
            table(
                "Versions",
                "Version of each router and connector.",
                "none",
                [Target(versions)],
                columns={"job": "Job", "instance": "Instance", "version": "Version"},
                hide=["Value"],
            ),
            10,
            11,
        ),
        Sized(
            table(
                "Settings that differ between engines",
                "Each setting that is not the same on all engines of a model and role, and by how much.",
                "locale",
                [Target(str(_differing()))],
                Look(no_value="All engines agree"),
                columns={"model_name": "Model", "role": "Role", "setting": "Setting", "Value": "Most less least"},
            ),
            10,
            6,
        ),
    ]
    return [Column(14, in_force), Column(10, sameness)]


def _store() -> list[Sized]:
    held = [
        Target(str(by("sum", router("kvtune_conversations_remembered"), "instance")), "conversations {{instance}}"),
        Target(str(by("sum", router("kvtune_references"), "instance")), "unused references {{instance}}"),
    ]
    flow = [
        Target(str(per_second(router("kvtune_references_received_total"))), "received"),
        Target(str(per_second(router("kvtune_references_ended_total", end="handed_over"))), "handed over"),
        Target(str(per_second(router("kvtune_references_ended_total", end="evicted"))), "evicted"),
        Target(str(per_second(router("kvtune_references_put_back_total"))), "put back"),
    ]
    new = [
        Target(str(per_second(router("kvtune_conversations_total"))), "new"),
        Target(str(per_second(router("kvtune_turns_given_up_total"))), "forgotten"),
    ]
    return [
        Sized(
            timeseries(
                "Conversation store",
                "Conversations that each router remembers, and references to retained KV that wait for a next turn.",
                "short", held,
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "References",
                "References received from decode, handed over to prefill, and let go for want of memory. *Evicted* "
                "above 0: give the router's store more room.",
                "ops", flow,
                Look(colours={
                    "received": "#8ab8ff", "handed over": "#37872d", "evicted": "#fade2a", "put back": "#9fa7b3",
                }),
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Conversations", "Conversations seen for the first time, and turns given up on.", "ops", new,
            ),
            8, 8,
        ),
    ]  # fmt: skip


def _http() -> list[Sized]:
    kinds = BY_NAME["kvtune_turn_retries_total"].labels[0].values or ()
    retries = sum_by(increase(router("kvtune_turn_retries_total"), STEP), "kind")
    codes = per_second(router("kvtune_http_responses_total"), "code").over(0)
    flight = by("sum", router("kvtune_turns_in_flight"), "instance")
    return [
        Sized(
            timeseries(
                "Answers to clients", "By status class; 499 is a client that left first.", "reqps",
                [Target(str(codes), "{{code}}")],
                Look(colours=CODES), stack="normal",
            ),
            8, 7,
        ),
        Sized(
            timeseries(
                "Retries",
                "Legs tried again in the minutes before, by how.",
                "short",
                [Target(str(retries), "{{kind}}")],
                spoken(*kinds),
            ),
            8, 7,
        ),
        Sized(
            timeseries(
                "Turns in flight, by router", "Turns that each router serves.", "short",
                [Target(str(flight), "{{instance}}")],
            ),
            8, 7,
        ),
    ]  # fmt: skip


def board() -> dict[str, Any]:
    """The dashboard."""
    return frame(
        UID,
        "kvtune / Fleet",
        "Engines, routers, their restarts, versions and settings, and the router's conversation store.",
        [
            Section("", _tiles()),
            Section("Engines and targets", _engines()),
            Section("Settings and versions", _settings()),
            Section("Conversation store", _store()),
            Section("Answers and retries", _http(), collapsed=True),
        ],
    )
