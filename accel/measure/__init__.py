"""Wall and device time, launches, and memory."""
