"""Every number of the recording rules and alerts in one place: windows, thresholds, traffic floors, objectives.

Each setting says why its default is what it is; `kvtune rules render --config FILE` takes a YAML file with others.
Durations are held in seconds and written with a unit (`30m`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from kvtune_telemetry.buckets import TTFT_SECONDS

Kind = Literal["duration", "number", "ratio", "text", "labels", "burns"]
Severity = Literal["critical", "warning", "info"]
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OURS = frozenset({"job", "instance", "model_name", "engine", "role"})


class ConfigError(ValueError):
    """A setting that cannot be used: names it, says what is wrong and what is allowed."""


def duration(seconds: float) -> str:
    """Seconds as Prometheus writes them: `5m`, `1h30m`."""
    left = round(seconds * 1000)
    text = ""
    for unit, size in (("d", 86400000), ("h", 3600000), ("m", 60000), ("s", 1000), ("ms", 1)):
        whole, left = divmod(left, size)
        text += f"{whole}{unit}" if whole else ""
    return text or "0s"


def parse_duration(text: object, where: str) -> float:
    """Seconds of `30m` or `1h30m`. Raises `ConfigError` for anything else, a number without a unit included."""
    if isinstance(text, str):
        parts = _PARTS.findall(text)
        if parts and "".join(number + unit for number, unit in parts) == text:
            # Rounded, as 1640 ms would not be the edge 1.64 of a histogram, and no bucket of it would be found.
            return round(sum(float(number) * _UNITS[unit] for number, unit in parts), 9)
        if text == "0":
            return 0.0
    raise ConfigError(f"{where}: {text!r} is no duration; write a number with its unit, like 30m, 15s or 1h30m")


def _set(default: Any, kind: Kind, why: str, low: float | None = None, high: float | None = None) -> Any:
    """A setting with its bounds (both allowed) and the reason for its default."""
    return field(default=default, metadata={"kind": kind, "why": why, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class Windows:
    """How often is measured, and over how long."""

    scrape: float = _set(
        15, "duration", "scrape_interval of the targets; every window must hold at least two scrapes.", 0.1, 300
    )
    evaluation: float = _set(30, "duration", "How often the rules are evaluated; two scrapes.", 0.1, 300)
    slow_evaluation: float = _set(
        120, "duration",
        "The same for rules over the long windows, which change slowly. Below 5 min, after which a series is stale.",
        0.1, 280,
    )  # fmt: skip
    rate: float = _set(
        300, "duration", "Rates on the boards and in alerts: 20 scrapes, so that a few lost ones do no harm.", 1
    )
    demand: float = _set(
        1800,
        "duration",
        "Tokens a second that ask to be retained: long enough to average over bursts of conversations.",
        1,
    )
    cost: float = _set(
        3600, "duration",
        "Costs of fetching and computing: enough requests for a line through them, short enough to see a network that "
        "changed.", 1,
    )  # fmt: skip
    history: float = _set(
        21600, "duration", "Pauses between turns: several times the longest pause that is bucketed (1 h).", 1
    )
    baseline: float = _set(
        3600, "duration", "What a past value is averaged over before today's is compared with it.", 1
    )
    baseline_offset: float = _set(
        86400, "duration", "How far back that lies: the same hour a day ago, so that the daily rhythm is no fault.", 1
    )


@dataclass(frozen=True, slots=True)
class Advice:
    """What the advised TTL and threshold aim at."""

    expired_target: float = _set(
        0.02,
        "ratio",
        "Share of returns that may come too late at the TTL advised: the last percents cost most memory.",
        0.0001,
        0.5,
    )
    pool_share: float = _set(
        0.3,
        "ratio",
        "Share of decode's KV pool that retained KV may take at the TTL advised; the rest serves requests.",
        0.01,
        0.95,
    )
    ttl_floor: float = _set(
        15, "duration", "No TTL below is advised: the reader keeps 5 s of it, the hand-over 1 s.", 7, 3600
    )
    ttl_step: float = _set(5, "duration", "An advised TTL is a multiple of this: nobody sets 217.3 s.", 1, 600)
    turn_ends: float = _set(
        100, "number", "Turns that must have ended in the history window before a TTL is advised.", 1
    )
    cost_observations: float = _set(
        50, "number", "Observations of each path in the cost window below which no line is drawn through them.", 3
    )
    cost_spread: float = _set(
        0.05, "number",
        "Least variance of the sizes over their squared mean. Sizes that hardly differ fix a point, not a line.",
        1e-6, 10,
    )  # fmt: skip
    threshold_reach: float = _set(
        2.0,
        "number",
        "How far below the smallest fetch that was seen a threshold may be advised: one step at a time.",
        1,
        16,
    )


@dataclass(frozen=True, slots=True)
class Burn:
    """One pair of windows of a burn-rate alert: both must burn `factor` times what the objective allows."""

    severity: Severity
    long: float
    short: float
    factor: float
    hold: float
    """`for`, seconds."""


@dataclass(frozen=True, slots=True)
class TtftSlo:
    """The objective for the time to first token."""

    bound: float = _set(
        TTFT_SECONDS[29], "duration",
        "A turn is good if its first byte comes within this. It must be an edge of the TTFT histogram: in between, "
        "nothing is counted.",
    )  # fmt: skip
    target: float = _set(0.95, "ratio", "Share of turns that shall be good.", 0.5, 0.99999)
    turns: str = _set("all", "text", "Which turns count: all, first or followup.")
    floor: float = _set(
        0.05, "number", "Turns a second in the short window below which a few slow ones are no burn rate.", 0
    )
    burns: tuple[Burn, ...] = _set(
        (
            Burn("critical", 3600, 300, 14.4, 120),
            Burn("critical", 21600, 1800, 6.0, 900),
            Burn("warning", 86400, 7200, 3.0, 3600),
            Burn("warning", 259200, 21600, 1.0, 10800),
        ),
        "burns",
        "2 % of a month's budget in an hour, 5 % in six hours, 10 % in a day, 10 % in three: page for the first two.",
    )


@dataclass(frozen=True, slots=True)
class Alerts:
    """When alerts fire."""

    turns_floor: float = _set(
        0.02, "number", "Follow-up turns a second below which shares of them are not judged: 6 in 5 minutes.", 0
    )
    reads_floor: float = _set(0.01, "number", "Reads a second below which their speed and failures are not judged.", 0)
    guard_window: float = _set(
        600, "duration", "How long a late read or a bypass stays visible: time to look at it.", 1
    )
    expired_ratio: float = _set(0.05, "ratio", "Share of follow-up turns that came too late.", 0.0001, 1)
    expired_for: float = _set(1800, "duration", "Longer than a meeting after which everybody returns at once.", 0)
    retained_share: float = _set(
        0.4, "ratio", "Share of decode's pool retained, while requests wait for room.", 0.01, 1
    )
    retained_waiting: float = _set(
        1, "number", "Requests that wait, on average over the rate window, for a crowded pool to matter.", 0.01
    )
    retained_for: float = _set(600, "duration", "Requests that wait ten minutes for memory that nobody reads.", 0)
    threshold_factor: float = _set(
        1.5, "number", "How far the threshold must be from the crossing: less costs little and would flap.", 1, 100
    )
    threshold_for: float = _set(1800, "duration", "Half the cost window: one burst does not move a threshold.", 0)
    skipped_floor: float = _set(
        50,
        "number",
        "Tokens a second computed below the threshold, under which lowering it saves nothing to speak of.",
        0,
    )
    collapsed_factor: float = _set(0.5, "ratio", "Reuse below this part of its own baseline has collapsed.", 0.01, 0.99)
    collapsed_baseline: float = _set(0.2, "ratio", "A baseline below this was not worth comparing with.", 0, 1)
    collapsed_for: float = _set(900, "duration", "Longer than a rolling restart of decode takes.", 0)
    nothing_for: float = _set(900, "duration", "Not one hit in so long is no bad luck.", 0)
    settings_for: float = _set(1800, "duration", "Longer than a rolling change of a setting takes.", 0)
    failed_ratio: float = _set(0.02, "ratio", "Share of reads that failed.", 0.0001, 1)
    failed_for: float = _set(600, "duration", "Longer than one engine's restart.", 0)
    slow_factor: float = _set(
        0.3, "ratio",
        "Bytes a second of a read, against its own baseline at the same sizes. RDMA that fell back to TCP is a tenth "
        "or less; a busy network is a half.", 0.01, 0.99,
    )  # fmt: skip
    slow_for: float = _set(900, "duration", "Longer than a burst that fills the network.", 0)
    restarts: float = _set(2, "number", "Restarts of one engine in the restart window that lose references.", 1)
    restarts_window: float = _set(3600, "duration", "A rolling update restarts each engine once in it.", 1)
    lost_ratio: float = _set(
        0.05, "ratio", "Share of follow-up turns whose engine is gone, from which restarts hurt.", 0.0001, 1
    )
    absent_for: float = _set(180, "duration", "Twelve scrapes: longer than a pod takes to be replaced.", 0)
    stuck_for: float = _set(600, "duration", "No read takes ten minutes: NIXL's own time-outs are shorter.", 0)
    stuck_window: float = _set(300, "duration", "Nothing may have been admitted or finished in it.", 1)


@dataclass(frozen=True, slots=True)
class Links:
    """Where alerts send their reader."""

    runbooks: str = _set(
        "https://kvtune.example/runbooks/{alert}.md", "text",
        "Where `dashboards/runbooks/` is served; {alert} is replaced by the alert's name. Set it.",
    )  # fmt: skip
    dashboards: str = _set(
        "https://grafana.example/d/{uid}", "text",
        "Address of a dashboard; {uid} is replaced by its uid, and the panel is added. Set it.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RulesConfig:
    """All of it."""

    deployment_labels: tuple[str, ...] = _set(
        (), "labels",
        "Labels that tell deployments of one Prometheus apart (cluster, namespace). Router and engines are matched by "
        "them: with more than one deployment and none of these, the settings of all are taken for one.",
    )  # fmt: skip
    windows: Windows = Windows()
    advice: Advice = Advice()
    ttft_slo: TtftSlo = TtftSlo()
    alerts: Alerts = Alerts()
    links: Links = Links()

    def __post_init__(self) -> None:
        """Check what hangs together. Raises `ConfigError`."""
        check(self)


def load_config(path: Path) -> RulesConfig:
    """Read a YAML file of overrides. Raises `ConfigError`, which names the file and the key."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no YAML: {' '.join(str(error).split())}") from None
    try:
        return config_from(data if data is not None else {})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def config_from(data: object) -> RulesConfig:
    """The configuration with the values of `data` (nested as the dataclasses are) in place of defaults."""
    found = _section(RulesConfig, data, "")
    assert isinstance(found, RulesConfig)
    return found


