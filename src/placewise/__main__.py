"""The command line as `python -m placewise`."""

import sys

from placewise.cli import main

sys.exit(main())
