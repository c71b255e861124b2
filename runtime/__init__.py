"""The C++ runtime and its Python loader."""
