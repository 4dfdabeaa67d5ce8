"""Alerts as data. Those that advise carry the number to set as their value; labels never hold one.

All are silent while nothing happens: shares are absent without traffic, and each names the traffic below which it does
not judge. An alert may be several rules, which differ in a static label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvtune_dashboards.config import RulesConfig, Severity, duration
from kvtune_dashboards.layout import panel_id
from kvtune_dashboards.promql import (
    Expr,
    Match,
    Selector,
    absent,
    by,
    increase,
    metric,
    over_time,
    rate,
    ratio,
    sum_by,
)
from kvtune_dashboards.recording import RecordingRule, recorded, recording_rules
from kvtune_telemetry.vocabulary import Decision, Outcome, Path, Reason, ReferenceEnd, Role


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule. `name` may repeat; `labels` then differ."""

    name: str
    severity: Severity
    hold: float
    """`for`, seconds."""
    expr: str
    summary: str
    """What is wrong, without any number, so that notifications of one alert group."""
    description: str
    """What is wrong here and what to turn; Prometheus fills in its templates."""
    value: str
    """What the alert's value is, for the reader of the table."""
    floor: str
    """The traffic below which it is silent."""
    board: str
    """uid of the dashboard to look at."""
    panel: str
    """Title of the panel on it."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Labels that the rule sets, beside `severity`."""
    by_job: bool = False
    """Whether its series say which job they are about."""

    def annotations(self, config: RulesConfig) -> dict[str, str]:
        """All annotations, links included."""
        board = config.links.dashboards.replace("{uid}", self.board)
        board += f"{'&' if '?' in board else '?'}viewPanel={panel_id(self.panel)}"
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": config.links.runbooks.replace("{alert}", self.name),
            "dashboard_url": board + ("&var-job={{ $labels.job }}" if self.by_job else ""),
        }


class _Alerts:
    """Alerts in the making."""

    def __init__(self, config: RulesConfig, rules: tuple[RecordingRule, ...]) -> None:
        self.config = config
        self._rules = rules
        self.own = config.deployment_labels
        self.job = ("job", *self.own)
        self.model = ("job", "model_name", *self.own)
        self.engine = ("job", "instance", "model_name", "engine", *self.own)
        self.found: list[Alert] = []

    def of(self, name: str, /, **matchers: str | Match) -> Selector:
        return metric(name, extra=self.own, **matchers)

    def rec(self, name: str, /, **matchers: str | Match) -> Selector:
        return recorded(name, self._rules, **matchers)

    def setting(self, function: str, of: str, *keep: str, role: Role | None = None) -> Expr:
        """A setting of routers, or of the engines of a role."""
        shown = (
            self.of("kvtune_router_setting", setting=of)
            if role is None
            else self.of("kvtune_connector_setting", setting=of, role=role.value)
        )
        return by(function, shown, *keep)

    def busy(self) -> Expr:
        """Jobs with enough follow-up turns to judge shares of them."""
        return self.rec("kvtune:followup_turns:rate").over(self.config.alerts.turns_floor)

    def add(
        self, name: str, severity: Severity, hold: float, expr: Expr, *, summary: str, description: str, value: str,
        floor: str, board: str, panel: str, **labels: str,
    ) -> None:  # fmt: skip
        self.found.append(
            Alert(
                name, severity, hold, expr.text, " ".join(summary.split()), " ".join(description.split()), value, floor,
                f"kvtune-{board}", panel, MappingProxyType(dict(labels)), "job" in expr.labels,
            )
        )  # fmt: skip


def alerts(config: RulesConfig) -> tuple[Alert, ...]:
    """All alerts, the gravest first."""
    book = _Alerts(config, recording_rules(config))
    for make in (
        _late_read, _guard_bypassed, _expired, _crowded, _fetch_slower, _fetch_faster, _collapsed, _nothing,
        _router_ttl, _settings_differ, _failing, _slow, _restarts, _burn_rate, _absent, _stuck, _no_rules,
    ):  # fmt: skip
        make(book)
    return tuple(book.found)


