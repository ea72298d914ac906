"""`python -m footplate`: the command line, where the `footplate` script is not on the path."""

import sys

from footplate.cli.main import main

sys.exit(main())
