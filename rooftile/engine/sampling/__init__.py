"""How the next token is chosen from the logits.

params            SamplingParams: what a caller asks for
features          the features of sampling that a batch computes
new_slots         the parameters of requests that get a slot, in integers
state             the parameters and token counts of all requests, in tensors with a row per slot
sampler           the definition in torch, for any device
sampling_kernels  the same in Triton, for CUDA
noise             the noise of a draw in Triton
forbidden         tokens that an answer must not have next
grammar           structured output, and in grammar_errors what is wrong with one
beam_search       which beams go on
"""
