"""Equal shares of tokens among experts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.run.rehearse.phantom_world import equal_shares


@given(tokens=st.integers(0, 50), experts=st.integers(1, 16), chosen=st.integers(1, 16))
def test_every_token_has_its_experts_and_every_expert_its_share(tokens: int, experts: int, chosen: int) -> None:
    chosen = min(chosen, experts)
    shares = equal_shares(tokens, experts, chosen)
    assert shares.shape == (tokens, experts)
    assert shares.sum(1).tolist() == [chosen] * tokens
    of_experts = shares.sum(0).tolist()
    assert max(of_experts) - min(of_experts) <= 1
