"""The table of inodes: names, attributes and listings that are known, and for how long. No I/O and no policy of when
to ask the source.

A node id stands for one version of a file: when the source has a new one, the name leads to a new node, and the
kernel's pages of the old one can never be shown for it. Directories keep their node as long as they stay the same
directory. All names of a hard-linked file share a node, as they do natively.

A node lives as long as the kernel refers to it, plus a bounded number whose attributes were fetched in advance.
"""

import itertools
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

import trio

from dmfs.types import Attributes, DirEntry, Stat, VersionFrom, unpack_attributes

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = 1  # the node id of the source directory, FUSE_ROOT_ID of the kernel
MAX_UNREFERENCED = 65_536  # nodes known in advance, that no look-up has asked for yet


class Node:
    """A file as the kernel knows it.

    Attributes:
        id: the node id; never used again for anything else.
        parent, name: where it was found last. The root has no parent; its name is b"".
        attributes: as the source gave them.
        expires: until when the attributes may be used without asking, on the monotonic clock.
        references: how many look-ups the kernel has not taken back yet.
        is_superseded: its name leads to another version now; its attributes are final.
    """

    __slots__ = ("attributes", "expires", "id", "is_superseded", "name", "parent", "references")

    def __init__(self, node_id: int, parent: "Directory | None", name: bytes, attributes: Attributes) -> None:
        self.id = node_id
        self.parent = parent
        self.name = name
        self.attributes = attributes
        self.expires = 0.0
        self.references = 0
        self.is_superseded = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.path()!r}>"

    def path(self) -> bytes:
        """The path relative to the source; b"" is the root."""
        parts = []
        node: Node = self
        while node.parent is not None:
            parts.append(node.name)
            node = node.parent
        return b"/".join(reversed(parts))


class Directory(Node):
    """A directory.

    Attributes:
        children: the nodes that are known, by name.
        negatives: names that did not exist, and until when that may be said without asking.
        listing: the listing read last, if there is one.
    """

    __slots__ = ("children", "listing", "negatives")

    def __init__(self, node_id: int, parent: "Directory | None", name: bytes, attributes: Attributes) -> None:
        super().__init__(node_id, parent, name, attributes)
        self.children: dict[bytes, Node] = {}
        self.negatives: dict[bytes, float] = {}
        self.listing: Listing | None = None


class Listing:
    """The names of a directory, growing while the source is being read. Packed: about 70 bytes and the name's length
    an entry.

    Attributes:
        expires: until when it may be used for a new open, on the monotonic clock.
        is_complete: every name is here.
        error: why reading ended early, if it did. Raise it by way of `without_traceback`: it is shared.
        grown: set, and replaced by a new event, each time names or the end arrive.
    """

    def __init__(self) -> None:
        self.expires = 0.0
        self.is_complete = False
        self.error: Exception | None = None
        self.grown = trio.Event()
        self._names: list[bytes] = []
        self._inos = array("Q")
        self._types = bytearray()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def is_over(self) -> bool:
        """No more names will come."""
        return self.is_complete or self.error is not None

    def extend(self, entries: list[DirEntry]) -> None:
        """More names, in the order of the source."""
        for name, ino, kind in entries:
            self._names.append(name)
            self._inos.append(ino)
            self._types.append(kind)
        self._tell()

    def finish(self, error: Exception | None) -> None:
        """All names are here, or reading failed."""
        self.error = error
        self.is_complete = error is None
        self._tell()

    def _tell(self) -> None:
        grown, self.grown = self.grown, trio.Event()
        grown.set()

    def names(self, start: int, stop: int) -> list[bytes]:
        """The names from index `start` up to, not including, `stop`."""
        return self._names[start:stop]

    def entries(self, start: int, stop: int) -> list[DirEntry]:
        """The entries from index `start` up to, not including, `stop`."""
        stop = min(stop, len(self._names))
        return [DirEntry(self._names[i], self._inos[i], self._types[i]) for i in range(start, stop)]


