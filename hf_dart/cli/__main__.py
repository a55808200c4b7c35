"""`python -m hf_dart.cli`, for launchers such as accelerate's."""

import sys

from hf_dart.cli import main

sys.exit(main())
