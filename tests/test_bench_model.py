"""`bench --model m5`: what it prints and writes, and that the README says the same."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import expertile
from expertile import cli
from expertile.commands import bench_model
from expertile.predict import m5
from expertile.predict.m5 import Rates
from expertile.predict.reported import REPORTED, TOKENS, find


def predicted(n_tokens: int, rates: Rates | None = None) -> bench_model.Predicted:
    return bench_model.Predicted.of(n_tokens, None, rates or bench_model.fit())


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(("stage", "table"), [("plan", "kernels"), ("gather", "end to end"), ("moe", "end to end")])
def test_errors_are_what_is_printed(capsys: Any, tmp_path: Path, monkeypatch: Any, stage: str, table: str) -> None:
    def no_device(*_: Any, **__: Any) -> Any:
        raise AssertionError("a prediction opened a device")

    monkeypatch.setattr(expertile, "open_device", no_device)
    path = tmp_path / "x.json"
    code, text, _ = run(capsys, "bench", stage, "--model", "m5", "--json", path, "--csv", tmp_path / "x.csv")
    assert code == 0
    assert "PREDICTED" in text
    assert "no Mac has run this" in text
    document = json.loads(path.read_text())
    assert (document["model"], document["prediction"], document["device"]) == ("m5", True, None)
    halves: dict[str, list[float]] = {"calibration": [], "judged": []}
    for row in document["rows"]:
        reported = row.get("reported_us")
        if reported is None:
            assert row.get("error_percent") is None and row.get("half") is None
            continue
        name = (
            f"plan {row['variant']}" if row["kernel"] == "total" and stage == "plan" else row.get("step", row["kernel"])
        )
        assert reported == find(REPORTED, "text" if name == "gemms" else table, name, row["tokens"])
        error = 100 * (row["predicted_us"] - reported) / reported
        assert row["error_percent"] == pytest.approx(error)
        assert f"{error:+.1f}" in text
        halves["calibration" if row["tokens"] in (512, 2048) else "judged"].append(abs(error))
    for half, errors in halves.items():
        assert document["errors"][half]["figures"] == len(errors) > 0
        assert document["errors"][half]["mean_percent"] == pytest.approx(sum(errors) / len(errors))
        assert f"{len(errors)} figures, mean error {sum(errors) / len(errors):.1f} %" in text
    with (tmp_path / "x.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(document["rows"])


def test_every_reported_figure_is_shown() -> None:
    shown = set()
    for count in TOKENS:
        for stage in ("plan", "gather", "moe"):
            for row in bench_model.stage_rows(stage, predicted(count), m5.VARIANTS):
                if row["reported_us"] is not None:
                    shown.add((count, row["reported_us"]))
    assert {(f.tokens, f.us) for f in REPORTED} == shown


def test_other_routings_have_no_reported_figure(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    code, text, _ = run(capsys, "bench", "plan", "--model", "m5", "--routing", "zipf:1.1", "--json", path)
    assert code == 0
    assert all(row["reported_us"] is None for row in json.loads(path.read_text())["rows"])
    assert "no reported figure among these" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--model", "m9"],
        ["moe", "--model", "m9"],
        ["plan", "--model", "m5", "--device", "cpu"],
        ["plan", "--model", "m5", "--layers", "2"],
        ["plan", "--model", "m5", "--variants", "fastest"],
        ["gather", "--model", "m5", "--json", "/no/such/folder/x.json"],
    ],
    ids=" ".join,
)
def test_misuse_exits_2(capsys: Any, arguments: list[str]) -> None:
    code, _, error = run(capsys, "bench", *arguments)
    assert code == 2
    assert error.startswith("expertile: ")
    assert error.count("\n") == 1


def test_the_readme_says_what_the_model_says() -> None:
    """Figures of the table, and the errors beside them: whoever changes a statement or the fit changes both."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    lines = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines()
             if line.startswith("| ")}  # fmt: skip
    rates = bench_model.fit()
    cells: dict[str, tuple[str, float]] = {
        "plan, `padscan`": ("plan padscan", 1),
        "plan, `two_dispatch`": ("plan two_dispatch", 1),
        "gather, fp16 rows": ("mm_gather_h", 1),
        "plan to sum of the rows, ms": ("layer after", 1e-3),
    }
    for head, (name, unit) in cells.items():
        table = "kernels" if name.startswith("plan") else "end to end"
        for n_tokens, cell in zip(TOKENS, lines[head], strict=False):
            shown = re.findall(r"[\d.,]+", cell)
            values = [predicted(n_tokens, rates).times[name].us, find(REPORTED, table, name, n_tokens)]
            for figure, value in zip(shown, [v for v in values if v is not None], strict=True):
                assert float(figure.replace(",", "")) == pytest.approx(value * unit, rel=0.012), (head, n_tokens)
    layers = ("layer before", "layer after")
    for head, stage, names in (
        ("plan, `padscan`", "plan", None),
        ("gather, fp16 rows", "gather", None),
        ("plan to sum of the rows, ms", "moe", layers),
    ):
        rows = [r for count in TOKENS for r in bench_model.stage_rows(stage, predicted(count, rates), m5.VARIANTS)]
        judged = [r for r in rows if r["half"] == "judged" and (names is None or r["step"] in names)]
        assert lines[head][4].startswith(f"{bench_model.summary(judged)['mean_percent']:.0f} %")
