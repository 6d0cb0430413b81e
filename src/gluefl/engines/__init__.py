"""Where a cohort is trained."""
