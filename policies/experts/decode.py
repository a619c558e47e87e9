"""What those who run ask of the devices now: at first what their prompts were seen to ask, then what they decode.

After its prompt is read a request's own counts are the best predictor of what it decodes (cosine 0.90 to 0.95 on
recorded routings, against 0.86 to 0.92 for a token table over the prompt). Decoded tokens take over with a weight of
n / (n + 64): 64 tokens count as much as the prompt.
"""

from headway.policies.experts.arrays import Floats, Loads

PROMPT_WORTH = 64  # decoded tokens that count as much as the prompt


class Running:
    """One running request's demand: the load of one of its tokens [layers, groups]."""

    __slots__ = ("_decoded", "_decoded_tokens", "_prompt")

    def __init__(self, predicted: Loads, tokens: int) -> None:
        self._prompt: Floats = predicted / max(1, tokens)
        self._decoded: Floats | float = 0.0
        self._decoded_tokens = 0

    def prefilled(self, counts: Loads, tokens: int) -> None:
        """Its prompt was read: what was predicted gives way to what was observed."""
        if tokens > 0:
            self._prompt = counts / tokens

    def decoded(self, counts: Loads, tokens: int) -> None:
        """`tokens` more were decoded, with these counts."""
        self._decoded = self._decoded + counts
        self._decoded_tokens += tokens

    @property
    def demand(self) -> Loads:
        """The load of its next token."""
        if not self._decoded_tokens:
            return self._prompt
        weight = self._decoded_tokens / (self._decoded_tokens + PROMPT_WORTH)
        demand: Loads = (1.0 - weight) * self._prompt + weight * self._decoded / self._decoded_tokens
        return demand
