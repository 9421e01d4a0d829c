"""Command-line tools beside the executor."""
