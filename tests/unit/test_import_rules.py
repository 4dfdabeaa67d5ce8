"""Arrows between rooms run one way, and heavy or optional packages are imported only where they are needed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE_CONNECTOR = {"fingerprint", "policy", "retention", "settings", "wire"}
MAY_IMPORT = {
    "telemetry": set(),
    "connector": {"telemetry"},
    "router": {"telemetry", "connector"},
    "tuning": {"telemetry", "connector"},
    "bench": {"telemetry", "connector", "router", "tuning"},
    "dashboards": {"telemetry"},
    "cli": {"telemetry", "connector", "router", "tuning", "bench", "dashboards"},
}
ONLY_IN = {
    "vllm": ("connector/",),
    "nixl": ("connector/",),
    "grafana_api": ("dashboards/",),
    "redis": ("router/",),
    "matplotlib": ("bench/kvtune_bench/charts", "bench/kvtune_bench/replay/charts"),
    "typer": ("cli/",),
    "rich": ("cli/", "bench/kvtune_bench/demo", "bench/kvtune_bench/replay/table", "tuning/kvtune_tuning/render"),
}


def modules() -> list[Path]:
    return [path for room in MAY_IMPORT for path in sorted((ROOT / room / f"kvtune_{room}").rglob("*.py"))]


def imports(path: Path) -> list[tuple[str, int]]:
    """(module, depth) of every import; depth 0 is at module level."""
    found: list[tuple[str, int]] = []

    def visit(node: ast.AST, depth: int) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, depth) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                found.extend((f"{child.module}.{alias.name}", depth) for alias in child.names)
            inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            visit(child, depth + (inner or typing_only))

    visit(ast.parse(path.read_text(encoding="utf-8")), 0)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_to_the_plan(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    room = relative.split("/")[0]
    for name, depth in imports(path):
        top, *rest = name.split(".")
        if top.startswith("kvtune_"):
            other = top.removeprefix("kvtune_")
            assert other == room or other in MAY_IMPORT[room], f"{relative} imports {name}"
            if other == "connector" and room != "connector":
                assert rest and rest[0] in PURE_CONNECTOR, f"{relative} imports {name}, which is not pure"
        for package, places in ONLY_IN.items():
            if top == package:
                assert relative.startswith(places), f"{relative} imports {package}"
        if top in ("pandas", "matplotlib", "vllm", "nixl"):
            at_home = relative.startswith(("bench/kvtune_bench/charts", "connector/kvtune_connector/nixl"))
            assert depth > 0 or at_home, (
                f"{relative} imports {name} at the top: it is slow to load, import it where it is used"
            )


def test_the_catalogue_of_rooms_is_complete() -> None:
    assert {path.parent.name for path in ROOT.glob("*/kvtune_*/") if path.is_dir()} == set(MAY_IMPORT)
