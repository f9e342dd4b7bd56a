"""FLUX.2: text and reference images to images (Black Forest Labs; networks from diffusers)."""
