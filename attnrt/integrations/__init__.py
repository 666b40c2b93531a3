# SPDX-License-Identifier: Apache-2.0
"""Bridges to frameworks; each module imports its framework, nothing else of attnrt imports them."""
