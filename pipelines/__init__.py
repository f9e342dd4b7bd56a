"""One folder per model: network modules, weights, and the list of its stages."""
