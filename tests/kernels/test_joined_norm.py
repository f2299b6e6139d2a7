from __future__ import annotations

import torch

from specengine.kernels.linear.joined_norm import joined_norm


def test_embedding_and_feature_side_by_side(device: torch.device) -> None:
    torch.manual_seed(0)
    embedding = torch.randn(30, 24, device=device)
    ids = torch.tensor([[3, 1], [29, 1], [0, 1]], device=device)[:, 0]
    features = torch.randn(3, 48, device=device)[:, 24:]
    gains = torch.randn(2, 24, device=device)
    given = embedding, ids, features, gains[0], gains[1], 1e-5
    expected = joined_norm(*given, backend="torch")
    assert expected.shape == (3, 48)
    normed = torch.nn.functional.rms_norm(embedding[ids], (24,), gains[0], 1e-5)
    torch.testing.assert_close(expected[:, :24], normed)
    torch.testing.assert_close(joined_norm(*given, backend="triton"), expected)
