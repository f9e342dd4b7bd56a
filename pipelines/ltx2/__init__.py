"""LTX-2: a prompt, and optionally a first frame, in; a video with its sound out."""