def names(found: tuple[Alert, ...]) -> Iterator[str]:
    """Names in order, each once."""
    yield from dict.fromkeys(alert.name for alert in found)


_AT = "{{ $labels.job }}"
_ENGINE = "{{ $labels.instance }} (engine {{ $labels.engine }}, {{ $labels.model_name }})"
_TTL = '{{ printf "%.0f" $value }} s'
_TOKENS = '{{ printf "%.0f" $value }}'
_SHARE = "{{ $value | humanizePercentage }}"


def _asked(query: str, show: str, keys: tuple[str, ...]) -> str:
    """A template that shows the first result of a query, or nothing.

    `%s` in the query stands for matchers of the alert's own values of `keys`.
    """
    matchers = ",".join(f"{label}='%s'" for label in keys)
    values = " ".join(f"$labels.{label}" for label in keys)
    return f'{{{{ with printf "{query.replace("%s", matchers)}" {values} | query }}}}{show}{{{{ end }}}}'


def _late_read(a: _Alerts) -> None:
    w = duration(a.config.alerts.guard_window)

    def seen(name: str) -> Expr:
        return sum_by(increase(a.of(name), w), *a.engine).over(0)

    a.add(
        "KvtuneLateReadOfFreedKV", "critical", 0,
        seen("kvtune_kv_late_notifications_total").otherwise(seen("vllm:nixl_num_notifications_after_expiry_total")),
        summary="KV was read after it had been freed: answers may be wrong",
        description=f"A reader told {_ENGINE} that it had read KV which was no longer held for it. The blocks may have "
        "been another request's by then: the turn's answer, and what prefill cached of it, cannot be trusted.",
        value="late reads", floor="none: one is too many", board="reuse", panel="KV read after it was freed",
    )  # fmt: skip


def _guard_bypassed(a: _Alerts) -> None:
    w = duration(a.config.alerts.guard_window)
    prefill = Role.PREFILL
    hits = sum_by(increase(a.of("kvtune_turns_total", outcome=Outcome.HIT.value), w), *a.job).over(0)
    lax_router = a.setting("max", "accept_unverified", *a.job).equal_to(1)
    provers = by(
        "count", by("group", a.of("kvtune_connector_build_info", role=prefill.value), "instance", *a.own), *a.own
    )
    engines = by("count", by("group", a.of("kvtune_engine_up", role=prefill.value), "engine", *a.own), *a.own)
    # Stock prefill shows no setting and refuses nothing; it is known by being more than those that show theirs.
    all_refuse = a.setting("min", "require_fingerprint", *a.own, role=prefill).equal_to(1)
    all_refuse = all_refuse.where(provers.at_least(engines), a.own)
    fetches = sum_by(increase(a.of("kvtune_decisions_total", decision=Decision.FETCH.value), w), *a.job).over(0)
    lax_engine = a.setting("min", "require_fingerprint", *a.job, role=prefill).equal_to(0)
    strict_router = a.setting("max", "accept_unverified", *a.own).equal_to(0)
    routed = hits.where(lax_router, a.job).unless(all_refuse, a.own)
    read = fetches.where(lax_engine, a.job).unless(strict_router, a.own)
    a.add(
        "KvtuneReuseGuardBypassed", "critical", 0, routed.otherwise(read),
        summary="Histories are reused without proof that they are the prompt's: answers may be wrong",
        description=f"{_AT} reuses KV, and neither router nor prefill insists on proof that it belongs to the "
        "prompt. A "
        "history that was rewritten, re-tokenised or stripped of its reasoning is answered from another text's KV, "
        "with "
        "HTTP 200. Take --accept-unverified off the router, or require_fingerprint=false off prefill.",
        value="turns reused without a guard in the window", floor="none: a single reuse is at risk",
        board="reuse", panel="Answers at risk",
    )  # fmt: skip


