"""The policy server: wire formats, protocols, scheduling. Start reading at `service.py`."""
