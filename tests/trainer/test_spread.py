"""What a sweep says of its seeds: means and standard deviations of what the runs left, and who is missing."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from trainer.spread import Job, as_json, find_settings, report_spread, spread_rows


def finished(folder: Path, number: int, *overrides: str, status: int = 0, **summary: Any) -> Job:
    place = folder / str(number)
    place.mkdir()
    if summary:
        (place / "summary.json").write_text(json.dumps(summary))
    return Job(number=number, overrides=["task=distill", *overrides], sweep=folder, folder=place, status=status)


def scored(kl: float, **more: float | None) -> dict[str, Any]:
    after = {"val/kl": kl, **{f"val/{name}": value for name, value in more.items()}}
    return {
        "before": {"val/kl": 2.0},
        "after": after,
        "reference": {"val/kl": 0.0},
        "gap_closed": {"val/kl": 1 - kl / 2},
    }


def test_one_table_for_all_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [finished(tmp_path, seed, f"seed={seed}", **scored(kl)) for seed, kl in enumerate((1.0, 1.2, 1.7))]

    report_spread(jobs)

    mean, std = 1.3, statistics.stdev([1.0, 1.2, 1.7])
    assert std == pytest.approx((((0.3**2) + (0.1**2) + (0.4**2)) / 2) ** 0.5), "of a sample: n - 1"
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    assert lines[0] == "| mean ± standard deviation | before | after | reference | gap closed |"
    assert lines[2:] == [
        "| seed=0,1,2 (n=3) |  |  |  |  |",
        f"| kl | 2.0000 ± 0 | {mean:.4f} ± {std:.4f} | 0 ± 0 | 35.0 ± {50 * std:.1f} % |",
    ]
    (setting,) = json.loads((tmp_path / "sweep.json").read_text())["settings"]
    assert setting["after"]["val/kl"] == {"mean": mean, "std": std, "n": 3, "values": [1.0, 1.2, 1.7]}
    shown = capsys.readouterr().out
    assert f"{mean:.4f} ± {std:.4f}" in shown and "sweep.json" in shown


def test_counts_are_shown_whole_where_they_do_not_differ(tmp_path: Path) -> None:
    jobs = [finished(tmp_path, seed, f"seed={seed}", after={"val/pairs": 13, "val/cut": seed}) for seed in (0, 1)]

    _, rows = spread_rows(find_settings(jobs))

    assert {row[0]: row[1] for row in rows[1:]} == {"pairs": "13 ± 0", "cut": "0.5000 ± 0.7071"}


def test_settings_are_blocks_of_their_own(tmp_path: Path) -> None:
    words = [(weight, seed) for weight in (0, 1) for seed in (5, 6)]
    jobs = [
        finished(tmp_path, number, f"++task.weight={weight}", f"seed={seed}", **scored(weight + seed / 10))
        for number, (weight, seed) in enumerate(words)
    ]

    settings = find_settings(jobs)

    assert [setting.title for setting in settings] == [f"task.weight={weight} seed=5,6 (n=2)" for weight in (0, 1)]
    assert [setting.metrics["after"]["val/kl"].values for setting in settings] == [[0.5, 0.6], [1.5, 1.6]]


def test_what_failed_is_missing_and_not_averaged(tmp_path: Path) -> None:
    jobs = [
        finished(tmp_path, 0, "seed=0", **scored(1.0)),
        finished(tmp_path, 1, "seed=1", status=1, **scored(99.0)),
        finished(tmp_path, 2, "seed=2", **scored(3.0)),
        finished(tmp_path, 3, "seed=3"),  # ended well, but its summary is gone
    ]

    (setting,) = find_settings(jobs)

    assert setting.title == "seed=0,1,2,3 (n=2, without job 1 and job 3)"
    assert setting.metrics["after"]["val/kl"].mean == 2.0
    found = as_json([setting])["settings"][0]
    assert (found["n"], found["missing"]) == (2, [1, 3])
    assert [job["seed"] for job in found["jobs"]] == ["0", "1", "2", "3"]


def test_a_single_run_has_no_spread(tmp_path: Path) -> None:
    settings = find_settings([finished(tmp_path, 0, "seed=0", **scored(1.0))])

    columns, rows = spread_rows(settings)

    assert columns == ["", "before", "after", "reference", "gap closed"]
    assert rows == [["seed=0 (n=1)", "", "", "", ""], ["kl", "2.0000", "1.0000", "0", "50.0 %"]]
    assert as_json(settings)["settings"][0]["after"]["val/kl"]["std"] is None


def test_a_metric_that_some_runs_lack_says_how_many_have_it(tmp_path: Path) -> None:
    jobs = [
        finished(tmp_path, 0, "seed=0", **scored(1.0, extra=None)),  # not finite, which JSON has as null
        finished(tmp_path, 1, "seed=1", **scored(1.0, extra=5.0)),
    ]

    _, rows = spread_rows(find_settings(jobs))

    assert rows[2] == ["extra", "", "5.0000 (n=1)", "", ""]


def test_metrics_of_groups_are_in_the_file_and_not_in_the_table(tmp_path: Path) -> None:
    settings = find_settings([finished(tmp_path, 0, "seed=0", after={"val/kl": 1.0, "val/by_length/1-16/kl": 1.0})])

    columns, rows = spread_rows(settings)

    assert (columns, [row[0] for row in rows[1:]]) == (["", "after"], ["kl"])
    assert "val/by_length/1-16/kl" in as_json(settings)["settings"][0]["after"]


def test_a_sweep_without_numbers_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_spread([])
    report_spread([finished(tmp_path, 0, "seed=0", status=1)])

    assert capsys.readouterr().out == ""
    assert not list(tmp_path.glob("sweep.*"))


def test_no_secret_of_the_command_line_is_written(tmp_path: Path) -> None:
    jobs = [
        finished(tmp_path, number, f"logger.wandb.api_key={key}", "seed=0", **scored(1.0))
        for number, key in enumerate(("correct-horse", "battery-staple"))
    ]

    report_spread(jobs)

    for file in tmp_path.glob("sweep.*"):
        assert "correct-horse" not in file.read_text() and "battery-staple" not in file.read_text()
