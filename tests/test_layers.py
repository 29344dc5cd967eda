"""Imports point down and third-party packages stay in their homes; the contracts are in pyproject.toml."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def imported_packages(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_contracts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("importlinter.cli")
    monkeypatch.chdir(ROOT)
    assert cli.lint_imports(config_filename="pyproject.toml", no_cache=True) == cli.EXIT_STATUS_SUCCESS


def test_triton_is_imported_in_kernel_files_only() -> None:
    files = [f for f in (ROOT / "jetspec").rglob("*.py") if "triton" in imported_packages(f)]
    assert [f.name for f in files if not f.stem.endswith(("_triton", "_gluon"))] == []
