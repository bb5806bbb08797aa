"""The command line: each command is a thin layer over what the package offers in Python."""
