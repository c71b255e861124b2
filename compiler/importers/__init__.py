"""Readers of foreign model files."""
