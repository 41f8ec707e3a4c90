"""What several commands use: their flags, checkpoints, scores and measurements, and what becomes of results."""
