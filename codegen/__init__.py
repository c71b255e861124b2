"""From a node to source to binaries, and the plan package."""
