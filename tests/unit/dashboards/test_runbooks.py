from __future__ import annotations

from pathlib import Path

import pytest

from kvtune_cli.rules import _router_flags
from kvtune_connector.settings import ConnectorSettings
from kvtune_dashboards.alerts import alerts, names
from kvtune_dashboards.config import RulesConfig
from kvtune_dashboards.runbooks import CONNECTOR_KEYS, HEADINGS, Known, known, problems, runbook_findings

BOOKS = Path(__file__).resolve().parents[3] / "dashboards" / "runbooks"
CONFIG = RulesConfig()
NAME = "KvtuneTransferSlow"
ALERT = next(alert for alert in alerts(CONFIG) if alert.name == NAME)
GOOD = (BOOKS / f"{NAME}.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def there() -> Known:
    return known(CONFIG, _router_flags())


def test_every_alert_has_a_runbook_and_all_are_well() -> None:
    assert runbook_findings(CONFIG, BOOKS, _router_flags()) == []
    assert {path.stem for path in BOOKS.glob("*.md")} == set(names(alerts(CONFIG)))


def test_the_link_of_an_alert_leads_to_its_file() -> None:
    for alert in alerts(CONFIG):
        url = alert.annotations(CONFIG)["runbook_url"]
        assert (BOOKS / url.rsplit("/", 1)[1]).is_file()


@pytest.mark.parametrize("name", [*names(alerts(CONFIG))])
def test_a_runbook_says_what_to_set_or_run(name: str) -> None:
    turn = (BOOKS / f"{name}.md").read_text().split("## What to turn")[1].split("## Verify")[0]
    assert "```" in turn or "`" in turn


def test_a_missing_page_and_one_too_many(tmp_path: Path) -> None:
    for path in BOOKS.glob("*.md"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / f"{NAME}.md").rename(tmp_path / "KvtuneNoSuchAlert.md")
    (tmp_path / "KvtuneSettingsDiffer.md").write_bytes(b"\xff")
    found = {Path(one.where).name: one.message for one in runbook_findings(CONFIG, tmp_path)}
    assert found == {
        f"{NAME}.md": "is missing: every alert has a runbook",
        "KvtuneNoSuchAlert.md": "there is no alert of this name",
        "KvtuneSettingsDiffer.md": found["KvtuneSettingsDiffer.md"],
    }
    assert "cannot be read" in found["KvtuneSettingsDiffer.md"]


def said(text: str, there: Known) -> str:
    return "\n".join(f"{line}: {message}" for line, message in problems(ALERT, text, there))


def test_a_good_page_has_no_problems(there: Known) -> None:
    assert said(GOOD, there) == ""


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_section_that_is_missing(heading: str, there: Known) -> None:
    assert "it must have Meaning; Impact" in said(GOOD.replace(f"## {heading}\n", ""), there)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (f"# {NAME}", "# Slow", f"1: does not begin with `# {NAME}`"),
        ("## Impact\n", "## Impact\n\nNone.\n\n## Impact\n", "says nothing under `Impact`"),
        ("```promql\nkvtune:kv_read_bytes", "```text\nkvtune:kv_read_bytes", "shows no query under `First look`"),
        ("sum by (direction) (kvtune:kv_read_bytes:rate)", "sum by (direction) (kvtune:kv_bytes:rate)",
         "`kvtune:kv_bytes:rate` is in neither"),
        ("sum by (direction) (kvtune:kv_read_bytes:rate)", "sum by (role) (kvtune:kv_read_bytes:rate)",
         "sum by (role)"),
        ("sum by (direction) (kvtune:kv_read_bytes:rate)", "sum((", "does not parse"),
        ("`kvtune:threshold_tokens:crossing`", "`kvtune:threshold:crossing`", "`kvtune:threshold:crossing` is in"),
        ("`alerts.slow_factor`", "`alerts.slow_ratio`", "the rules' configuration has no `alerts.slow_ratio`"),
        ("`--prefill`", "`--prefills`", "no command has a flag `--prefills`"),
        ('"kv_recompute_threshold"', '"recompute_threshold"', "no setting `kv_connector_extra_config.recompute_thresh"),
        ('{"kv_connector_extra_config": {', '{"kv_connector_extra_config": {{', "is no JSON"),
        ('Panel "Speed of a read, and a day before"', 'Panel "Speed of a read"', "there is no panel 'Speed of a read'"),
        ('Panel "Speed of a read, and a day before" of', "The panel of", "does not lead to the panel"),
        ("```json", "```python", "a block of kind 'python'"),
    ],
)  # fmt: skip
def test_what_leads_nowhere_is_found(old: str, new: str, wanted: str, there: Known) -> None:
    assert old in GOOD
    assert wanted in said(GOOD.replace(old, new, 1), there)


def test_a_problem_is_where_it_says(there: Known) -> None:
    text = GOOD.replace("sum by (direction) (kvtune:kv_read_bytes:rate)", "kvtune:kv_bytes:rate")
    line = text.splitlines().index("kvtune:kv_bytes:rate") + 1
    assert said(text, there).startswith(f"{line}: ")


def test_flags_are_looked_up_only_where_they_are_known() -> None:
    text = GOOD.replace("`--prefill`", "`--prefills`")
    assert "flag" not in said(text, known(CONFIG))


def test_keys_of_kvtune_are_those_that_the_connector_takes() -> None:
    accepted = set(ConnectorSettings.__dataclass_fields__) - {"bidirectional", "ttl_s", "threshold_tokens"}
    assert set(CONNECTOR_KEYS["kv_connector_extra_config"]["kvtune"]) == accepted


def test_keys_may_begin_inside(there: Known) -> None:
    inside = GOOD.replace('{"kv_connector_extra_config": {"kv_recompute_threshold": 6000}}', '{"max_retain_s": 9}')
    assert said(inside, there) == ""
    wrong = GOOD.replace('{"kv_connector_extra_config": {"kv_recompute_threshold": 6000}}', '{"max_retain": 9}')
    assert "there is no setting `max_retain`" in said(wrong, there)
    wrong = GOOD.replace('{"kv_recompute_threshold": 6000}', "[6000]")
    assert "kv_connector_extra_config. is no object" in said(wrong, there)