def settings(section: type = RulesConfig, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default as written in YAML, reason) of every setting, in order."""
    hints = get_type_hints(section)
    for one in fields(section):
        key = f"{prefix}{one.name}"
        if is_dataclass(hints[one.name]):
            yield from settings(hints[one.name], f"{key}.")
        else:
            yield key, _written(one.default, one.metadata["kind"]), " ".join(one.metadata["why"].split())


def _written(value: Any, kind: Kind) -> Any:
    if kind == "duration":
        return duration(value)
    if kind == "burns":
        return [
            {"severity": b.severity, "long": duration(b.long), "short": duration(b.short), "factor": b.factor,
             "for": duration(b.hold)}
            for b in value
        ]  # fmt: skip
    return list(value) if kind == "labels" else value


def _section(section: type[Any], data: object, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'the file'}: expected settings by name, found {data!r}")
    hints = get_type_hints(section)
    known = {one.name: one for one in fields(section)}
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in known:
            raise ConfigError(f"{name}: there is no such setting; {_nearest(str(key), known, where)}")
        if is_dataclass(hints[key]):
            values[key] = _section(hints[key], value, name)
        else:
            values[key] = _value(value, known[key].metadata, name)
    return section(**values)


def _nearest(key: str, known: Mapping[str, Any], where: str) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"did you mean `{near[0]}`?"
    elsewhere = [name for name, _, _ in settings() if name.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return (
            f"it belongs under `{elsewhere[0].rsplit('.', 1)[0]}`" if "." in elsewhere[0] else "it belongs at the top"
        )
    return f"{where or 'the file'} can hold {', '.join(f'`{name}`' for name in known)}"


def _value(value: object, metadata: Mapping[str, Any], where: str) -> Any:
    kind: Kind = metadata["kind"]
    if kind == "text":
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{where}: expected text, found {value!r}")
        return value
    if kind == "labels":
        if not isinstance(value, list) or not all(isinstance(one, str) and _LABEL.fullmatch(one) for one in value):
            raise ConfigError(f"{where}: expected a list of label names, found {value!r}")
        return tuple(value)
    if kind == "burns":
        return _burns(value, where)
    if kind == "duration":
        found = parse_duration(value, where)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found = float(value)
        if math.isinf(found):
            raise ConfigError(f"{where}: {value} can never be reached; expected a finite number")
    else:
        raise ConfigError(f"{where}: expected a number, found {value!r}")
    low, high = metadata["low"], metadata["high"]
    if (low is not None and not found >= low) or (high is not None and not found <= high) or found != found:
        said = duration if kind == "duration" else "{:g}".format
        bounds = f"at least {said(low)}" if high is None else f"between {said(low)} and {said(high)}"
        raise ConfigError(f"{where}: {value} is out of range; it must be {bounds}")
    return found


def _burns(value: object, where: str) -> tuple[Burn, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: expected a list of burn rates with severity, long, short, factor and for")
    found = []
    wanted = {"severity", "long", "short", "factor", "for"}
    for number, one in enumerate(value):
        at = f"{where}[{number}]"
        if not isinstance(one, Mapping) or set(one) != wanted:
            raise ConfigError(f"{at}: expected exactly severity, long, short, factor and for, found {one!r}")
        if one["severity"] not in get_args(Severity):
            raise ConfigError(f"{at}.severity: {one['severity']!r} is none of {', '.join(get_args(Severity))}")
        if not isinstance(one["factor"], (int, float)) or isinstance(one["factor"], bool):
            raise ConfigError(f"{at}.factor: expected a number, found {one['factor']!r}")
        long, short, hold = (parse_duration(one[key], f"{at}.{key}") for key in ("long", "short", "for"))
        found.append(Burn(one["severity"], long, short, float(one["factor"]), hold))
    return tuple(found)


def check(config: RulesConfig) -> None:
    """What no single setting shows. Raises `ConfigError`."""
    clash = _OURS.intersection(config.deployment_labels)
    if clash:
        raise ConfigError(f"deployment_labels: {', '.join(sorted(clash))} is on every series already; leave it out")
    windows = config.windows
    for name in ("rate", "demand", "cost", "history", "baseline"):
        _holds(f"windows.{name}", getattr(windows, name), windows.scrape)
    for name in ("guard_window", "restarts_window", "stuck_window"):
        _holds(f"alerts.{name}", getattr(config.alerts, name), windows.scrape)
    if config.alerts.absent_for < 2 * windows.scrape:
        raise ConfigError(
            f"alerts.absent_for: {duration(config.alerts.absent_for)} is less than two scrapes "
            f"(windows.scrape is {duration(windows.scrape)}): one that was lost would page somebody"
        )
    if config.alerts.retained_share <= config.advice.pool_share:
        raise ConfigError(
            f"advice.pool_share: {config.advice.pool_share:g} must be below alerts.retained_share "
            f"({config.alerts.retained_share:g}), or the alert fires again at the TTL that it advised"
        )
    if config.alerts.expired_ratio <= config.advice.expired_target:
        raise ConfigError(
            f"advice.expired_target: {config.advice.expired_target:g} must be below alerts.expired_ratio "
            f"({config.alerts.expired_ratio:g}), or the alert fires again at the TTL that it advised"
        )
    if "{alert}" not in config.links.runbooks:
        raise ConfigError("links.runbooks: it must hold {alert}, where the alert's name goes")
    if "{uid}" not in config.links.dashboards:
        raise ConfigError("links.dashboards: it must hold {uid}, where the dashboard's uid goes")
    _check_slo(config)


def _holds(name: str, window: float, scrape: float) -> None:
    if window < 2 * scrape:
        raise ConfigError(
            f"{name}: {duration(window)} holds less than two scrapes (windows.scrape is {duration(scrape)}): a rate "
            "over it is empty"
        )


def _check_slo(config: RulesConfig) -> None:
    slo = config.ttft_slo
    if not any(math.isclose(slo.bound, edge) for edge in TTFT_SECONDS):
        near = sorted(TTFT_SECONDS, key=lambda edge: abs(edge - slo.bound))[:2]
        raise ConfigError(
            f"ttft_slo.bound: {slo.bound:g} s is no edge of the TTFT histogram; the nearest are "
            f"{' and '.join(f'{edge * 1000:g}ms' for edge in sorted(near))}"
        )
    if slo.turns not in ("all", "first", "followup"):
        raise ConfigError(f"ttft_slo.turns: {slo.turns!r} is none of all, first, followup")
    seen: set[tuple[str, float, float]] = set()
    for burn in slo.burns:
        named = f"the burn rate over {duration(burn.long)}"
        if not burn.factor > 0:
            raise ConfigError(f"ttft_slo.burns: {named} has factor {burn.factor:g}; it must be above 0")
        if (burn.severity, burn.long, burn.short) in seen:
            raise ConfigError(f"ttft_slo.burns: {named} is there twice as {burn.severity} with the same short window")
        seen.add((burn.severity, burn.long, burn.short))
        if burn.factor * (1 - slo.target) >= 1:
            raise ConfigError(
                f"ttft_slo.burns: {named} can never fire: factor {burn.factor:g} times the {1 - slo.target:.4g} of "
                f"slow turns that the target {slo.target:g} allows is {burn.factor * (1 - slo.target):.3g}, and no "
                f"more than all turns can be slow; use a factor below {1 / (1 - slo.target):.4g} or a target above "
                f"{1 - 1 / burn.factor:.4g}"
            )
        if burn.short >= burn.long:
            raise ConfigError(
                f"ttft_slo.burns: {named} has a short window that is not shorter ({duration(burn.short)})"
            )
        _holds("ttft_slo.burns: short window", burn.short, config.windows.scrape)
