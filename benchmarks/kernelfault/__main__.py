"""`python -m benchmarks.kernelfault`."""

import sys

from .command import main

sys.exit(main())