def _expired(a: _Alerts) -> None:
    limit = a.config.alerts
    advised = a.rec("kvtune:ttl_seconds:advised_raise").otherwise(
        sum_by(a.rec("kvtune:ttl_seconds:factor", factor="1"), *a.job)
    )
    late = a.rec("kvtune:followup_turns_expired:ratio").over(limit.expired_ratio)
    share = _asked("kvtune:followup_turns_expired:ratio{%s}", "{{ . | first | value | humanizePercentage }}", a.job)
    now = '{{ . | first | value | printf "%.0f" }}'
    todo = _asked(
        "kvtune:ttl_seconds:factor{%s,factor='1'}",
        "{{ if gt $value (. | first | value) }}"
        f"Raise decoder_kv_blocks_ttl of decode from {now} s to {_TTL} (or kvtune router --retain, within decode's "
        "max_retain_s and without its restart)."
        "{{ else }}"
        f"The TTL in force ({now} s) is as long as fits the {a.config.advice.pool_share:.0%} of decode's pool that the "
        "rules give to retention (advice.pool_share): add memory, or ask kvtune suggest what more would cost."
        "{{ end }}",
        a.job,
    )
    a.add(
        "KvtuneExpiredReadsHigh", "warning", limit.expired_for,
        advised.where(late, a.job).where(a.busy(), a.job),
        summary="Too many follow-up turns come after their KV was given up",
        description=f"{share} of the follow-up turns of {_AT} came too late and were computed again. {todo} If "
        "prefill declines reads, the router believes in a longer life than decode gives: lower kvtune router --ttl.",
        value="TTL to set, s", floor="alerts.turns_floor", board="reuse", panel="Follow-up turns that came too late",
    )  # fmt: skip


def _crowded(a: _Alerts) -> None:
    limit = a.config.alerts
    w = duration(a.config.windows.rate)
    waiting = by("max", over_time("avg", a.of("vllm:num_requests_waiting"), w), *a.engine).at_least(
        limit.retained_waiting
    )
    crowded = a.rec("kvtune:retained_pool:ratio").over(limit.retained_share).where(waiting, a.engine)
    worst = by("max", crowded, *a.own)
    now = sum_by(a.rec("kvtune:ttl_seconds:factor", factor="1"), *a.job)
    # Without enough pauses to predict from: in proportion, a first step.
    step = now.joined("*", a.config.advice.pool_share / worst.over(0), a.own)
    advised = a.rec("kvtune:ttl_seconds:advised_lower").where(worst, a.own).otherwise(step)
    a.add(
        "KvtuneRetainedKVCrowdsPool", "warning", limit.retained_for, advised,
        summary="KV kept for turns to come crowds out requests that wait",
        description=f"Decode engines behind {_AT} hold more than {limit.retained_share:.0%} of their KV pool for turns "
        f"that may come, while requests wait. Lower decoder_kv_blocks_ttl to {_TTL} (or kvtune router --retain, "
        f"without its restart): that keeps about {a.config.advice.pool_share:.0%} of the pool.",
        value="TTL to set, s", floor="alerts.retained_waiting", board="retention", panel="Share of the KV pool",
    )  # fmt: skip


def _threshold(a: _Alerts) -> tuple[Expr, Expr]:
    return a.rec("kvtune:threshold_tokens:advised"), a.rec("kvtune:threshold_tokens:in_force")


def _fetch_slower(a: _Alerts) -> None:
    limit = a.config.alerts
    w = duration(a.config.windows.rate)
    advised, in_force = _threshold(a)
    losing = by("min", a.rec("kvtune:fetch_gain_seconds:mean"), *a.model).under(0)
    fetched = sum_by(rate(a.of("kvtune_path_observations_total", path=Path.FETCH.value), w), *a.model)
    now = _asked("kvtune:threshold_tokens:in_force{%s}", '{{ . | first | value | printf "%.0f" }}', a.model)
    a.add(
        "KvtuneFetchSlowerThanRecompute", "warning", limit.threshold_for,
        advised.over(in_force * limit.threshold_factor).where(losing).where(fetched.over(limit.reads_floor)),
        summary="Histories are fetched that would be computed faster",
        description=f"On {_AT} ({{{{ $labels.model_name }}}}), reading short histories back takes longer than "
        "computing "
        f"them. Raise kv_recompute_threshold of prefill from {now} to {_TOKENS} tokens, where both cost the same. If "
        "reads have become slow, mend that first.",
        value="threshold to set, tokens", floor="alerts.reads_floor", board="transfer",
        panel="Crossing point and threshold",
    )  # fmt: skip


