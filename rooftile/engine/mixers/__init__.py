"""The kinds of layers: what each of them brings to an engine.

mixer           Mixer: what every kind brings
registry        which kinds there are, and which one a layer has
step            where the tokens of a step lie in the caches
layers          the layers of a model in a step, each by its mixer
exact/          exact attention
loki/           Loki in the steps that decode; calibration fits it to a model's keys
native_sparse/  Native Sparse Attention
latent/         multi-head latent attention
recurrent/      Mamba-1, Mamba-2, gated delta nets, linear attention and Performer
approximation   what `LLM(approximate=)` takes
trial           runs of kernels that are compiled before the first request
"""
