# SPDX-License-Identifier: Apache-2.0
import sys

from .command import main

sys.exit(main())