def _fetch_faster(a: _Alerts) -> None:
    limit = a.config.alerts
    advised, in_force = _threshold(a)
    skipped = sum_by(
        a.rec("kvtune:history_tokens:rate", decision=Decision.RECOMPUTE.value, reason=Reason.BELOW_THRESHOLD.value),
        *a.model,
    ).over(limit.skipped_floor)
    now = _asked("kvtune:threshold_tokens:in_force{%s}", '{{ . | first | value | printf "%.0f" }}', a.model)
    a.add(
        "KvtuneRecomputeWhereFetchIsFaster", "info", limit.threshold_for,
        advised.under(in_force / limit.threshold_factor).where(skipped),
        summary="Histories are computed that would be fetched faster",
        description=f"On {_AT} ({{{{ $labels.model_name }}}}), histories below kv_recompute_threshold are computed "
        "again "
        f"though reading them back is faster. Lower it on prefill from {now} to {_TOKENS} tokens.",
        value="threshold to set, tokens", floor="alerts.skipped_floor", board="transfer",
        panel="Tokens computed because of the threshold",
    )  # fmt: skip


def _collapsed(a: _Alerts) -> None:
    limit, windows = a.config.alerts, a.config.windows
    now = a.rec("kvtune:followup_turns_reused:ratio")
    before = over_time("avg", now, duration(windows.baseline), duration(windows.baseline_offset))
    a.add(
        "KvtuneReuseCollapsed", "warning", limit.collapsed_for,
        now.under(before.over(limit.collapsed_baseline) * limit.collapsed_factor).where(a.busy(), a.job),
        summary="Far fewer follow-up turns are reused than before",
        description=f"{_SHARE} of the follow-up turns of {_AT} are reused, less than "
        f"{limit.collapsed_factor:.0%} of what it was {duration(windows.baseline_offset)} ago. The stacked reasons say "
        "which took over: rewritten (a client or template changed), expired, engine_gone, absent.",
        value="share reused now", floor="alerts.turns_floor and alerts.collapsed_baseline", board="reuse",
        panel="Why turns were not reused",
    )  # fmt: skip


_WHY_NOTHING = (
    (Outcome.NO_IDENTITY, "clients send neither X-Session-ID nor a conversation id, and histories are not recognised"),
    (Outcome.ABSENT, "answers carry no reference: kvtune's plug-in is not loaded on decode, bidirectional_kv_xfer is "
     "off there, or every answer ends at a stop string"),
    (Outcome.UNVERIFIED, "prefill or decode runs without kvtune's connector, which proves what is read"),
    (Outcome.REWRITTEN, "the chat template or the client changes earlier turns"),
    (Outcome.EXPIRED, "the TTL is shorter than the pauses"),
    (Outcome.READ_FAILED, "reads fail: see the engines' logs for NIXL"),
    (Outcome.ENGINE_GONE, "the decode engine restarts, or its address is another's"),
)  # fmt: skip


def _nothing(a: _Alerts) -> None:
    limit = a.config.alerts
    none = a.rec("kvtune:followup_turns_reused:ratio").equal_to(0).where(a.busy(), a.job)
    every = sum_by(a.rec("kvtune:turns:rate"), *a.job).over(limit.turns_floor)
    unknown = a.rec("kvtune:turns_unidentified:ratio").over(0.95).where(every, a.job) * 0
    causes = "".join(
        f'{{{{ {"if" if not n else "else if"} eq $why "{outcome.value}" }}}}: {text}'
        for n, (outcome, text) in enumerate(_WHY_NOTHING)
    )
    untried = "|".join((Outcome.FIRST, Outcome.HIT, Outcome.DISABLED, Outcome.ERROR))
    query = f"topk(1, sum by (outcome) (kvtune:turns:rate{{%s,outcome!~'{untried}'}}))"
    why = _asked(
        query, f'{{{{ $why := . | first | label \\"outcome\\" }}}} Mostly {{{{ $why }}}}{causes}{{{{ end }}}}.', a.job
    )
    a.add(
        "KvtuneNothingReused", "warning", limit.nothing_for, none.otherwise(unknown),
        summary="Not one follow-up turn is reused",
        description=f"No turn of {_AT} reuses the KV of its history.{why}".replace('\\"', '"'),
        value="share reused: 0", floor="alerts.turns_floor", board="reuse", panel="Why turns were not reused",
    )  # fmt: skip


