"""FedAvg's curves on the default population beside the authors' logs, as docs/results/calibration.json.

gluefl study lean --scale paper --device cuda --only fedavg --seeds 1,2,3,4,5 --out runs/shufflenet
gluefl study lean --scale paper --device cuda --only fedavg --seeds 1,2,3 --model mobilenet_v2 --out runs/mobilenet
python tools/make_calibration.py runs/shufflenet runs/mobilenet     # then tools/make_pictures.py
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from gluefl.experiments.runs import find, read_run
from gluefl.populations.glyphs import Glyphs

RESULT = Path(__file__).resolve().parent.parent / "docs" / "results" / "calibration.json"
ROUNDS = (50, 100, 150, 200, 250, 300, 400)
AUTHORS = {  # eqfy/fl-experiments, results/previous_baseline_log: mean of the last five evaluations, one every 5 rounds
    "shufflenet_v2_x2_0": (0.516, 0.653, 0.703, 0.735, 0.749, 0.757, 0.766),
    "mobilenet_v2": (0.461, 0.616, 0.678, 0.699, 0.723, 0.732, 0.749),
}


def calibration(folders: Iterable[Path]) -> dict[str, object]:
    """The population, and by model the authors' curve and those of the runs by seed."""
    knobs = {field.name: getattr(Glyphs(), field.name) for field in fields(Glyphs) if field.init}
    seeds: dict[str, dict[str, list[float]]] = {name: {} for name in AUTHORS}
    for run in map(read_run, find(folders)):
        if run.label == "fedavg":
            curve = dict(run.smoothed)
            seeds[run.config["model.name"]][str(run.seed)] = [curve[round] for round in ROUNDS]
    models = {name: {"authors": AUTHORS[name], "seeds": dict(sorted(seeds[name].items()))} for name in AUTHORS}
    population = {name: knobs[name] for name in knobs if name not in ("seed", "cache_mb")}
    return {"population": population, "rounds": ROUNDS, "models": models}


if __name__ == "__main__":
    RESULT.write_text(json.dumps(calibration(map(Path, sys.argv[1:])), indent=2) + "\n", encoding="utf-8")
