"""Fixtures of the tests of reports."""

from browsing import browser as browser
