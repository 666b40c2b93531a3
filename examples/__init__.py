# SPDX-License-Identifier: Apache-2.0
"""Programs that use attnrt from outside, through its public surface alone."""
