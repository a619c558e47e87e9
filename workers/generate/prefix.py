"""Pages that requests of one tenant share: the same beginning of a text is read once.

A tree for each tenant holds full pages by the exact token ids in them, page after page from the beginning of a text. A
request that begins alike holds these pages instead of computing them. They are only ever read: what a request writes
comes after its last full page and goes to pages of its own, so nothing is ever copied or changed under another. Token
ids are compared, not a digest of them, so no two texts can be taken for one; and nobody can tell from an answer's speed
what another tenant has asked. Pages that only the tree holds are as good as free: the longest unused, at the end of its
text, goes first when pages are wanted.
"""

from array import array
from collections.abc import Sequence

from headway.workers.generate.pages import Guard, Pages


class Node:
    """One full page of a text: `ids` are its tokens, `children` what follows somewhere."""

    __slots__ = ("children", "ids", "page", "parent")

    def __init__(self, ids: bytes, page: int, parent: "Node | None") -> None:
        self.ids = ids
        self.page = page
        self.parent = parent
        self.children: dict[bytes, Node] = {}

    def __repr__(self) -> str:
        return f"<Node page {self.page}, {len(self.children)} children>"


class SharedPages(Pages):
    """Pages with a tree of beginnings for each tenant. `free` counts those that only a tree holds."""

    def __init__(self, total: int, page_tokens: int, guard: Guard | None = None) -> None:
        super().__init__(total, guard)
        self._page_tokens = page_tokens
        self._roots: dict[str, Node] = {}
        self._nodes: dict[int, Node] = {}  # page -> where in a tree
        self._idle: dict[int, None] = {}  # pages that only a tree holds, longest unused first

    def __repr__(self) -> str:
        return f"<SharedPages {self.used}/{self.total} used, {len(self._nodes)} known>"

    @property
    def free(self) -> int:
        return super().free + len(self._idle)

    def take(self, count: int) -> list[int]:
        while super().free < count and self._idle:
            self._forget(self._nodes[next(iter(self._idle))])
        return super().take(count)

    def give(self, pages: Sequence[int]) -> None:
        backwards = pages[::-1]  # the end of a text is forgotten before its beginning
        super().give(backwards)
        for page in backwards:
            if page in self._nodes and self._holders[page] == 1:
                self._idle[page] = None

    def reuse(self, tenant: str, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the beginning of `tokens`, now also the caller's; at least one token is left to read."""
        found = []
        node = self._roots.get(tenant)
        for ids in self._pages_of(tokens, (len(tokens) - 1) // self._page_tokens):
            node = node.children.get(ids) if node is not None else None
            if node is None:
                break
            found.append(node.page)
        for page in found:
            self._idle.pop(page, None)
        self.hold(found)
        return found

    def learn(self, tenant: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """`pages` hold all of `tokens`, written: those that are full may be shared. A page that is known stays."""
        node = self._roots.setdefault(tenant, Node(b"", -1, None))
        for ids, page in zip(self._pages_of(tokens, len(tokens) // self._page_tokens), pages, strict=False):
            child = node.children.get(ids)
            if child is None:
                child = node.children[ids] = self._nodes[page] = Node(ids, page, node)
                self.hold([page])
            node = child

    def _pages_of(self, tokens: Sequence[int], count: int) -> list[bytes]:
        size = self._page_tokens
        return [array("I", tokens[at * size : (at + 1) * size]).tobytes() for at in range(count)]

    def _forget(self, node: Node) -> None:
        """Out of its tree, with all that follows it: what requests still hold becomes free with them."""
        assert node.parent is not None
        del node.parent.children[node.ids]
        stack = [node]
        while stack:
            one = stack.pop()
            stack += one.children.values()
            del self._nodes[one.page]
            self._idle.pop(one.page, None)
            super().give([one.page])