def _router_ttl(a: _Alerts) -> None:
    decode, prefill = Role.DECODE, Role.PREFILL
    believed = a.setting("max", "default_ttl_seconds", *a.job) - a.setting("min", "margin_seconds", *a.job)
    granted = a.setting("min", "decoder_kv_blocks_ttl", *a.own, role=decode)
    kept = a.setting("max", "expiry_margin_seconds", *a.own, role=prefill)
    too_long = believed.joined(">", granted - kept, a.own)
    asked = a.setting("max", "retain_seconds", *a.job)
    bound = a.setting("min", "max_retain_seconds", *a.own, role=decode)
    over = asked.joined(">", bound, a.own)
    a.add(
        "KvtuneRouterTTLNotBelowEngine", "warning", a.config.alerts.settings_for,
        (too_long * 0).joined("+", granted, a.own).otherwise((over * 0).joined("+", bound, a.own)),
        summary="The router believes in a longer retention than decode gives",
        description=f"{_AT} may hand over references that have expired: prefill declines them, and stock prefill reads "
        f"freed KV. Set kvtune router --ttl (and --retain) to no more than {_TTL}, what decode gives, or raise "
        "decode's "
        "decoder_kv_blocks_ttl (max_retain_s).",
        value="TTL that decode gives, s", floor="none: settings need no traffic", board="fleet",
        panel="Router settings in force",
    )  # fmt: skip


def _settings_differ(a: _Alerts) -> None:
    keep = ("setting", *a.own)
    engines = by("max", a.rec("kvtune:connector_setting:spread"), *keep).over(0)
    routers = by("max", a.rec("kvtune:router_setting:spread"), *keep).over(0)
    on = a.of("kvtune_connector_setting", setting="bidirectional_kv_xfer")
    roles = (by("max", on, *keep) - by("min", on, *keep)).over(0)
    a.add(
        "KvtuneSettingsDiffer", "warning", a.config.alerts.settings_for, engines.otherwise(routers).otherwise(roles),
        summary="Engines or routers run with different settings",
        description="{{ $labels.setting }} differs between engines of one role, between routers, or "
        "(bidirectional_kv_xfer) "
        "between prefill and decode. A turn's fate then depends on where it lands, and no advice fits all. Give all "
        "the "
        "same value.",
        value="largest less smallest value", floor="none: settings need no traffic", board="fleet",
        panel="Settings that differ between engines",
    )  # fmt: skip


def _failing(a: _Alerts) -> None:
    limit = a.config.alerts
    w = duration(a.config.windows.rate)
    keep = (*a.model, "direction")
    failed = sum_by(rate(a.of("kvtune_kv_reads_failed_total"), w), *keep)
    tried = (failed + sum_by(a.rec("kvtune:kv_reads:rate"), *keep)).over(limit.reads_floor)
    a.add(
        "KvtuneTransfersFailing", "warning", limit.failed_for,
        a.rec("kvtune:kv_reads_failed:ratio").over(limit.failed_ratio).where(tried),
        summary="KV transfers fail",
        description=f"{_SHARE} of the {{{{ $labels.direction }}}} reads of {_AT} ({{{{ $labels.model_name }}}}) "
        "fail. Each "
        "costs its turn the time until it failed and a whole prefill. d2p is the read back of a history, p2d the "
        "hand-over after prefill.",
        value="share of reads that failed", floor="alerts.reads_floor", board="transfer", panel="KV reads that failed",
    )  # fmt: skip