class InodeTable:
    """All nodes.

    Attributes:
        root: the source directory.
        on_superseded: called with a node that the kernel still refers to when its name leads elsewhere.
    """

    def __init__(self, root_attributes: Attributes, *, version_from: VersionFrom) -> None:
        self.on_superseded: Callable[[Node], None] = lambda node: None
        self._version_from = version_from
        self._ids = itertools.count(ROOT)
        self._nodes: dict[int, Node] = {}
        self._unreferenced: OrderedDict[int, Node] = OrderedDict()
        self._linked: dict[int, Node] = {}  # hard-linked files by the source's inode number
        self._linked_names: dict[
            int, set[tuple[int, bytes]]
        ] = {}  # by node id: every (directory id, name) that leads to it
        self.root = Directory(next(self._ids), None, b"", root_attributes)
        self.root.references = 1
        self._nodes[ROOT] = self.root

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._nodes

    def get(self, node_id: int) -> Node:
        """The node with this id. Raises KeyError if the kernel has forgotten it, which is a fault of the front end."""
        return self._nodes[node_id]

    def update(self, parent: Directory, name: bytes, attributes: Attributes) -> Node:
        """The source has these attributes for a name now: the node of that version, an old one or a new one.

        The attributes of an old one are left as they were: the caller compares, then sets them.
        """
        parent.negatives.pop(name, None)
        new = unpack_attributes(attributes)
        old = parent.children.get(name)
        if old is not None:
            if self.is_same(unpack_attributes(old.attributes), new):
                return old
            self.remove(parent, name)
        if new.is_regular and new.nlink > 1:
            return self._update_linked(parent, name, attributes, new)
        return self._add(parent, name, attributes, new)

    def is_same(self, old: Stat, new: Stat) -> bool:
        """True if both are the same version of the same file."""
        if old.ino != new.ino or old.mode & 0o170000 != new.mode & 0o170000:
            return False
        if new.is_directory:
            return True
        if old.size != new.size or old.mtime_ns != new.mtime_ns:
            return False
        return self._version_from == "mtime" or old.ctime_ns == new.ctime_ns

    def _update_linked(self, parent: Directory, name: bytes, attributes: Attributes, new: Stat) -> Node:
        node = self._linked.get(new.ino)
        if node is not None and self.is_same(unpack_attributes(node.attributes), new):
            node.parent, node.name = parent, name
            parent.children[name] = node
        else:
            if node is not None:
                self.supersede(node)
            node = self._linked[new.ino] = self._add(parent, name, attributes, new)
        self._linked_names.setdefault(node.id, set()).add((parent.id, name))
        return node

    def _add(self, parent: Directory, name: bytes, attributes: Attributes, new: Stat) -> Node:
        make = Directory if new.is_directory else Node
        node = make(next(self._ids), parent, name, attributes)
        self._nodes[node.id] = node
        parent.children[name] = node
        self._unreferenced[node.id] = node
        if len(self._unreferenced) > MAX_UNREFERENCED:
            self._free(next(iter(self._unreferenced.values())))
        return node

    def remove(self, parent: Directory, name: bytes) -> None:
        """A name does not lead to its node any more; who has it open goes on with it."""
        node = parent.children.pop(name, None)
        if node is None:
            return
        names = self._linked_names.get(node.id)
        if names is not None:
            names.discard((parent.id, name))
            if self._rename_to_one_of(node, names):
                return
        self.supersede(node)

    def _rename_to_one_of(self, node: Node, names: set[tuple[int, bytes]]) -> bool:
        """Find a hard-linked file by another of its names from now on. False if there is none left."""
        for parent_id, name in list(names):
            parent = self._nodes.get(parent_id)
            if isinstance(parent, Directory) and parent.children.get(name) is node:
                node.parent, node.name = parent, name
                return True
            names.discard((parent_id, name))
        return False

    def supersede(self, node: Node) -> None:
        """No name leads to this version any more."""
        node.is_superseded = True
        if node.references:
            self.on_superseded(node)
        else:
            self._free(node)

    def refer(self, node: Node) -> None:
        """The kernel was told of the node once more."""
        if not node.references:
            self._unreferenced.pop(node.id, None)
        node.references += 1

    def forget(self, node_id: int, count: int) -> None:
        """The kernel takes back `count` references; with the last one the node goes."""
        node = self._nodes.get(node_id)
        if node is None or node is self.root:
            return
        node.references -= count
        if node.references <= 0:
            self._free(node)

    def _free(self, node: Node) -> None:
        self._nodes.pop(node.id, None)
        self._unreferenced.pop(node.id, None)
        if node.parent is not None and node.parent.children.get(node.name) is node:
            del node.parent.children[node.name]
        for parent_id, name in self._linked_names.pop(node.id, ()):
            parent = self._nodes.get(parent_id)
            if isinstance(parent, Directory) and parent.children.get(name) is node:
                del parent.children[name]
        ino = unpack_attributes(node.attributes).ino
        if self._linked.get(ino) is node:
            del self._linked[ino]
        if isinstance(node, Directory):
            for child in list(node.children.values()):
                if not child.references:
                    self._free(child)

    def find(self, path: bytes) -> Node | None:
        """The node a path leads to, if every step of it is known."""
        node: Node | None = self.root
        for name in path.split(b"/") if path else ():
            if not isinstance(node, Directory):
                return None
            node = node.children.get(name)
        return node
