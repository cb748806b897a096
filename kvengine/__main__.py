"""`python -m kvengine`."""

import sys

from kvengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
