"""What to do with a pipeline: run it, measure it, prove it, serve it."""
