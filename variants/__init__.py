"""Complete single-file variants beyond the scripts at the top: `python -m variants.NAME`."""
