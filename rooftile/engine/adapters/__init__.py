"""Low-rank adapters: small matrices beside a model's projections, which a request chooses by name.

    y = W x + s B (A x)    A (r, in), B (out, r), s = alpha / r, or alpha / sqrt(r) (rslora)

peft_config  adapter_config.json: what is read, and what is refused
folder       reads a folder of PEFT into an `Adapter`
targets      the projections of a decoder that an adapter may have parts for
matrices     their matrices beside one projection
slots        the memory of the adapters that are there
groups       the rows of a step, grouped by their adapters
product      adds the adapters' part to a product
kernels      the same in two Triton kernels
adapters     `Adapters`: names, slots, and which of them are in use

Hu et al., LoRA, arXiv:2106.09685; Kalajdzievski, rsLoRA, arXiv:2312.03732; Chen et al., Punica, arXiv:2310.18547.
"""
