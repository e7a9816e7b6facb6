"""Speculative decoding: several tokens of an answer are guessed, and the model checks them in one step.

settings     what `LLM(speculative=...)` takes
ngrams       where the last tokens of a sequence occurred before
drafter      what another model that guesses has to do
draft_model  a smaller model that guesses
features     what a head reads of the model's hidden states
head_runner  runs a head of EAGLE-3, or a checkpoint's layer of MTP, as a draft model is run
draft_reads  how far it has read the tokens of each block
draft        a draft: guessed tokens, cut where the answer could not go on
pace         how long an answer's next draft may be, by what became of the last ones
forecast     whether drafts pay in a batch, by the bytes and FLOPs of a step
speculator   all of these for the answers of an engine
"""
