"""The exact distribution of what a model says next, by asking for every continuation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import PrefillResult
from specengine.engine.loop import Engine
from specengine.engine.parts import BeginAsync
from specengine.engine.proof.check import chi_squared_p
from specengine.layers.logits import RowMap, edit_logits, target_weights

Text = tuple[int, ...]


class LogitProbe:
    """Raw logits after texts, from prefills of an engine that is idle."""

    def __init__(self, engine: Engine) -> None:
        self._sample_prefill = engine.parts.sample_prefill
        self._engine = Engine(replace(engine.parts, sample_prefill=self._note))
        self._found: dict[str, Tensor] = {}

    def logits(self, texts: list[list[int]]) -> Tensor:
        """float32 [R, V] on the CPU, what each text is followed by."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        for index, text in enumerate(texts):
            self._engine.add_request(str(index), text, params)
        while self._engine.has_work:
            self._engine.step()
        return torch.stack([self._found[f"{index}#0"] for index in range(len(texts))])

    def _note(
        self, output: LogitsOutput, batch: ScheduleBatch, early: BeginAsync | None
    ) -> PrefillResult:
        asking = [req for req, samples in zip(batch.reqs, batch.samples, strict=True) if samples]
        for req, logits_V in zip(asking, output.logits, strict=True):
            self._found[req.rid] = logits_V.cpu()
        return self._sample_prefill(output, batch, early)


class Continuations:
    """What a model says after every text of a few tokens behind one prompt."""

    def __init__(
        self, probe: LogitProbe, prompt: list[int], tokens: list[int], length: int
    ) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.length = length
        texts = [t for size in range(length) for t in product(tokens, repeat=size)]
        logits_RV = probe.logits([prompt + list(text) for text in texts])
        self._logits = dict(zip(texts, logits_RV, strict=True))

    def joint(self, params: SamplingParams) -> dict[Text, float]:
        """The probability of each text of `length` tokens, as plain decoding samples it."""
        joint: dict[Text, float] = {(): 1.0}
        for _ in range(self.length):
            shares_RK = self._next(list(joint), params).tolist()
            joint = {
                (*text, token): mass * share
                for (text, mass), shares in zip(joint.items(), shares_RK, strict=True)
                for token, share in zip(self.tokens, shares, strict=True)
            }
        return joint

    def p_value(self, seen: Counter[Text], params: SamplingParams) -> float:
        """χ² of what was seen against the joint distribution; 0 if any of it cannot be."""
        joint = self.joint(params)
        if not set(seen) <= set(joint):
            return 0.0
        observed = torch.tensor([float(seen[text]) for text in joint])
        expected = torch.tensor(list(joint.values()), dtype=torch.float64)
        return chi_squared_p(observed, expected * sum(seen.values()))

    def _next(self, texts: list[Text], params: SamplingParams) -> Tensor:
        """float64 [R, K], over the few tokens."""
        reqs = [Req("r", self.prompt, params, output_ids=list(text)) for text in texts]
        logits_RV = torch.stack([self._logits[text] for text in texts])
        sampling = SamplingBatch.from_reqs(reqs, logits_RV.shape[1], logits_RV.device)
        assert sampling.random is not None
        edited_RV = edit_logits(logits_RV, sampling, RowMap())
        weights_RV = target_weights(edited_RV, sampling.random, RowMap()).double()
        return weights_RV[:, self.tokens] / weights_RV.sum(-1, keepdim=True)
