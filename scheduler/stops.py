"""Finding stop strings in text that comes in pieces, without ever showing a part of one.

Lives here: one automaton over all stop strings of a request (Aho and Corasick, 1975), so that a character costs the
same for one stop as for sixteen, and what must be held back is the depth of one state: the longest ending of the text
that could still become a stop. Never here: tokens. The stop that is complete first ends the text; of several complete
at the same character, the longest. This rule looks at one character after another, so it cannot depend on how text was
split.
"""

import re
from collections.abc import Sequence


class _Node:
    """A state: `depth` characters of some stop have been seen; a stop of `found` characters ends here (0: none)."""

    __slots__ = ("depth", "fail", "found", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.found = 0
        self.next: dict[str, _Node] = {}
        self.fail = self


class StopMatcher:
    """The stop strings of one request. Empty ones are ignored; without any, all text passes at once."""

    def __init__(self, stops: Sequence[str]) -> None:
        kept = [stop for stop in stops if stop]
        self._root = self._state = _automaton(kept)
        self._first = re.compile("|".join(map(re.escape, sorted({stop[0] for stop in kept})))) if kept else None
        self._held = ""
        self._hit = False

    def __repr__(self) -> str:
        return f"<StopMatcher {'hit' if self._hit else 'open'}, {len(self._held)} characters held>"

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop was met. After that, nothing more comes out."""
        if self._hit:
            return "", True
        if self._first is None:
            return text, False
        before, text_all = len(self._held), self._held + text
        end, length = self._scan(text)
        if length:
            self._hit, self._held = True, ""
            return text_all[: before + end - length], True
        shown = len(text_all) - self._state.depth
        self._held = text_all[shown:]
        return text_all[:shown], False

    def finish(self) -> str:
        """The text still held back: no stop can come of it any more."""
        held, self._held = self._held, ""
        self._state = self._root
        return held

    def _scan(self, text: str) -> tuple[int, int]:
        """Where in `text` the first stop is complete and how long it is; (0, 0) if there is none."""
        root, state, at = self._root, self._state, 0
        assert self._first is not None
        while at < len(text):
            if state is root:  # skip, at the speed of `re`, what begins no stop
                begin = self._first.search(text, at)
                if begin is None:
                    break
                at = begin.start()
            char = text[at]
            while state is not root and char not in state.next:
                state = state.fail
            state = state.next.get(char, root)
            at += 1
            if state.found:
                return at, state.found
        self._state = state
        return 0, 0


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.found = len(stop)
    level = [root]
    while level:  # by depth, so that every shorter state is complete when a longer one asks for it
        deeper = []
        for node in level:
            for char, child in node.next.items():
                child.fail = _fallback(root, node, char)
                child.found = child.found or child.fail.found
                deeper.append(child)
        level = deeper
    return root


def _fallback(root: _Node, parent: _Node, char: str) -> _Node:
    """The state of the longest proper ending of `parent` + `char`."""
    if parent is root:
        return root
    node = parent.fail
    while node is not root and char not in node.next:
        node = node.fail
    return node.next.get(char, root)
