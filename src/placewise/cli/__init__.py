"""The command line: parsing and printing only. Each command is one file, named like it: place_command.py.

Importing this loads nothing, so that Ctrl-C is heeded from the first moment on: `main` loads what a command needs.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 wrong input, 3 nothing fits.

    As for other tools, it is 128 and the number of the signal that ended it: 130 Ctrl-C, 141 a closed pipe, 143 SIGTERM.
    """
    try:
        from placewise.cli.running import run

        return run(arguments)
    except KeyboardInterrupt:
        from placewise.cli.outputs import warn

        warn("stopped")
        return 130
