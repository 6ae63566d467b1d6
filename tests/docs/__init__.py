"""Tests of the documentation: its site, its snippets."""
