"""Broken lines of models, the engine and the server."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = {
    "steps, masks of no answer": Mutation(
        "engine/steps/step.py", "(-1, *tensor.shape)[-2:]", "(0, *tensor.shape)[-2:]",
        ("tests/engine/test_step.py", "-k", "buffer"),
    ),
    "steps, rows of bans": Mutation(
        "engine/steps/step_maker.py", "self.answer.pending - 1 - len", "self.answer.pending - len",
        ("tests/engine/test_step.py", "-k", "all_of_its_plan"),
    ),
    "calls, tokens that go on wrongly": Mutation(
        "engine/sampling/call_matcher.py", "if not self._beginning.allows_behind(whole, more)", "if False",
        ("tests/engine/chat/test_call_matcher.py", "-k", "beginning"),
    ),
    "ranks, columns in another order": Mutation(
        "engine/ranks/group.py", "self.stack(x).transpose(0, 1).reshape", "self.stack(x).reshape",
        ("tests/engine/test_rank_group.py", "-k", "columns"),
    ),
    "ranks, sums of words": Mutation(
        "engine/ranks/peers/kernels.py", "second = high.to(dtype)", "second = low.to(dtype)",
        ("tests/interpreter/test_peer_sums.py",),
    ),
    "ranks, another rank's experts": Mutation(
        "models/experts/feed_forward.py", "self.first = placement.rank * E if", "self.first = 0 if",
        ("tests/parallel/test_tensor.py", "-k", "one_process_does and 2"),
    ),
    "contexts, a window of all ranks": Mutation(
        "engine/mixers/exact/context_step.py", "else CAUSAL & Window(window // self.share.ranks - 1)",
        "else CAUSAL & Window(window - 1)",
        ("tests/engine/test_context_steps.py", "-k", "definition"),
    ),
    "ranks, a bias on each": Mutation(
        "models/projection.py", "self.adds_bias = not (summed and placement.rank)", "self.adds_bias = True",
        ("tests/parallel/test_tensor.py", "-k", "one_process_does and 2"),
    ),
    "ranks, parts side by side": Mutation(
        "models/checkpoints/shares.py", "if name.startswith(those.name):", "if False:",
        ("tests/parallel/test_tensor.py", "-k", "one_process_does and 2"),
    ),
    "text that cannot be made": Mutation(
        "engine/engine.py", "            self._note_failure(request, error)\n            return output_of(request, prompt)",
        "            raise", ("tests/engine/test_failures.py", "-k", "text_that"),
    ),
    "loki, recomputed": Mutation(
        "engine/steps/step_maker.py", "works = split_prompts(works) if self.separates_prompts else works", "works = [*works]",
        ("tests/engine/test_loki.py", "-k", "schedule"),
    ),
    "states, of a beam's parent": Mutation(
        "engine/steps/scheduler.py", "answers[parents[n]].slot", "answer.slot",
        ("tests/engine/test_state_mixer.py", "tests/engine/test_state_books.py", "-k", "beams or every_sequence"),
    ),
    "states, found in their step": Mutation(
        "kvcache/states.py", "self._coming[digest] = place, bet", "self._place[digest] = place",
        (
            "tests/engine/test_state_mixer.py", "tests/engine/test_state_books.py", "tests/unit/test_snapshots.py",
            "-k", "alike or last or every_sequence",
        ),
    ),
    "states, kept in an answer": Mutation(
        "engine/steps/state_plan.py", "stop = min(prompt, answer.planned)", "stop = answer.planned",
        ("tests/engine/test_state_books.py",),
    ),
    "states, where prompts part": Mutation(
        "engine/steps/state_plan.py", ", answer.request.paged_tokens}", "}", ("tests/engine/test_state_mixer.py", "-k", "branch"),
    ),
    "states, kept after a whole chunk": Mutation(
        "engine/steps/rounds.py", "marks.append((first + offset, rows[offset]))",
        "marks.append((first + chunk.tokens, rows[offset]))", ("tests/engine/test_state_mixer.py", "-k", "marks or half"),
    ),
    "states, rounds in another order": Mutation(
        "engine/steps/rounds.py", "self.order is None else", "True else", ("tests/engine/test_rounds.py",),
    ),
    "states, chunks under deterministic": Mutation(
        "engine/steps/batch_invariant.py", "first=first, single=True)", "first=first)",
        ("tests/engine/test_batch_invariant.py", "-k", "preemption and mamba2"),
    ),
    "states, a bet that is found": Mutation(
        "kvcache/states.py", "self._place[digest] = self._bets.pop(digest)", "return self._bets[digest]",
        ("tests/unit/test_snapshots.py", "tests/engine/test_state_books.py", "-k", "bets or every_sequence"),
    ),
    "states, a prefix without one": Mutation(
        "kvcache/blocks.py", "keep = self._complete(table.blocks)", "keep = len(table.blocks)",
        ("tests/engine/test_state_books.py",),
    ),
    "states, beams that are read again": Mutation(
        "engine/steps/scheduler.py", "return answers * self.pool.needed_by(prompt, more, 1)",
        "return self.pool.needed_by(prompt, more, answers)", ("tests/engine/test_state_books.py",),
    ),
    "compressed keys, row": Mutation(
        "engine/mixers/native_sparse/step.py", "ends % self.size // stride", "0 * ends",
        ("tests/engine/test_native_sparse.py", "-k", "without_a_cache"),
    ),
    "stop string, overlap": Mutation(
        "engine/text/stops.py", "            while self.matched and self.text[self.matched] != character:\n"
        "                self.matched = self._borders[self.matched]",
        "            if self.text[self.matched] != character:\n                self.matched = 0",
        ("tests/engine/test_detokenizer.py",),
    ),
    "stop string, held back": Mutation(
        "engine/text/detokenizer.py", "self._released.append(text[: len(text) - held])", "self._released.append(text)",
        ("tests/engine/test_detokenizer.py",),
    ),
    "stop string, hidden characters": Mutation(
        "engine/text/stops.py", "left -= length", "left -= 0", ("tests/engine/test_ends.py", "-k", "another_stop"),
    ),
    "text, the space behind a prompt": Mutation(
        "engine/text/border.py", "            window.append(id)", "            pass",
        ("tests/engine/test_continuations.py", "-k", "keeps_its_space"),
    ),
    "text, a character that a prompt begins": Mutation(
        "engine/text/border.py", "len(text) - half + broken", "len(text) + broken",
        ("tests/engine/test_continuations.py", "-k", "character_that"),
    ),
    "echo, where an answer begins": Mutation(
        "server/http/app.py", "start=len(echo)", "start=0", ("tests/server/test_prompt_logprobs.py", "-k", "offsets"),
    ),
    "ends of text of the tokenizer": Mutation(
        "engine/engine.py", "() if tokenizer is None else tokenizer.eos_ids", "()",
        ("tests/engine/test_ends.py", "-k", "every_end"),
    ),
    "text, half a character of several tokens": Mutation(
        "engine/text/incremental_decoder.py", "if not self._half or len(ids) == 1:", "if True:",
        ("tests/engine/test_detokenizer_lazy.py",),
    ),
    "text, a token that ends an answer": Mutation(
        "server/engine/following.py", "detokenizer.take_ids()", "answer.ids[-1:]",
        ("tests/server/test_answer_decoder.py", "-k", "belongs_to_no_text"),
    ),
    "gptq, zeros less one": Mutation(
        "weights/files/layouts/gptq.py", "words + one", "words",
        ("tests/models/test_quantised_checkpoints.py", "-k", "layout"),
    ),
    "weights in a mapped file": Mutation(
        "models/checkpoints/quantised.py", 'if device.type != "cpu":', "if True:",
        ("tests/models/test_reading_memory.py", "-k", "stay_in"),
    ),
    "fp8 on a gpu without it": Mutation(
        "engine/start/blueprint.py", "        check_device(reader, device)", "        pass",
        ("tests/engine/test_quantised_weights.py", "-k", "without_it"),
    ),
    "awq, order in a word": Mutation(
        "weights/files/layouts/awq.py", "torch.tensor(ORDER).argsort()", "torch.tensor(ORDER)",
        ("tests/models/test_quantised_checkpoints.py", "-k", "layout and awq"),
    ),
    "act-order": Mutation(
        "weights/files/tensors.py", "order = groups.argsort(stable=True)", "order = groups.argsort(stable=True).flip(0)",
        ("tests/models/test_quantised_checkpoints.py", "-k", "layout and order"),
    ),
    "parts in one product, orders": Mutation(
        "models/checkpoints/quantised.py", "return torch.equal(a.order, b.order)", "return True",
        ("tests/models/test_quantised_checkpoints.py", "-k", "order or together"),
    ),
    "2:4, parts in one product": Mutation(
        "models/checkpoints/quantised.py", "isinstance(last, TwoFour) and _alike", "isinstance(last, QuantisedWeight) and _alike",
        ("tests/engine/test_two_four_weights.py", "-k", "one_product or patterns"),
    ),
    "2:4, layouts counted twice": Mutation(
        "engine/caches/memory.py", "return peak - kept", "return peak", ("tests/engine/test_memory.py",),
    ),
    "requests ahead": Mutation(
        "server/http/protocol.py", "if len(self.pipeline) > limits.PIPELINED:", "if len(self.pipeline) > 9999:",
        ("tests/server/test_ahead.py",),
    ),
    "names that stand twice": Mutation(
        "server/http/body.py", "written != _kept_names(found)", "written < _kept_names(found)", ("tests/server/test_routes.py",)
    ),
    "room of bodies": Mutation(
        "server/http/body.py", "if self.held + taken > limits.BODIES * self.most:", "if taken > limits.BODIES * self.most:",
        ("tests/server/test_slow.py",),
    ),
    "room given back": Mutation(
        "server/http/body.py", "bodies.held -= taken", "bodies.held -= len(body)", ("tests/server/test_slow.py",)
    ),
    "ids as a whole": Mutation(
        "engine/text/prompt.py", "0 <= min(prompt) <= max(prompt) < vocabulary", "0 <= min(prompt)",
        ("tests/engine/test_prompts.py",),
    ),
    "masks, nothing left": Mutation(
        "engine/sampling/sampler.py", "return torch.where(drawn, best, NOTHING)", "return best",
        ("tests/engine/test_forbidden.py", "-k", "reason or nan"),
    ),
    "masks, nothing left, triton": Mutation(
        "engine/sampling/sampling_kernels.py", "tl.where(drawn, token, NOTHING)", "token",
        ("tests/interpreter/test_sampling.py", "-k", "without_a_token"),
    ),
    "masks, on the host": Mutation(
        "engine/sampling/forbidden.py", "left[banned + never] = False", "left[never] = False",
        ("tests/engine/test_forbidden.py", "-k", "known"),
    ),
    "bad words, inside a text": Mutation(
        "engine/text/prompt.py", 'INSIDE = ("\\n", "a", "e", "z")', 'INSIDE = ("a",)',
        ("tests/engine/test_bad_words.py", "-k", "every_spelling"),
    ),
    "bad words, begun in the prompt": Mutation(
        "engine/sampling/forbidden.py", "ids = [*answer.ids[-longest:], *drafted]",
        "ids = [*answer.ids[len(request.prompt) :][-longest:], *drafted]",
        ("tests/engine/test_bad_words.py", "-k", "in_the_prompt"),
    ),
    "samples, a kept prompt": Mutation(
        "engine/steps/scheduler.py", "self.pool.truncate(request.kept, len(request.prompt) - 1)", "pass",
        ("tests/engine/test_queued_samples.py", "-k", "read_once"),
    ),
    "samples, a prompt that is being read": Mutation(
        "engine/steps/scheduler.py", "        self._read_now = request", "        pass",
        ("tests/engine/test_queued_samples.py", "-k", "being_read"),
    ),
    "order of a schema": Mutation(
        "engine/sampling/grammar.py", "key = json.dumps(structured)", "key = json.dumps(structured, sort_keys=True)",
        ("tests/server/test_structured.py", "-k", "properties_come"),
    ),
    "metrics before tokens": Mutation(
        "server/engine/remote.py", "get_running_loop().call_soon(self._noted, message.stats)",
        "get_running_loop().call_later(1, self._noted, message.stats)",
        ("tests/server/test_responder.py",),
    ),
    "GPTQ, groups of columns in another order": Mutation(
        "weights/files/layouts/gptq.py", "((*codes, *groups), ()) if self.in_another_order else (codes, groups)",
        "(codes, groups)", ("tests/models/test_quantised_checkpoints.py", "-k", "need_their_groups"),
    ),
}  # fmt: skip
