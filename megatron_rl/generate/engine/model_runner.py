"""Execute the scheduler's plans on one rank, with the policy's own weights, a key/value cache and the rows.

If the ranks of a replica share the model, each executes the same plans on its part of every layer, and all of them have
the logits of the whole vocabulary to sample from.

A row that resumes an answer prefills its prompt and known tokens together, and draws its next token by the random
number of that token. The plans assign pages to rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.generate.engine.admission import Prefill
from megatron_rl.generate.engine.cache import CacheShape, ContinuedLayout, DecodeLayout, KeyValueCache, PrefillLayout
from megatron_rl.generate.engine.choice_cache import ChoiceCache
from megatron_rl.generate.engine.decode_graphs import decode_graphs
from megatron_rl.generate.engine.delta_states import DeltaStates
from megatron_rl.generate.engine.interface import PromptScores
from megatron_rl.generate.engine.row_grammars import RowGrammars
from megatron_rl.generate.engine.row_state import DrawWork, RowState, to_device
from megatron_rl.generate.engine.scheduler import StepPlan
from megatron_rl.generate.engine.top_logprobs import prompt_scores
from megatron_rl.generate.engine.transcript import Amount, RowAnswer
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.frozen import FrozenPolicy
from megatron_rl.model.fused import FusedPolicy, why_not_fused
from megatron_rl.model.platform.attention import Layout, whole_sequences
from megatron_rl.model.platform.paged_attention import PagedChunks, PagedRows
from megatron_rl.model.policy import Policy
from megatron_rl.model.router import Replay
from megatron_rl.recipe.inference import InferenceConfig
from megatron_rl.recipe.model import ModelConfig

logger = logging.getLogger(__name__)


class ModelRunner:
    def __init__(
        self,
        policy: Policy,
        model: ModelConfig,
        config: InferenceConfig,
        pages: tuple[int, int],
        end_ids: Collection[int],
        max_length: int,
    ) -> None:
        """
        pages: number of pages of the cache, and slots in each.
        end_ids: at least one token that ends an answer.
        max_length: tokens of a prompt and its answer together.
        """
        self.policy, self._dtype = policy, policy.config.params_dtype
        self._page_tokens = pages[1]
        if policy.kernels.layer_kernels and (against := why_not_fused(policy, model)):
            logger.info("generation uses the training layers, which take more kernels: %s", against)
        self._graphs = decode_graphs(policy, model, config, self._page_tokens)
        spare_page = pages[0] if self._graphs else None
        self._rows = RowState(policy, config.max_batch, max_length, self._page_tokens, end_ids, spare_page)
        ranks = policy.pg_collection.tp.size()
        self._heads = model.num_attention_heads // ranks
        self._kv_heads = max(1, model.num_query_groups // ranks)  # more ranks than heads share them
        self._states = DeltaStates(policy, config.max_batch) if policy.recurrent else None  # of layers without a cache
        shape = CacheShape(
            layers=len(self._states.cached) if self._states else model.num_layers,
            pages=pages[0] + (spare_page is not None),
            page_tokens=self._page_tokens,
            kv_heads=self._kv_heads,
            head_size=model.head_size,
            gathered=policy.kernels.gathers_pages(self._dtype, self._page_tokens),
        )
        self._make_cache = partial(KeyValueCache, shape, policy.kernels.cache_dtype(self._dtype), policy.device)
        self.scores: PromptScores | None = None
        """Scores of the prompt that the newest plan scores."""
        self.cache: KeyValueCache | None = None
        self._choices: ChoiceCache | None = None
        self._make_choices: Callable[[], ChoiceCache | None] = lambda: None
        if model.router_replay == "rollout":
            self._make_choices = partial(
                ChoiceCache, ChoiceForm.of(model), shape.pages, shape.page_tokens, policy.device
            )
        self._frozen: FrozenPolicy | FusedPolicy | None = None  # built when it is first needed
        self._tokens_until_sync = policy.kernels.tokens_between_syncs

    @property
    def grammars(self) -> RowGrammars:
        return self._rows.grammars

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[int] | None:
        """Sample the next token of the plan's rows. Return the rows that have ended; None if the host did not check."""
        if self.cache is None:
            self.cache, self._choices = self._make_cache(), self._make_choices()
        cache = self.cache
        if plan.moves:
            self._rows.move(plan.moves)
            if self._states:
                self._states.move(plan.moves)
        self._rows.occupy(plan.rows.stop)
        if plan.pages:
            self._rows.give_pages(plan.pages)
        rows, self.scores = slice(plan.rows.start, plan.rows.stop), None
        if plan.prefills:
            self._prefill(rows, plan.prefills, cache)
        else:
            self._decode(rows, cache)
        if not plan.rows:
            return None
        self._rows.count_token(rows)
        self._tokens_until_sync -= 1
        if self._tokens_until_sync:
            return None
        self._tokens_until_sync = self.policy.kernels.tokens_between_syncs
        return self._rows.ended(rows.stop)

    def answers(self, held: Mapping[int, Amount]) -> list[RowAnswer]:
        return self._rows.answers(held, self._choices)

    def _prefill(self, rows: slice, prefills: Sequence[Prefill], cache: KeyValueCache) -> None:
        """Compute the prefills, fill the rows that start with them, and draw the next token of each."""
        device = self.policy.device
        ends = np.cumsum([len(prefill.tokens) for prefill in prefills])
        last = [(end - 1, prefill) for end, prefill in zip(ends.tolist(), prefills, strict=True) if prefill.samples]
        selected = [end for end, _ in last]
        begins = zip(ends.tolist(), prefills, strict=True)
        begin, scored = next(((end - len(each.tokens), each) for end, each in begins if each.scored), (0, None))
        if scored:
            selected += range(begin, begin + len(scored.scored))
        positions = [np.arange(each.start, each.start + len(each.tokens)) for each in prefills]
        source, target = (to_device(each, device) for each in slots_written(prefills, self._page_tokens))
        layout = self._prefill_layout(prefills, cache, (source, target))
        logits = self._logits(
            to_device([token for prefill in prefills for token in prefill.tokens], device),
            to_device(np.concatenate(positions), device),
            self._states.begin(layout, prefills, rows) if self._states else layout,
            to_device(np.array(selected, dtype=np.int64), device),
            self._choices.recorder(target, source) if self._choices else None,
        )
        if scored:
            targets = to_device(scored.scored, device)
            self.scores = prompt_scores(logits[len(last) :], targets, scored.most_scored)
        if not last:
            return
        begun = [prefill for _, prefill in last]
        self._rows.begin(rows, begun)
        sequence = np.repeat(np.arange(len(begun)), [len(prefill.samples) for prefill in begun])  # of each row
        of_rows = logits.index_select(0, to_device(sequence, device))
        self._rows.draw(rows, of_rows, self._rows.work(rows))

    def _prefill_layout(
        self, prefills: Sequence[Prefill], cache: KeyValueCache, written: tuple[Tensor, Tensor]
    ) -> Layout:
        """Return attention among the packed tokens; if some sequences have earlier tokens, also to their cache.

        written: see `slots_written`.
        """
        device, (source, target) = self.policy.device, written
        stops = [prefill.start + len(prefill.tokens) for prefill in prefills]
        whole = whole_sequences(stops)
        if not any(prefill.start for prefill in prefills):
            return PrefillLayout(self.policy.layout(whole), cache, source, cache.index(target), None)
        pages = self.policy.kernels.chunk_attention(paged_chunks(prefills, self._page_tokens), self._dtype)
        if pages is not None:
            return ContinuedLayout(cache, source, cache.index(target), pages)
        offsets = np.cumsum([0, *stops[:-1]])
        part = [
            np.arange(offset + prefill.start, offset + stop)
            for offset, stop, prefill in zip(offsets, stops, prefills, strict=True)
        ]
        layout = self.policy.layout(whole, torch.from_numpy(np.concatenate(part)))
        seen = to_device(slots_seen(prefills, self._page_tokens), device)
        return PrefillLayout(layout, cache, source, cache.index(target), cache.index(seen))

    def release(self) -> None:
        """Free the cache. No row may be in use."""
        if self._graphs:
            self._graphs.drop()  # this waits until nothing reads the cache
        self.cache = self._choices = None
        if self._states:
            self._states.release()

    def forget_weights(self) -> None:
        self._frozen = None

    def weights_changed(self) -> None:
        self.forget_weights()
        if self._graphs:
            self._graphs.keep_for_weights()

    def _decode(self, rows: slice, cache: KeyValueCache) -> None:
        self._rows.follow_grammars(rows)
        work = self._rows.work(rows)
        if self._graphs:
            padded = slice(0, self._graphs.size(rows.stop))
            self._graphs.run((padded.stop, work), partial(self._decode_step, padded, work, cache))
        else:
            self._decode_step(rows, work, cache)

    def _decode_step(self, rows: slice, work: DrawWork, cache: KeyValueCache) -> None:
        """Write the newest token of each of the first rows to the cache, and draw its next one. A recording replays
        this, so it must depend on the host's knowledge of the rows only through its arguments."""
        state = self._rows
        positions, table = state.position[rows], state.pages[rows]
        page = table.gather(1, (positions // self._page_tokens)[:, None]).squeeze(1)
        lengths, most = positions + 1, state.lengths(rows)
        paged = PagedRows(table, lengths, most, self._page_tokens, self._heads, self._kv_heads)
        target = page * self._page_tokens + positions % self._page_tokens
        pages = self.policy.kernels.paged_attention(paged, self._dtype)
        layout: Layout = DecodeLayout(cache, cache.index(target), pages)
        if self._states:
            layout = self._states.continued(layout, rows)
        replay = self._choices.recorder(target) if self._choices else None
        state.draw(rows, self._logits(state.token[rows], positions, layout, None, replay), work)

    def _logits(
        self, tokens: Tensor, positions: Tensor, layout: Layout, select: Tensor | None, replay: Replay | None
    ) -> Tensor:
        """[tokens, vocab] or [selected, vocab], see `Policy.forward`."""
        frozen = self._frozen = self._frozen or self.policy.frozen()
        with self.policy.without_fp8():
            if frozen is None:
                logits = self.policy(tokens, positions, layout, select, replay)
            else:
                logits = frozen.logits(tokens, positions, layout, select)
            return self.policy.whole_logits(logits)


def slots_written(prefills: Sequence[Prefill], page_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which packed tokens are copied to the cache, [copied], and the slot of each, [copied].

    A token of a full page is copied once, a later one to the own page of each row. Example: pages of 4 slots, a prefill
    of 6 tokens with full page 7 and own pages 8 and 9: tokens 0 1 2 3 4 5 4 5 go to slots 28 29 30 31 32 33 36 37.
    """
    runs: list[tuple[int, int, int]] = []  # first packed token, first slot, number of tokens
    packed = 0
    for prefill in prefills:
        full = len(prefill.pages) * page_tokens
        stop = prefill.start + len(prefill.tokens)
        for number in range(prefill.start // page_tokens, len(prefill.pages)):
            first = number * page_tokens
            runs.append((packed + first - prefill.start, prefill.pages[number] * page_tokens, page_tokens))
        if stop > full:
            runs += [(packed + full - prefill.start, page * page_tokens, stop - full) for page in prefill.own]
        packed += len(prefill.tokens)
    sources, slots, lengths = np.array(runs, dtype=np.int64).T
    return _runs(sources, lengths), _runs(slots, lengths)


def paged_chunks(prefills: Sequence[Prefill], page_tokens: int) -> PagedChunks:
    pages = [(*prefill.pages, *prefill.own[:1]) for prefill in prefills]
    table = np.zeros((len(pages), max(map(len, pages))), dtype=np.int32)
    for row, of_sequence in zip(table, pages, strict=True):
        row[: len(of_sequence)] = of_sequence
    new = np.array([len(prefill.tokens) for prefill in prefills])
    return PagedChunks(table, new, new + [prefill.start for prefill in prefills], page_tokens)


def slots_seen(prefills: Sequence[Prefill], page_tokens: int) -> NDArray[np.int64]:
    """Return the slots of every sequence, [seen], from its first token to the last one of the prefill."""
    pages, lengths = [], []
    for prefill in prefills:
        left = prefill.start + len(prefill.tokens)
        for page in (*prefill.pages, *prefill.own[:1]):
            pages.append(page)
            lengths.append(min(left, page_tokens))
            left -= page_tokens
    return _runs(np.array(pages) * page_tokens, np.array(lengths).clip(min=0))


def _runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return start, start + 1, ... for each run, joined: starts 5, 9 with lengths 2, 3 are 5 6 9 10 11."""
    ends = lengths.cumsum()
    joined: NDArray[np.int64] = np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])
    return joined
