"""The compiler: vocabulary, importers, the driver and the command line."""
