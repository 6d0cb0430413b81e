"""Every table and figure of the paper as a study: one TOML file each, and what runs, measures and shows it."""
