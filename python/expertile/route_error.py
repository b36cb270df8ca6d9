"""What a window raises for tokens that cannot be routed."""

from __future__ import annotations


class RouteError(RuntimeError):
    """Tokens that could not be routed: a logit of +inf, or fewer than K finite logits.

    layer, token  the first of them
    tokens        all of them, token -> layer
    """

    def __init__(self, faults: dict[int, int]) -> None:
        self.tokens = dict(faults)
        self.layer, self.token = min((layer, token) for token, layer in faults.items())
        super().__init__(
            f"[route_topk] expected K finite logits and none of +inf, got a token without at layer {self.layer}, "
            f"token {self.token} ({len(faults)} such tokens in all; the others are unharmed)"
        )
