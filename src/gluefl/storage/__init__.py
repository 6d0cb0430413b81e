"""What a run leaves on disk: its journal and its checkpoints."""
