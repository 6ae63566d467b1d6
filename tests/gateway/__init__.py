"""Tests of the front: gateway, launcher, command line, settings."""
