"""Does the size of a page suit the texts that are served? A hint for the operator, from what requests really used."""

ENOUGH = 64  # texts before anything is said
EMPTY_MAX = 0.25  # of the pages' room, in the last page of each text
PAGES_MAX = 512  # of one text on average: the plan of a step walks through them


class PageUse:
    """Watches texts of `observe`d lengths in pages of `page_tokens`. Speaks once."""

    __slots__ = ("_said", "page_tokens", "pages", "texts", "tokens")

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.texts = self.tokens = self.pages = 0
        self._said = False

    def __repr__(self) -> str:
        return f"<PageUse {self.texts} texts, {self.empty:.0%} empty>"

    @property
    def empty(self) -> float:
        """Share of the room in pages that held no token."""
        room = self.pages * self.page_tokens
        return 1 - self.tokens / room if room else 0.0

    def observe(self, tokens: int) -> str:
        """A text of so many tokens was held. What is to be said about it, mostly nothing."""
        self.texts += 1
        self.tokens += tokens
        self.pages += -(-tokens // self.page_tokens)
        if self._said or self.texts < ENOUGH:
            return ""
        mean = self.tokens // self.texts
        if self.empty > EMPTY_MAX and self.page_tokens > 1:
            self._said = True
            better = _power_below(max(1, mean // 8))
            return (
                f"page_tokens {self.page_tokens} is large for texts of {mean} tokens: {self.empty:.0%} of the pages' "
                f"room stays empty; {min(better, self.page_tokens // 2)} would hold more requests"
            )
        if self.pages > PAGES_MAX * self.texts:
            self._said = True
            return (
                f"page_tokens {self.page_tokens} is small for texts of {mean} tokens, {self.pages // self.texts} pages "
                f"each; {_power_below(mean // 128)} would be planned faster"
            )
        return ""


def _power_below(number: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1)
