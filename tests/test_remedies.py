"""A comparison that was finished before it had remedies gets their rows when it is called again, and nothing else changes."""
import json
from route_transport.remedies import ROWS, remedy_file
from route_transport.reproduce import reproduce, run_folder


def test_a_finished_comparison_gets_the_rows_that_it_lacks(tmp_path):
    kwargs = dict(preset="smoke", systems=["rope", "alibi"], seeds=[0], out=tmp_path, steps=10, workers=1)
    first = reproduce(**kwargs)
    assert [r["system"] for r in first["runs"]] == ["rope", *(f"rope+{n}" for n in ROWS), "alibi"]
    run = run_folder(tmp_path, "rope", 0)
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("eval*.json")}
    for name in ROWS[1:]: remedy_file(run, name).unlink()
    again = reproduce(**kwargs)
    assert again["runs"] == first["runs"]
    kept = [p for p in stamps if p.exists() and p.stat().st_mtime_ns == stamps[p]]
    assert len(kept) == len(stamps) - len(ROWS[1:])                       # what was there is not done again
    assert all(f"rope+{n}" in (tmp_path / "table.md").read_text() for n in ROWS)
    assert json.loads((tmp_path / "results.json").read_text())["systems"] == ["rope", "alibi"]
