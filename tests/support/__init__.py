"""What the tests share: real mounts, files that describe themselves, waiting for a condition."""