def _slow(a: _Alerts) -> None:
    limit, windows = a.config.alerts, a.config.windows
    w = duration(windows.rate)
    speed = a.rec("kvtune:kv_read_bytes_per_second:mean")
    before = over_time("avg", speed, duration(windows.baseline), duration(windows.baseline_offset))
    read = sum_by(rate(a.of("kvtune_kv_read_seconds_count"), w), *a.model, "direction", "size").over(limit.reads_floor)
    slow = ratio(speed, before).under(limit.slow_factor).where(read)
    a.add(
        "KvtuneTransferSlow", "warning", limit.slow_for, by("min", slow, *a.model, "direction"),
        summary="KV transfers are far slower than they were",
        description=f"{{{{ $labels.direction }}}} reads of {_AT} ({{{{ $labels.model_name }}}}) get {_SHARE} of the "
        "bytes a "
        f"second that reads of their size got {duration(windows.baseline_offset)} ago. UCX falls back from RDMA to TCP "
        "without an error: look for its transports in the engines' logs (UCX_LOG_LEVEL=info).",
        value="speed now, as a part of the baseline", floor="alerts.reads_floor", board="transfer",
        panel="Speed of a read, and a day before",
    )  # fmt: skip


def _restarts(a: _Alerts) -> None:
    limit = a.config.alerts
    w = duration(limit.restarts_window)
    restarts = sum_by(increase(a.of("kvtune_engine_restarts_total"), w), *a.job, "engine", "role")
    gone = sum_by(increase(a.of("kvtune_references_ended_total", end=ReferenceEnd.ENGINE_GONE.value), w), *a.job)
    received = sum_by(increase(a.of("kvtune_references_received_total"), w), *a.job)
    # Half a restart less: an increase over a window is extrapolated, and need not be whole.
    a.add(
        "KvtuneEngineRestartsLoseReferences", "warning", 0,
        restarts.over(limit.restarts - 0.5).where(ratio(gone, received).over(limit.lost_ratio), a.job),
        summary="Engine restarts lose the KV of running conversations",
        description="{{ $labels.role }} engine {{ $labels.engine }} restarted {{ $value | humanize }} times in "
        f"{duration(limit.restarts_window)}, and what it held for turns to come is gone. Look for the reason "
        "(memory, probes, node) in its log before tuning anything: retention that does not outlive the engine is "
        "waste.",
        value="restarts in the window", floor="alerts.lost_ratio of the references", board="fleet",
        panel="Engine restarts, by engine",
    )  # fmt: skip


def _burn_rate(a: _Alerts) -> None:
    slo = a.config.ttft_slo
    turns: dict[str, str | Match] = {} if slo.turns == "all" else {"turn": slo.turns}
    for burn in slo.burns:
        long, short = duration(burn.long), duration(burn.short)
        limit = float(f"{burn.factor * (1 - slo.target):.12g}")

        def burning(window: str, limit: float = limit) -> Expr:
            return sum_by(a.rec("kvtune:ttft_slow:ratio", window=window), *a.job).over(limit)

        served = sum_by(rate(a.of("kvtune_turn_ttft_seconds_count", **turns), short), *a.job).over(slo.floor)
        a.add(
            "KvtuneTTFTBurnRate", burn.severity, burn.hold,
            burning(long).where(burning(short)).where(served),
            summary="Too many turns wait too long for their first token",
            description=f"{_SHARE} of the turns of {_AT} took longer than {duration(slo.bound)} to their first byte "
            "over "
            f"{long}, {burn.factor:g} times what the objective of {slo.target:.4g} allows; over {short} it is no "
            "better.",
            value="share of slow turns over the long window", floor="ttft_slo.floor", board="reuse",
            panel="TTFT, first and follow-up turns", long=long, short=short,
        )  # fmt: skip


