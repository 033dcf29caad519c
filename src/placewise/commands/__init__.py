"""The commands, one file for those that belong together; cli.py puts them on the command line."""
