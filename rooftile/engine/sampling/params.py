"""`SamplingParams`: how the tokens of a request are chosen, when its answers end, and how urgent it is."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftile.engine.sampling.structural_tags import check_tags
from rooftile.engine.settings.changed import changed
from rooftile.engine.vllm_names import SAMPLING_REFUSED, SAMPLING_RENAMED
from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import as_python_numbers, python_number, shown
from rooftile.runtime.words import takes_names

# limits for one request: a parameter without a bound can bring a service down
MOST_SAMPLES = 16
MOST_LOGPROBS = 20
MOST_STOPS = 16
LONGEST_STOP = 256
MOST_WORDS = 64
# the kinds of structured output
STRUCTURES = ("json", "regex", "choice", "grammar", "structural_tag")
# whole numbers that may be None
OPTIONAL = ("thinking_token_budget", "max_tokens", "logprobs", "prompt_logprobs", "beam_width", "truncate_prompt_tokens", "seed")
# whole numbers have 64 bits on their way to the engine and to the device
LARGEST = 2**63 - 1
LARGEST_PRIORITY = 10**9
# a length to a larger power leaves the range of a float
LARGEST_PENALTY = 10.0


@takes_names(SAMPLING_RENAMED, SAMPLING_REFUSED)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request: how its tokens are chosen, and when its answers end.

    Args:
        n: how many answers to return; they share the prompt's blocks of the KV cache. With a seed, answer i has seed + i.
        temperature: logits are divided by it; 0 takes the most likely token (greedy).
        top_p: keep the smallest set of the most likely tokens that together have at least this probability.
        top_k: keep this many of the most likely tokens; 0 keeps all.
        min_p: keep tokens that are at least this share as likely as the most likely one.
        presence_penalty: subtracted from the logit of each token that was generated, in [-2, 2].
        frequency_penalty: subtracted from a token's logit once for each time it was generated, in [-2, 2].
        repetition_penalty: divides the logits, if positive, or multiplies them, of tokens in the prompt and the answer.
        logit_bias: added to the logits of these token ids, in [-100, 100]; -inf forbids a token.
        allowed_token_ids: only these tokens are taken; None for all.
        bad_words: words that an answer must not have, where they begin with a token of their own: with a space before them and
            without, at the start of a text and inside it, and also where the prompt ends with the beginning of one. Spaces
            around a word make no difference.
        truncate_prompt_tokens: only this many of the prompt's last tokens are read; None for all.
        seed: the same seed, prompt and position give the same token, whatever else is in the batch; None for random samples.
        max_tokens: the most tokens of an answer; None for as many as the longest sequence leaves.
        min_tokens: an answer with fewer tokens is ended neither by the end of text nor by a stop.
        stop: a string or several; the first one that appears ends the answer and is cut off, unless include_stop is set. One
            with a special token in it ("<|im_end|>") is found also where the text leaves special tokens out.
        stop_token_ids: tokens that end the answer.
        include_stop: keep the stop string in the text, all of it, also a special token that the text would leave out;
            include_stop_str_in_output is the same.
        ignore_eos: go on past the tokens that the tokenizer, config.json or generation_config.json names as ends of text.
        logprobs: return the logprob of each token, and of this many of the most likely ones; None for no logprobs.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_tokens: special tokens, as they are spelt, that are text even so, such as ["[TOOL_CALLS]"].
        beam_width: search for the most likely answers with this many beams instead of sampling; the best n are returned.
        length_penalty: for beam search: an answer's score is the sum of its logprobs divided by its length to this power,
            in [-10, 10].
        structured: what the answer must follow: {"json": a JSON schema, also as a text}, {"regex": a regular expression},
            {"choice": a list of texts}, {"grammar": a grammar in Lark's form or in GBNF, the EBNF of llama.cpp and XGrammar} or
            {"structural_tag": {"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}}, which leaves the
            text free up to a trigger. It needs the package llguidance. None for free text.
        thinking_token_budget: the most tokens of a thought, of a model that marks its thoughts: then the mark that ends it is
            written, and the answer goes on. None, or vLLM's -1, for any number.
        thinks: whether an answer may have a thought, as answers of `LLM.chat` may: what is structured then begins behind it.
        calls: how an answer with tools writes its calls, as `LLM.chat` sets it: the texts that begin one, and the grammar that it
            follows from there on (see `constraint_of`). None for no tools.
        speculative: whether tokens of the answer may be guessed and checked several at a time, where the engine does so
            (`LLM(speculative=)`); the tokens are the same either way.
        early_stopping: for beam search: end as soon as there are beam_width complete answers.
        priority: requests with a smaller number begin first, and keep their place in the cache longest. At most 16 in a row begin
            before the oldest request that waits, whatever their priorities.

    Raises:
        InvalidInput: a value is out of bounds, or two values contradict each other.

    Example:
        >>> from rooftile.engine import SamplingParams
        >>> SamplingParams(temperature=0, max_tokens=20).greedy
        True
        >>> SamplingParams(stop=".").stops
        ('.',)
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    truncate_prompt_tokens: int | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    shown_special_tokens: Sequence[str] = ()
    structured: Mapping[str, Any] | None = None
    thinking_token_budget: int | None = None
    thinks: bool = False
    calls: Mapping[str, Any] | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False
    priority: int = 0
    speculative: bool = True

    def __repr__(self) -> str:
        return changed(self)

    def __post_init__(self) -> None:
        as_python_numbers(self)
        stops = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop, "a string, or a list of them")
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", _several("stop_token_ids", self.stop_token_ids, "a list of token ids"))
        shown = _several("shown_special_tokens", self.shown_special_tokens, "a list of special tokens, as they are spelt")
        object.__setattr__(self, "shown_special_tokens", shown)
        object.__setattr__(self, "bad_words", _several("bad_words", self.bad_words, "a list of words"))
        if self.allowed_token_ids is not None:
            allowed = _several("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if not isinstance(self.logit_bias, Mapping | None):
            raise InvalidInput(f"logit_bias is {self.logit_bias!r}; must be a dictionary of token ids and biases")
        if self.logit_bias is not None:
            # a copy: the caller's dictionary may change after it was checked
            biases = {python_number(token): python_number(bias) for token, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases or None)
        # other engines write -1 for all tokens
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        self._check_bounds()
        self._check_stops(stops)
        self._check_beams()
        if self.structured is not None:
            self._check_structured(self.structured)
        if self.calls is not None:
            self._check_calls(self.calls)

    @property
    def grammar(self) -> Mapping[str, Any] | None:
        """The grammar to compile, for `structured` or `calls`; None for neither."""
        return self.structured if self.calls is None else {"calls": self.calls}

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature == 0 and self.beam_width is None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(self.stop)

    def check_vocabulary(self, size: int) -> None:
        """Raises InvalidInput if a token id is outside a vocabulary of `size` tokens."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids: Iterable[int] = getattr(self, name) or ()
            for token in ids:
                if not 0 <= token < size:
                    raise InvalidInput(f"{name} names token {token}; the model has 0 to {size - 1}")

    def _check_bounds(self) -> None:
        for name, least, most in (
            ("n", 1, MOST_SAMPLES), ("top_k", 0, LARGEST), ("min_tokens", 0, LARGEST), ("max_tokens", 1, LARGEST),
            ("logprobs", 0, MOST_LOGPROBS), ("prompt_logprobs", 0, MOST_LOGPROBS), ("beam_width", 1, MOST_SAMPLES),
            ("truncate_prompt_tokens", 1, LARGEST), ("seed", 0, LARGEST), ("priority", -LARGEST_PRIORITY, LARGEST_PRIORITY),
            ("thinking_token_budget", 0, LARGEST),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                # the largest number of all is told to those who have passed it
                told = math.inf if most == LARGEST and not (isinstance(value, int) and value > most) else most
                raise InvalidInput(f"{name} is {value!r}; must be a whole number {_between(least, told)}")
        for name, low, high in (
            ("temperature", 0.0, math.inf), ("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0), ("length_penalty", -LARGEST_PENALTY, LARGEST_PENALTY),
        ):  # fmt: skip
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                raise InvalidInput(f"{name} is {value!r}; must be a finite number {_between(low, high)}")
        for name, high in (("top_p", 1.0), ("repetition_penalty", math.inf)):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= high:
                raise InvalidInput(f"{name} is {value!r}; must be a finite number above 0{_at_most(high)}")
        for name in ("include_stop", "ignore_eos", "skip_special_tokens", "early_stopping", "speculative", "thinks"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{name} is {getattr(self, name)!r}; must be True or False")
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidInput(f"logit_bias has {token!r} for a token; must be its id, a whole number")
            if bias != -math.inf and (not _is_number(bias) or not -100 <= bias <= 100):
                raise InvalidInput(f"logit_bias of token {token} is {shown(bias)}; must be a number from -100 to 100, or -inf")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput(f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; it must not be more")

    def _check_stops(self, stops: tuple[str, ...]) -> None:
        for what, given in (("stops", stops), ("stop_token_ids", self.stop_token_ids)):
            if len(given) > MOST_STOPS:
                raise InvalidInput(f"there are {len(given)} {what}; there may be at most {MOST_STOPS}")
        for stop in stops:
            if not isinstance(stop, str) or not 0 < len(stop) <= LONGEST_STOP:
                said = shown(stop) if not isinstance(stop, str) or not stop else f"{len(stop)} characters long"
                raise InvalidInput(f"a stop is {said}; must be a string of 1 to {LONGEST_STOP} characters")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if isinstance(token, bool) or not isinstance(token, int):
                    raise InvalidInput(f"{name} has {shown(token)}; must be token ids, whole numbers")
        if self.allowed_token_ids == ():
            raise InvalidInput("allowed_token_ids is empty; must have at least one token")
        if len(self.bad_words) > MOST_WORDS:
            raise InvalidInput(f"there are {len(self.bad_words)} bad_words; there may be at most {MOST_WORDS}")
        for word in self.bad_words:
            if not isinstance(word, str) or not 0 < len(word) <= LONGEST_STOP:
                raise InvalidInput(f"bad_words has {str(word)[:40]!r}; must be strings of 1 to {LONGEST_STOP} characters")

    def _check_structured(self, given: Any) -> None:
        if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in STRUCTURES:
            raise InvalidInput(f"structured is {repr(given)[:60]}; must be a dictionary with one of {', '.join(STRUCTURES)}")
        kind: str = next(iter(given))
        dues: dict[str, tuple[type, ...]] = {
            "json": (dict, bool, str), "regex": (str,), "choice": (list, tuple), "grammar": (str,), "structural_tag": (dict,),
        }  # fmt: skip
        if not isinstance(given[kind], dues[kind]):
            raise InvalidInput(f"structured has a {kind} of type {type(given[kind]).__name__}; must be {dues[kind][0].__name__}")
        if kind == "choice" and not (given[kind] and all(isinstance(text, str) and text for text in given[kind])):
            raise InvalidInput("structured has a choice that is no list of texts; must have one or more, none empty")
        if kind == "structural_tag":
            check_tags(given[kind])
        self._check_alone("structured")

    def _check_alone(self, who: str) -> None:
        for name, none in (("min_tokens", 0), ("ignore_eos", False), ("bad_words", ()), ("allowed_token_ids", None)):
            if getattr(self, name) != none:
                raise InvalidInput(f"{name} is given with {who}, which alone decides what may come next")

    def _check_calls(self, given: Any) -> None:
        if not isinstance(given, Mapping) or not isinstance(given.get("grammar"), str):
            raise InvalidInput(f"calls is {repr(given)[:60]}; must be what constraint_of returns: give tools to LLM.chat")
        if self.structured is not None:
            raise InvalidInput("calls and structured are both given; give one of them")
        if given.get("required"):
            self._check_alone("a tool_choice that asks for a call")

    def _check_beams(self) -> None:
        if self.beam_width is None:
            if (self.length_penalty, self.early_stopping) != (1.0, False):
                name = "early_stopping" if self.early_stopping else "length_penalty"
                raise InvalidInput(f"{name} is {getattr(self, name)} without beam_width; it is of a search alone")
            return
        if self.n > self.beam_width:
            raise InvalidInput(f"n is {self.n} with beam_width {self.beam_width}; a search returns at most its beams")
        draws, plain = "a search draws nothing", "a search takes scores as the model gives them"
        refused: tuple[tuple[str, object, str], ...] = (
            ("top_p", 1.0, draws), ("top_k", 0, draws), ("min_p", 0.0, draws), ("seed", None, draws),
            ("presence_penalty", 0.0, plain), ("frequency_penalty", 0.0, plain), ("repetition_penalty", 1.0, plain),
            ("logit_bias", None, plain), ("allowed_token_ids", None, plain), ("bad_words", (), plain),
            ("structured", None, plain), ("calls", None, plain), ("thinking_token_budget", None, "a search closes no thought"),
            ("logprobs", None, "a search has the sum of an answer's alone, in cumulative_logprob"),
        )  # fmt: skip
        for name, none, why in refused:
            if getattr(self, name) != none:
                raise InvalidInput(f"{name} is {getattr(self, name)} with beam_width {self.beam_width}; {why}")
        if self.temperature not in (0.0, 1.0):
            raise InvalidInput(f"temperature is {self.temperature} with beam_width {self.beam_width}; a search draws nothing")


def _is_number(value: object) -> bool:
    # compared, and not converted: a whole number may be too large for a float
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _several(name: str, value: object, due: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise InvalidInput(f"{name} is {shown(value)}; must be {due}")
    return tuple(map(python_number, value))


def _between(least: float, most: float) -> str:
    if most == math.inf:
        return f"of at least {least:g}"
    first, last = (str(each) if isinstance(each, int) else f"{each:g}" for each in (least, most))
    return f"from {first} to {last}"


def _at_most(most: float) -> str:
    return f" and at most {most:g}" if math.isfinite(most) else ""
