"""The files in the folder of a run, by name."""

CONFIG, JOURNAL, MODEL, SUMMARY = "config.toml", "journal.jsonl", "model.safetensors", "summary.json"
CHECKSUMS = "checksums.json"  # of the files that a run leaves at its end
CHECKPOINT = "checkpoint"  # a folder
FAILURE = "failed.txt"  # of a run that diverged: the error message
EVALUATIONS = "evaluations.jsonl"  # of a server on Flower