def _absent(a: _Alerts) -> None:
    hold = a.config.alerts.absent_for
    parts: tuple[tuple[str, Expr], ...] = (
        ("router", absent(a.of("kvtune_router_build_info"))),
        ("prefill", by("group", absent(a.of("kvtune_connector_build_info", role=Role.PREFILL.value)))),
        ("decode", by("group", absent(a.of("kvtune_connector_build_info", role=Role.DECODE.value)))),
    )
    for part, expr in parts:
        a.add(
            "KvtuneExporterAbsent", "warning", hold, expr,
            summary="kvtune's series are missing: nothing here can be judged",
            description=f"Prometheus has no series of kvtune's {part}. No alert about it can fire, and boards are "
            "empty. "
            "Either it is down, or the scrape configuration does not reach it, or the engines run without kvtune's "
            "connector.",
            value="1", floor="none: an idle exporter still answers", board="fleet", panel="Targets not scraped",
            part=part,
        )  # fmt: skip
    known = by("group", over_time("last", a.of("kvtune_router_build_info"), "1h"), *a.job, "instance").otherwise(
        by("group", over_time("last", a.of("kvtune_connector_build_info"), "1h"), *a.job, "instance")
    )
    down = by("max", a.of("up"), *a.job, "instance").equal_to(0).where(known, (*a.job, "instance"))
    a.add(
        "KvtuneExporterAbsent", "warning", hold, down,
        summary="kvtune's series are missing: nothing here can be judged",
        description=f"{{{{ $labels.instance }}}} of {_AT} was scraped within the last hour and no longer answers. If "
        "it was "
        "taken down on purpose, take it out of the scrape configuration.",
        value="0", floor="none: an idle exporter still answers", board="fleet", panel="Targets not scraped",
        part="target",
    )  # fmt: skip


def _stuck(a: _Alerts) -> None:
    w = duration(a.config.alerts.stuck_window)
    each = a.engine
    ours = by("group", a.of("kvtune_connector_build_info"), *each)
    deferred = by("max", over_time("min", a.of("vllm:num_requests_waiting_by_reason", reason="deferred"), w), *each)
    # By Little's law the seconds waited in a second are the mean number that waits; who never ends is not in them.
    passing = sum_by(rate(a.of("kvtune_kv_wait_seconds_sum"), w), *each)
    hanging = (deferred - passing).over(0.5)
    waiting = by("max", over_time("min", a.of("vllm:num_requests_waiting"), w), *each).over(0)
    running = by("max", over_time("max", a.of("vllm:num_requests_running"), w), *each).over(0)
    moved = sum_by(increase(a.of("kvtune_kv_reads_total"), w), *each).over(0)
    moved = moved.otherwise(sum_by(increase(a.of("kvtune_decisions_total"), w), *each).over(0))
    idle = waiting.unless(running, each).unless(moved, each)
    a.add(
        "KvtuneDeferredRequestsStuck", "critical", a.config.alerts.stuck_for,
        hanging.otherwise(idle).where(ours, each),
        summary="Requests wait for KV that does not come",
        description=f"{_ENGINE} has had about {{{{ $value | humanize }}}} requests waiting all the time, longer than "
        "those "
        "whose KV arrived. Stock vLLM 0.32 hangs so after a failed read under kv_load_failure_policy=recompute, and "
        "keeps their blocks until it is restarted.",
        value="requests that wait", floor="one request that waits", board="transfer",
        panel="Requests waiting, by engine",
    )  # fmt: skip


def _no_rules(a: _Alerts) -> None:
    def missing(rule: str, raw: str) -> Expr:
        return absent(a.rec(rule)).where(by("group", a.of(raw)), ())

    expr = missing("kvtune:turns:rate", "kvtune_router_build_info")
    expr = expr.otherwise(missing("kvtune:connector_setting:spread", "kvtune_connector_build_info"))
    expr = expr.otherwise(missing("kvtune:turn_ends:increase", "kvtune_router_build_info"))
    hold = max(a.config.alerts.absent_for, 2 * a.config.windows.slow_evaluation)
    a.add(
        "KvtuneRecordingRulesAbsent", "warning", hold, expr,
        summary="kvtune is scraped, but its recording rules are not evaluated",
        description="The series that boards and most alerts read are not there. Load kvtune-recording.yaml into the "
        "server "
        "that evaluates these alerts, and look for failures under its /rules.",
        value="1", floor="none: rules need no traffic", board="fleet", panel="Targets not scraped",
    )  # fmt: skip
