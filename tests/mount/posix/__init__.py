"""The checks of the POSIX suite by theme; tests/mount/posix_suite.py puts them together."""
