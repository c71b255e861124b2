"""Graph rewrites, and analyses that return their own type."""
