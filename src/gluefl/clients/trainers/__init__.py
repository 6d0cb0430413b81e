"""Trainers: how a cohort is trained on the hardware that is there."""
