"""A report as a Markdown file, with its picture beside it."""

from __future__ import annotations

from pathlib import Path

from mxquant.evals.plots import plot_comparison
from mxquant.evals.report import Report, versions
from mxquant.evals.tables import all_of


def write_report(report: Report, path: Path, picture: Path) -> None:
    """Write ``path`` (Markdown) and ``picture``, which it shows."""
    plot_comparison(report.results, picture, report.measured_on())
    path.write_text(to_markdown(report, picture.name), encoding="utf-8")


def to_markdown(report: Report, picture: str) -> str:
    """The verdict of the gate first, then the picture, tables, and what it takes to measure the same again."""
    baseline = next((row.name for row in report.results if row.is_baseline), None)
    models = ", ".join(row.name for row in report.results if not row.is_baseline)
    title = f"# {models}" + ("" if baseline is None else f" against {baseline}")
    tables = [found.to_markdown() for found in all_of(report.results, report.gate)]
    notes = "\n".join(f"- {line}" for line in report.footnote().splitlines())
    problems = [f"**{problem}.**" for problem in report.problems]
    parts = [title, *_verdict(report), *problems, f"![comparison]({picture})", *tables, notes]
    parts += ["## Settings", _settings(report), "## Versions", _pairs(versions())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(report: Report) -> list[str]:
    if report.gate is None:
        return []
    if report.gate.passed:
        return ["**Gate: passed.**"]
    return ["**Gate: failed.**", "\n".join(f"- {line}" for line in report.gate.failures)]


def _settings(report: Report) -> str:
    given = {name: value for name, value in report.settings.items() if value not in (None, False)}
    return _pairs({row.name: row.source for row in report.results} | given)


def _pairs(found: dict[str, object] | dict[str, str | None]) -> str:
    return "\n".join(f"- {name}: `{value}`" for name, value in found.items() if value is not None)
