"""The limits of the server in one place: what a client may send, and how long it may take.

Each number has a flag of `rooftile serve`, or the reason why it has no flag. Limits of single sampling parameters are in
`SamplingParams`, which checks them offline, too.
"""

from __future__ import annotations

# bounds of one HTTP message. No flag: larger ones are no requests of this API
REQUEST_LINE_BYTES = 8 * 2**10
HEADERS_BYTES = 16 * 2**10
# a flag, --max-body, for long lists of token ids
BODY_BYTES = 4 * 2**20
# number of the longest bodies that are read and parsed at once. No flag: it follows --max-body
BODIES = 64
# JSON is parsed by recursion in other programs on the way. No flag: no field is as deep
JSON_DEPTH = 64
# a larger body is parsed in a thread, so that it does not hold up running streams
PARSED_AT_ONCE_BYTES = 32 * 2**10

# bounds of one request. No flags: what is longer than the model reads is refused by its tokens anyway
PROMPT_BYTES = 2**20
MESSAGES = 1024
PROMPTS = 64
ANSWERS = 128
# texts of a request for vectors or scores, as many as OpenAI takes
TEXTS = 2048
BEST_OF = 16
# logprobs of prompts in one answer, with logprobs of other tokens and of each of n answers: some 50 MB of JSON
PROMPT_SCORES = 2**20
BIASES = 1024
# calls in one message of the assistant. No flag: tools have limits of their own in engine/chat/tools/use.py
CALLS = 128
# answers of /v1/responses that are kept, as JSON. No flag: a client that needs more sends its whole input
RESPONSES_BYTES = 64 * 2**20
# names that a client chooses
NAME_CHARACTERS = 128

# variables of a chat template, which may run loops over them. No flags: a switch is a word
TEMPLATE_VARIABLES = 32
TEMPLATE_BYTES = 16 * 2**10
TEMPLATE_DEPTH = 8

# bounds of structured output. No flags: they bound what a grammar may cost other clients
SCHEMA_BYTES = 64 * 2**10
SCHEMA_DEPTH = 32
REGEX_BYTES = 4 * 2**10
GRAMMAR_BYTES = 16 * 2**10
CHOICES = 1024
COMPILING_S = 5.0

# seconds. No flags: --deadline bounds the whole
READ_S = 10.0
CHUNK_S = 60.0
# so much must be read in CHUNK_S, if there is as much
CHUNK_BYTES = 4 * 2**10
IDLE_S = 75.0
LONGEST_RETRY_S = 60
# for what a client still sends when it is refused
LINGER_S = 0.5

# no flag: the system's own limit of open files comes next
CONNECTIONS = 2048
# requests that a connection may hold behind the one that is answered. No flag: the usual clients send none ahead
PIPELINED = 16

# engines of one server. No flag: no machine has as many GPUs
REPLICAS = 64

# texts that wait for one of the tokenizer's threads. No flag: more would only wait longer
TOKENISING = 256
TOKENISING_THREADS = 2
# tokens of an answer whose text is made in the event loop, in less than a millisecond. No flag: the rest is made in a thread
DECODED_AT_ONCE = 1024
