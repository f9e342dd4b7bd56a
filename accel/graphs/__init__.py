"""CUDA graphs: capture once, replay with new inputs."""
