"""FLUX 3 Action: cameras, robot state and an instruction in; a chunk of actions out."""
