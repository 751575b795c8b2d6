"""The command line: one module a command, all behind `edgespec.cli.main`."""
