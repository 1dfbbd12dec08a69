"""Stand-ins for what goes wrong in the field: sources, disks and clients that misbehave on purpose."""
