"""dmfs: a read-only FUSE overlay that keeps deep-learning datasets on the local disks of the nodes that read them."""

__version__ = "0.1.0"
