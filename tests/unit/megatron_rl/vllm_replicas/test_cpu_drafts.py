"""Numbers of requests, repeated for their drafted tokens."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.generate.vllm.cpu_drafts import of_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_drafted_token_has_the_number_of_its_request(dtype: torch.dtype) -> None:
    numbers = torch.tensor([0, 2, 3, 4], dtype=dtype)
    found = of_tokens(numbers, torch.tensor([2, 2, 5, 6], dtype=torch.int32), 6, replace_from=0, replace_to=1)
    assert found.tolist() == [1, 1, 3, 3, 3, 4]
    assert found.dtype == dtype
