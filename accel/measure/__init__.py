"""Wall and device time, and launches."""
